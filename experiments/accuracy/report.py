"""Test accuracy at best validation, mean and deviation over seeds, from run folders.

python experiments/accuracy/report.py multirun/accuracy    # prints the table, writes results.csv
"""

import csv
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
PUBLISHED = {
    ("cora", "gcn"): "81.5",
    ("cora", "gat"): "83.0 +- 0.7",
    ("citeseer", "gcn"): "70.3",
    ("citeseer", "gat"): "72.5 +- 0.7",
    ("computers", "gcn"): "82.6 +- 2.4",
    ("computers", "gat"): "78 +- 19",
    ("cs", "gcn"): "91.1 +- 0.5",
    ("cs", "gat"): "90.5 +- 0.6",
}


def main(folder: Path) -> None:
    cells: dict[tuple[str, str, int], list[tuple[int, float]]] = defaultdict(list)
    for file in sorted(folder.rglob("result.json")):
        result = json.loads(file.read_text())
        if result["status"] != "completed":
            raise SystemExit(f"{file}: {result['status']}: {result['error']}")
        key = result["dataset"], result["model"], result["world_size"]
        cells[key].append((result["seed"], 100 * result["metric"]["test_at_best_val"]))
    rows = []
    for (dataset, model, ranks), runs in sorted(cells.items()):
        values = [value for _, value in sorted(runs)]
        ends = {"mean": round(statistics.mean(values), 2), "deviation": round(statistics.stdev(values), 2)}
        row = {"dataset": dataset, "model": model, "ranks": ranks, "seeds": len(values), **ends}
        rows.append({**row, "published": PUBLISHED[dataset, model], "values": " ".join(f"{v:.2f}" for v in values)})
    print("| dataset | model | ranks | seeds | test accuracy | published |\n|---|---|---|---|---|---|")
    for r in rows:
        measured = f"{r['mean']:.1f} +- {r['deviation']:.1f}"
        print(f"| {r['dataset']} | {r['model']} | {r['ranks']} | {r['seeds']} | {measured} | {r['published']} |")
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
