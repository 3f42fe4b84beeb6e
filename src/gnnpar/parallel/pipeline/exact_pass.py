"""One exact pass, stage after stage, all rows of a way at a time: evaluation, the fidelity probe, exact histories.

Inside a stage the ways exchange halo rows before each aggregation, as in graph parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Communicator, Incoming, Outgoing, RowLike, Site
from gnnpar.comm.communicator import Phase
from gnnpar.folds.block import Rows
from gnnpar.models.gnn import GNN
from gnnpar.parallel.local import Pass


@dataclass(frozen=True, eq=False)
class Relay:
    """`exchange`: of the stages of this way, in order, exact; virtual stage s runs on rank s % size."""

    model: GNN
    layers_of: Sequence[range]
    exchange: CodedExchange
    x: Tensor
    num_rows: int

    @property
    def comm(self) -> Communicator:
        return self.exchange.comm

    def forward(self, graph: Any, run: Pass) -> Lap:
        """Every rank runs its stages; the last one has the logits."""
        lap = Lap(self, run)
        for stage in range(len(self.layers_of)):
            if stage % self.comm.size == self.comm.rank:
                lap.run_stage(graph, stage)
        return lap


@dataclass(eq=False)
class Lap:
    """What a rank keeps of one pass."""

    relay: Relay
    run: Pass
    logits: Tensor | None = None
    _ends: dict[int, tuple[Rows, Rows]] = field(default_factory=dict)  # stage -> (leaves, results)
    _local: dict[tuple[str, int], Rows] = field(default_factory=dict)  # between stages on one rank

    def run_stage(self, graph: Any, stage: int) -> None:
        relay, model = self.relay, self.relay.model
        leaves: Rows = ()
        if stage == 0:
            carry = model.begin(graph, relay.x)
        else:
            carry = self._received("forward", stage, stage - 1)
            if torch.is_grad_enabled():
                leaves = carry = tuple(t.requires_grad_() for t in carry)
        for i in relay.layers_of[stage]:
            carry = model.layers[i](graph.at(i), carry)
        if stage + 1 == len(relay.layers_of):
            self.logits = model.end(graph, carry)
        else:
            self._send("forward", stage + 1, stage + 1, tuple(t.detach() for t in carry))
        if torch.is_grad_enabled():
            self._ends[stage] = leaves, carry

    def backward(self, loss: Tensor | None) -> None:
        """Gradients into the parameters' .grad; `loss` on the last stage."""
        relay = self.relay
        for stage in reversed(range(len(relay.layers_of))):
            if stage not in self._ends:
                continue
            leaves, carry = self._ends.pop(stage)
            if stage + 1 == len(relay.layers_of):
                assert loss is not None
                loss.backward()
            else:
                backward_through(carry, self._received("backward", stage + 1, stage + 1))
            if leaves:
                self._send("backward", stage, stage - 1, gradients_of(leaves))

    def _send(self, direction: str, boundary: int, to: int, rows: Rows) -> None:
        comm = self.relay.comm
        if to % comm.size == comm.rank:
            self._local[direction, boundary] = rows
            return
        self.relay.exchange.post({to % comm.size: Outgoing(rows)}, {}, RowLike.of(rows), self._site())

    def _received(self, direction: str, boundary: int, source: int) -> Rows:
        relay, comm = self.relay, self.relay.comm
        if source % comm.size == comm.rank:
            return self._local.pop((direction, boundary))
        widths = relay.model.carry_widths(relay.layers_of[boundary].start)
        like, peer = [RowLike((width,), relay.x.dtype, relay.x.device) for width in widths], source % comm.size
        posted = relay.exchange.post({}, {peer: Incoming(relay.num_rows)}, like, self._site())
        return relay.exchange.take(posted, peer)

    def _site(self) -> Site:
        phase: Phase = "stage" if self.run.counted else "evaluate"
        return Site(self.run.epoch, -1, 0, phase)


def backward_through(carry: Rows, grads: Rows) -> None:
    """Differentiate what a stage made, given the gradients from the next one."""
    pairs = [(t, g) for t, g in zip(carry, grads, strict=True) if t.requires_grad]
    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


def gradients_of(leaves: Rows) -> Rows:
    return tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)
