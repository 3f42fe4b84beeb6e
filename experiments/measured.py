"""Which studies were measured where and when: python experiments/measured.py prints the table of experiments/README.md.

From the raw lines, which hold machine, versions and commit of most runs; dates are those that a page gives.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any  # of JSON

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import records

PACKED = ".1.xz"
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
HEAD = ("study", "lines", "machine", "torch", "measured", "commits", "lines of changed trees")


def files(folder: Path) -> Iterator[Path]:
    """Committed raw lines of a study, by the names that records.py knows them by; rehearsals are not."""
    yield from (folder / file.name.removesuffix(PACKED) for file in sorted(folder.glob(f"*.jsonl{PACKED}")))


def origins(row: Any) -> Iterator[Mapping[str, Any]]:
    """Every part of a line that says on which commit it was made."""
    if isinstance(row, dict):
        if "commit" in row and isinstance(row["commit"], str | None):
            yield row
        else:
            for value in row.values():
                yield from origins(value)
    elif isinstance(row, list):
        for value in row:
            yield from origins(value)


def line(folder: Path) -> list[str]:
    rows = [row for file in files(folder) for row in records.read(file)]
    found = [next(origins(row), {}) for row in rows]
    machines = sorted({str(each["hardware"]) for each in found if each.get("hardware")})
    versions = sorted({str(each["versions"]["torch"]) for each in found if each.get("versions")})
    commits = {str(each["commit"]).rstrip("+") for each in found if each.get("commit")}
    changed = sum(str(each.get("commit")).endswith("+") for each in found)
    text = (folder / "README.md").read_text(encoding="utf-8")
    dates = sorted(set(DATE.findall(text)))
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "-"
    unknown = "see page"
    known = str(len(commits)) if commits else unknown
    return [
        f"[{folder.name}]({folder.name}/README.md)",
        str(len(rows)) if rows else "-",
        "; ".join(machines) or unknown,
        ", ".join(versions) or unknown,
        when,
        known,
        str(changed) if commits else "-",
    ]


def table() -> list[str]:
    """A line a study."""
    folders = sorted(file.parent for file in HERE.glob("*/README.md"))
    lines = [line(folder) for folder in folders]
    return [f"| {' | '.join(cells)} |" for cells in (HEAD, ["---"] * len(HEAD), *lines)]


if __name__ == "__main__":
    print("\n".join(table()))
