"""Accuracy tables and the figure. Differences are paired by seed with exact training. "not inferior": the one-sided
95 % bound lies above -MARGIN points; "not converged": the last fifth of the epochs raises the best validation by more
than MARGIN points."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pictures
import records
import reports
from paired import FIT, Row, Runs, average, curve, differences, gap, late_gain, test, verdict

import graphs
from gnnpar.config.study import Study, read_study
from gnnpar.report.columns import Runs as Results
from gnnpar.report.statistics import non_inferiority

HERE = Path(__file__).parent
PARTS = ("accuracy", "bytes", "memory", "times")
MARGIN = 1.0  # points
MIB = 2**20
DRAWN_POINTS = 20  # of a curve
COLOURS = ("#000000", "#999999", "#d95f02", "#e6ab02", "#1b9e77", "#66a61e", "#7570b3", "#e7298a", "#a6761d")
DRAWN = ("exact", "control", "pipegcn", "pipegcn both", "bns 0.1", "bns 0.01", "sancus k=4", "digest k=10", "cofree")
ROWS = "bytes_per_epoch.forward + bytes_per_epoch.backward"
prepare = graphs.untyped_debian


def job(row: Row) -> str:
    return row.get("job") or "{graph}; {cut}; {world_size}; {strategy}".format(**row)


def before() -> str:
    lines: list[str] = []
    for study, variants in studies_of(records.read(HERE / "accuracy.jsonl")).items():
        lines += [
            f"### {study}, {len(variants['exact'])} seeds",
            "",
            accuracy_table(variants),
            "",
            *notes(variants),
            "",
        ]
    return "\n".join([*lines, ""])


def studies_of(rows: Iterable[Row]) -> dict[str, Mapping[str, Runs]]:
    found: dict[str, dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        study, variant = row["job"].split("; ")
        found[study][variant][row["result"]["seed"]] = row
    cells = read_study(HERE / "accuracy.yaml")
    return {
        study: {name: found[study][name] for name in cells.methods if name in found[study]}
        for study in cells.cells
        if "exact" in found[study]
    }


def accuracy_table(variants: Mapping[str, Runs]) -> str:
    exact = variants["exact"]
    sent = {name: average(runs, "bytes_per_epoch", "total") for name, runs in variants.items()}
    gains = {name: late_gain(runs) for name, runs in variants.items()}
    gaps = {name: differences(runs, exact) for name, runs in variants.items()}
    of = {
        "variant": str,
        "test": lambda name: f"{test(variants[name]):.1f}",
        "over exact, points (95 %)": lambda name: gap(gaps[name], "+.1f"),
        "verdict": lambda name: verdict(gaps[name], gains[name], MARGIN) if name != "exact" else "",
        "gradient error": lambda name: f"{average(variants[name], 'fidelity', 'relative_error', 'mean'):.3f}",
        "cosine": lambda name: f"{average(variants[name], 'fidelity', 'cosine', 'mean'):.3f}",
        "MiB an epoch": lambda name: f"{sent[name] / MIB:.3f}",
        "of exact": lambda name: f"{sent[name] / sent['exact']:.3f}",
        "last loss": lambda name: f"{average(variants[name], 'loss', 'last'):.3f}",
        "late gain": lambda name: f"{gains[name]:+.1f}",
    }
    return reports.columns(of, variants)


def notes(variants: Mapping[str, Runs]) -> Iterator[str]:
    exact = variants["exact"]
    gain = late_gain(exact)
    yield f"The last fifth of the epochs raises the best validation of exact training by {gain:.1f} points."
    if "control" in variants:
        control = non_inferiority(differences(variants["control"], exact), MARGIN)
        yield f"The control is {control}: the graph {FIT.get(control, 'may not carry')} a claim of no loss."


def draw(part: Study, runs: Results, file: Path) -> None:
    """Training loss and validation of each study, mean over seeds; last: feature parallelism's bytes over halos'."""
    if "cut" not in part.axes:
        return
    studies = studies_of(records.read(HERE / "accuracy.jsonl"))
    plt = pictures.pyplot(8)
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
            ratios = [pictures.measured(part, runs, ratio, graph, cut, str(n), "feature") for n in ranks]
            axis.plot(ranks, ratios, "o-", color=colour, ms=3, lw=1, label=graph)
        axis.axhline(1, color="0.7", lw=0.8)
        axis.set(yscale="log", ylabel="bytes: feature / halos", title=f"{cut} cut")
        axis.set_xticks([2, 4, 8], ["2", "4", "8"])
    metrics.set(xlabel="ranks")
    losses.legend(frameon=False, fontsize=6)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(DRAWN), frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    pictures.save(figure, file)
    plt.close(figure)
