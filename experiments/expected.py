"""Do an experiment's headline numbers lie where a re-run should put them? `report.py | python expected.py NAME`

expected.toml names lines and columns of the report's tables. Exit code 1: a number lies outside, or is not there.
`expected.py --list NAME` says what is expected.
"""

import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".toml")
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
Line = tuple[str, dict[str, str]]  # the heading above its table, and heading of a column -> cell


def lines_of(report: str) -> list[Line]:
    """Every line of every Markdown table."""
    found: list[Line] = []
    above, columns = "", None
    for line in report.splitlines():
        if not line.startswith("|"):
            above, columns = (line if line.startswith("#") else above), None
            continue
        cells = [cell.strip().replace("**", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if columns is None:
            columns = cells
        elif not all(re.fullmatch(":?-+:?", cell) for cell in cells):
            found.append((above, dict(zip(columns, cells, strict=False))))
    return found


def expected(name: str) -> list[Mapping[str, Any]]:
    """The headline numbers of an experiment."""
    return tomllib.loads(FILE.read_text(encoding="utf-8")).get(name, [])


def value_of(entry: Mapping[str, Any], lines: Sequence[Line]) -> float:
    """The number that an entry names; ValueError where none or several lines are meant."""
    meant = [
        cells
        for above, cells in lines
        if above.startswith(entry.get("under", ""))
        and entry["column"] in cells
        and all(name in cells and text in ("*", cells[name]) for name, text in entry["row"].items())
    ]
    if len(meant) != 1:
        raise ValueError(f"{len(meant)} lines are {entry['row']} and have a column {entry['column']}")
    numbers, part = NUMBER.findall(meant[0][entry["column"]]), entry.get("part", 0)
    if len(numbers) <= part:
        raise ValueError(f"no number {part} in {entry['column']} of {entry['row']}: {meant[0][entry['column']]}")
    return float(numbers[part])


def verdicts(name: str, report: str) -> list[tuple[bool, str]]:
    """For every headline number: does it lie inside, and a line that says so."""
    lines, found = lines_of(report), []
    for entry in expected(name):
        low, high = entry["range"]
        try:
            value = value_of(entry, lines)
        except ValueError as error:
            found.append((False, f"missing: {entry['what']}: {error}"))
            continue
        inside = low <= value <= high
        where = "inside" if inside else "OUTSIDE"
        found.append((inside, f"{where} {low:g} to {high:g}: {value:g} ({entry['what']})"))
    return found


def main() -> int:
    if sys.argv[1] == "--list":
        lines = [f"{low:g} to {high:g}: {e['what']}" for e in expected(sys.argv[2]) for low, high in [e["range"]]]
        print("\n".join(["", "expected:", *lines]) if lines else "")
        return 0
    found = verdicts(sys.argv[1], sys.stdin.read())
    print("\n".join(line for _, line in found) or f"no ranges are expected of {sys.argv[1]}")
    return 0 if all(inside for inside, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
