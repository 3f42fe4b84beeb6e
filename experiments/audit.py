"""Are the numbers that texts quote those of the raw lines? python experiments/audit.py [--count N] [--seed S]

quoted.toml says where each number is quoted and which cell of which study's table it is. Some are drawn at random, the
reports of their studies are built again from the raw lines, and each must be its cell, rounded to the digits shown.
Exit code 1: one is not.
"""

import argparse
import random
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import all_studies
from expected import Line, lines_of, value_of

FILE = Path(__file__).with_name("quoted.toml")
BRACES = re.compile(r"\{([^{}]*)\}")


class Quoted(NamedTuple):
    """`shown`: the number as its text has it. `where`: file and words. `cell`: as quoted.toml has it."""

    shown: str
    where: str
    cell: Mapping[str, Any]


def entries(file: Path = FILE) -> list[dict[str, Any]]:
    """Texts and their cells, as the file has them."""
    return tomllib.loads(file.read_text(encoding="utf-8"))["quoted"]


def quoted(file: Path = FILE) -> list[Quoted]:
    """Every number of the file; ValueError where a text no longer stands, or has not one cell a number."""
    found: list[Quoted] = []
    for entry in entries(file):
        name, text, cells = entry["in"], entry["text"], entry["of"]
        shown = BRACES.findall(text)
        words = BRACES.sub(r"\1", text)
        if words not in (HERE.parent / name).read_text(encoding="utf-8"):
            raise ValueError(f"{name} does not say: {words}")
        if len(shown) != len(cells):
            raise ValueError(f"{len(shown)} numbers and {len(cells)} cells: {name}: {text}")
        found += [Quoted(number, f"{name}: {words}", cell) for number, cell in zip(shown, cells, strict=True)]
    return found


def value(cell: Mapping[str, Any], lines: Sequence[Line]) -> float:
    """What the lines have; ValueError where that is no number, or not one."""
    found = value_of(cell, lines)
    if "over" in cell:
        found /= value_of(cell["over"], lines)
    return abs(found) if cell.get("without_sign") else found


def rounded(found: float, shown: str) -> str:
    """With as many digits as what is shown, and its sign."""
    sign = "+" if shown.startswith("+") else ""
    return f"{found:{sign}.{len(shown.partition('.')[2])}f}"


def difference(quote: Quoted, lines: Sequence[Line]) -> str | None:
    """What is wrong with it, if something is."""
    try:
        found = value(quote.cell, lines)
    except ValueError as error:
        return str(error)
    return None if float(rounded(found, quote.shown)) == float(quote.shown) else f"the lines have {found:g}"


def report_of(study: str) -> str:
    """The tables of a study, from its raw lines."""
    with tempfile.TemporaryDirectory() as scratch:  # the figure that lies beside the report stays as it is
        draws = ["--figure", f"{scratch}/figure.svg"] if (HERE / study / "figure.svg").exists() else []
        report = [*all_studies.command(HERE / study, "report"), *draws]
        return subprocess.run(report, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="how many numbers")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="which ones")
    asked = parser.parse_args()
    every = quoted()
    drawn = random.Random(asked.seed).sample(every, min(asked.count, len(every)))
    print(f"{len(drawn)} of {len(every)} quoted numbers, --seed {asked.seed}")
    wrong = 0
    for study in sorted({quote.cell["study"] for quote in drawn}):
        lines = lines_of(report_of(study))
        for quote in (quote for quote in drawn if quote.cell["study"] == study):
            problem = difference(quote, lines)
            wrong += problem is not None
            print(f"{'WRONG' if problem else 'right'}  {quote.shown:>6}  {study}: {problem or quote.where[:90]}")
    print(f"{len(drawn) - wrong} of {len(drawn)} match")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
