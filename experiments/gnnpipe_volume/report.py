"""Volumes of GNNPipe's main table by formula (specs/gnnpipe.md 1.3, 5.3) beside the authors' logs, and bytes sent.

N nodes, L = 32 layers, H hidden width, P = 8 GPUs, S stages, W ways, alpha(P) remote copies of a node, b = 4 bytes.
V_pipe = 2 b N H (S - 1) (1 + delta); V_graph = 2 b N H L alpha(P) + V_w(P); V_w(X) = 2 b |theta| (X - 1);
V_hybrid = 2 b N H (P/W - 1) (1 + delta) + 2 b N H L alpha(W) + V_w(W). delta = 1 for GCNII, whose h0 travels along.
"""

import itertools
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import reports
from records import Files

LAYERS, GPUS, WAYS, BYTES = 32, 8, 2, 4
MODELS = ("GCN", "SAGE", "GCNII", "ResGCN+")
Rows = dict[tuple[str, int, str], dict[str, Any]]
Volumes = tuple[float, float, float]  # GiB an epoch: graph parallelism, pipeline, hybrid
NAMES = ("graph", "pipeline", "hybrid")
SBM = ("gcn", "sage", "gcnii", "resgcn")  # models that are trained on sbm
STRATEGIES = {"graph_parallel": (1, 4), "gnnpipe": (4, 1), "hybrid": (2, 2)}  # stages, ways
COLOURS = ("#444444", "#d95f02", "#1b9e77")


class Graph(NamedTuple):
    """A row of the paper's table of graphs, with volumes as logged, by model. alpha_8: plain METIS; alpha_2: of the
    pipeline's two sets of chunks."""

    nodes: int
    features: int
    classes: int
    hidden: int
    alpha_8: float
    alpha_2: float
    logs: tuple[Volumes, ...]


GRAPHS = {
    "Squirrel": Graph(
        *(5201, 2089, 5, 1000, 2.220, 0.823),
        ((4.43, 0.27, 1.38), (6.10, 0.27, 1.61), (4.53, 0.54, 1.51), (6.20, 0.27, 1.63)),
    ),
    "Flickr": Graph(
        *(89250, 500, 7, 100, 2.154, 0.843),
        ((4.60, 0.47, 2.00), (4.62, 0.47, 2.00), (4.60, 0.93, 2.19), (4.62, 0.47, 2.00)),
    ),
    "Reddit": Graph(
        *(232965, 602, 41, 100, 2.607, 0.962),
        ((14.50, 1.22, 5.87), (14.52, 1.22, 5.87), (14.50, 2.43, 6.39), (14.52, 1.22, 5.87)),
    ),
    "Physics": Graph(
        *(34493, 8415, 5, 100, 0.993, 0.650),
        ((0.88, 0.18, 0.62), (0.94, 0.18, 0.63), (0.88, 0.36, 0.70), (0.89, 0.18, 0.62)),
    ),
}


def num_parameters(model: str, graph: Graph) -> int:
    """Weights of a model of 32 layers (specs/gnnpipe.md 5.2)."""
    wide, hidden, out = graph.features, graph.hidden, graph.classes
    chain = wide * hidden + (LAYERS - 2) * hidden**2 + hidden * out
    ends = wide * hidden + hidden * out  # a linear layer in and one out
    return {
        "GCN": chain,
        "SAGE": 2 * chain,
        "GCNII": ends + LAYERS * hidden**2,
        "ResGCN+": ends + LAYERS * (2 * hidden**2 + 2 * hidden) + 2 * hidden,
    }[model]


def volumes(model: str, graph: Graph) -> Volumes:
    """GiB an epoch: graph parallelism, pipeline, hybrid; L aggregations and boundaries, forward and backward."""
    rows = 2 * BYTES * graph.nodes * graph.hidden
    carried = rows * (2 if model == "GCNII" else 1)
    weights = 2 * BYTES * num_parameters(model, graph)
    full = rows * LAYERS * graph.alpha_8 / 2**30 + weights * (GPUS - 1) / 2**30
    hybrid = carried * (GPUS // WAYS - 1) + rows * LAYERS * graph.alpha_2 + weights * (WAYS - 1)
    return full, carried * (GPUS - 1) / 2**30, hybrid / 2**30


BOTH = {  # (graph, model) -> volumes by formula, and as logged
    (name, model): (volumes(model, graph), logged)
    for name, graph in GRAPHS.items()
    for model, logged in zip(MODELS, graph.logs, strict=True)
}


def paper_table() -> str:
    """GiB an epoch at 8 GPUs, 32 layers: by formula, and as logged."""
    heads = ("graph", "model", "graph, pipeline, hybrid by formula, GiB", "as logged", "graph / pipeline", "as logged")
    lines, ratios = [], []
    for key, pair in BOTH.items():
        ratios.append([each[0] / each[1] for each in pair])
        cells = [" / ".join(f"{value:.2f}" for value in each) for each in pair]
        lines.append([*key, *cells, *(f"{ratio:.2f}" for ratio in ratios[-1])])
    shown = [reports.table(heads, lines)]
    for name, of in (("geometric mean | 16 cells", statistics.geometric_mean), ("largest |", max)):
        ends = [of(each) for each in zip(*ratios, strict=True)]
        shown.append(f"| {name} | | | {ends[0]:.2f} | {ends[1]:.2f} |")
    return "\n".join(shown)


def deviations() -> list[float]:
    """Formula over log less 1, of all 48 volumes; logs have two decimals, so half a unit of the last is taken off."""
    pairs = [pair for formula, logged in BOTH.values() for pair in zip(formula, logged, strict=True)]
    return [max(0.0, abs(ours - theirs) - 0.005) / theirs for ours, theirs in pairs]


def line(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the formulas need, also of lines that blocks.py has written."""
    if "job" not in row:
        return dict(row)
    model, layers, strategy = row["job"].split("; ")
    stages, ways = STRATEGIES[strategy]
    about = {"model": model, "layers": int(layers), "strategy": strategy, "stages": stages, "ways": ways, "hidden": 32}
    return about | row["graph"] | {"bytes_per_epoch": row["result"]["bytes_per_epoch"]}


def expected(row: dict[str, Any]) -> tuple[float, float]:
    """Bytes an epoch by formula: halos over the ways, boundaries. alpha is of as many parts as there are ways."""
    each = 2 * BYTES * row["nodes"] * row["hidden"]
    carried = 2 if row["model"] == "gcnii" else 1
    rows = round(row["alpha"] * row["nodes"])  # alpha is kept in single precision
    return each * row["layers"] * rows / row["nodes"], each * (row["stages"] - 1) * carried


def sent(row: dict[str, Any]) -> tuple[int, int]:
    counted = row["bytes_per_epoch"]
    return counted["forward"] + counted["backward"], counted["stage"]


def measured_table(rows: Rows) -> str:
    """sbm: bytes that were sent against the formulas, and ratios of volumes against alpha L / ((S - 1)(1 + delta))."""
    lines = []
    for (model, depth, strategy), row in rows.items():
        base = rows[model, depth, "graph_parallel"]
        ratio = sum(sent(base)) / max(1, sum(sent(row)))
        carried = (row["stages"] - 1) * (2 if model == "gcnii" else 1)
        law = f"{base['alpha'] * depth / carried:.2f}" if strategy == "gnnpipe" else ""
        shape = (f"{row['stages']} x {row['ways']}", f"{row['alpha']:.3f}")
        counts = [
            text for found, wanted in zip(sent(row), expected(row), strict=True) for text in (found, f"{wanted:.0f}")
        ]
        lines.append([model, depth, strategy, *shape, *counts, f"{ratio:.2f}", law])
    heads = (
        "model",
        "layers",
        "strategy",
        "S x W",
        "alpha(W)",
        "halo bytes",
        "by formula",
        "stage bytes",
        "by formula",
    )
    return reports.table((*heads, "graph_parallel / this", "alpha L / ((S - 1)(1 + delta))"), lines)


def draw(rows: Rows, files: Files) -> None:
    plt = reports.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.6), layout="constrained")
    for number, (name, colour) in enumerate(zip(NAMES, COLOURS, strict=True)):
        pairs = [(logged[number], formula[number]) for formula, logged in BOTH.values()]
        axes[0].plot(*zip(*pairs, strict=True), "o", color=colour, ms=4, label=name)
    axes[0].plot([0.15, 16], [0.15, 16], "-", color="0.8", lw=1, zorder=0)
    axes[0].set(xscale="log", yscale="log", xlabel="logged by the authors, GiB", ylabel="by formula, GiB")
    axes[0].set_title("8 GPUs, 32 layers")
    axes[0].legend(frameon=False)
    for strategy, colour in zip(STRATEGIES, COLOURS, strict=True):
        mine = [row for (_, _, name), row in rows.items() if name == strategy]
        pairs = [(sum(expected(row)) / 2**20, sum(sent(row)) / 2**20) for row in mine]
        axes[1].plot(*zip(*pairs, strict=True), "o", color=colour, ms=4, label=strategy)
    ends = axes[1].get_xlim()
    axes[1].plot(ends, ends, "-", color="0.8", lw=1, zorder=0)
    axes[1].set(xscale="log", yscale="log", xlabel="by formula, MiB", ylabel="sent, MiB", title="sbm, 4 ranks")
    axes[1].legend(frameon=False)
    reports.save(figure, files.figure)


def report(files: Files) -> None:
    print(paper_table())
    print(f"\n48 volumes: the largest deviation beyond rounding is {max(deviations()):.2%}\n")
    found = {(row["model"], row["layers"], row["strategy"]): row for row in map(line, files.read())}
    if rows := {key: found[key] for key in itertools.product(SBM, (8, 32), STRATEGIES) if key in found}:
        print(measured_table(rows))
        draw(rows, files)
