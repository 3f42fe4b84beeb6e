"""One exact pass, stage after stage, all rows of a part at a time: evaluation, the fidelity probe, exact histories.

Inside a stage the parts exchange halo rows before each aggregation, as in graph parallelism. A snapshot is such a pass
that leaves its source rows as the history: the remedy for zeros at first and for old histories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Communicator, Incoming, Outgoing, RowLike, Site
from gnnpar.comm.communicator import Phase
from gnnpar.folds.block import Rows
from gnnpar.graph import Graph
from gnnpar.models.gnn import GNN
from gnnpar.parallel.halo_graph import HaloGraph
from gnnpar.parallel.local import Pass
from gnnpar.parallel.pipeline.chunk import Part
from gnnpar.parallel.view import View
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


def recording(view: View, part: Part) -> View:
    """Return the exact view whose aggregations also write what they read into the part's tables.

    What other parts send is written as the view receives it, and sent once.
    """
    if isinstance(view, HaloGraph):
        view = replace(view, exchange=view.exchange.observed(partial(_keep, part)))
    return replace(view, watch=partial(_keep_own, part))


def _keep_own(part: Part, layer: int, call: int, src: Rows) -> None:
    """Write this part's rows of an aggregation into its table."""
    own = slice(part.history.fresh, part.history.fresh + part.chunks.num_own)
    for table, rows in zip(part.history.sources((layer, call), src), src, strict=True):
        table[own] = rows[part.chunks.order]


def _keep(part: Part, site: Site, peer: int, operands: Rows) -> None:
    """Write the halo rows of an aggregation into its table."""
    tables = part.history.sources((site.layer, site.call), operands)
    for table, rows in zip(tables, operands, strict=True):
        table[part.history.fresh + part.chunks.halo_rows[peer]] = rows
