"""One exact pass, stage after stage, all rows of a part at a time: evaluation, the fidelity probe, exact histories.

Inside a stage the parts exchange halo rows before each aggregation, as in graph parallelism. A snapshot is such a pass
that leaves its source rows as the history: the remedy for zeros at first and for old histories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Communicator, Incoming, Outgoing, RowLike, Site
from gnnpar.comm.communicator import Phase
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Rows
from gnnpar.graph import EdgeDropout, Graph, InEdges, Message, Moments, Reduction
from gnnpar.models.gnn import GNN
from gnnpar.parallel.halo_graph import HaloGraph
from gnnpar.parallel.local import Pass
from gnnpar.parallel.pipeline.chunk import Part
from gnnpar.partition.shard import Shard


@dataclass(frozen=True, eq=False)
class ExactPass:
    """`exchange`: of the stages of this part, in order, exact; virtual stage s runs on rank s % size."""

    model: GNN
    layers_of: Sequence[range]
    exchange: CodedExchange
    shard: Shard

    @property
    def comm(self) -> Communicator:
        return self.exchange.comm

    def forward(self, graph: Graph, run: Pass) -> ExactForward:
        """Every rank runs its stages; the last one has the logits."""
        state = ExactForward(self, run)
        for stage in range(len(self.layers_of)):
            if stage % self.comm.size == self.comm.rank:
                state.run_stage(graph, stage)
        return state


@dataclass(eq=False)
class ExactForward:
    """What a rank keeps of one pass from its forward to its backward. `logits`: on the last stage."""

    exact_pass: ExactPass
    run: Pass
    logits: Tensor | None = None
    # stage -> (leaves, results)
    _ends: dict[int, tuple[Rows, Rows]] = field(default_factory=dict[int, tuple[Rows, Rows]])
    # (direction, boundary) -> rows between stages of one rank
    _local: dict[tuple[str, int], Rows] = field(default_factory=dict[tuple[str, int], Rows])

    def run_stage(self, graph: Graph, stage: int) -> None:
        exact_pass, model = self.exact_pass, self.exact_pass.model
        leaves: Rows = ()
        if stage == 0:
            carry = model.begin(graph, exact_pass.shard.inputs())
        else:
            carry = self._received("forward", stage, stage - 1)
            if torch.is_grad_enabled():
                leaves = carry = tuple(t.requires_grad_() for t in carry)
        for i in exact_pass.layers_of[stage]:
            carry = model.run_layer(i, graph, carry)
        if stage + 1 == len(exact_pass.layers_of):
            self.logits = model.end(graph, carry)
        else:
            self._send("forward", stage + 1, stage + 1, tuple(t.detach() for t in carry))
        if torch.is_grad_enabled():
            self._ends[stage] = leaves, carry

    def backward(self, loss: Tensor | None) -> None:
        """Gradients into the parameters' .grad; `loss` on the last stage."""
        exact_pass = self.exact_pass
        for stage in reversed(range(len(exact_pass.layers_of))):
            if stage not in self._ends:
                continue
            leaves, carry = self._ends.pop(stage)
            if stage + 1 == len(exact_pass.layers_of):
                assert loss is not None
                torch.autograd.backward(loss)
            else:
                backward_through(carry, self._received("backward", stage + 1, stage + 1))
            if leaves:
                self._send("backward", stage, stage - 1, gradients_of(leaves))

    def _send(self, direction: str, boundary: int, to: int, rows: Rows) -> None:
        comm = self.exact_pass.comm
        if to % comm.size == comm.rank:
            self._local[direction, boundary] = rows
            return
        self.exact_pass.exchange.post({to % comm.size: Outgoing(rows)}, {}, RowLike.of(rows), self._site())

    def _received(self, direction: str, boundary: int, source: int) -> Rows:
        exact_pass, comm = self.exact_pass, self.exact_pass.comm
        if source % comm.size == comm.rank:
            return self._local.pop((direction, boundary))
        x = exact_pass.shard.x
        widths = exact_pass.model.carry_widths(exact_pass.layers_of[boundary].start)
        like = [RowLike((width,), x.dtype, x.device) for width in widths]
        peer = source % comm.size
        posted = exact_pass.exchange.post({}, {peer: Incoming(exact_pass.shard.num_inner)}, like, self._site())
        return exact_pass.exchange.take(posted, peer)

    def _site(self) -> Site:
        phase: Phase = "stage" if self.run.counted else "evaluate"
        return Site(self.run.epoch, -1, 0, phase)


def backward_through(carry: Rows, grads: Rows) -> None:
    """Differentiate what a stage made, given the gradients from the next one."""
    if pairs := [(t, g) for t, g in zip(carry, grads, strict=True) if t.requires_grad]:  # none of frozen layers
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


def gradients_of(leaves: Rows) -> Rows:
    return tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)


@dataclass(eq=False)
class Snapshot:
    """An exact view whose aggregations also write what they read into the part's tables."""

    view: Graph
    part: Part
    layer: int = 0
    _calls: int = 0

    @staticmethod
    def of(view: Graph, part: Part) -> Snapshot:
        """What other parts send is written as the view receives it, and sent once."""
        if isinstance(view, HaloGraph):
            view = replace(view, exchange=view.exchange.observed(partial(_keep, part)))
        return Snapshot(view, part)

    @property
    def node_ids(self) -> Tensor:
        return self.view.node_ids

    @property
    def num_nodes(self) -> int:
        return self.view.num_nodes

    @property
    def in_degree(self) -> Tensor:
        return self.view.in_degree

    @property
    def in_weight(self) -> Tensor | None:
        return self.view.in_weight

    @property
    def normalised(self) -> bool:
        return self.view.normalised

    @property
    def edge_attr(self) -> Tensor | None:
        return self.view.edge_attr

    @property
    def edge_type(self) -> Tensor | None:
        return self.view.edge_type

    @property
    def edge_ids(self) -> Tensor:
        return self.view.edge_ids

    @property
    def in_edges(self) -> InEdges:
        return self.view.in_edges

    def type_degree(self, types: int) -> Tensor:
        return self.view.type_degree(types)

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        return self.view.dropout(x, p, tag=tag)

    def moments(self, x: Tensor) -> Moments | None:
        return self.view.moments(x)

    def total(self, part: Tensor, how: Reduction = "sum") -> Tensor:
        return self.view.total(part, how)

    def edge_dropout(self, p: float, *, tag: int = 0) -> EdgeDropout | None:
        return self.view.edge_dropout(p, tag=tag)

    def source(self, message: Message, *rows: Tensor) -> Rows:
        return self.view.source(message, *rows)

    def at(self, layer: int) -> Self:
        return type(self)(self.view.at(layer), self.part, layer)

    def destinations(self, *rows: Tensor) -> tuple[Self, Rows]:
        return self, rows

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        call, self._calls = self._calls, self._calls + 1
        history, chunks = self.part.history, self.part.chunks
        tables = history.sources((self.layer, call), src)
        for table, rows in zip(tables, src, strict=True):
            table[history.fresh : history.fresh + chunks.num_own] = rows[chunks.order]
        return self.view.aggregate(agg, src, dst, edge, shared)


def _keep(part: Part, site: Site, peer: int, operands: Rows) -> None:
    """Halo rows of an aggregation, into its table."""
    tables = part.history.sources((site.layer, site.call), operands)
    for table, rows in zip(tables, operands, strict=True):
        table[part.history.fresh + part.chunks.halo_rows[peer]] = rows


@torch.no_grad()
def take_snapshot(snapshot: Snapshot, run: Callable[[Graph], object], epoch: int) -> None:
    """Run one pass through the recording view; what it wrote is the history from now on."""
    run(snapshot)
    snapshot.part.history.take(epoch - 1)
