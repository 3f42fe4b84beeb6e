"""Test accuracy at best validation, mean and deviation over seeds.

python experiments/study.py report accuracy --runs multirun/accuracy    # of run folders: writes results.csv
"""

import csv
import json
import statistics
from collections import defaultdict
from pathlib import Path

import reports
from records import Files

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


def collect(runs: Path, out: Path) -> None:
    """Write a line a dataset, model and number of ranks."""
    cells: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
    for file in sorted(runs.rglob("result.json")):
        result = json.loads(file.read_text())
        if result["status"] != "completed":
            raise SystemExit(f"{file}: {result['status']}: {result['error']}")
        key = result["dataset"], result["model"], result["world_size"]
        cells[key][result["seed"]] = 100 * result["metric"]["test_at_best_val"]
    rows = []
    for (dataset, model, ranks), of in sorted(cells.items()):
        values = [of[seed] for seed in sorted(of)]
        ends = {"mean": round(statistics.mean(values), 2), "deviation": round(statistics.stdev(values), 2)}
        row = {"dataset": dataset, "model": model, "ranks": ranks, "seeds": len(values), **ends}
        rows.append({**row, "published": PUBLISHED[dataset, model], "values": " ".join(f"{v:.2f}" for v in values)})
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def report(files: Files, *, runs: str = "") -> None:
    lines = files.folder / "results.csv"
    if runs:
        collect(Path(runs), lines)
    with lines.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    of = {heading: lambda row, heading=heading: row[heading] for heading in ("dataset", "model", "ranks", "seeds")}
    of["test accuracy"] = lambda row: f"{float(row['mean']):.1f} ± {float(row['deviation']):.1f}"
    of["published"] = lambda row: row["published"]
    print(reports.columns(of, rows))
