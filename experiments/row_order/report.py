"""The table of README.md from results.jsonl: `python experiments/row_order/report.py`."""

import sys
from pathlib import Path
from typing import Any  # of JSON

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
import records
import reports

from gnnpar.report.statistics import geometric_mean, mean

HEAD = (
    "model",
    "where",
    "ms an epoch, none",
    "ms, metis",
    "times faster",
    "last loss differs by",
    "s at the start",
    "epochs to break even",
)


def main() -> None:
    rows = records.read(reports.asked(HERE, file="results.jsonl").file)
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["job"], []).append(row["result"])
    print("| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|", sep="\n")
    for place in sorted({job.rsplit(" | ", 1)[0] for job in found}):
        none, metis = f"{place} | none", f"{place} | metis"
        seconds = {job: mean([r["epoch_seconds"]["mean"] for r in found[job]]).value for job in (none, metis)}
        faster = geometric_mean(blocks.ratios(rows, none, metis))
        losses = {job: found[job][0]["loss"]["last"] for job in (none, metis)}
        start = [mean([r["cold_start_seconds"]["shard"] for r in found[job]]).value for job in (metis, none)]
        cost, gain = start[0] - start[1], seconds[none] - seconds[metis]
        cells = [
            *place.split(" | "),
            f"{1000 * seconds[none]:.0f}",
            f"{1000 * seconds[metis]:.0f}",
            f"{faster.value:.2f} ({faster.low:.2f} to {faster.high:.2f})",
            f"{abs(losses[metis] / losses[none] - 1):.0e}",
            f"{cost:.2f}",
            f"{cost / gain:.0f}" if gain > 0 else "never",
        ]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
