"""The sample of an epoch's boundary rows, the shard with only these rows, and folds that reweight them.

A row of node j that part p reads is kept with probability `rate`, keyed by (seed, epoch, p, j): owner and reader draw
the same, so no ids are sent, and all layers of an epoch use one sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gnnpar.folds.block import Block, Operands, Rows, widened
from gnnpar.folds.wrapped import Wrapped
from gnnpar.parallel.view import edge_order, rows_left
from gnnpar.partition.shard import Shard
from gnnpar_kernels import fold_key, keep_mask

_BOUNDARY = 0xB45  # use of the key


def kept(ids: Tensor, *, rate: float, seed: int, epoch: int, reader: int) -> Tensor:
    """Return the mask of boundary rows that part `reader` reads in an epoch. Shapes: ids [n] global -> [n] bool."""
    if rate <= 0:
        return torch.zeros_like(ids, dtype=torch.bool)
    return keep_mask(ids, 1, p=1 - rate, key=fold_key(seed, epoch, reader, _BOUNDARY))[:, 0]


def sampled(shard: Shard, *, rate: float, seed: int, epoch: int) -> Shard:
    """Return the shard with only the drawn boundary rows, without peers that have none, with unchanged degrees."""
    boundary: dict[int, Tensor] = {}
    for peer, index in shard.boundary.items():
        keep = kept(shard.node_ids[index], rate=rate, seed=seed, epoch=epoch, reader=peer)
        if bool(keep.any()):
            boundary[peer] = index[keep]
    edges: dict[int, Tensor] = {}
    for peer, block in shard.halo.items():
        assert block.src_ids is not None
        edges[peer] = kept(block.src_ids, rate=rate, seed=seed, epoch=epoch, reader=shard.part)[block.indices]
    drawn = shard.narrowed(edges, boundary)
    return drawn if shard.edge_attr is None else replace(drawn, edge_attr=rows_left(shard, edge_order(drawn)))


@dataclass(frozen=True, eq=False)
class Reweighted(Wrapped):
    """A summed fold with weight `weight` on in-edges of the blocks `drawn`: unbiased for weight = 1 / rate."""

    weight: float
    drawn: frozenset[Block]

    def update(self, state: Rows, block: Block, x: Operands) -> Rows:
        if block not in self.drawn:
            return self.fold.update(state, block, x)
        if self.fold.linear:  # scale rows, which are fewer than results
            return self.fold.update(state, block, x._replace(src=self._weighted(x.src)))
        (part,) = self.fold.update(self.fold.init(block.num_dst, x), block, x)
        return (state[0].add_(part, alpha=self.weight),) if state else (part * self.weight,)

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        grads = self.fold.grad(block, x, prepared, grad_out)
        return Operands(*map(self._weighted, grads)) if block in self.drawn else grads

    def _weighted(self, rows: Rows) -> Rows:
        return tuple(widened(t) * self.weight if t.is_floating_point() else t for t in rows)
