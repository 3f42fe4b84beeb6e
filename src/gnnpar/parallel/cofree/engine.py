"""Y[copies, F] = A[copies, copies] X[copies, F] on one part of a vertex cut as if it were the whole graph.

Every copy has a weight in the loss; gradients are summed over ranks once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from gnnpar.data.raw import MASKS
from gnnpar.files import require_memory
from gnnpar.folds.block import Block
from gnnpar.folds.edge_data import EdgeData
from gnnpar.graph import Graph
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.engine import FlatEngine, PassGraph
from gnnpar.parallel.local import Pass
from gnnpar.parallel.view import FeatureCache
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import Mirrors, Shard, degrees_by_type
from gnnpar_kernels import fold_key, keep_mask

Degrees = Literal["part", "graph"]
_CHOICE, _MASK = 0xC0F, 0xC10  # uses of a key


@dataclass(eq=False)
class PartGraph:
    """Training passes of a part, each under one of `masks` masks, which drop an edge with probability `drop_edge`.

    `shard`: the part, with the in-degrees of the whole graph. All masks are made here, none during training.
    """

    shard: Shard
    degrees: Degrees
    drop_edge: float
    masks: int
    part: int
    seed: int
    cache: FeatureCache | None = None
    _masked_shards: list[Shard] = field(init=False)

    def __post_init__(self) -> None:
        if self.drop_edge:
            each = self.shard.inner.nbytes + self.shard.in_degree.nbytes
            require_memory(self.masks * each, f"{self.masks} masks of a part", "lower strategy.masks")
        self._masked_shards = [self._masked(self.seed, number) for number in range(self.masks if self.drop_edge else 1)]

    def during(self, run: Pass) -> Graph:
        number = fold_key(run.seed, run.epoch, self.part, _CHOICE) % len(self._masked_shards)
        return WholeGraph(self._masked_shards[number], Pass(run.seed), cache=self.cache).during(run)

    @property
    def nbytes(self) -> int:
        """Return the bytes of structure in addition to that of `shard`."""
        degrees = sum(s.in_degree.nbytes for s in self._masked_shards) if self.degrees == "part" else 0
        return degrees + sum(s.inner.nbytes for s in self._masked_shards if s.inner is not self.shard.inner)

    def _masked(self, seed: int, number: int) -> Shard:
        shard = self.shard
        if self.drop_edge:
            shard = replace(shard, inner=dropped(shard.inner, shard.node_ids, self.drop_edge, seed, number))
        if self.degrees == "part":
            inner, weights = shard.inner, shard.inner.weights
            in_degree = inner.indptr.diff().to(shard.in_degree.dtype)
            in_weight = None
            if weights is not None:
                in_weight = torch.zeros_like(in_degree).index_add_(0, inner.edge_dst, weights.to(in_degree.dtype))
            type_degree = None
            if shard.type_degree is not None:
                type_degree = degrees_by_type([inner], shard.edge_sizes.types).to(in_degree.dtype)
            shard = replace(shard, in_degree=in_degree, in_weight=in_weight, type_degree=type_degree)
        return shard


def dropped(block: Block, ids: Tensor, p: float, seed: int, number: int) -> Block:
    """Return the block under a mask, which keeps or drops both directions of an edge together, and keeps loops. Shapes:
    ids [num_src]."""
    dst, src = block.edge_dst, block.indices.long()
    low, high = torch.minimum(ids[dst], ids[src]), torch.maximum(ids[dst], ids[src])
    keep = keep_mask(low * (1 << 31) + high, 1, p=p, key=fold_key(seed, number, _MASK))[:, 0] | (low == high)
    return block.restrict(keep, compress=False)


def union_of(parts: Sequence[Mirrors]) -> Mirrors:
    """Return nodes and edges of all parts, one part after the other, as one graph: the oracle on one device."""
    shards = [part.shard for part in parts]
    firsts = [0, *accumulate(s.num_inner for s in shards)]
    rows = ("node_ids", "x", "y", *MASKS, "in_degree", "in_weight", "type_degree")
    held = {name: [vars(s)[name] for s in shards] for name in rows if vars(shards[0])[name] is not None}
    block = Block.from_edges(
        torch.cat([s.inner.edge_dst + first for s, first in zip(shards, firsts, strict=False)]),
        torch.cat([s.inner.indices.long() + first for s, first in zip(shards, firsts, strict=False)]),
        num_dst=firsts[-1],
        num_src=firsts[-1],
        src_ids=torch.arange(firsts[-1]),
        edges=EdgeData.cat([s.inner.edges for s in shards]),
    )
    shard = replace(shards[0], **{name: torch.cat(parts) for name, parts in held.items()}, inner=block)
    return Mirrors(shard, torch.cat([p.share for p in parts]), torch.cat([p.number for p in parts]))


Reweight = Literal["degree", "copies", "none"]


class VertexCutEngine(FlatEngine):
    """Train on `copies`, evaluate the rank's own nodes on `exact`. `reweight`: the weight of a copy's loss."""

    def __init__(
        self, context: BuildContext, *, copies: Mirrors, view: PartGraph, reweight: Reweight, exact: PassGraph
    ) -> None:
        structure, parts = (copies.shard.inner, view), {"cache": view.cache}
        super().__init__(context, view=view, exact=exact, structure=structure, parts=parts)
        self._copies, self._task = copies, context.task
        self._rows = copies.shard.rows_of_split["train"]
        self._labels = copies.shard.y[self._rows]
        self._weights = weights_of(copies, self._rows, reweight)
        total = self._weights.sum().reshape(1)
        self._total = float(context.shard.num_train if reweight != "none" else context.comm.all_reduce(total))

    def live_bytes(self) -> dict[str, int]:
        held = super().live_bytes()
        held["features"] += self._copies.shard.features_nbytes + self._weights.nbytes
        return held

    def _differentiate(self, view: PassGraph, run: Pass) -> Tensor:
        """Return the gradients and the sum of this part's weighted losses; for a probe, of the losses of own nodes."""
        if run.probe:
            return super()._differentiate(view, run)
        if not len(self._rows):
            return self.bucket_of(None)
        logits = self._model(view.during(run), self._copies.shard.x)
        loss = self._task.loss_sum(logits[self._rows], self._labels, self._weights)
        return self.bucket_of(loss / self._total)


def weights_of(copies: Mirrors, rows: Tensor, reweight: Reweight) -> Tensor:
    """Return the weights of copies in the loss. Shapes: rows [t] -> [t]."""
    share = copies.share[rows]
    if reweight == "degree":
        return share
    return torch.ones_like(share) if reweight == "none" else 1 / copies.number[rows].to(share.dtype)
