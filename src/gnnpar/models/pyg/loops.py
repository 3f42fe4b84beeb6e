"""The graph on which a PyG model is looked at before it is trained: a few nodes, each with a self loop."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from gnnpar.folds.aggregator import Aggregator, EdgeDropout
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar.folds.edge_data import EdgeData
from gnnpar.graph import Message
from gnnpar.models.pyg.dropout import LAST_TAG


class Loops:
    """n nodes and n edges. Shapes: like [n, ...]; in_weight [n]; edge_attr [n, D].

    `training`: masks are asked for, and those of rows keep everything. `last_tag`: of dropout of rows so far.
    """

    def __init__(
        self,
        like: Tensor,
        in_weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
        *,
        training: bool = False,
    ) -> None:
        self.node_ids = torch.arange(len(like), device=like.device)
        self.in_degree = torch.ones(len(like), dtype=like.dtype, device=like.device)
        self.in_weight, self.edge_attr, self.training = in_weight, edge_attr, training
        self.edge_ids, self.last_tag = self.node_ids, LAST_TAG
        weight = None if in_weight is None else torch.ones_like(in_weight)
        self._block = Block.from_edges(
            self.node_ids,
            self.node_ids,
            num_dst=len(like),
            num_src=len(like),
            src_ids=self.node_ids,
            edges=EdgeData(ids=self.edge_ids, weight=weight),
        )

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        if not self.training:
            return x
        self.last_tag = tag
        return x.clone()

    def type_degree(self, types: int) -> Tensor:
        return self.in_degree[:, None].expand(-1, types)

    def moments(self, x: Tensor) -> None:
        """Running statistics are used."""

    def at(self, layer: int) -> Self:
        return self

    def source(self, message: Message, *rows: Tensor) -> Rows:
        return message(self, *rows)

    def destinations(self, *rows: Tensor) -> tuple[Self, Rows]:
        return self, rows

    def edge_dropout(self, p: float, *, tag: int = 0) -> EdgeDropout | None:
        return EdgeDropout(p, 0) if self.training and p > 0 else None

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        x = Operands(src, dst, edge, shared)
        return agg.finish(agg.update(agg.init(len(self.node_ids), x), self._block, x))[0]
