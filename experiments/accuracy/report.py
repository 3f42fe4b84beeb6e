"""Test accuracy at best validation, mean and deviation over seeds.

python experiments/study.py report accuracy --runs multirun/accuracy    # of run folders: renews results.csv
"""

import json
import statistics
from pathlib import Path

import reports
from records import Files


def collected(runs: Path, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return a line a dataset, model and number of ranks, with what the present lines say is published."""
    published = {(row["dataset"], row["model"]): row["published"] for row in rows}
    results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(runs.rglob("result.json"))]
    for result in results:
        if result["status"] != "completed":
            raise SystemExit(f"{result['dataset']}, {result['model']}: {result['status']}: {result['error']}")
    lines = []
    for (dataset, model, ranks), of in sorted(
        reports.by(results, lambda r: (r["dataset"], r["model"], r["world_size"])).items()
    ):
        by_seed = {result["seed"]: 100 * result["metric"]["test_at_best_val"] for result in of}
        values = [by_seed[seed] for seed in sorted(by_seed)]
        ends = {"mean": round(statistics.mean(values), 2), "deviation": round(statistics.stdev(values), 2)}
        row = {"dataset": dataset, "model": model, "ranks": ranks, "seeds": len(values), **ends}
        row |= {"published": published[dataset, model], "values": " ".join(f"{value:.2f}" for value in values)}
        lines.append({key: str(value) for key, value in row.items()})
    return lines


def report(files: Files, *, runs: str = "") -> None:
    file = files.folder / "results.csv"
    rows = reports.read_csv(file)
    if runs:
        rows = collected(Path(runs), rows)
        reports.write_csv(file, rows)
    heads = ("dataset", "model", "ranks", "seeds", "test accuracy", "published")
    tests = [f"{float(row['mean']):.1f} ± {float(row['deviation']):.1f}" for row in rows]
    lines = [[(row | {"test accuracy": test})[head] for head in heads] for row, test in zip(rows, tests, strict=True)]
    print(reports.table(heads, lines))
