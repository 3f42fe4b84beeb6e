"""Accuracy tables and the figure. Differences are paired by seed with exact training. "not inferior": the one-sided
95 % bound lies above -MARGIN points; "not converged": the last fifth of the epochs raises the best validation by more
than MARGIN points."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any  # of JSON

import pictures
import records

import graphs
from gnnpar.config.study import Study, read_study
from gnnpar.report.columns import Runs as Results
from gnnpar.report.statistics import mean, non_inferiority

HERE = Path(__file__).parent
PARTS = ("accuracy", "bytes", "memory", "times")
MARGIN = 1.0  # points
MIB = 2**20
DRAWN_POINTS = 20  # of a curve
LAST = 0.8  # of a run: what validation gains after it
COLOURS = ("#000000", "#999999", "#d95f02", "#e6ab02", "#1b9e77", "#66a61e", "#7570b3", "#e7298a", "#a6761d")
DRAWN = ("exact", "control", "pipegcn", "pipegcn both", "bns 0.1", "bns 0.01", "sancus k=4", "digest k=10", "cofree")
ROWS = "bytes_per_epoch.forward + bytes_per_epoch.backward"
Row = Mapping[str, Any]
Runs = dict[int, Row]  # by seed
prepare = graphs.untyped_debian


def job(row: Row) -> str:
    return row.get("job") or "{graph}; {cut}; {world_size}; {strategy}".format(**row)


def before() -> str:
    lines: list[str] = []
    for study, variants in studies_of(records.read(HERE / "accuracy.jsonl")).items():
        lines += [
            f"### {study}, {len(variants['exact'])} seeds",
            "",
            *accuracy_table(variants),
            "",
            *notes(variants),
            "",
        ]
    return "\n".join([*lines, ""])


def studies_of(rows: Iterable[Row]) -> dict[str, dict[str, Runs]]:
    found: dict[str, dict[str, Runs]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        study, variant = row["job"].split("; ")
        found[study][variant][row["result"]["seed"]] = row
    cells = read_study(HERE / "accuracy.yaml")
    return {
        study: {name: found[study][name] for name in cells.methods if name in found[study]}
        for study in cells.cells
        if "exact" in found[study]
    }


def points(run: Row) -> float:
    """Test metric at the best validation, in percent."""
    return 100 * run["result"]["metric"]["test_at_best_val"]


def over_exact(runs: Runs, exact: Runs) -> list[float]:
    return [points(runs[seed]) - points(exact[seed]) for seed in sorted(runs.keys() & exact.keys())]


def late_gain(run: Row) -> float:
    """Points by which the last fifth of a run raises its best validation."""
    end = LAST * run["result"]["epochs"]
    before = max(row["metric/val"] for row in run["curve"] if row["epoch"] < end)
    return 100 * (max(row["metric/val"] for row in run["curve"]) - before)


def average(runs: Runs, *path: str) -> float:
    """Of a number of result.json."""
    values = []
    for run in runs.values():
        value: Any = run["result"]
        for key in path:
            value = value[key]
        values.append(value)
    return statistics.fmean(values)


def accuracy_table(variants: dict[str, Runs]) -> Iterator[str]:
    exact = variants["exact"]
    sent = average(exact, "bytes_per_epoch", "total")
    yield (
        "| variant | test | over exact, points (95 %) | verdict | gradient error | cosine | MiB an epoch | of exact "
        "| last loss | late gain |"
    )
    yield "|" + "---|" * 10
    for name, runs in variants.items():
        differences = over_exact(runs, exact)
        gap, bytes_sent = mean(differences), average(runs, "bytes_per_epoch", "total")
        error = average(runs, "fidelity", "relative_error", "mean")
        cosine = average(runs, "fidelity", "cosine", "mean")
        gain = statistics.fmean(late_gain(run) for run in runs.values())
        verdict = "not converged" if gain > MARGIN else non_inferiority(differences, MARGIN)
        verdict = "" if name == "exact" else verdict
        yield (
            f"| {name} | {statistics.fmean(points(run) for run in runs.values()):.1f} "
            f"| {gap.value:+.1f} ({gap.low:+.1f} to {gap.high:+.1f}) | {verdict} | {error:.3f} | {cosine:.3f} "
            f"| {bytes_sent / MIB:.3f} | {bytes_sent / sent:.3f} | {average(runs, 'loss', 'last'):.3f} | {gain:+.1f} |"
        )


def notes(variants: dict[str, Runs]) -> Iterator[str]:
    exact = variants["exact"]
    gain = statistics.fmean(late_gain(run) for run in exact.values())
    yield f"The last fifth of the epochs raises the best validation of exact training by {gain:.1f} points."
    if "control" in variants:
        control = non_inferiority(over_exact(variants["control"], exact), MARGIN)
        fit = {"not inferior": "is unfit for", "inferior": "can carry"}.get(control, "may not carry")
        yield f"The control is {control}: the graph {fit} a claim of no loss."


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
                losses.plot(*curve(variants[name], "loss/train"), color=colour, lw=1.1, label=name)
                metrics.plot(*curve(variants[name], "metric/val"), color=colour, lw=1.1, label=name)
        top = max(curve(variants["exact"], "loss/train")[1])
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


def curve(runs: Runs, key: str) -> tuple[list[int], list[float]]:
    """Epochs, at most DRAWN_POINTS of them and the last, and the mean over seeds at each."""
    at: dict[int, list[float]] = defaultdict(list)
    for run in runs.values():
        every = -(-len(run["curve"]) // DRAWN_POINTS)
        for row in run["curve"][::-every]:
            at[row["epoch"] + 1].append(row[key])
    return sorted(at), [statistics.fmean(at[epoch]) for epoch in sorted(at)]
