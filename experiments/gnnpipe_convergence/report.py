"""Accuracy of each technique, with curves.

Differences are paired by seed; "not inferior" is protocol rule 12 with a margin of 1 point. Where the drop control
passes too, the dataset cannot carry the claim. Targets are the exact runs' mean best validation less one deviation.
"""

import itertools
import math
import statistics
from collections.abc import Mapping

import reports
from paired import Runs, average, cells, control, curve, differences, points, target
from records import Files

from gnnpar.report.statistics import mean, non_inferiority

MARGIN = 1.0
STUDIES = ("sbm", "squirrel", "cs")
MODELS = ("gcn", "gcn deep", "gcnii", "resgcn")
DRAWN = ("exact", "gnnpipe", "no shuffle", "R = 1", "stale gradients", "mix 0.5", "exact refresh", "drop")
WIDE = 4  # columns of the figure
COLOURS = ("#000000", "#d95f02", "#e6ab02", "#66a61e", "#e7298a", "#1b9e77", "#7570b3", "#999999")
Cells = Mapping[tuple[str, str], Mapping[str, Runs]]  # (study, model) -> variant -> runs


def to_target(runs: Runs, target: float) -> str:
    """Median epochs until validation reaches the target; > where half of the runs never do."""
    hits = ((row["epoch"] + 1 for row in run["curve"] if row["metric/val"] >= target) for run in runs.values())
    middle = statistics.median(next(hit, math.inf) for hit in hits)
    return f"{middle:.0f}" if math.isfinite(middle) else f"> {next(iter(runs.values()))['result']['epochs']}"


def table(variants: Mapping[str, Runs]) -> str:
    exact, lines = variants["exact"], []
    goal = target(run["result"]["metric"]["best_val"] for run in exact.values())
    for name, runs in variants.items():
        tests = list(map(points, runs.values()))
        spread = statistics.stdev(tests) if len(tests) > 1 else 0.0
        found = differences(runs, exact)
        over = mean(found)
        shown = reports.interval(over, "+.1f") if over.low == over.low else f"{over.value:+.1f}"
        verdict = "" if name == "exact" else non_inferiority(found, MARGIN)
        loss = average(runs, "loss", "last")
        tested = f"{statistics.fmean(tests):.1f} ± {spread:.1f}"
        lines.append([name, tested, shown, verdict, f"{loss:.3f}", to_target(runs, goal)])
    heads = ("variant", "test", "over exact, points (95 %)", "verdict", "last loss", f"epochs to {100 * goal:.1f} %")
    return reports.table(heads, lines)


def draw(cells: Cells, files: Files) -> None:
    """Training loss above validation, mean over seeds; a column a study and model, four side by side. Losses that leave
    the axis have passed 1.2 times the first of exact training."""
    plt = reports.pyplot(8)
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
    reports.save(figure, files.figure)


def report(files: Files) -> None:
    found = cells(files.read())
    shown = {cell: found[cell] for cell in itertools.product(STUDIES, MODELS) if cell in found}
    for (study, model), variants in shown.items():
        exact = variants["exact"]
        settings = next(iter(exact.values()))["result"]["settings"]["model"]
        reports.show(f"{study}, {model}, {settings['num_layers']} layers, {len(exact)} seeds", table(variants))
        if "drop" in variants and len(exact) > 1:
            print(control(differences(variants["drop"], exact), MARGIN))
    draw(shown, files)
