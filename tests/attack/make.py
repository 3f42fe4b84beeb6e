"""Runs the fuzzers in full and writes how the cases ended: `python tests/attack/make.py [files|inputs|overrides ...]`.

counts.json beside this file holds the counts; the table in docs/guide/reliability.md is made from it. Half an hour.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / name) for name in ("src", "kernels", "tests")]

from attack import test_files, test_hetero_inputs, test_inputs, test_overrides
from attack.fuzzing import Counts

COUNTS, PAGE = HERE / "counts.json", HERE.parents[1] / "docs/guide/reliability.md"
BEGIN, END = "<!-- counts of tests/attack/make.py -->\n", "<!-- end of counts -->\n"
Table = Mapping[str, Mapping[str, int]]


def count(kind: str, top: Path) -> Counts:
    """All cases of `make test-all`, those of `make test` included."""
    counts = Counts()
    if kind == "files":
        test_files.make_folder(top)
        for name in test_files.READERS:
            test_files.fuzz(top, name, range(test_files.MANY), counts)
    elif kind == "inputs":
        test_inputs.fuzz(range(test_inputs.MANY), top, counts)
        test_hetero_inputs.fuzz(range(test_hetero_inputs.MANY), top, counts)
    else:
        test_overrides.fuzz(range(test_overrides.MANY), top, counts)
    return counts


def table(counts: Table) -> str:
    """In Markdown, a row a kind of case."""
    lines = ["| cases | tried | accepted | refused in one line | tracebacks | hung | silent |", "|---|" + "---:|" * 6]
    for name, row in counts.items():
        cells = [f"{row[key]:,}" for key in ("tried", "accepted", "refused", "traceback", "hung", "silent")]
        lines.append("| " + " | ".join((name, *cells)) + " |")
    return "\n".join(lines) + "\n"


def with_table(page: str, counts: Table) -> str:
    """The page with the table in its place."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(counts) + END + rest.split(END)[1]


def main(kinds: list[str]) -> None:
    for kind in kinds or ["files", "inputs", "overrides"]:
        with tempfile.TemporaryDirectory(prefix="gnnpar-attack-") as top:
            counts = count(kind, Path(top))
        for line in counts.findings:
            sys.stderr.write(line + "\n")
        found = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
        found[kind] = counts.as_json()
        COUNTS.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
        PAGE.write_text(with_table(PAGE.read_text(), found))


if __name__ == "__main__":
    main(sys.argv[1:])
