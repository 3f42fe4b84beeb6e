"""The tables and the figure of README.md from the JSONL files: `python experiments/compare_all/report.py`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
import pictures
import reports
import tables

from gnnpar.results.statistics import geometric_mean, mean

STUDIES = {"speed": "single", "paced": "graph_parallel", "accuracy": "single"}
COLOURS = {"speed": "#7a8794", "paced": "#2b7bba", "gcn": "#2b7bba", "sage": "#1a9e77", "gat": "#e09f1f"}
Rows = Sequence[Mapping[str, Any]]


def draw(studies: Mapping[str, Rows], file: Path) -> None:
    """Epoch time by link, and the difference in accuracy to `single`, paired by seed."""
    plt = pictures.pyplot(8)
    figure, (times, points) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    jobs = [name.removeprefix("gcn ") for name in dict.fromkeys(row["job"] for row in studies["accuracy"])]
    for study, shift, label in (("speed", -0.12, "loopback"), ("paced", 0.12, "1 Gbit/s")):
        for i, job in enumerate(jobs):
            found = [r["result"] for r in studies[study] if r["job"] == f"gcn {job}"]
            if found:
                e = geometric_mean([r["epoch_seconds"]["median"] for r in found])
                _point(times, e.value, e.low, e.high, i + shift, COLOURS[study], label)
    for model, shift in (("gcn", -0.2), ("sage", 0.0), ("gat", 0.2)):
        by_seed = {job: _by_seed(studies["accuracy"], job, model) for job in jobs}
        for i, job in enumerate(jobs[1:], start=1):
            e = mean([100 * (value - by_seed["single"][seed]) for seed, value in by_seed[job].items()])
            _point(points, e.value, e.low, e.high, i + shift, COLOURS[model], model)
    times.set(xlabel="seconds an epoch (GCN, 5 blocks)", xlim=(0, None))
    points.set(xlabel="test accuracy over single, points (10 seeds)", xscale="symlog")
    points.axvline(-0.3, color="#5a6572", linewidth=0.6, linestyle=":")
    for axes in (times, points):
        axes.set_yticks(range(len(jobs)), jobs)
        axes.set_ylim(len(jobs) - 0.5, -0.5)
        named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.legend(named.values(), named, frameon=False)
    pictures.save(figure, file)


def _by_seed(rows: Rows, job: str, model: str) -> dict[int, float]:
    results = [row["result"] for row in rows if row["job"] == job]
    return {r["seed"]: r["metric"]["test_at_best_val"] for r in results if r["model"] == model}


def _point(axes: Any, value: float, low: float, high: float, at: float, colour: str, label: str) -> None:
    axes.plot([low, high], [at, at], color=colour, linewidth=1)
    axes.plot([value], [at], "o", color=colour, markersize=3.5, label=label)


def main() -> None:
    studies = {name: blocks.read(HERE / f"{name}.jsonl") for name in STUDIES}
    for name, rows in studies.items():
        print(f"### {name}\n\n{tables.markdown(tables.comparison(rows, baseline=STUDIES[name]))}")
    draw(studies, reports.asked(HERE).figure)


if __name__ == "__main__":
    main()
