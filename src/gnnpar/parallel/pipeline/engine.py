"""A schedule, interpreted: chunks of a part through the stages, all forwards, then all backwards, one optimiser step.

Source: Chen, Chen and Qian, GNNPipe (arXiv 2308.10087). The numbers depend on the chunks, their order, the history and
the weights of gradients, never on how many stages there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gnnpar.codecs.codec import Codec, Identity
from gnnpar.comm import CodedExchange, Communicator, RowLike, Site
from gnnpar.comm.clock import monotonic as now
from gnnpar.data.tasks import Task
from gnnpar.files import StateDict
from gnnpar.folds.block import Rows
from gnnpar.models.gnn import GNN
from gnnpar.parallel.engine import EngineDefaults, EpochReport, Stateful, Stepper, set_gradients, summand
from gnnpar.parallel.local import Pass
from gnnpar.parallel.pipeline.boundary import Boundary, Form, Lanes, Message
from gnnpar.parallel.pipeline.chunk import ChunkGraph, Part
from gnnpar.parallel.pipeline.chunks import EpochOrder, draw_order
from gnnpar.parallel.pipeline.exact_pass import ExactPass, recording
from gnnpar.parallel.pipeline.schedule.action import Action, Schedule
from gnnpar.parallel.pipeline.stage import Kept, Remat, Stage
from gnnpar.parallel.torch_types import floats
from gnnpar.parallel.view import View
from gnnpar.partition.shard import Shard


@dataclass(frozen=True, kw_only=True)
class HistoryPolicy:
    """`shuffled`: a new order every epoch. `exact_start`, `exact_refresh`: snapshots by an exact pass, the first one
    and all later ones."""

    shuffled: bool = True
    exact_start: bool = False
    exact_refresh: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranks:
    """Who a rank talks to: everybody, the parts of its stage, the stages of its part."""

    world: Communicator
    parts: Communicator
    stages: Communicator


@dataclass(eq=False)
class _Epoch:
    """What lives from a chunk's forward to its backward."""

    run: Pass
    epoch_order: EpochOrder
    boundary: Boundary
    loss: Tensor
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict[tuple[int, int], Kept])  # by (stage, slot)
    kept_bytes: int = 0
    ready: dict[Message, Rows] = field(default_factory=dict[Message, Rows])  # to be sent, or to be read on this rank


class PipelineEngine(EngineDefaults):
    """`layers_of`: of virtual stages; stage s runs on rank s % stages. `schedule` is lowered. `boundary`: the codec
    between stages; `codec`: the one between the parts of a stage, by which `part` exchanges rows. `stage_of`: the
    virtual stages of the entries of the whole model's state_dict."""

    def __init__(
        self,
        *,
        part: Part,
        exact: View,
        shard: Shard,
        model: GNN,
        task: Task,
        ranks: Ranks,
        layers_of: tuple[range, ...],
        schedule: Schedule,
        boundary: Codec,
        codec: Codec,
        seed: int,
        history_policy: HistoryPolicy,
        remat: Remat = "none",
        stage_of: Mapping[str, int],
    ) -> None:
        self._part, self._exact, self._shard, self._model, self._task = part, exact, shard, model, task
        self._ranks, self._layers_of, self._schedule = ranks, layers_of, schedule
        self._boundary, self._codecs = CodedExchange(ranks.stages, boundary), (boundary, codec)
        self._stateful: dict[str, Stateful] = {  # what lives between epochs, by its name in a checkpoint
            "history": part.history,
            "slots": part.slots.exchange,
            "boundary": self._boundary,
        }
        self._seed, self._history_policy = seed, history_policy
        stages = ranks.stages
        self._lanes = Lanes.of(schedule, stages.rank)
        self._mine = [s for s in range(len(layers_of)) if s % stages.size == stages.rank]
        self._is_last = self._mine[-1] == len(layers_of) - 1
        exact_stages = CodedExchange(stages, Identity().build(shard.row_lists, stages, seed))
        self._exact_pass = ExactPass(model, layers_of, exact_stages, shard)
        self._stage_of = stage_of
        self._parameters = {n: p for n, p in model.named_parameters() if stage_of[n] in self._mine}
        self._parameters |= shard.own_parameters
        self._targets = self._targets_of_chunks() if self._is_last else {}
        self._remat: Remat = remat
        self._stages = {s: Stage(layers_of[s], self._piece, remat=remat) for s in self._mine}
        self._turning = _turning_back(schedule.actions[stages.rank])
        self._unread = None
        self._most_kept = 0  # bytes of rows kept to compute chunks again, at most in the last epoch

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    @property
    def node_ids(self) -> Tensor:
        return self._shard.node_ids if self._is_last else self._shard.node_ids[:0]

    def train_epoch(self, epoch: int, optimizer: Stepper, *, keep_gradient: bool = False) -> EpochReport:
        comm = self._ranks.world
        with comm.clock("compute"):
            optimizer.zero_grad()
            loss = self._run(epoch)
        if self._ranks.stages.size > 1:
            with comm.clock("bubble"):  # the drain: whoever is through waits for the first stage
                comm.barrier()
        gradients = self._reduced(epoch)
        total = self._totals(epoch, loss, gradients)
        with comm.clock("compute"):
            kept = {name: g.clone() for name, g in gradients.items()} if keep_gradient else None
            self._unread = set_gradients(self._trained, gradients, self._unread)
            mean_loss, square = floats(total.cpu())  # the host waits once
            optimizer.step(norm=square**0.5)
        comm.flush(keep=0)
        return EpochReport(mean_loss, kept)

    def _run(self, epoch: int) -> Tensor:
        """All actions of this rank; its share of the loss. Gradients are left in the parameters."""
        history, chunks = self._part.history, self._part.chunks
        self.drain()  # what is in flight was written with the codec's bits of the last epoch
        for codec in self._codecs:
            codec.begin_epoch(epoch)
        self._refresh(epoch)
        order = draw_order(chunks.num, seed=self._seed, epoch=epoch, shuffled=self._history_policy.shuffled)
        epoch_order = EpochOrder(chunks, order, fresh=history.fresh, stale=history.stale)
        boundary = Boundary(self._boundary, self._lanes, epoch=epoch, form=lambda m: self._form(m, epoch_order))
        run = Pass(self._seed, epoch, training=True)
        now_running = _Epoch(
            run, epoch_order, boundary, torch.zeros((), dtype=self._shard.in_degree.dtype, device=self._shard.x.device)
        )
        self._most_kept = 0
        if self.timeline is not None:
            self.timeline.clear()
        for action in self._schedule.actions[self._ranks.stages.rank]:
            began = now()
            self._do(action, now_running)
            if self.timeline is not None:
                self.timeline.append((str(action), began, now()))
        assert not now_running.kept, "the schedule left a forward without its backward"
        history.end_epoch(epoch, take=not self._history_policy.exact_refresh)
        return now_running.loss

    def _do(self, action: Action, at: _Epoch) -> None:
        stage, slot = action.stage, action.slot
        if action.kind == "forward":
            self._forward(stage, slot, at)
        elif action.kind == "backward":
            self._backward(stage, slot, at)
        elif action.kind == "receive_forward":
            at.boundary.post(Message("forward", stage, slot))
        elif action.kind == "receive_backward":
            at.boundary.post(Message("backward", stage + 1, slot))
        elif action.kind == "send_forward":
            message = Message("forward", stage + 1, slot)
            at.boundary.send(message, at.ready.pop(message), (stage + 1) % self._ranks.stages.size)
        else:
            message = Message("backward", stage, slot)
            at.boundary.send(message, at.ready.pop(message), (stage - 1) % self._ranks.stages.size)

    def _forward(self, stage: int, slot: int, at: _Epoch) -> None:
        graph = ChunkGraph(self._part, at.epoch_order, at.run, slot, keeps_masks=self._remat == "none")
        given = self._arrived(Message("forward", stage, slot), stage - 1, at) if stage else ()
        keep = self._remat == "none" or (self._remat == "chunk" and (stage, slot) in self._turning)
        made, at.kept[stage, slot] = self._stages[stage].forward(graph, given, keep=keep)
        if stage + 1 == len(self._layers_of):
            at.loss += made[0]
        else:
            at.ready[Message("forward", stage + 1, slot)] = made
        at.kept_bytes += at.kept[stage, slot].nbytes
        self._most_kept = max(self._most_kept, at.kept_bytes)

    def _piece(self, graph: ChunkGraph, layers: range, carry: Rows) -> Rows:
        """Run some layers of a chunk, with the encoder before the first and the loss after the last."""
        if layers.start == 0:
            carry = self._model.begin(graph, self._shard.inputs(self._part.chunks.order[graph.span.rows]))
        for i in layers:
            carry = self._model.run_layer(i, graph, carry)
        if layers.stop < self._model.num_layers:
            return carry
        rows, labels = self._targets[graph.chunk]
        logits = self._model.end(graph, carry)
        return (self._task.loss_sum(logits[rows], labels) / self._shard.num_train,)

    def _backward(self, stage: int, slot: int, at: _Epoch) -> None:
        kept, arrived = at.kept.pop((stage, slot)), None
        at.kept_bytes -= kept.nbytes
        if stage + 1 < len(self._layers_of):
            message = Message("backward", stage + 1, slot)
            arrived = partial(self._arrived, message, stage + 1, at)
        grads = self._stages[stage].backward(kept, arrived)
        if grads:
            at.ready[Message("backward", stage, slot)] = grads

    def _arrived(self, message: Message, sender: int, at: _Epoch) -> Rows:
        """Return the output of another virtual stage, on this rank or on another."""
        stages = self._ranks.stages
        if sender % stages.size == stages.rank:
            return at.ready.pop(message)
        return at.boundary.take(message)

    def _form(self, message: Message, epoch_order: EpochOrder) -> Form:
        layer = self._layers_of[message.stage].start
        like = RowLike((), self._shard.x.dtype, self._shard.x.device)
        widths = self._model.carry_widths(layer)
        span = self._part.chunks.own(epoch_order.order[message.slot])
        return Form(layer, tuple(like._replace(shape=(width,)) for width in widths), span)

    def _refresh(self, epoch: int) -> None:
        """Update the snapshot of an exact pass at the present weights if it is due. A run resumed without its history,
        on other ranks, starts one again."""
        history, history_policy = self._part.history, self._history_policy
        start = history_policy.exact_start and history.taken_after is None
        again = history_policy.exact_refresh and epoch > 0 and epoch % history.refresh == 0
        if (start or again) and history.halves == 2:
            run = Pass(self._seed, epoch, training=True)
            with torch.no_grad():
                self._exact_pass.forward(recording(self._exact.during(run), self._part), run)
            history.take(epoch - 1)

    def _reduced(self, epoch: int | None) -> dict[str, Tensor]:
        """Gradients by name, summed over the parts: stages hold different layers, parts vectors of different nodes."""
        parts = self._ranks.parts
        grads = {n: summand(p.grad, p) for n, p in self._trained.items()}
        summed = {n: g for n, g in grads.items() if n not in self._shard.own_parameters}
        if parts.size == 1 or not summed:
            return grads
        with parts.clock("compute"):
            bucket = torch.cat([g.reshape(-1) for g in summed.values()])
        bucket = parts.all_reduce(bucket, None if epoch is None else Site(epoch, -1, 0, "reduce"))
        pieces = torch.split(bucket, [g.numel() for g in summed.values()])
        return grads | {n: piece.view_as(g) for (n, g), piece in zip(summed.items(), pieces, strict=True)}

    def _totals(self, epoch: int, loss: Tensor, gradients: dict[str, Tensor]) -> Tensor:
        """Return the loss, and the square of the gradient's norm over all stages."""
        own = self._shard.own_parameters
        squares = {n: g.square().sum() for n, g in gradients.items()}
        shared = [square for n, square in squares.items() if n not in own] or [loss.new_zeros(())]
        total = torch.stack(shared).sum() / self._ranks.parts.size
        mine = torch.stack([loss, total + sum(squares[n] for n in own)])
        return self._ranks.world.all_reduce(mine, Site(epoch, -1, 1, "reduce"))

    @torch.no_grad()
    def predict(self) -> Tensor:
        run = Pass(self._seed)
        logits = self._exact_pass.forward(self._exact.during(run), run).logits
        self._ranks.world.flush(keep=0)
        return self._shard.in_degree.new_zeros(0, self._model.out_dim) if logits is None else logits

    def exact_gradient(self, epoch: int) -> dict[str, Tensor]:
        run = Pass(self._seed, epoch, training=True, probe=True)
        parameters = self._trained
        before = {name: p.grad for name, p in parameters.items()}
        for p in parameters.values():
            p.grad = None
        exact = self._exact_pass.forward(self._exact.during(run), run)
        loss = None
        if exact.logits is not None:
            train = self._shard.rows_of_split["train"]
            loss = self._task.loss_sum(exact.logits[train], self._shard.y[train]) / self._shard.num_train
        exact.backward(loss)
        found = self._reduced(None)
        for name, p in parameters.items():
            p.grad = before[name]
        self._ranks.world.flush(keep=0)
        return found

    def drain(self) -> None:
        for part in self._stateful.values():
            part.drain()

    def live_bytes(self) -> dict[str, int]:
        return {
            "features": self._shard.features_nbytes,
            "structure": self._shard.structure_nbytes + self._part.chunks.nbytes,
            "halo": self._stateful["slots"].nbytes + self._stateful["boundary"].nbytes,
            "history": self._stateful["history"].nbytes,
            "host": 0,
            "activations": self._most_kept,
        }

    def peak_elsewhere(self) -> int:
        return 0

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._parameters.items())

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        held = self._model.held
        for name in (name for name, stage in self._stage_of.items() if stage in self._mine):
            module, _, leaf = name.rpartition(".")
            yield name, held[name] if name in held else self._model.get_submodule(module).state_dict()[leaf]
        yield from self._shard.own_weights.items()

    def state_dict(self) -> StateDict:
        model = dict(self.named_weights())
        codecs = [codec.state_dict() for codec in self._codecs]
        parts = {name: part.state_dict() for name, part in self._stateful.items()}
        return {"model": model, "codecs": codecs, **parts}

    @torch.no_grad()
    def load_state_dict(self, state: StateDict) -> None:
        self._model.load_state_dict(state["model"], strict=False)  # of other stages, PyG keeps empty modules
        for codec, saved in zip(self._codecs, state["codecs"], strict=True):
            codec.load_state_dict(saved)
        for name, part in self._stateful.items():
            part.load_state_dict(state.get(name, {}))  # a part with nothing to save may be missing

    def _targets_of_chunks(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Chunk -> (its training rows, their labels)."""
        chunks = self._part.chunks
        targets: dict[int, tuple[Tensor, Tensor]] = {}
        for k in range(chunks.num):
            rows = chunks.order[chunks.own(k).rows]
            train = self._shard.train_mask[rows].nonzero().flatten()
            targets[k] = train, self._shard.y[rows[train]]
        return targets


def _turning_back(actions: tuple[Action, ...]) -> set[tuple[int, int]]:
    """(stage, slot) whose backward is the next thing that a rank computes after its forward."""
    computing = [a for a in actions if a.computes]
    return {
        (a.stage, a.slot)
        for a, b in pairwise(computing)
        if a.kind == "forward" and b == Action("backward", a.stage, a.slot)
    }
