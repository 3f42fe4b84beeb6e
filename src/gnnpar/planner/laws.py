"""What a partition of a graph into P parts costs, as a law: for graphs that are not at hand.

By family: `random` cuts of power-law degrees (exponent 2.5), exactly; `community`, where a partitioner finds clusters
and keeps a share of that; `mesh`, where a part of n nodes has about 4 sqrt(n) on its surface.
"""

from __future__ import annotations

from collections.abc import Callable

from gnnpar.pricing.statistics import GraphStats, PartStats

FAMILIES = ("random", "community", "mesh")
_QUANTILES = 32


def law_of(graph: GraphStats, family: str, quality: float) -> Callable[[int], tuple[float, float]]:
    """Parts -> (alpha, share of the edges that are cut). `quality`: of the partitioner, its cut over a random one's.

    A node of degree d has a copy in each of the P - 1 other parts with probability 1 - (1 - 1/P)^d.
    """
    if family not in FAMILIES:
        raise ValueError(f"{family} is no family of graphs; there are {', '.join(FAMILIES)}")
    mean = graph.edges / graph.nodes
    degrees = [(1 - (i + 0.5) / _QUANTILES) ** (-2 / 3) for i in range(_QUANTILES)]
    degrees = [d * mean * _QUANTILES / sum(degrees) for d in degrees]

    def law(parts: int) -> tuple[float, float]:
        others = parts - 1
        alpha = sum(others * (1 - (1 - 1 / parts) ** d) for d in degrees) / _QUANTILES
        share = others / parts
        if family == "community":
            return quality * alpha, quality * share
        if family == "mesh":
            alpha = min(alpha, 20 * quality * (parts / graph.nodes) ** 0.5)
            return alpha, min(share, alpha)
        return alpha, share

    return law


def partitioned(graph: GraphStats, family: str, quality: float) -> Callable[[int], PartStats]:
    """Parts -> statistics of equal parts, by law."""
    law = law_of(graph, family, quality)

    def even(parts: int) -> PartStats:
        alpha, share = law(parts)
        return PartStats.even(graph.nodes, graph.edges, parts, alpha=alpha, cut_share=share)

    return even
