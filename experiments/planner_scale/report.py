"""Which strategy is predicted to win: tables and figure."""

import itertools
import math
from collections import Counter
from typing import Any

import reports
from planner_scale.run import PANELS
from records import Files

PIPELINES, FLAT = ("gnnpipe", "hybrid"), ("graph_parallel", "sar")
COLOURS = {"graph_parallel": "#2b7bba", "sar": "#1a9e77", "gnnpipe": "#d1495b", "hybrid": "#e09f1f", "none": "#d5d9dd"}
LABELS = {"ranks": "ranks", "layers": "layers", "nodes": "nodes", "rate": "Gbit/s a host"}
Row = dict[str, Any]


def best(row: Row, families: tuple[str, ...]) -> float:
    return min((row["seconds"].get(family, math.inf) for family in families), default=math.inf)


def winner(row: Row) -> str:
    """Of those that send full precision."""
    families = (*FLAT, *PIPELINES)
    found = min(families, key=lambda family: row["seconds"].get(family, math.inf))
    return found if found in row["seconds"] else "none"


def advantage(row: Row, staged: tuple[str, ...] = PIPELINES) -> float:
    """log2 of graph parallelism over the best pipeline; above 0 pipelines win; 8 where only one of them fits."""
    flat, deep = best(row, FLAT), best(row, staged)
    if math.isinf(flat) or math.isinf(deep):
        return 0.0 if flat == deep else math.copysign(8.0, flat - deep)
    return math.log2(flat / deep)


def crossing(rows: list[Row], staged: tuple[str, ...] = PIPELINES) -> str:
    """Depths at which pipelines are predicted to win: from the crossing, between priced depths, to the last."""
    rows = sorted((row for row in rows if winner(row) != "none"), key=lambda row: row["layers"])
    values, depths = [advantage(row, staged) for row in rows], [row["layers"] for row in rows]
    won = [i for i, value in enumerate(values) if value > 0]
    if not won:
        return "none"
    until = "" if depths[won[-1]] == 256 else f" to {depths[won[-1]]}"
    if (first := won[0]) == 0:
        return f"<= {depths[0]}{until}"
    low, high = values[first - 1], values[first]
    at = 1.0 if 8.0 in (-low, high) else -low / (high - low)
    return f"{depths[first - 1] ** (1 - at) * depths[first] ** at:.1f}{until}"


def table(panels: dict[str, list[Row]]) -> str:
    names, lines = ("depth, slow links", "depth", "depth, fast links"), []
    for ranks in sorted({row["ranks"] for row in panels["depth"]}):
        columns = [[row for row in panels[name] if row["ranks"] == ranks] for name in names]
        alpha = columns[0][0]["alpha"]
        told = [*map(crossing, columns), crossing(columns[1], ("gnnpipe",))]
        deepest = max(row["layers"] for row in columns[1] if winner(row) != "none")
        lines.append([ranks, f"{alpha:.2f}", f"{ranks / alpha:.1f}", *told, deepest])
    heads = ("ranks W", "alpha", "rule: W / alpha", "pipelines win at 2 Gbit/s from layer", "at 25 Gbit/s")
    return reports.table((*heads, "at 400 Gbit/s", "gnnpipe alone, 25 Gbit/s", "deepest that fits"), lines)


def wins(panels: dict[str, list[Row]]) -> str:
    """How many points of each panel a family wins, and how far ahead it is of graph parallelism at most."""
    every, lines = (*FLAT, *PIPELINES), []
    for name, (title, *_) in PANELS.items():
        rows = panels[name]
        count, base = Counter(map(winner, rows)), "graph_parallel"
        ahead = [row["seconds"][base] / best(row, every) for row in rows if base in row["seconds"]]
        adaqp = sum(best(row, ("adaqp",)) < best(row, every) for row in rows)
        won = [count[family] for family in (*every, "none")]
        lines.append([f"{name}: {title}", len(rows), *won, f"{max(ahead):.1f} x", adaqp])
    heads = ("panel", "points", *every, "nothing fits", "most over graph_parallel")
    return reports.table((*heads, "with 4 bit rows adaqp wins"), lines)


def draw(panels: dict[str, list[Row]], files: Files) -> None:
    plt = reports.pyplot(8)  # before anything else of matplotlib's
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle

    figure, grid = plt.subplots(2, 3, figsize=(10, 6.2), layout="constrained")
    for axis, (panel, (title, (across, up), _)) in zip(grid.flat, PANELS.items(), strict=True):
        xs, ys = (sorted({row[key] for row in panels[panel]}) for key in (across, up))
        at = {(row[across], row[up]): row for row in panels[panel]}
        for y, depth in enumerate(ys):
            for name, run in itertools.groupby(range(len(xs)), key=lambda x: winner(at[xs[x], depth])):
                cells = list(run)  # one rectangle a run: one a cell makes a file of 260 kB
                at_left = (cells[0] - 0.5, y - 0.5)
                axis.add_patch(Rectangle(at_left, len(cells), 1, color=COLOURS[name], lw=0, alpha=0.75))
        axis.set(xlim=(-0.5, len(xs) - 0.5), ylim=(-0.5, len(ys) - 0.5))
        ahead = [[advantage(at[x, y]) for x in xs] for y in ys]
        rule = [[math.log2(at[x, y]["layers"] * at[x, y]["alpha"] / at[x, y]["ranks"]) for x in xs] for y in ys]
        for values, style in ((ahead, {"linewidths": 1.8}), (rule, {"linewidths": 1.2, "linestyles": "dashed"})):
            if min(map(min, values)) < 0 < max(map(max, values)):
                axis.contour(range(len(xs)), range(len(ys)), values, levels=[0], colors="black", **style)
        for set_ticks, values in ((axis.set_xticks, xs), (axis.set_yticks, ys)):
            shown = [i for i in range(len(values)) if len(values) <= 8 or i % 2 == 0]
            set_ticks(shown, [f"{values[i]:.0e}" if values[i] >= 1e5 else f"{values[i]:g}" for i in shown])
        axis.set(xlabel=LABELS[across], ylabel=LABELS[up])
        axis.set_title(title, loc="left", fontsize=8, fontweight="bold")
    handles: list[Any] = [
        Patch(color=COLOURS[n], alpha=0.75, label=n if n != "none" else "nothing fits") for n in COLOURS
    ]
    handles += [
        Line2D([], [], color="black", lw=1.8, label="predicted crossing"),
        Line2D([], [], color="black", lw=1.2, ls="--", label="rule L alpha = W"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False)
    figure.suptitle("Modelled, not measured: the fastest strategy of full precision", fontsize=9)
    reports.save(figure, files.figure)


def report(files: Files) -> None:
    panels = reports.by(files.read(), lambda row: row["panel"])
    print(table(panels), wins(panels), sep="\n\n")
    draw(panels, files)
