"""A graph in torch's own operations, for tracing: no kernels, no blocks, edges in any order; it evaluates only."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from gnnpar.folds.aggregator import Aggregator, EdgeDropout
from gnnpar.folds.block import Rows
from gnnpar.folds.generic import Generic
from gnnpar.folds.max import Max
from gnnpar.folds.softmax import Softmax
from gnnpar.folds.sum import Sum
from gnnpar.graph import Message


class PlainGraph:
    """Sum, Max, Softmax and Generic by `index_add` and `scatter_reduce`; ValueError names any other aggregator.

    Shapes: edge_index [2, E], (source, destination), of N nodes.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int, like: Tensor) -> None:
        self._src, self._dst, self._num_nodes = edge_index[0], edge_index[1], num_nodes
        self._ones = like.new_ones(edge_index.shape[1])

    @property
    def node_ids(self) -> Tensor:
        return torch.arange(self._num_nodes, device=self._src.device)

    @property
    def edge_ids(self) -> Tensor:
        return torch.arange(self._src.shape[0], device=self._src.device)

    @property
    def in_degree(self) -> Tensor:
        return self._added(self._ones)

    def at(self, layer: int) -> Self:
        return self

    def source(self, message: Message, *rows: Tensor) -> Rows:
        return message(self, *rows)

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        return x

    def edge_dropout(self, p: float, *, tag: int = 0) -> EdgeDropout | None:
        return None

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        there, here = tuple(rows[self._src] for rows in src), tuple(rows[self._dst] for rows in dst)
        if isinstance(agg, Sum):
            return self._added(there[0])
        if isinstance(agg, Max):
            best = self._largest(there[0])
            return torch.where(best > -torch.inf, best, torch.zeros_like(best))
        if isinstance(agg, Softmax):
            x, score = there
            return self._attended(torch.nn.functional.leaky_relu(score + here[0], agg.slope), x)
        if isinstance(agg, Generic):
            value = agg.value(there, here, edge, shared)
            return (
                self._added(value) if agg.score is None else self._attended(agg.score(there, here, edge, shared), value)
            )
        raise ValueError(f"the aggregator {type(agg).__name__} has no form in plain torch; use Generic in its place")

    def _added(self, rows: Tensor) -> Tensor:
        """Rows of edges summed by destination."""
        return rows.new_zeros(self._num_nodes, *rows.shape[1:]).index_add(0, self._dst, rows)

    def _largest(self, rows: Tensor) -> Tensor:
        """-inf without an in-edge."""
        index = self._dst.reshape(-1, *[1] * (rows.ndim - 1)).expand_as(rows)
        return rows.new_full((self._num_nodes, *rows.shape[1:]), -torch.inf).scatter_reduce(0, index, rows, "amax")

    def _attended(self, score: Tensor, value: Tensor) -> Tensor:
        """Shapes: score [E, H], value [E, H, D] -> [N, H, D]; 0 without an in-edge."""
        weight = (score - self._largest(score)[self._dst]).exp()
        total = self._added(weight).clamp_min(torch.finfo(score.dtype).tiny)
        return self._added(weight[..., None] * value) / total[..., None]
