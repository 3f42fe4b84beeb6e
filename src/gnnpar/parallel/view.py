"""The common part of all views: the row-local half of the Graph Protocol, constant results of layer 0, and sums over
the rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from torch import Tensor

from gnnpar.comm import Communicator, MessageTag
from gnnpar.comm.communicator import Phase
from gnnpar.files import StateDict
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Rows, chosen, widened
from gnnpar.graph import InEdges, Message, Moments, Reduction
from gnnpar.parallel.local import OwnRows, Pass, Source, as_messages, by_type
from gnnpar.parallel.torch_types import Context, apply, apply_to_rows
from gnnpar.partition.shard import Shard

FirstLayer = Literal["live", "cached"]


@dataclass(eq=False)
class FeatureCache:
    """Constant values of layer 0 for first_layer=cached. A part of an engine.

    `halo`: features of the halo nodes [halo nodes, F], None until they are fetched. `folds`: results of linear folds of
    constant rows, by the number of the aggregation.
    """

    halo: Tensor | None = None
    folds: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    @property
    def nbytes(self) -> int:
        halo = () if self.halo is None else (self.halo,)
        return sum(t.nbytes for t in (*halo, *self.folds.values()))

    def drain(self) -> None:
        """Do nothing: nothing is in flight."""

    def state_dict(self) -> StateDict:
        state: StateDict = {("fold", call): result for call, result in self.folds.items()}
        return state if self.halo is None else {"features": self.halo, **state}

    def load_state_dict(self, state: StateDict) -> None:
        self.halo = state.get("features")
        self.folds = {key[1]: result for key, result in state.items() if key != "features"}


@dataclass(eq=False)
class View(OwnRows):
    """A shard in one layer of one pass. Subclasses add `fold`, or their own `aggregate`.

    `cache`: of the engine; None: nothing is kept. `watch`: called with (layer, number of the aggregation in it, source
    rows) before each aggregation.
    """

    shard: Shard
    run: Pass
    layer: int = 0
    cache: FeatureCache | None = None
    watch: Callable[[int, int, Rows], None] | None = field(default=None, kw_only=True)
    _calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        shard = self.shard
        self.node_ids, self.in_degree, self.in_weight = shard.node_ids, shard.in_degree, shard.in_weight
        self.normalised = shard.normalised

    @property
    def num_nodes(self) -> int:
        return self.shard.num_nodes

    @property
    def edge_ids(self) -> Tensor:
        return edge_order(self.shard)

    @property
    def in_edges(self) -> InEdges:
        return self.shard.in_edges

    def type_degree(self, types: int) -> Tensor:
        return by_type(self.shard.type_degree, self.in_degree, types)

    @property
    def edge_attr(self) -> Tensor | None:
        return self.shard.edge_attr

    @property
    def edge_type(self) -> Tensor | None:
        return self.shard.edge_type

    @property
    def comm(self) -> Communicator | None:
        """Return the ranks that together hold each row of the graph once; None: this view alone."""
        return None

    def moments(self, x: Tensor) -> Moments | None:
        alone, nodes, total = self.comm is None, len(self.node_ids), self.shard.num_nodes
        if not self.run.training or (alone and nodes != total):
            return super().moments(x)
        if not alone and len(x) != nodes:
            raise ValueError(
                f"a batch norm of chosen rows ({len(x)} of the {nodes} here, in layer {self.layer}) needs all ranks' "
                "choices: set world_size=1, or normalise the rows of all nodes"
            )
        tag = MessageTag(self.run.epoch, self.layer, 0, "reduce") if self.run.counted else None
        rows = len(x) if alone else total
        mean, variance = apply_to_rows(_Moments, x, rows, self.comm, tag)
        return Moments(mean, variance, rows, self.run.probe)

    def total(self, part: Tensor, how: Reduction = "sum") -> Tensor:
        if self.comm is None and len(self.node_ids) != self.shard.num_nodes:
            return super().total(part, how)
        tag = MessageTag(self.run.epoch, self.layer, 0, "global") if self.run.counted else None
        return total_of(part, self.comm, tag, how)

    def during(self, run: Pass) -> Self:
        """Return this view in another pass. A probe keeps no rows, since training never sent their bytes."""
        return replace(self, run=run, layer=0, cache=None if run.probe else self.cache)

    def at(self, layer: int) -> Self:
        return replace(self, layer=layer)

    def source(self, message: Message, *rows: Tensor) -> Rows:
        """Return message(self, *rows), marked constant if it reads features alone and nothing learned or random."""
        self.random = False
        out = as_messages(message(self, *rows), self.shard.x.dtype, len(self.node_ids))
        fixed = len(rows) == 1 and rows[0] is self.shard.x and not self.random
        return Source(out, constant=fixed and not any(t.requires_grad for t in out))

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        call = self.next_call()
        if self.watch is not None:
            self.watch(self.layer, call, src)
        if self.cache is None or not self._constant(agg, src):
            return self.fold(agg, call, src, dst, edge, shared)
        if call not in self.cache.folds:
            self.cache.folds[call] = self.exactly().fold(agg, call, src, dst, edge, shared)
        return self.cache.folds[call].clone()  # a user's module may write into it

    def exactly(self) -> Self:
        """Return the view for rows that are sent once and kept over epochs."""
        return self

    def fold(self, agg: Aggregator, call: int, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        """Fold over all in-edges of this part. `call`: the number of the aggregation within its layer."""
        raise NotImplementedError

    def next_call(self) -> int:
        """Return the number of this aggregation within its layer."""
        call, self._calls = self._calls, self._calls + 1
        return call

    def message_tag(self, call: int, phase: Phase) -> MessageTag:
        """Return the tag of a message: its bytes are counted by it, and a codec's random numbers keyed."""
        return MessageTag(self.run.epoch, self.layer, call, phase if self.run.counted else "evaluate")

    def _constant(self, agg: Aggregator, src: Rows) -> bool:
        return self.layer == 0 and agg.linear and isinstance(src, Source) and src.constant


def rows_left(shard: Shard, edge_ids: Tensor) -> Tensor | None:
    """Return the attributes of the remaining in-edges of the shard's rows. Shapes: edge_ids [e] ascending -> [e, D]."""
    return chosen(shard.edge_attr, torch.searchsorted(edge_order(shard), edge_ids))


def edge_order(shard: Shard) -> Tensor:
    """Return the global ids of the shard's in-edges, ascending: the order of edge operands."""
    ids = [b.edge_ids for b in (shard.inner, *shard.halo.values()) if b.edge_ids is not None]
    if not ids:
        raise ValueError("edge operands need edge ids on the shard: give the model needs_edge_ids = True.")
    return torch.cat(ids).sort().values


def total_of(part: Tensor, comm: Communicator | None, tag: MessageTag | None, how: Reduction = "sum") -> Tensor:
    """Sum `part` over ranks, in fp32 at least. Collective, like its gradient: every rank reads the sum, so the
    gradients of all ranks are added. "max": the entrywise maximum, without a gradient, by a sum of a table with one row
    per rank. `comm` None: `part` is the total. `tag` None: not counted. Shapes: [...] -> [...]."""
    if how == "sum":
        return widened(part) if comm is None else apply(_Total, widened(part), comm, tag)
    if comm is None:
        return part.detach()
    slots = part.new_zeros(comm.size, *part.shape)
    slots[comm.rank] = part.detach()
    return comm.all_reduce(slots, tag).amax(0)


class _Kept(Context):
    rows: int
    comm: Communicator | None
    tag: MessageTag | None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, part: Tensor, comm: Communicator, tag: MessageTag | None) -> Tensor:
        ctx.comm, ctx.tag = comm, tag
        return comm.all_reduce(part.contiguous(), tag)

    @staticmethod
    def backward(ctx: _Kept, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _over_ranks(grads[0].contiguous(), ctx.comm, ctx.tag), None, None


class _Moments(torch.autograd.Function):
    """(mean, variance) over the `rows` rows of all ranks, by two sums over ranks forward and one backward, of twice the
    size. The variance is the mean of squares of centred rows, which keeps its digits if the mean is large. `comm` None:
    x has all rows. `tag` None: not counted. Shapes: x [N, F] -> [F], [F]."""

    @staticmethod
    def forward(ctx: _Kept, x: Tensor, rows: int, comm: Communicator | None, tag: MessageTag | None) -> Rows:
        mean = _over_ranks(x.sum(0), comm, tag) / rows
        variance = _over_ranks((x - mean).square_().sum(0), comm, tag) / rows
        ctx.rows, ctx.comm, ctx.tag = rows, comm, tag
        ctx.save_for_backward(x, mean)
        return mean, variance

    @staticmethod
    def backward(ctx: _Kept, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean = ctx.saved_tensors
        of_mean, of_variance = _over_ranks(torch.stack(grads), ctx.comm, ctx.tag) / ctx.rows
        return ((x - mean) * (2 * of_variance) + of_mean, None, None, None)


def _over_ranks(total: Tensor, comm: Communicator | None, tag: MessageTag | None) -> Tensor:
    return total if comm is None else comm.all_reduce(total, tag)
