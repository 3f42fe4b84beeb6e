"""Tables and figure of results.jsonl: `python experiments/gnnpipe_convergence/report.py [FILE] [--figure FILE]`.

Differences are paired by seed; "not inferior" is protocol rule 12 with a margin of 1 point. Where the drop control
passes too, the dataset cannot carry the claim. Targets are the exact runs' mean best validation less one deviation.
"""

import itertools
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import pictures
import records
import reports

from gnnpar.report.statistics import mean, non_inferiority

MARGIN = 1.0
STUDIES = ("sbm", "squirrel", "cs")
MODELS = ("gcn", "gcn deep", "gcnii", "resgcn")
DRAWN = ("exact", "gnnpipe", "no shuffle", "R = 1", "stale gradients", "mix 0.5", "exact refresh", "drop")
WIDE = 4  # columns of the figure
COLOURS = ("#000000", "#d95f02", "#e6ab02", "#66a61e", "#e7298a", "#1b9e77", "#7570b3", "#999999")
Runs = dict[int, dict[str, Any]]  # by seed
Cells = dict[tuple[str, str], dict[str, Runs]]  # (study, model) -> variant -> runs


def cells_of(rows: Iterable[dict[str, Any]]) -> Cells:
    cells: Cells = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        study, model, variant = row["job"].split("; ")
        cells[study, model][variant][row["result"]["seed"]] = row
    return {cell: cells[cell] for cell in itertools.product(STUDIES, MODELS) if cell in cells}


def points(run: dict[str, Any]) -> float:
    """Test accuracy at the best validation, in percent."""
    return 100 * run["result"]["metric"]["test_at_best_val"]


def paired(runs: Runs, exact: Runs) -> list[float]:
    return [points(runs[seed]) - points(exact[seed]) for seed in sorted(runs.keys() & exact.keys())]


def to_target(runs: Runs, target: float) -> str:
    """Median epochs until validation reaches the target; > where half of the runs never do."""
    reached = []
    for run in runs.values():
        hit = next((row["epoch"] + 1 for row in run["curve"] if row["metric/val"] >= target), math.inf)
        reached.append(hit)
    middle = statistics.median(reached)
    return f"{middle:.0f}" if math.isfinite(middle) else f"> {next(iter(runs.values()))['result']['epochs']}"


def table(variants: dict[str, Runs]) -> Iterable[str]:
    exact = variants["exact"]
    best = [run["result"]["metric"]["best_val"] for run in exact.values()]
    target = statistics.fmean(best) - (statistics.stdev(best) if len(best) > 1 else 0.0)
    yield f"| variant | test | over exact, points (95 %) | verdict | last loss | epochs to {100 * target:.1f} % |"
    yield "|" + "---|" * 6
    for name, runs in variants.items():
        test = [points(run) for run in runs.values()]
        spread = statistics.stdev(test) if len(test) > 1 else 0.0
        differences = paired(runs, exact)
        gap = mean(differences)
        interval = f" ({gap.low:+.1f} to {gap.high:+.1f})" if gap.low == gap.low else ""
        verdict = "" if name == "exact" else non_inferiority(differences, MARGIN)
        loss = statistics.fmean(run["result"]["loss"]["last"] for run in runs.values())
        yield (
            f"| {name} | {statistics.fmean(test):.1f} ± {spread:.1f} | {gap.value:+.1f}{interval} | {verdict} | "
            f"{loss:.3f} | {to_target(runs, target)} |"
        )


def draw(cells: Cells, file: Path) -> None:
    """Training loss above validation, mean over seeds; a column a study and model, four side by side. Losses that leave
    the axis have passed 1.2 times the first of exact training."""
    plt = pictures.pyplot(8)
    bands = -(-len(cells) // WIDE)
    figure, axes = plt.subplots(
        2 * bands, min(WIDE, len(cells)), figsize=(10, 4.2 * bands), squeeze=False, layout="constrained"
    )
    for axis in axes[-2:, (len(cells) - 1) % WIDE + 1 :].flat:
        axis.set_axis_off()
    for place, ((study, model), variants) in enumerate(cells.items()):
        losses, metrics = axes[2 * (place // WIDE), place % WIDE], axes[2 * (place // WIDE) + 1, place % WIDE]
        for name, colour in zip(DRAWN, COLOURS, strict=True):
            if name not in variants:
                continue
            for axis, key in ((losses, "loss/train"), (metrics, "metric/val")):
                axis.plot(*curve(variants[name], key), color=colour, lw=1.2, label=name)
        losses.set(title=f"{study}, {model}", ylim=(0, 1.2 * max(curve(variants["exact"], "loss/train")[1])))
        metrics.set(xlabel="epoch")
        if place % WIDE == 0:
            losses.set_ylabel("training loss")
            metrics.set_ylabel("validation")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(DRAWN), frameon=False)
    pictures.save(figure, file)


def curve(runs: Runs, key: str) -> tuple[list[int], list[float]]:
    """Epochs, and the mean over seeds at each."""
    at: dict[int, list[float]] = defaultdict(list)
    for run in runs.values():
        for row in run["curve"]:
            at[row["epoch"] + 1].append(row[key])
    return list(at), [statistics.fmean(values) for values in at.values()]


def main() -> None:
    options = reports.asked(HERE, file="results.jsonl")
    cells = cells_of(records.read(options.file))
    for (study, model), variants in cells.items():
        exact = variants["exact"]
        settings = next(iter(exact.values()))["result"]["settings"]["model"]
        print(f"\n### {study}, {model}, {settings['num_layers']} layers, {len(exact)} seeds\n")
        print("\n".join(table(variants)))
        if "drop" in variants and len(exact) > 1:
            control = non_inferiority(paired(variants["drop"], exact), MARGIN)
            fit = {"not inferior": "is unfit for", "inferior": "can carry"}.get(control, "may not carry")
            print(f"\nThe drop control is {control}: the dataset {fit} the claim.")
    draw(cells, options.figure)


if __name__ == "__main__":
    main()
