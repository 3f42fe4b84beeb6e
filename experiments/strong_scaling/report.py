"""Table and figure of README.md from results.jsonl: `python experiments/strong_scaling/report.py [--figure FILE]`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
import pictures
import records
import reports

from gnnpar.report.statistics import geometric_mean

COLOURS = {"graph_parallel": "#2b7bba", "graph_parallel bf16": "#7a8794", "sar": "#1a9e77", "adaqp": "#e09f1f"}


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Memory of a rank and bytes of all against the number of ranks; dashed: 1/N of one rank."""
    plt = pictures.pyplot(8)
    figure, (memory, sent) = plt.subplots(1, 2, figsize=(7, 3), layout="constrained")
    found = {row["job"]: row["result"] for row in rows}
    one = max(found["1 single"]["memory_bytes"]["peak"]) / 2**20
    memory.plot([1, 8], [one, one / 8], "--", color="#5a6572", linewidth=0.7)
    for name, colour in COLOURS.items():
        results = [found[f"{n} {name}"] for n in (2, 4, 8)]
        peaks = [max(r["memory_bytes"]["peak"]) / 2**20 for r in results]
        memory.plot([1, 2, 4, 8], [one, *peaks], "o-", color=colour, label=name, markersize=3)
        sent.plot([2, 4, 8], [r["bytes_per_epoch"]["total"] / 2**20 for r in results], "o-", color=colour, markersize=3)
    memory.set(xscale="log", yscale="log", xlabel="ranks", ylabel="peak of a rank, MiB")
    sent.set(xscale="log", yscale="log", xlabel="ranks", ylabel="sent an epoch, MiB")
    for axes in (memory, sent):
        axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        axes.minorticks_off()
    memory.legend(frameon=False)
    pictures.save(figure, file)


def main() -> None:
    rows = records.read(HERE / "results.jsonl")
    draw(rows, reports.asked(HERE).figure)
    jobs = sorted({row["job"] for row in rows}, key=lambda job: (job.partition(" ")[2], int(job.partition(" ")[0])))
    print("| strategy | ranks | s an epoch | times one rank (95 % over blocks) | sent an epoch | peak of a rank |")
    print("|---|---|---|---|---|---|")
    for job in jobs:
        ranks, _, name = job.partition(" ")
        mine = [row["result"] for row in rows if row["job"] == job]
        sent, peak = mine[0]["bytes_per_epoch"]["total"] / 2**20, max(mine[0]["memory_bytes"]["peak"]) / 2**20
        time, ratio = "-", "-"  # more ranks than cores: no statement on speed
        if not mine[0]["oversubscribed"]:
            time = f"{geometric_mean([r['epoch_seconds']['mean'] for r in mine]).value:.3f}"
            faster = geometric_mean([1 / x for x in blocks.ratios(rows, job, "1 single")])
            ratio = f"{faster.value:.2f} ({faster.low:.2f} to {faster.high:.2f})"
        print(f"| {name} | {ranks} | {time} | {ratio} | {sent:.1f} MiB | {peak:.0f} MiB |")


if __name__ == "__main__":
    main()
