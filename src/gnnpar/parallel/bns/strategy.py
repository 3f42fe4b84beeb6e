"""BNS-GCN: Y[N_P, F] = A[N_P, N_P] X[N_P, F] + A[N_P, S] X[S, F] / rate, S a sample of the halo drawn every epoch.

Wan, Li, Li, Kim, Lin, BNS-GCN: Efficient Full-Graph Training of Graph Convolutional Networks with Partition-Parallelism
and Random Boundary Node Sampling, MLSys 2022 (arXiv 2203.10983). Specification, bytes and deviations from the paper and
the public code: docs/strategies/bns.md.

A row of node j that part p reads is kept with probability `rate`, keyed by (seed, epoch, p, j): owner and reader draw
the same, so no ids are sent, and all layers of an epoch use one sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Self

import torch
from annotated_types import Ge, Le
from torch import Tensor

from gnnpar.codecs.adaptive.codec import Adaptive, with_edge_weights
from gnnpar.codecs.codec import Codec
from gnnpar.codecs.delta import refuse_delta
from gnnpar.comm import CodedExchange, RowLists
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands, Rows, widened
from gnnpar.folds.wrapped import Wrapped
from gnnpar.graph import Message
from gnnpar.parallel.blocks import fold_all_edges, fold_block
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.declared import Declaration, Declares, overlapped_folds
from gnnpar.parallel.edges import EdgeOrder, Overlap
from gnnpar.parallel.engine import Engine, FlatEngine, PassGraph
from gnnpar.parallel.halo_graph import HaloGraph, halo_engine
from gnnpar.parallel.local import Pass, Source
from gnnpar.parallel.strategy import HALO, CodedStrategy, name_of
from gnnpar.parallel.view import View, edge_order, rows_left
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan
from gnnpar.pricing.steps import Step
from gnnpar_kernels import fold_key, keep_mask


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


@dataclass(frozen=True, kw_only=True)
class BoundarySampling(CodedStrategy, Declares):
    """Parameters of BNS-GCN. `rate`: probability that a boundary row is sent in an epoch; 1: graph parallelism, 0:
    nothing is sent.

    `codec`: of sent rows and their gradients. Evaluation reads all rows, exactly.
    """

    rate: Annotated[float, Ge(0), Le(1)] = 0.1
    overlap: Overlap = "edges"
    capabilities = HALO
    limit = {"rate": 1.0}
    beyond = "sampled"
    mode = "sampled halo"

    def __post_init__(self) -> None:
        if self.rate > 0 and 1 - self.rate == 1:
            raise ValueError(f"strategy.rate={self.rate} is too small to draw by: give 0, which sends nothing, or more")
        if self.rate < 1:
            refuse_delta(self.codec, "bns", "draws other rows in every epoch")
        if self.rate < 1 and isinstance(self.codec, Adaptive):
            raise ValueError(
                "codec=adaptive chooses bits of rows by what they sent before, but strategy=bns draws other rows every "
                "epoch: use codec=uniform, random, bf16, drop or identity, or strategy.rate=1"
            )

    def oracle(self, plan: Plan, whole: Shard, *, seed: int) -> PassGraph:
        return SampledWhole(whole, Pass(seed), part_of=plan.part_of, rate=self.rate)

    def declared(self) -> Declaration:
        """Declare expected values: the number of rows has standard deviation sqrt(rate (1 - rate) n)."""
        step = Step("halo", overlap=overlapped_folds(self.overlap), share=self.rate)
        notes = ("drawing and cutting the sample of an epoch is not in the time",) if self.rate < 1 else ()
        return Declaration(family="bns", step=step, words=[f"{self.rate:g} of the boundary rows"], notes=notes)

    @property
    def how(self) -> str:
        return f"{self.rate:g} of the boundary rows, {name_of(self.codec)}, overlap {self.overlap}"

    def build(self, context: BuildContext) -> Engine:
        if self.rate == 1:
            return halo_engine(context, self, overlap=self.overlap, features_exact="quantized" in self.exactness)
        config = with_edge_weights(self.codec, context.model)

        def codec_of(lists: RowLists) -> Codec:
            return config.build(lists, context.comm, context.seed)

        shard, run, exchange = context.shard, context.start, context.exact_exchange()
        edges, cache = EdgeOrder(shard, self.overlap), context.new_cache()
        full = HaloGraph(shard, run, exchange=exchange, edges=edges, cache=cache)
        exact = replace(full, cache=context.new_cache())
        view = SampledHalo(
            shard, run, exchange=exchange, edges=edges, cache=cache, rate=self.rate, codec_of=codec_of, full=full
        )
        parts = {"held": view.held, "cache": cache}
        return FlatEngine(context, view=view, exact=exact, structure=[view.drawn], parts=parts)
