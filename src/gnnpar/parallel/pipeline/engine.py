"""A schedule, interpreted: chunks of a part through the stages, all forwards, then all backwards, one optimiser step.

Source: Chen, Chen and Qian, GNNPipe (arXiv 2308.10087). The numbers depend on the chunks, their order, the history and
the weights of gradients, not on the number of stages.

An exact pass (evaluation, the fidelity probe, exact histories) runs all rows of a part as one batch. Inside a stage the
parts exchange halo rows before each aggregation, as in graph parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gnnpar.codecs.codec import Identity
from gnnpar.comm import CodedExchange, Incoming, Mesh, MessageTag, Outgoing, Posted, RowLike
from gnnpar.comm.clock import monotonic as now
from gnnpar.comm.communicator import Phase
from gnnpar.files import StateDict
from gnnpar.folds.block import Rows
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.engine import (
    Engine,
    EpochReport,
    Stepper,
    Timeline,
    set_gradients,
    summand,
    trained,
)
from gnnpar.parallel.halo_graph import HaloGraph, exact_view
from gnnpar.parallel.local import Pass
from gnnpar.parallel.pipeline.chunk import ChunkGraph, PartState
from gnnpar.parallel.pipeline.chunks import Chunks, EpochOrder, RowRange, draw_order
from gnnpar.parallel.pipeline.history import History
from gnnpar.parallel.pipeline.schedule import Action, Schedule, fill_drain, lower, message_of
from gnnpar.parallel.pipeline.stage import Batch, Kept, Remat, Stage
from gnnpar.parallel.torch_types import floats
from gnnpar.parallel.view import View
from gnnpar.partition.shard import comm_check
from gnnpar_kernels import fold_key

if TYPE_CHECKING:
    from gnnpar.parallel.pipeline.strategy import GNNPipe


class Pipeline:
    """The stages of a rank under one lowered schedule. `stages`: by virtual stage; `entries`: of all of them, the first
    layer and the rows that enter it.

    Receives are posted when the schedule says so: one message ahead of its use, in the order in which the other rank
    sends, so that messages travel while chunks are computed. A message is named by its receive.

    `most_kept`: bytes of rows kept to compute batches again, at most in the last pass.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        entries: Sequence[tuple[int, Sequence[RowLike]]],
        schedule: Schedule,
        exchange: CodedExchange,
        remat: Remat = "none",
    ) -> None:
        self._stages, self._entries, self._schedule, self._exchange = stages, entries, schedule, exchange
        self._actions = schedule.actions[exchange.comm.rank]
        self._last = schedule.num_stages - 1
        self._open = _kept_open(self._actions, remat)
        self.most_kept = 0

    def run(
        self, batches: Sequence[Batch], *, epoch: int, phase: Phase = "stage", timeline: Timeline | None = None
    ) -> list[Tensor]:
        """Run a batch in each slot, forwards alone if gradients are off. Return the losses (or logits) of the last
        stage, slot by slot. Gradients are left in the parameters."""
        spans = [batch.span for batch in batches]
        ready: dict[Action, Rows] = {}  # by receive: to be sent, or read by another stage of this rank
        posted: dict[Action, Posted] = {}
        kept: dict[tuple[int, int], Kept] = {}  # by (stage, slot)
        results: list[Tensor] = []
        kept_bytes = self.most_kept = 0
        backward = torch.is_grad_enabled()
        for action in self._actions:
            began, stage, slot = now(), action.stage, action.slot
            if action.kind == "forward":
                given = self._take(Action("receive_forward", stage, slot), ready, posted) if stage else ()
                keep = (stage, slot) in self._open
                made, state = self._stages[stage].forward(batches[slot], given, keep=keep)
                if stage < self._last:
                    ready[Action("receive_forward", stage + 1, slot)] = made
                else:
                    results.append(made[0])
                if backward:
                    kept[stage, slot] = state
                    kept_bytes += state.nbytes
                    self.most_kept = max(self.most_kept, kept_bytes)
                del given, made, state  # rows live in `kept` and in `ready` alone
            elif action.kind.endswith("backward") and not backward:
                continue
            elif action.kind == "backward":
                state = kept.pop((stage, slot))
                kept_bytes -= state.nbytes
                self._stages[stage].reopen(state)  # before waiting: a second forward fills the bubble
                if stage < self._last:
                    grads = self._take(Action("receive_backward", stage, slot), ready, posted)
                else:
                    grads = (torch.ones_like(results[0]),)
                grads = self._stages[stage].backward(state, grads)
                if stage:
                    ready[Action("receive_backward", stage - 1, slot)] = grads
                del state, grads
            else:
                message = self._post(action, spans[slot], ready, epoch, phase)
                if action.kind.startswith("receive"):
                    posted[action] = message
            if timeline is not None:
                timeline.append((str(action), began, now()))
        assert not kept, "the schedule left a forward without its backward"
        return results

    def _post(self, action: Action, span: RowRange, ready: dict[Action, Rows], epoch: int, phase: Phase) -> Posted:
        """Send the rows of a message, or post its receive. span: table rows of its slot."""
        source, target, receive = message_of(self._schedule, action)
        sends = action != receive
        outgoing = {target: Outgoing(ready.pop(receive), None, span.first)} if sends else {}
        incoming = {} if sends else {source: Incoming(len(span), span.first)}
        direction: Phase = "forward" if receive.kind == "receive_forward" else "backward"
        layer, like = self._entries[receive.stage + (direction == "backward")]
        tag = MessageTag(epoch, layer, 0, direction)
        counted = MessageTag(epoch, -1, 0, phase, chunk=action.slot)
        return self._exchange.post(outgoing, incoming, like, tag, counted=counted)

    def _take(self, receive: Action, ready: dict[Action, Rows], posted: dict[Action, Posted]) -> Rows:
        """Return the rows of a message, once; wait for them if another rank sends them."""
        if receive in ready:
            return ready.pop(receive)
        message = posted.pop(receive)
        return self._exchange.take(message, message.peers[0])


def _kept_open(actions: Sequence[Action], remat: Remat) -> set[tuple[int, int]]:
    """Return the (stage, slot) that keep all saved tensors: with remat=chunk, if backward follows forward at once."""
    computing = [a for a in actions if a.computes]
    if remat == "none":
        return {(a.stage, a.slot) for a in computing}
    turns = [a for a, b in pairwise(computing) if b == Action("backward", a.stage, a.slot)]
    return {(a.stage, a.slot) for a in turns if remat == "chunk"}


_BOUNDARY = 0xB0DA  # keeps the noise between stages apart from that of halo rows


class PipelineEngine(Engine):
    """Virtual stage s, of the layers `layers_of[s]`, runs on rank s % stages; the parts of a stage run side by side."""

    def __init__(self, context: BuildContext, strategy: GNNPipe, stage_of: Mapping[str, int]) -> None:
        """`stage_of`: the virtual stages of the entries of the whole model's state_dict."""
        shard, model, layers_of = context.shard, context.model, context.plan.placement.layers_of
        mesh = Mesh(context.plan.placement.mesh)
        parts, stages = (context.comm.along(mesh, axis) for axis in ("part", "stage"))
        if stages.size > 1:
            comm_check(parts, shard)
        mine = {s: layers for s, layers in enumerate(layers_of) if s % stages.size == stages.rank}
        self._is_last, self._waits = len(layers_of) - 1 in mine, stages.size > 1
        model.keep_layers({i for layers in mine.values() for i in layers}, first=0 in mine, last=self._is_last)
        chunks = Chunks.of(shard)
        halves, remembers = 1 if chunks.num == 1 else 2, strategy.gradient == "mix"
        history = History(chunks.num_rows, chunks.num_own, refresh=strategy.refresh, halves=halves, remembers=remembers)
        codec = strategy.codec.build(chunks.row_lists(parts.size), parts, context.seed)
        boundary = strategy.boundary.build(chunks.boundary_lists(stages), stages, fold_key(context.seed, _BOUNDARY))
        part = PartState(chunks, CodedExchange(parts, codec), history, strategy.weights)
        self._part, self._exact, self._shard, self._model = part, exact_view(replace(context, comm=parts)), shard, model
        self._comm, self._group, self._seed = context.comm, parts, context.seed
        self._codecs, self._strategy = (boundary, codec), strategy
        coded = CodedExchange(stages, boundary)
        self._parts = {"history": history, "slots": part.exchange, "boundary": coded}
        held = {name: p for name, p in model.named_parameters() if stage_of[name] in mine}
        self._parameters: dict[str, nn.Parameter] = held | shard.own_parameters
        self._weights = [name for name, stage in stage_of.items() if stage in mine]
        of_stage = {s: Stage(model, context.task, shard, layers, strategy.remat) for s, layers in mine.items()}
        like = RowLike((), shard.x.dtype, shard.x.device)
        widths = {0: ()} | {layers.start: model.activation_widths(layers.start) for layers in layers_of[1:]}
        entries = [(layer, [like._replace(shape=(w,)) for w in each]) for layer, each in widths.items()]
        whole = CodedExchange(stages, Identity().build(shard.row_lists, stages, context.seed))
        virtual = len(layers_of) // stages.size
        schedule = lower(strategy.schedule(stages.size, chunks.num, virtual=virtual))
        once = lower(fill_drain(stages.size, 1, virtual=virtual))
        self._by_chunks = Pipeline(of_stage, entries, schedule, coded, strategy.remat)
        self._at_once = Pipeline(of_stage, entries, once, whole)
        self._targets = [self._target(chunks.own(k)) for k in range(chunks.num)]
        self._unread = None

    def _target(self, span: RowRange) -> tuple[Tensor | None, Tensor | None]:
        """Return the training rows of a chunk and their labels, on the last stage."""
        if not self._is_last:
            return None, None
        rows = self._part.chunks.order[span.rows]
        train = self._shard.train_mask[rows].nonzero().flatten()
        return train, self._shard.y[rows[train]]

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        return trained(self._parameters.items())

    @property
    def node_ids(self) -> Tensor:
        return self._shard.node_ids if self._is_last else self._shard.node_ids[:0]

    def train_epoch(self, epoch: int, optimizer: Stepper, *, keep_gradient: bool = False) -> EpochReport:
        comm = self._comm
        with comm.clock("compute"):
            optimizer.zero_grad()
            loss = self._all_chunks(epoch)
        if self._waits:
            with comm.clock("bubble"):  # the drain: wait for the first stage
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

    def _all_chunks(self, epoch: int) -> Tensor:
        """Run the schedule; return this rank's share of the loss. Gradients are left in the parameters."""
        part, history = self._part, self._part.history
        self.drain()  # messages in flight were written with the codec's bits of the last epoch
        for codec in self._codecs:
            codec.begin_epoch(epoch)
        self._refresh(epoch)
        shuffled = self._strategy.order == "shuffled"
        order = draw_order(part.chunks.num, seed=self._seed, epoch=epoch, shuffled=shuffled)
        epoch_order = EpochOrder(part.chunks, order, fresh=history.fresh, stale=history.stale)
        run, keeps_masks = Pass(self._seed, epoch, training=True), self._strategy.remat == "none"
        batches: list[Batch] = []
        for slot, chunk in enumerate(order):
            graph = ChunkGraph(part, epoch_order, run, slot, keeps_masks=keeps_masks)
            batches.append(Batch(graph, part.chunks.order[graph.span.rows], graph.span, *self._targets[chunk]))
        if self.timeline is not None:
            self.timeline.clear()
        loss = torch.zeros((), dtype=self._shard.in_degree.dtype, device=self._shard.x.device)
        for each in self._by_chunks.run(batches, epoch=epoch, timeline=self.timeline):
            loss += each
        history.end_epoch(epoch, take=not self._strategy.refresh_exact)
        return loss

    def _refresh(self, epoch: int) -> None:
        """Update the snapshot of an exact pass at the present weights if it is due. A run resumed without its history,
        on other ranks, starts one again."""
        history = self._part.history
        start = self._strategy.history_init == "exact" and history.taken_after is None
        again = self._strategy.refresh_exact and epoch > 0 and epoch % history.refresh == 0
        if (start or again) and history.halves == 2:
            with torch.no_grad():
                self._exactly(recording(self._exact, self._part), Pass(self._seed, epoch, training=True))
            history.take(epoch - 1)

    def _exactly(self, view: View, run: Pass, *, losses: bool = False) -> list[Tensor]:
        """Run all rows as one batch; return the logits of the last stage, or the loss."""
        shard = self._shard
        batch = Batch(view.during(run), slice(None), RowRange(0, shard.num_inner))
        if losses and self._is_last:
            train = shard.rows_of_split["train"]
            batch = batch._replace(train=train, labels=shard.y[train])
        return self._at_once.run([batch], epoch=run.epoch, phase="stage" if run.counted else "evaluate")

    def _reduced(self, epoch: int | None) -> dict[str, Tensor]:
        """Gradients by name, summed over the parts: stages hold different layers, parts vectors of different nodes."""
        parts = self._group
        grads = {n: summand(p.grad, p) for n, p in self._trained.items()}
        summed = {n: g for n, g in grads.items() if n not in self._shard.own_parameters}
        if parts.size == 1 or not summed:
            return grads
        with parts.clock("compute"):
            bucket = torch.cat([g.reshape(-1) for g in summed.values()])
        bucket = parts.all_reduce(bucket, None if epoch is None else MessageTag(epoch, -1, 0, "reduce"))
        pieces = torch.split(bucket, [g.numel() for g in summed.values()])
        return grads | {n: piece.view_as(g) for (n, g), piece in zip(summed.items(), pieces, strict=True)}

    def _totals(self, epoch: int, loss: Tensor, gradients: dict[str, Tensor]) -> Tensor:
        """Return the loss, and the square of the gradient's norm over all stages."""
        own = self._shard.own_parameters
        squares = {n: g.square().sum() for n, g in gradients.items()}
        shared = [square for n, square in squares.items() if n not in own] or [loss.new_zeros(())]
        total = torch.stack(shared).sum() / self._group.size
        mine = torch.stack([loss, total + sum(squares[n] for n in own)])
        return self._comm.all_reduce(mine, MessageTag(epoch, -1, 1, "reduce"))

    @torch.no_grad()
    def predict(self) -> Tensor:
        logits = self._exactly(self._exact, Pass(self._seed)) or [
            self._shard.in_degree.new_zeros(0, self._model.out_dim)
        ]
        self._comm.flush(keep=0)
        return logits[0]

    def exact_gradient(self, epoch: int) -> dict[str, Tensor]:
        parameters = self._trained
        before = {name: p.grad for name, p in parameters.items()}
        for p in parameters.values():
            p.grad = None
        self._exactly(self._exact, Pass(self._seed, epoch, training=True, probe=True), losses=True)
        found = self._reduced(None)
        for name, p in parameters.items():
            p.grad = before[name]
        self._comm.flush(keep=0)
        return found

    def live_bytes(self) -> dict[str, int]:
        return {
            "features": self._shard.features_nbytes,
            "structure": self._shard.structure_nbytes + self._part.chunks.nbytes,
            "halo": self._parts["slots"].nbytes + self._parts["boundary"].nbytes,
            "history": self._parts["history"].nbytes,
            "host": 0,
            "activations": self._by_chunks.most_kept,
        }

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._parameters.items())

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        held = self._model.held
        for name in self._weights:
            module, _, leaf = name.rpartition(".")
            yield name, held[name] if name in held else self._model.get_submodule(module).state_dict()[leaf]
        yield from self._shard.own_weights.items()

    def state_dict(self) -> StateDict:
        return {"model": dict(self.named_weights()), **self.kept()}

    @torch.no_grad()
    def load_state_dict(self, state: StateDict) -> None:
        self._model.load_state_dict(state["model"], strict=False)  # of other stages, PyG keeps empty modules
        self.load_kept(state)


def recording(view: View, part: PartState) -> View:
    """Return the exact view with aggregations that also write the rows that they read into the history of the part.

    Rows of other parts are sent once, and written as the view receives them.
    """
    history, chunks = part.history, part.chunks

    def write_own(layer: int, call: int, src: Rows) -> None:
        history.write((layer, call), tuple(rows[chunks.order] for rows in src), slice(chunks.num_own))

    def write_halo(tag: MessageTag, peer: int, src: Rows) -> None:
        history.write((tag.layer, tag.call), src, chunks.halo_rows[peer])

    if isinstance(view, HaloGraph):
        view = replace(view, exchange=view.exchange.observed(write_halo))
    return replace(view, watch=write_own)
