"""The table of README.md from results.jsonl: `python experiments/strong_scaling/report.py`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks  # noqa: E402

from gnnpar.results.statistics import geometric_mean  # noqa: E402


def main() -> None:
    rows = blocks.read(HERE / "results.jsonl")
    jobs = sorted({row["job"] for row in rows}, key=lambda job: (job.partition(" ")[2], int(job.partition(" ")[0])))
    print("| strategy | ranks | s an epoch | times one rank (95 % over blocks) | sent an epoch | peak of a rank |")
    print("|---|---|---|---|---|---|")
    for job in jobs:
        ranks, _, name = job.partition(" ")
        mine = [row["result"] for row in rows if row["job"] == job]
        sent, peak = mine[0]["bytes_per_epoch"]["total"] / 2**20, max(mine[0]["memory_bytes"]["peak"]) / 2**20
        time, ratio = "-", "-"  # more ranks than cores: no statement on speed
        if not mine[0]["oversubscribed"]:
            time = f"{geometric_mean([r['epoch_seconds']['median'] for r in mine]).value:.3f}"
            faster = geometric_mean([1 / x for x in blocks.ratios(rows, job, "1 single")])
            ratio = f"{faster.value:.2f} ({faster.low:.2f} to {faster.high:.2f})"
        print(f"| {name} | {ranks} | {time} | {ratio} | {sent:.1f} MiB | {peak:.0f} MiB |")


if __name__ == "__main__":
    main()
