"""Accuracy tables and the figure. Differences are paired by seed with exact training. "not inferior": the one-sided
95 % bound lies above -MARGIN points; "not converged": the last fifth of the epochs raises the best validation by more
than MARGIN points."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import reports
from paired import FIT, MIB, Row, Runs, accuracy_table, cells, curve, differences, late_gain
from records import Files

from gnnpar.config.study import Study, read_study
from gnnpar.report.columns import Runs as Results
from gnnpar.report.statistics import non_inferiority

HERE = Path(__file__).parent
MARGIN = 1.0  # points
DRAWN_POINTS = 20  # of a curve
COLOURS = ("#000000", "#999999", "#d95f02", "#e6ab02", "#1b9e77", "#66a61e", "#7570b3", "#e7298a", "#a6761d")
DRAWN = ("exact", "control", "pipegcn", "pipegcn both", "bns 0.1", "bns 0.01", "sancus k=4", "digest k=10", "cofree")
ROWS = "bytes_per_epoch.forward + bytes_per_epoch.backward"


def job(row: Row) -> str:
    return row.get("job") or "{graph}; {cut}; {world_size}; {strategy}".format(**row)


def before(files: Files, measured: object) -> str:
    lines: list[str] = []
    heads = {"over exact, points": "over exact, points (95 %)"}
    how = {"margin": MARGIN, "nbytes": nbytes, "form": ("+.1f", ".3f"), "heads": heads}
    for study, variants in studies_of(files).items():
        table = accuracy_table(variants, variants["exact"], **how)
        lines += [f"### {study}, {len(variants['exact'])} seeds", "", table, "", *notes(variants), ""]
    return "\n".join([*lines, ""])


def nbytes(row: Row) -> float:
    return row["result"]["bytes_per_epoch"]["total"] / MIB


def studies_of(files: Files) -> dict[str, Mapping[str, Runs]]:
    found, study = cells(files.read("accuracy")), read_study(HERE / "accuracy.yaml")
    here = {cell: found[cell,] for cell in study.cells if "exact" in found.get((cell,), {})}
    return {cell: {name: runs[name] for name in study.methods if name in runs} for cell, runs in here.items()}


def notes(variants: Mapping[str, Runs]) -> Iterator[str]:
    exact = variants["exact"]
    gain = late_gain(exact)
    yield f"The last fifth of the epochs raises the best validation of exact training by {gain:.1f} points."
    if "control" in variants:
        control = non_inferiority(differences(variants["control"], exact), MARGIN)
        yield f"The control is {control}: the graph {FIT.get(control, 'may not carry')} a claim of no loss."


def draw(files: Files, name: str, part: Study, runs: Results) -> None:
    """Training loss and validation of each study, mean over seeds; last: feature parallelism's bytes over halos'."""
    if name != "bytes":
        return
    studies = studies_of(files)
    plt = reports.pyplot(8)
    figure, axes = plt.subplots(2, len(studies) + 1, figsize=(3.4 * (len(studies) + 1), 5), squeeze=False)
    for column, (study, variants) in enumerate(studies.items()):
        losses, metrics = axes[:, column]
        for name, colour in zip(DRAWN, COLOURS, strict=True):
            if name in variants:
                losses.plot(*curve(variants[name], "loss/train", DRAWN_POINTS), color=colour, lw=1.1, label=name)
                metrics.plot(*curve(variants[name], "metric/val", DRAWN_POINTS), color=colour, lw=1.1, label=name)
        top = max(curve(variants["exact"], "loss/train", DRAWN_POINTS)[1])
        losses.set(title=study, ylabel="training loss", ylim=(0, 1.2 * top))
        metrics.set(xlabel="epoch", ylabel="validation")
    losses, metrics = axes[:, -1]
    for axis, cut in zip((losses, metrics), part.axes["cut"], strict=True):
        for graph, colour in zip(part.axes["graph"], COLOURS, strict=False):
            ranks = [n for n in (2, 4, 8) if (graph, cut, str(n), "feature") in runs]
            ratio = f"({ROWS}) / ({ROWS})(graph_parallel)"
            ratios = [reports.measured(part, runs, ratio, graph, cut, str(n), "feature") for n in ranks]
            axis.plot(ranks, ratios, "o-", color=colour, ms=3, lw=1, label=graph)
        axis.axhline(1, color="0.7", lw=0.8)
        axis.set(yscale="log", ylabel="bytes: feature / halos", title=f"{cut} cut")
        axis.set_xticks([2, 4, 8], ["2", "4", "8"])
    metrics.set(xlabel="ranks")
    losses.legend(frameon=False, fontsize=6)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(DRAWN), frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    reports.save(figure, files.figure)
