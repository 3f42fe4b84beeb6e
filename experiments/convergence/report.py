"""Accuracy at full length, and how many of the runs are there.

Differences are paired by seed; verdicts of a method over its cells are corrected for their number (Holm), margin 0.3
points. Cells whose lines are few are tables all the same: their heading says how many of how many runs are there.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import reports
from paired import Row, Runs, cells, differences, points
from records import Files

from gnnpar.config.study import read_study
from gnnpar.report.formatting import interval
from gnnpar.report.statistics import Verdict, family, mean

LONGEST = 2000  # epochs
MARGIN = 0.3  # points
EXACT, CONTROL = "exact", "drop"
COLOURS = {"exact": "#000000", "drop": "#7a8794", "gnnpipe": "#8e5ea2", "gnnpipe, exact start": "#c59bd8"}
COLOURS |= {"adaqp": "#d9780f"}
HEADINGS = ("method", "seeds", "test, %", "over exact, points", "verdict", "epochs", "at the limit", "failed")
STUDY = read_study(Path(__file__).with_name("study.yaml"))
CELLS, METHODS, SEEDS = STUDY.axes["cell"], STUDY.axes["method"], len(STUDY.seed_list)
Trained = Mapping[str, Runs]  # method -> completed runs
Failed = Mapping[tuple[str, ...], int]  # (cell, method) -> runs


def read(rows: Iterable[Row]) -> tuple[dict[str, Trained], Failed]:
    """Completed runs of cells that have some; how many failed."""
    of = reports.by(rows, lambda row: row["result"]["status"] == "completed")
    found = cells(of.get(True, []))
    failed = Counter(tuple(row["job"].split("; ")) for row in of.get(False, []))
    here = {cell: found[cell,] for cell in CELLS if (cell,) in found}
    return {cell: {m: runs[m] for m in METHODS if m in runs} for cell, runs in here.items()}, failed


def verdicts(cells: Mapping[str, Trained]) -> dict[tuple[str, str], Verdict]:
    """Of every method in every cell, corrected over the cells of the method."""
    found: dict[tuple[str, str], Verdict] = {}
    for method in (method for method in METHODS if method != EXACT):
        mine = {c: differences(t[method], t[EXACT]) for c, t in cells.items() if method in t and EXACT in t}
        mine = {cell: values for cell, values in mine.items() if values}
        found |= {(cell, method): v for cell, v in zip(mine, family(list(mine.values()), MARGIN), strict=True)}
    return found


def table(cell: str, trained: Trained, judged: Mapping[tuple[str, str], Verdict], failed: Failed) -> str:
    lines = []
    for method, runs in trained.items():
        gap = differences(runs, trained.get(EXACT, {})) if method != EXACT else []
        epochs = [run["result"]["epochs_done"] for run in runs.values()]
        over = interval(mean(gap), signed=True) if gap else "-"
        ends = [f"{statistics.median(epochs):.0f}", sum(done >= LONGEST for done in epochs)]
        tests = interval(mean(list(map(points, runs.values()))))
        verdict = judged.get((cell, method), "-")
        lines.append([method, len(runs), tests, over, verdict, *ends, failed.get((cell, method), 0)])
    return reports.table(HEADINGS, lines)


def fitness(cell: str, judged: Mapping[tuple[str, str], Verdict]) -> str:
    """What the control says of the cell."""
    says = {
        "inferior": "The control is inferior: the cell can carry a claim.",
        "not inferior": "The control is not inferior: the cell is unfit, sending nothing does as well.",
        "inconclusive": "The control is inconclusive: the cell may not carry a claim.",
        "not enough runs": "The control has fewer seeds than a verdict needs.",
    }
    return says[judged.get((cell, CONTROL), "not enough runs")]


def draw(cells: Mapping[str, Trained], files: Files) -> None:
    """Mean validation against the epoch, while all seeds of a method still train."""
    plt = reports.pyplot(8)
    columns = min(3, len(cells))
    lines = -(-len(cells) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.2 * columns, 2.6 * lines), squeeze=False, layout="constrained"
    )
    for axis, (cell, trained) in zip(axes.flat, cells.items(), strict=False):
        for method, colour in COLOURS.items():
            runs = trained.get(method, {})
            at = list(zip(*(run["curve"] for run in runs.values()), strict=False))
            x = [epoch[0]["epoch"] + 1 for epoch in at]
            y = [100 * statistics.fmean(point["metric/val"] for point in epoch) for epoch in at]
            axis.plot(x, y, color=colour, lw=1, label=method)
        axis.set(title=cell, xlabel="epoch", ylabel="validation, %")
    for axis in axes.flat[len(cells) :]:
        axis.set_axis_off()
    axes.flat[0].legend(frameon=False)
    reports.save(figure, files.figure)


def report(files: Files) -> None:
    found, failed = read(files.read())
    judged = verdicts(found)
    there = sum(len(runs) for trained in found.values() for runs in trained.values()) + sum(failed.values())
    every = len(CELLS) * len(METHODS) * SEEDS
    print(f"{there} of {every} runs are here, of {len(found)} of {len(CELLS)} cells.")
    for cell, trained in found.items():
        count = sum(len(runs) for runs in trained.values())
        title = f"{cell}: {count} of {len(METHODS) * SEEDS} runs"
        reports.show(title, table(cell, trained, judged, failed))
        print(f"\n{fitness(cell, judged)}")
    if found:
        draw(found, files)
