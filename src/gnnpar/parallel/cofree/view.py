"""A part of a vertex cut as if it were the whole graph: Y[copies, F] = A[copies, copies] X[copies, F]."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from gnnpar.files import require_memory
from gnnpar.folds.block import Block
from gnnpar.graph import Graph
from gnnpar.parallel.local import Pass
from gnnpar.parallel.view import FeatureCache
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import Shard, degrees_by_type
from gnnpar_kernels import fold_key, keep_mask

Degrees = Literal["part", "graph"]
_CHOICE, _MASK = 0xC0F, 0xC10  # what a key is for


@dataclass(eq=False)
class PartGraph:
    """Training passes of a part, each under one of `masks` masks, in which an edge is missing with some probability.

    `shard`: the part, with the in-degrees of the whole graph. All masks are cut here, none during training.
    """

    shard: Shard
    degrees: Degrees
    drop_edge: float
    masks: int
    part: int
    seed: int
    cache: FeatureCache | None = None
    _made: list[Shard] = field(init=False)

    def __post_init__(self) -> None:
        if self.drop_edge:
            each = self.shard.inner.nbytes + self.shard.in_degree.nbytes
            require_memory(self.masks * each, f"{self.masks} masks of a part", "lower strategy.masks")
        self._made = [self._masked(self.seed, number) for number in range(self.masks if self.drop_edge else 1)]

    def during(self, run: Pass) -> Graph:
        number = fold_key(run.seed, run.epoch, self.part, _CHOICE) % len(self._made)
        return WholeGraph(self._made[number], Pass(run.seed), cache=self.cache).during(run)

    @property
    def nbytes(self) -> int:
        """Return the bytes of structure in addition to that of `shard`."""
        degrees = sum(s.in_degree.nbytes for s in self._made) if self.degrees == "part" else 0
        return degrees + sum(s.inner.nbytes for s in self._made if s.inner is not self.shard.inner)

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
    """Return the block under a mask. Both directions of an edge stay or go together, loops stay. Shapes: ids
    [num_src]."""
    dst, src = block.edge_dst, block.indices.long()
    low, high = torch.minimum(ids[dst], ids[src]), torch.maximum(ids[dst], ids[src])
    keep = keep_mask(low * (1 << 31) + high, 1, p=p, key=fold_key(seed, number, _MASK))[:, 0] | (low == high)
    return Block.from_edges(
        dst[keep],
        src[keep],
        num_dst=block.num_dst,
        num_src=block.num_src,
        src_ids=block.src_ids,
        edges=block.edges.at(keep),
    )
