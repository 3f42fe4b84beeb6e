"""Tables and figure of README.md from seeds.jsonl and times.jsonl: `python experiments/adaqp_knobs/report.py`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import pictures
import records
import reports

from gnnpar.report.formatting import interval
from gnnpar.report.statistics import Estimate, geometric_mean, mean

HEADINGS = (
    "codec",
    "sent, of exact",
    "bits, last choice",
    "gradient error",
    "over adaptive",
    "test, points over exact",
    "choosing, bytes of all",
)
FAMILIES = {  # colour and mark of the figure
    "uniform": ("#7a8794", "s"),
    "lambda": ("#2b7bba", "o"),
    "group": ("#1a9e77", "D"),
    "period": ("#e09f1f", "v"),
}
Results = Mapping[str, Mapping[int, Any]]  # job -> block or seed -> result


def load(name: str) -> Results:
    found: dict[str, dict[int, Any]] = {}
    for row in records.read(HERE / f"{name}.jsonl"):
        result = row["result"]
        found.setdefault(row["job"], {})[result["seed"] if name == "seeds" else row["block"]] = result
    return found


def sent(result: Mapping[str, Any]) -> float:
    """Bytes of rows and of choosing, without gradients of weights, which no codec touches."""
    return float(result["bytes_per_epoch"]["total"] - result["bytes_per_epoch"]["reduce"])


def error(result: Mapping[str, Any]) -> float:
    return float(result["fidelity"]["relative_error"]["mean"])


def over(found: Results, job: str, base: str, of: Any) -> list[float]:
    """Of `job` over that of `base`, a quotient a seed."""
    return [of(found[job][seed]) / of(found[base][seed]) for seed in sorted(found[job])]


def points(found: Results, job: str) -> list[float]:
    """Test accuracy at the best validation, over that of the exact run of the same seed."""
    score = {name: {s: r["metric"]["test_at_best_val"] for s, r in found[name].items()} for name in (job, "exact")}
    return [100 * (score[job][seed] - score["exact"][seed]) for seed in sorted(score[job])]


def by_seed(found: Results) -> list[str]:
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for job, results in found.items():
        chosen = [r["assignment"]["mean_bits"] for r in results.values() if r["assignment"]]
        errors = mean([error(r) for r in results.values()])
        share = mean([r["bytes_per_epoch"]["assign"] / sent(r) for r in results.values()]) if chosen else None
        cells = [
            job,
            f"{mean(over(found, job, 'exact', sent)).value:.3f}",
            f"{mean(chosen).value:.2f}" if chosen else "-",
            f"{errors.value:.4f}",
            "-" if job == "exact" else ratio(geometric_mean(over(found, job, "adaptive", error))),
            "-" if job == "exact" else interval(mean(points(found, job)), signed=True),
            f"{100 * share.value:.1f} %" if share else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ratio(found: Estimate) -> str:
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def choosing(result: Mapping[str, Any]) -> float:
    """Of the training's wall, in percent, that passes in choosing bits on the rank that chooses."""
    return 100 * result["assignment"]["count"] * result["assignment"]["seconds"] / result["train_wall_seconds"]


def in_time(found: Results) -> list[str]:
    lines = ["| bits by | ms a choice | choices | % of training | ms an epoch | over thresholds |", "|---" * 6 + "|"]
    for job, results in found.items():
        each = [results[block] for block in sorted(results)]
        seconds = [r["assignment"]["seconds"] for r in each]
        epochs = over(found, job, "thresholds, a row a group", lambda r: r["train_wall_seconds"])
        wall = geometric_mean([1000 * r["train_wall_seconds"] / r["epochs"] for r in each]).value
        cells = [
            job,
            f"{1000 * geometric_mean(seconds).value:.1f}",
            str(each[0]["assignment"]["count"]),
            f"{mean([choosing(r) for r in each], fewest=2).value:.1f}",
            f"{wall:.1f}",
            ratio(geometric_mean(epochs)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(found: Results, file: Path) -> None:
    """Gradient error against bytes: what a knob moves along the curve, and what moves off it."""
    plt = pictures.pyplot(10)
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    at = {job: (mean(over(found, job, "exact", sent)).value, mean_error(found[job])) for job in found}
    axis.plot(*at["adaptive"], "k*", markersize=12)
    axis.annotate("adaptive", at["adaptive"], xytext=(6, 4), textcoords="offset points")
    for family, (colour, mark) in FAMILIES.items():
        jobs = [job for job in found if job.startswith(family)]
        axis.plot(*zip(*(at[job] for job in jobs), strict=True), mark, color=colour)
        for job in jobs:
            axis.annotate(job, at[job], xytext=(6, -3), textcoords="offset points", color=colour, fontsize=8)
    axis.plot(*at["random"], "x", color="#b04040")
    axis.annotate("random", at["random"], xytext=(6, 4), textcoords="offset points", color="#b04040", fontsize=8)
    axis.set(xlabel="bytes sent, of fp32", ylabel="relative error of the gradient", yscale="log")
    pictures.save(figure, file)


def mean_error(results: Mapping[int, Any]) -> float:
    return mean([error(result) for result in results.values()]).value


def main() -> None:
    seeds, times = load("seeds"), load("times")
    first = next(iter(seeds["exact"].values()))
    print(f"{first['hardware']}, torch {first['versions']['torch']}", "", sep="\n")
    print("\n".join(by_seed(seeds)), "", "\n".join(in_time(times) if times else ()), sep="\n")
    draw(seeds, reports.asked(HERE).figure)


if __name__ == "__main__":
    main()
