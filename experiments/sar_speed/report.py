"""The table of README.md from results.jsonl: `python experiments/sar_speed/report.py`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
import records

from gnnpar.report.statistics import geometric_mean


def main() -> None:
    rows = records.read(HERE / "results.jsonl")
    print("| model | rounds | strategy | s an epoch | times graph_parallel (95 % over blocks) | sent an epoch |")
    print("|---|---|---|---|---|---|")
    for job in sorted({row["job"] for row in rows}):
        model, world, name = job.split("; ")
        mine = [row["result"] for row in rows if row["job"] == job]
        seconds = geometric_mean([r["epoch_seconds"]["mean"] for r in mine]).value
        ratio = geometric_mean(blocks.ratios(rows, job, f"{model}; {world}; graph_parallel"))
        sent = mine[0]["bytes_per_epoch"]["total"] / 2**20
        times = f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        print(f"| {model} | {world} | {name} | {seconds:.3f} | {times} | {sent:.0f} MiB |")


if __name__ == "__main__":
    main()
