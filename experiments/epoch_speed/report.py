"""The tables of README.md from results.csv: `python experiments/epoch_speed/report.py`."""

import csv
from pathlib import Path

NAMES = {"gcn": "GCN", "sage": "GraphSAGE", "gat": "GAT, 4 heads"}


def ratio(row: dict[str, str]) -> str:
    return f"{float(row['speedup']):.2f} ({float(row['low']):.2f} to {float(row['high']):.2f})"


def main() -> None:
    with (Path(__file__).parent / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    print("| model | threads | `single` | PyG | PyG / `single` (range) | peak above live, `single` / PyG |")
    print("|---|---|---|---|---|---|")
    for row in (row for row in rows if row["table"] == "pyg"):
        seconds = f"{float(row['single_seconds']):.3f} s | {float(row['other_seconds']):.3f} s"
        peaks = f"{float(row['single_mib']):.0f} / {float(row['other_mib']):.0f} MiB"
        print(f"| {NAMES[row['model']]} | {row['threads']} | {seconds} | {ratio(row)} | {peaks} |")
    print("\n| model | 2 ranks x 1 thread | faster than `single`, 1 thread | than `single`, 2 threads |")
    print("|---|---|---|---|")
    ranks = {(row["model"], row["threads"]): row for row in rows if row["table"] == "ranks"}
    for model, name in NAMES.items():
        one, two = ranks[model, "1"], ranks[model, "2"]
        print(f"| {name} | {float(one['other_seconds']):.3f} s | {ratio(one)} | {ratio(two)} |")


if __name__ == "__main__":
    main()
