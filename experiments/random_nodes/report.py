"""Tables of README.md: `python experiments/random_nodes/report.py`.

Differences are paired by seed with full-graph training; "late gain": the points by which the last fifth of the epochs
raises the best validation.
"""

import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records
import reports
from paired import Row, Runs, differences, each, late_gain, test, verdict

from gnnpar.report.formatting import interval
from gnnpar.report.statistics import FEWEST_SEEDS, mean

MARGIN = 1.0  # points
FULL = "full"
HEADINGS = ("model", "variant", "test, %", "over full, points", "verdict", "epochs", "steps an epoch")
HEADINGS += ("in-edges of a step's nodes kept", "late gain", "seeds")


def main() -> None:
    cells: dict[str, dict[tuple[str, str], dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in records.read(HERE / "results.jsonl"):
        cells[row["graph"]][row["model"], row["variant"]][row["seed"]] = row
    for graph, found in cells.items():
        lines = [(*key, *columns(key[1], runs, found[key[0], FULL])) for key, runs in found.items()]
        reports.show(graph, reports.table(HEADINGS, lines))


def columns(variant: str, runs: Runs, full: Runs) -> list[object]:
    first, found, gain = next(iter(runs.values())), differences(runs, full), late_gain(runs)
    over = interval(mean(found), signed=True) if len(found) >= FEWEST_SEEDS else each(found)
    judged = ["", ""] if variant == FULL else [over, verdict(found, gain, MARGIN)]
    about = [first["result"]["epochs"], first["steps"] or 1, kept(variant, first)]
    return [f"{test(runs):.1f}", *judged, *about, f"{gain:+.1f}", len(runs)]


def kept(variant: str, run: Row) -> str:
    """Share of the edges that the steps of an epoch have together, without self loops."""
    if run["edges"] is None:
        return {"control": "0"}.get(variant, "1")
    return f"{(run['edges'] - run['nodes']) / (run['whole'] - run['nodes']):.3f}"


if __name__ == "__main__":
    main()
