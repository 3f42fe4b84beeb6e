"""How good a plan each search finds: tables and figure."""

import math
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

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
Row = dict[str, Any]


def load(files: Files) -> tuple[dict[str, list[Row]], dict[int, float], list[Row]]:
    """Runs by search, the best known objective of each instance, and the rows on large machines."""
    rows = files.read()
    runs: dict[str, list[Row]] = {}
    best: dict[int, float] = {}
    for row in rows:
        if row.get("kind") != "large":
            runs.setdefault(row["search"], []).append(row)
            found = row["at_evaluations"][-1]
            if found is not None:
                best[row["instance"]] = min(found, best.get(row["instance"], math.inf))
    return runs, best, [row for row in rows if row.get("kind") == "large"]


def excess(rows: list[Row], best: dict[int, float], key: str, i: int) -> float | None:
    """Geometric mean over instances of (geometric mean over seeds of) objective over best known; null while a run has
    nothing."""
    per: dict[int, list[float]] = {}
    for row in rows:
        if row[key][i] is None:
            return None
        per.setdefault(row["instance"], []).append(math.log(row[key][i] / best[row["instance"]]))
    return math.exp(statistics.mean(statistics.mean(values) for values in per.values()))


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def hits(rows: list[Row], best: dict[int, float]) -> float:
    """Share of runs within 1 % of the best known at the end."""
    ends = [(row["at_evaluations"][-1], best[row["instance"]]) for row in rows]
    return sum(end is not None and end <= 1.01 * goal for end, goal in ends) / len(ends)


def table(runs: dict[str, list[Row]], best: dict[int, float]) -> str:
    evaluations, seconds, lines = (10, 30, 60, 120), (0.1, 0.3, 1.0, 2.0), []
    for name, (_, _, words) in STYLES.items():
        rows = runs[name]
        cells = [shown(excess(rows, best, "at_evaluations", EVALUATIONS.index(n))) for n in evaluations]
        cells += [shown(excess(rows, best, "at_seconds", SECONDS.index(s))) for s in seconds]
        each = statistics.median(1e3 * row["cpu_seconds"] / row["evaluations"] for row in rows)
        lines.append([f"{words} (`{name}`)", *cells, f"{hits(rows, best):.0%}", f"{each:.1f}"])
    heads = [*(f"{n} evaluations" for n in evaluations), *(f"{s:g} s" for s in seconds)]
    return reports.table(["search", *heads, "runs within 1 %", "ms an evaluation"], lines)


def against(runs: dict[str, list[Row]], one: str, other: str) -> str:
    """In how many instances `one` is better, equal, worse than `other` at equal seconds (means over seeds, 0.1 %)."""
    lines = []
    for limit in (0.1, 0.3, 1.0, 2.0):
        means: list[dict[int, float]] = []
        for name in (one, other):
            found = reports.by(runs[name], lambda row: row["instance"])
            values = {key: [row["at_seconds"][SECONDS.index(limit)] for row in rows] for key, rows in found.items()}
            means.append(
                {k: statistics.mean(math.inf if v is None else math.log(v) for v in values[k]) for k in values}
            )
        both = [(means[0][k], means[1][k]) for k in means[0] if k in means[1]]
        if gaps := [mine - theirs for mine, theirs in both if math.isfinite(mine + theirs)]:  # all runs found something
            better, worse = sum(g < -1e-3 for g in gaps), sum(g > 1e-3 for g in gaps)
            ratio = math.exp(statistics.mean(gaps))
            lines.append([f"{limit:g} s", better, len(gaps) - better - worse, worse, f"{ratio:.3f}"])
    return reports.table((f"`{one}` against `{other}` at", "better", "equal", "worse", "mean ratio"), lines)


def draw(runs: dict[str, list[Row]], best: dict[int, float], files: Files) -> None:
    plt = reports.pyplot(8)
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharey=True)
    axes = (("at_evaluations", EVALUATIONS, "evaluations"), ("at_seconds", SECONDS, "CPU seconds"))
    for axis, (key, marks, label) in zip(panels, axes, strict=True):
        for name, (colour, style, words) in STYLES.items():
            points = [(x, excess(runs[name], best, key, i)) for i, x in enumerate(marks)]
            points = [(x, y - 1) for x, y in points if y is not None]
            if points:
                axis.plot(*zip(*points, strict=True), style, color=colour, label=words, markersize=4)
        axis.set(xscale="log", xlabel=label)
        axis.set_yscale("symlog", linthresh=0.01)
        axis.set_ylim(bottom=0)
    panels[0].set_ylabel("predicted time over the best known, - 1")
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    reports.save(figure, files.figure)


def report(files: Files) -> None:
    runs, best, large = load(files)
    print(table(runs, best), against(runs, "guided", "mcts"), against(runs, "guided", "refine"), sep="\n\n")
    keys = {"search": "search", "devices": "devices", "layers": "layers", "evaluations": "evaluations"}
    keys |= {"CPU seconds, all": "cpu_seconds", "plan": "label"}
    print("", reports.table(list(keys), [[row[key] for key in keys.values()] for row in large]), sep="\n")
    draw(runs, best, files)
