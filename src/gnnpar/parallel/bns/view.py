"""A rank's part and a sample of its neighbours' rows: Y[N_P, F] = A[N_P, N_P] X[N_P, F] + A[N_P, S] X[S, F] / rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from gnnpar.codecs.codec import Codec
from gnnpar.comm import CodedExchange, RowLists
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Rows
from gnnpar.graph import Message
from gnnpar.parallel.bns.sample import Reweighted, kept, sampled
from gnnpar.parallel.edges import EdgeOrder
from gnnpar.parallel.halo_graph import HaloGraph
from gnnpar.parallel.local import Pass, Source
from gnnpar.parallel.view import View, edge_order, rows_left
from gnnpar.parallel.whole import fold_all_edges, fold_block
from gnnpar.partition.shard import Shard


@dataclass(eq=False)
class SampledWhole(View):
    """The oracle on one device: the masks of the epoch drop or weight edges between parts.

    `shard`: in a pass, only the edges that a part reads; `pieces`: of these, the edges with weight 1 and those with
    weight 1 / rate.
    """

    part_of: Tensor = field(kw_only=True)  # [N]
    rate: float = field(kw_only=True)
    pieces: tuple[Block, ...] = field(default=(), kw_only=True)

    def during(self, run: Pass) -> Self:
        whole, ids = self.shard.inner, self.shard.node_ids
        src, dst_part = whole.indices.long(), self.part_of[whole.edge_dst]
        within, drawn = self.part_of[src] == dst_part, torch.zeros_like(dst_part, dtype=torch.bool)
        for reader in range(int(self.part_of.max()) + 1):
            masks = kept(ids, rate=self.rate, seed=run.seed, epoch=run.epoch, reader=reader)
            drawn |= (dst_part == reader) & masks[src]
        every, *pieces = (
            replace(whole.restrict(edges, compress=False), src_ids=ids)
            for edges in (within | drawn, within, drawn & ~within)
        )
        shard = replace(self.shard, inner=every)
        if shard.edge_attr is not None:
            shard = replace(shard, edge_attr=rows_left(self.shard, edge_order(shard)))
        return replace(super().during(run), shard=shard, pieces=tuple(pieces))

    def fold(self, agg: Aggregator, call: int, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        if not agg.summed:
            return fold_all_edges(agg, self.shard.inner, src, dst, edge, shared)
        within, drawn = self.pieces
        total = self._piece(agg, within, src, dst, edge, shared)
        return total + self._piece(agg, drawn, src, dst, edge, shared) / self.rate if drawn.num_edges else total

    def _piece(self, agg: Aggregator, block: Block, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        if edge:
            assert block.edge_ids is not None
            place = torch.searchsorted(self.edge_ids, block.edge_ids)
            edge = tuple(rows[place] for rows in edge)
        return fold_block(agg, block, src, dst, edge, shared)


@dataclass(eq=False)
class Drawn:
    """The last sample: its shard, which is structure in addition to the engine's, and its codec."""

    shard: Shard | None = None
    codec: Codec | None = None

    @property
    def nbytes(self) -> int:
        if self.shard is None:
            return 0
        return sum(each.nbytes for each in (*self.shard.boundary.values(), *self.shard.halo.values()))


@dataclass(eq=False)
class SampledHalo(HaloGraph):
    """A view that draws the sample of its epoch in `during`. `codec_of`: the codec of a sample's row lists, which
    change every epoch. `full`: all rows, exactly; layer 0 reads it for constant rows (first_layer=cached)."""

    rate: float = field(kw_only=True)
    codec_of: Callable[[RowLists], Codec] = field(kw_only=True)
    full: HaloGraph = field(kw_only=True)
    drawn: Drawn = field(default_factory=Drawn, kw_only=True)

    def during(self, run: Pass) -> Self:
        self.drawn.shard = None  # free the last sample before the next is drawn
        with self.comm.clock("sample"):
            shard = sampled(self.full.shard, rate=self.rate, seed=run.seed, epoch=run.epoch)
        self.drawn.shard = shard
        with self.comm.clock("encode"):
            if self.drawn.codec is not None:
                self.drawn.codec.begin_epoch(run.epoch)  # on a GPU it reports rows without a range an epoch late
            self.drawn.codec = codec = self.codec_of(shard.row_lists)
            codec.begin_epoch(run.epoch)
        exchange, edges = CodedExchange(self.comm, codec), EdgeOrder(shard, self.edges.overlap)
        full = self.full.during(run)
        return replace(self, run=run, layer=0, shard=shard, exchange=exchange, edges=edges, full=full)

    def at(self, layer: int) -> Self:
        return replace(self, layer=layer, full=self.full.at(layer))

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        out = super().dropout(x, p, tag=tag)
        self.full._features = self._features
        return out

    def source(self, message: Message, *rows: Tensor) -> Rows:
        return super().source(message, *rows) if self.cache is None else self.full.source(message, *rows)

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        if self.cache is not None and self._reads_kept(agg, src) and not edge:
            return self.full.aggregate(agg, src, dst, edge, shared)
        if agg.summed and self.shard.halo:
            agg = Reweighted(agg, 1 / self.rate, frozenset(self.shard.halo.values()))
        return super().aggregate(agg, tuple(src), dst, edge, shared)

    def _reads_kept(self, agg: Aggregator, src: Rows) -> bool:
        """Return True if the rows are computed from the features alone, with kept halo rows."""
        return isinstance(src, Source) and (src.halo is not None or self._constant(agg, src))
