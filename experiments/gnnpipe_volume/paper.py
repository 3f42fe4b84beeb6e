"""Volumes of GNNPipe's main table by formula (specs/gnnpipe.md 1.3, 5.3), beside what the authors' logs say.

N nodes, L = 32 layers, H hidden width, P = 8 GPUs, S stages, W ways, alpha(P) remote copies of a node, b = 4 bytes.
V_pipe = 2 b N H (S - 1) (1 + delta); V_graph = 2 b N H L alpha(P) + V_w(P); V_w(X) = 2 b |theta| (X - 1);
V_hybrid = 2 b N H (P/W - 1) (1 + delta) + 2 b N H L alpha(W) + V_w(W). delta = 1 for GCNII, whose h0 travels along.
"""

from __future__ import annotations

from dataclasses import dataclass

LAYERS, GPUS, WAYS, BYTES = 32, 8, 2, 4
MODELS = ("GCN", "SAGE", "GCNII", "ResGCN+")


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A row of the paper's table of graphs. alpha_8: plain METIS; alpha_2: of the pipeline's two sets of chunks."""

    nodes: int
    features: int
    classes: int
    hidden: int
    alpha_8: float
    alpha_2: float


GRAPHS = {
    "Squirrel": Graph(nodes=5201, features=2089, classes=5, hidden=1000, alpha_8=2.220, alpha_2=0.823),
    "Flickr": Graph(nodes=89250, features=500, classes=7, hidden=100, alpha_8=2.154, alpha_2=0.843),
    "Reddit": Graph(nodes=232965, features=602, classes=41, hidden=100, alpha_8=2.607, alpha_2=0.962),
    "Physics": Graph(nodes=34493, features=8415, classes=5, hidden=100, alpha_8=0.993, alpha_2=0.650),
}
# GiB an epoch as logged, graph / pipeline / hybrid (W = 2), by model
LOGS = {
    "Squirrel": ((4.43, 0.27, 1.38), (6.10, 0.27, 1.61), (4.53, 0.54, 1.51), (6.20, 0.27, 1.63)),
    "Flickr": ((4.60, 0.47, 2.00), (4.62, 0.47, 2.00), (4.60, 0.93, 2.19), (4.62, 0.47, 2.00)),
    "Reddit": ((14.50, 1.22, 5.87), (14.52, 1.22, 5.87), (14.50, 2.43, 6.39), (14.52, 1.22, 5.87)),
    "Physics": ((0.88, 0.18, 0.62), (0.94, 0.18, 0.63), (0.88, 0.36, 0.70), (0.89, 0.18, 0.62)),
}
Volumes = tuple[float, float, float]  # GiB an epoch: graph parallelism, pipeline, hybrid


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


def weights(model: str, graph: Graph, ranks: int) -> float:
    """V_w, GiB."""
    return 2 * BYTES * num_parameters(model, graph) * (ranks - 1) / 2**30


def exchange(graph: Graph, alpha: float) -> float:
    """GiB of L aggregations, forward and backward."""
    return 2 * BYTES * graph.nodes * graph.hidden * LAYERS * alpha / 2**30


def boundaries(model: str, graph: Graph, stages: int) -> float:
    """GiB over the boundaries of S stages, forward and backward."""
    carried = 2 if model == "GCNII" else 1
    return 2 * BYTES * graph.nodes * graph.hidden * (stages - 1) * carried / 2**30


def volumes(model: str, graph: Graph) -> Volumes:
    """GiB an epoch: graph parallelism, pipeline, hybrid."""
    hybrid = boundaries(model, graph, GPUS // WAYS) + exchange(graph, graph.alpha_2) + weights(model, graph, WAYS)
    full = exchange(graph, graph.alpha_8) + weights(model, graph, GPUS)
    return full, boundaries(model, graph, GPUS), hybrid


def both() -> dict[tuple[str, str], tuple[Volumes, Volumes]]:
    """(graph, model) -> volumes by formula, and as logged."""
    return {
        (name, model): (volumes(model, graph), logged)
        for name, graph in GRAPHS.items()
        for model, logged in zip(MODELS, LOGS[name], strict=True)
    }
