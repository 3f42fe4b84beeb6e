"""Draw strategies.svg: each strategy as the walk of one rank over the blocks of the adjacency matrix.

    python docs/images/make_walks.py [FILE]

Rows are destinations, columns are sources, both cut into four parts. Colours are named, so that the file itself follows
the reader's light or dark setting.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

OUT = Path(__file__).with_name("strategies.svg")
PARTS = 4
COLOURS = {  # drawn colour -> (name, light, dark)
    "#fffffe": ("paper", "#ffffff", "#0d1117"),
    "#1f2328": ("ink", "#1f2328", "#e6edf3"),
    "#59636e": ("soft", "#59636e", "#9198a1"),
    "#d1d9e0": ("grid", "#d1d9e0", "#3d444d"),
    "#eef1f4": ("idle", "#eef1f4", "#1a2029"),
    "#2f6fd0": ("own", "#2f6fd0", "#3b7ddd"),
    "#f2a33a": ("halo", "#f2a33a", "#c9822a"),
    "#9a8fd6": ("old", "#b3a8ea", "#6f62b5"),
}
PAPER, INK, SOFT, GRID, IDLE, OWN, HALO, OLD = COLOURS


def cell(ax: Axes, row: float, column: float, colour: str, text: str = "", *, size: float = 1.0) -> None:
    """One block; row 0 is on top."""
    ax.add_patch(Rectangle((column, row), size, size, facecolor=colour, edgecolor=GRID, linewidth=0.8, zorder=3))
    if text:
        ax.text(
            column + size / 2,
            row + size / 2,
            text,
            ha="center",
            va="center",
            fontsize=9,
            color=INK,
            weight="bold",
            zorder=6,
        )


def arrow(ax: Axes, points: Sequence[tuple[float, float]], colour: str) -> None:
    """The order of a walk, as (column, row) points."""
    x, y = zip(*points, strict=True)
    ax.plot(x[:-1], y[:-1], color=colour, linewidth=1.8, solid_capstyle="round", zorder=4)
    ax.add_patch(
        FancyArrowPatch(
            points[-2], points[-1], arrowstyle="-|>", mutation_scale=9, shrinkA=0, shrinkB=0, linewidth=1.8,
            color=colour, zorder=5,
        )
    )  # fmt: skip


def panel(ax: Axes, title: str, lines: Sequence[str]) -> None:
    ax.set_xlim(-0.35, PARTS + 0.35)
    ax.set_ylim(PARTS + 1.75, -0.85)
    ax.set_aspect("equal")
    ax.axis("off")
    ax.text(0, -0.3, title, fontsize=10.5, weight="bold", color=INK, family="monospace")
    for number, line in enumerate(lines):
        ax.text(0, PARTS + 0.47 + 0.48 * number, line, fontsize=8.2, color=SOFT)
    for row in range(PARTS):
        for column in range(PARTS):
            ax.add_patch(Rectangle((column, row), 1, 1, facecolor=IDLE, edgecolor=GRID, linewidth=0.8, zorder=1))


def single(ax: Axes) -> None:
    panel(ax, "single", ("one device owns every row", "and folds every block"))
    for row in range(PARTS):
        for column in range(PARTS):
            cell(ax, row, column, OWN)
    arrow(ax, [(0.4, 0.5), (3.6, 0.5), (0.4, 1.5), (3.6, 1.5), (0.4, 2.5), (3.6, 2.5), (0.4, 3.5), (3.7, 3.5)], PAPER)


def graph_parallel(ax: Axes) -> None:
    panel(ax, "graph_parallel", ("a rank folds one row of blocks: its own", "while halo rows travel, then the others"))
    for column in range(PARTS):
        cell(ax, 1, column, OWN if column == 1 else HALO, "1" if column == 1 else "2")
    for column in (0, 2, 3):
        arrow(ax, [(column + 0.5, 3.7), (column + 0.5, 2.15)], HALO)


def adaqp(ax: Axes) -> None:
    panel(ax, "adaqp", ("the same walk;", "halo rows travel in 2, 4 or 8 bits"))
    for column in range(PARTS):
        cell(ax, 1, column, OWN if column == 1 else HALO, "" if column == 1 else {0: "2 b", 2: "8 b", 3: "4 b"}[column])
    for column in (0, 2, 3):
        ax.plot([column + 0.5] * 2, [3.7, 2.6], color=HALO, linewidth=1.8, linestyle=(0, (1, 1.4)))
        arrow(ax, [(column + 0.5, 2.6), (column + 0.5, 2.15)], HALO)


def sar(ax: Axes) -> None:
    panel(ax, "sar", ("the same row, one block at a time:", "a halo leaves memory when it is folded"))
    for step, column in enumerate((1, 0, 3, 2)):
        cell(ax, 1, column, OWN if column == 1 else HALO if step == 1 else PAPER, str(step + 1))
        if step > 1:
            ax.add_patch(
                Rectangle((column, 1), 1, 1, fill=False, edgecolor=HALO, linewidth=1.4, linestyle="--", zorder=4)
            )
    arrow(ax, [(1.5, 2.45), (0.5, 2.45), (0.5, 2.1)], INK)
    arrow(ax, [(0.5, 2.8), (3.5, 2.8), (3.5, 2.1)], INK)
    arrow(ax, [(3.5, 3.15), (2.5, 3.15), (2.5, 2.1)], INK)


def gnnpipe(ax: Axes) -> None:
    panel(ax, "gnnpipe", ("some layers, all rows, chunk by chunk:", "later chunks are read as of an older epoch"))
    for row in range(PARTS):
        for column in range(PARTS):
            cell(ax, row, column, OWN if column <= row else OLD)
    arrow(ax, [(0.5, 0.3), (0.5, 3.8)], PAPER)
    ax.text(2.0, 3.5, "this epoch", ha="center", va="center", fontsize=8.2, color=PAPER, zorder=6)
    ax.text(2.95, 0.5, "older", ha="center", va="center", fontsize=8.2, color=INK, zorder=6)


def hybrid(ax: Axes) -> None:
    panel(ax, "hybrid", ("stages of layers, each of several parts:", "halo rows travel inside a stage"))
    for row in (0, 1):
        for column in range(PARTS):
            fresh = column % 2 <= row
            colour = OLD if not fresh else OWN if column < 2 else HALO
            cell(ax, row, column, colour)
    ax.plot([-0.15, PARTS + 0.15], [2, 2], color=INK, linewidth=1.2, linestyle=(0, (2, 2)), zorder=4)
    ax.plot([2, 2], [-0.12, PARTS + 0.12], color=INK, linewidth=1.2, linestyle=(0, (2, 2)), zorder=4)
    arrow(ax, [(0.5, 0.3), (0.5, 1.8)], PAPER)
    arrow(ax, [(2.5, 3.7), (2.5, 2.15)], HALO)
    ax.text(0.12, 3.0, "rows of the\nother part", va="center", fontsize=8.2, color=SOFT)


def minibatch(ax: Axes) -> None:
    panel(ax, "minibatch", ("a rank holds the graph and folds", "samples around a batch of rows"))
    picked = ((0, 2), (0, 7), (3, 1), (3, 3), (3, 12), (6, 6), (6, 9), (9, 4), (9, 14), (13, 10), (13, 13), (13, 5))
    for row in sorted({row for row, _ in picked}):
        ax.plot([0, PARTS], [row / 4 + 0.125] * 2, color=SOFT, linewidth=0.6, zorder=2)
    for row, column in picked:
        cell(ax, row / 4, column / 4, OWN, size=0.25)


def key(ax: Axes) -> None:
    panel(ax, "Y = A X", ("rows: destinations, columns: sources;", "a block: edges from part to part"))
    ax.texts[0].set_family("DejaVu Sans")
    for row, (colour, name) in enumerate(
        (
            (OWN, "sources on this rank"),
            (HALO, "halo: received rows"),
            (OLD, "rows of an older epoch"),
            (IDLE, "other ranks"),
        )
    ):
        ax.add_patch(Rectangle((0, row), PARTS, 1, facecolor=PAPER, edgecolor=PAPER, linewidth=2, zorder=2))
        cell(ax, row + 0.15, 0.05, colour, size=0.7)
        ax.text(1.0, row + 0.5, name, va="center", fontsize=8.8, color=INK)


def themed(svg: str) -> str:
    """Colours by name, with a light and a dark value each."""
    for drawn, (name, _, _) in COLOURS.items():
        svg = svg.replace(drawn, f"var(--{name})")
    light, dark = ("".join(f"--{each[0]}:{each[i]};" for each in COLOURS.values()) for i in (1, 2))
    style = f"<style>svg{{{light}}}@media (prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    return re.sub(r"(<svg [^>]*>)", lambda opened: f"{opened[1]}\n {style}", svg, count=1)


def draw(out: Path) -> None:
    plt.switch_backend("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "gnnpar", "svg.fonttype": "path", "font.family": "DejaVu Sans"}
    figure, axes = plt.subplots(2, 4, figsize=(11.6, 6.5), facecolor=PAPER)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.995, bottom=0.005, wspace=0.06, hspace=0.0)
    for ax, make in zip(axes.flat, (key, single, graph_parallel, adaqp, sar, gnnpipe, hybrid, minibatch), strict=True):
        make(ax)
    figure.savefig(out, format="svg", facecolor=PAPER, metadata={"Date": None})
    plt.close(figure)
    out.write_text(themed(out.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
