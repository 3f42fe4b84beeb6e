"""How good a plan each search finds: tables and figure."""

import math
import statistics
from typing import Any

import numpy as np
import pandas
import reports
from planner_search.run import EVALUATIONS, SECONDS
from records import Files

STYLES = {
    "tag": ("#7a8794", "s--", "TAG's tree, as published"),
    "mcts": ("#2b7bba", "o-", "our tree, uniform prior"),
    "guided": ("#d1495b", "D-", "our tree, guide"),
    "descent": ("#1a9e77", "^-", "coordinate descent"),
    "anneal": ("#e09f1f", "v-", "annealing"),
    "random": ("#b0b7bd", "x:", "random"),
    "enumerate": ("#4a4e57", "*--", "enumeration alone"),
    "refine": ("#6b4ba3", "P-", "enumeration, then descent"),
}
MARKS = {"at_evaluations": EVALUATIONS, "at_seconds": SECONDS}
LARGE = {"search": "search", "devices": "devices", "layers": "layers", "evaluations": "evaluations"}
LARGE |= {"CPU seconds, all": "cpu_seconds", "plan": "label"}
Row = dict[str, Any]
Runs = dict[str, list[Row]]  # by search


def curves(rows: list[Row], key: str) -> pandas.DataFrame:
    """Return the logarithm of predicted seconds, mean over seeds: a line an instance, a column a mark. Infinite where
    a run had nothing."""
    found = [[math.inf if value is None else value for value in row[key]] for row in rows]
    return np.log(pandas.DataFrame(found, [row["instance"] for row in rows], MARKS[key])).groupby(level=0).mean()


def excess(rows: list[Row], best: pandas.Series, key: str) -> pandas.Series:
    """Return the geometric mean over instances and seeds of predicted time over the best known, by mark."""
    return np.exp(curves(rows, key).sub(np.log(best), axis=0).mean())


def table(runs: Runs, best: pandas.Series) -> str:
    evaluations, seconds, lines = (10, 30, 60, 120), (0.1, 0.3, 1.0, 2.0), []
    for name, (_, _, words) in STYLES.items():
        found = [
            excess(runs[name], best, key)[mark]
            for key, marks in zip(MARKS, (evaluations, seconds), strict=True)
            for mark in marks
        ]
        cells = [f"{value:.3f}" if value < math.inf else "-" for value in found]
        ends = [row["at_evaluations"][-1] or math.inf for row in runs[name]]
        near = [end <= 1.01 * best[row["instance"]] for end, row in zip(ends, runs[name], strict=True)]
        each = statistics.median(1e3 * row["cpu_seconds"] / row["evaluations"] for row in runs[name])
        lines.append([f"{words} (`{name}`)", *cells, f"{sum(near) / len(near):.0%}", f"{each:.1f}"])
    heads = [*(f"{n} evaluations" for n in evaluations), *(f"{s:g} s" for s in seconds)]
    return reports.table(["search", *heads, "runs within 1 %", "ms an evaluation"], lines)


def against(runs: Runs, one: str, other: str) -> str:
    """In how many instances `one` is better, equal, worse than `other` at equal seconds (means over seeds, 0.1 %)."""
    gaps, lines = curves(runs[one], "at_seconds") - curves(runs[other], "at_seconds"), []
    for limit in (0.1, 0.3, 1.0, 2.0):
        known = gaps[limit][np.isfinite(gaps[limit])]  # all runs found something
        better, worse = sum(known < -1e-3), sum(known > 1e-3)
        equal, ratio = len(known) - better - worse, math.exp(known.mean())
        lines += [[f"{limit:g} s", better, equal, worse, f"{ratio:.3f}"]] if len(known) else []
    return reports.table((f"`{one}` against `{other}` at", "better", "equal", "worse", "mean ratio"), lines)


def draw(runs: Runs, best: pandas.Series, files: Files) -> None:
    plt = reports.pyplot(8)
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharey=True)
    for axis, key, label in zip(panels, MARKS, ("evaluations", "CPU seconds"), strict=True):
        for name, (colour, style, words) in STYLES.items():
            above = excess(runs[name], best, key) - 1
            if len(known := above[above < math.inf]):
                axis.plot(known.index, known, style, color=colour, label=words, markersize=4)
        axis.set(xscale="log", xlabel=label)
        axis.set_yscale("symlog", linthresh=0.01)
        axis.set_ylim(bottom=0)
    panels[0].set_ylabel("predicted time over the best known, - 1")
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    reports.save(figure, files.figure)


def report(files: Files) -> None:
    runs = reports.by(files.read(), lambda row: row.get("kind", row["search"]))
    large = runs.pop("large", [])
    ends = [(row["instance"], row["at_evaluations"][-1]) for rows in runs.values() for row in rows]
    best = pandas.DataFrame(ends).groupby(0)[1].min()
    print(table(runs, best), against(runs, "guided", "mcts"), against(runs, "guided", "refine"), sep="\n\n")
    print("", reports.table(list(LARGE), [[row[key] for key in LARGE.values()] for row in large]), sep="\n")
    draw(runs, best, files)
