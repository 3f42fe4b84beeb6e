"""Vanilla's shares, geometric means over models, and the parts of an epoch."""

import math
from collections.abc import Iterator

import reports
from records import Files
from reports import Measured

from gnnpar.config.study import Study
from gnnpar.report.columns import Runs
from gnnpar.report.statistics import geometric_mean

PHASES = {
    "compute": ("compute", "encode", "other"),
    "bubble": ("bubble",),
    "exposed": ("exposed_wire", "exposed_skew"),
    "reduce": ("reduce",),
}
COLOURS = ("#444444", "#1b9e77", "#7570b3", "#d95f02")
SHARE = "average(breakdown_seconds.exposed_wire + breakdown_seconds.exposed_skew) / first(epoch_seconds.mean)"


def before(files: Files, measured: Measured) -> str:
    study, runs = measured["results"]
    cells = [(links, model) for links in study.axes["links"] for model in study.axes["model"]]
    shares = [f"{'; '.join(at)} {reports.measured(study, runs, SHARE, *at, 'vanilla'):.0%}" for at in cells]
    heads = ("links", "strategy", "cells", "times faster than vanilla, geometric mean", "worst", "best")
    says = f"vanilla's share of communication: {', '.join(shares)}"
    return f"{says}\n\n{reports.table(heads, summary(study, runs))}\n"


def summary(study: Study, runs: Runs) -> Iterator[list[str]]:
    """Return geometric means over all models of a kind of link: the paper's 2.03 is such a mean."""
    for links in ("loopback", "paced"):
        for method in (name for name in study.methods if (links, "gcn", name) in runs and name != "vanilla"):
            found = [reports.measured(study, runs, "times(vanilla)", links, m, method) for m in study.axes["model"]]
            cells = [each for each in found if not math.isnan(each)]
            values = (geometric_mean(cells).value, min(cells), max(cells))
            yield [links, method, str(len(cells)), *(f"{value:.2f}" for value in values)]


def draw(files: Files, name: str, study: Study, runs: Runs) -> None:
    """Draw the parts of an epoch over the shaped link, a bar a strategy, from the block with the median epoch: one
    disturbed block would decide a mean."""
    plt = reports.pyplot()
    needed = [name for name in study.methods if name != "hybrid"]
    models = [m for m in study.axes["model"] if all(("paced", m, name) in runs for name in needed)]
    if not models:
        return
    figure, axes = plt.subplots(1, len(models), figsize=(2.6 * len(models), 3.4), squeeze=False, layout="constrained")
    for axis, model in zip(axes[0], models, strict=True):
        mine = {name: list(runs["paced", model, name].values()) for name in needed}
        middle = [sorted(r, key=lambda r: r["epoch_seconds"]["mean"])[(len(r) - 1) // 2] for r in mine.values()]
        below = [0.0] * len(mine)
        for (phase, names), colour in zip(PHASES.items(), COLOURS, strict=True):
            values = [1e3 * sum(each["breakdown_seconds"][name] for name in names) for each in middle]
            axis.bar(range(len(mine)), values, bottom=below, color=colour, label=phase)
            below = [a + b for a, b in zip(below, values, strict=True)]
        axis.set_xticks(range(len(mine)), list(mine), rotation=60, ha="right", fontsize=7)
        axis.set_title(f"{model}, {mine['vanilla'][0]['paced']['rates']['host_gbps']:.2f} Gbit/s")
    axes[0, 0].set_ylabel("ms an epoch, median block")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(PHASES), frameon=False)
    reports.save(figure, files.figure)
