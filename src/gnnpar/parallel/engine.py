"""What training sees of a strategy at work, and the engine of every strategy without pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from gnnpar.codecs.codec import Codec, SavedProfile
from gnnpar.comm import Site
from gnnpar.files import JsonDict, StateDict
from gnnpar.graph import Graph
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.keys import KeyTable
from gnnpar.parallel.local import Pass
from gnnpar.parallel.objective import objective_of


class Stepper(Protocol):
    """An optimizer with its schedule and clipping."""

    @property
    def refused(self) -> bool:
        """Was the last step none, because a gradient was not finite? Asking waits for a GPU."""
        ...

    def zero_grad(self) -> None: ...
    def step(self, norm: float | None = None) -> None:
        """`norm`: the whole gradient's, given by an engine whose ranks hold parts of it."""
        ...


@dataclass(frozen=True, eq=False)
class EpochReport:
    """`loss`: the global mean over training nodes; `gradient`: by parameter name, before clipping, when asked for.

    `facts`: further metrics by their names in track.keys, on rank 0 (what a codec chose).
    """

    loss: float
    gradient: dict[str, Tensor] | None = None
    facts: JsonDict = field(default_factory=JsonDict)


def joined(facts: JsonDict, more: JsonDict) -> JsonDict:
    """Metrics of two codecs: tables by exchange in one, the mean bits of both, seconds together."""
    both = facts.keys() & more.keys()
    total: JsonDict = {**facts, **more}
    for name in both:
        total[name] = {**facts[name], **more[name]} if isinstance(facts[name], dict) else facts[name] + more[name]
    if (mean := "assign/mean_bits") in both:
        of = "assign/numbers"
        total[mean] = (facts[mean] * facts[of] + more[mean] * more[of]) / max(1, total[of])
    return total


class Stateful(Protocol):
    """Something that an engine keeps between epochs, as an exchange whose messages are taken in a later one."""

    @property
    def nbytes(self) -> int:
        """Bytes of rows held on the device."""
        ...

    def drain(self) -> None:
        """Finish what is in flight, without changing any result. Collective."""
        ...

    def state_dict(self) -> StateDict:
        """Return a tree as in `Engine.state_dict`; call `drain` first."""
        ...

    def load_state_dict(self, state: StateDict) -> None: ...


class Unsaved:
    """A Stateful that is empty between epochs but for a count of bytes: nothing is in flight, nothing is saved."""

    def drain(self) -> None:
        """Nothing is in flight."""

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Nothing was saved."""


def trained(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Those that are not frozen (requires_grad_(False))."""
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def summand(gradient: Tensor | None, of: Tensor) -> Tensor:
    """Return a rank's summand of a parameter's gradient: without one -0.0, which a sum keeps only if no rank has one; a
    zero of a gradient is +0.0."""
    return torch.full_like(of, -0.0) if gradient is None else gradient + 0.0


def set_gradients(
    parameters: Mapping[str, nn.Parameter], sums: Mapping[str, Tensor], before: frozenset[str] | None = None
) -> frozenset[str]:
    """Set sums of `summand` as gradients, None where the loss reads no such parameter on any rank: as in a loop of
    torch, weight decay does not move it either. Return the names of these. `before`: of the last step; on a GPU, where
    the host is not to wait, only they are looked at again, and none while a CUDA graph is captured."""
    unread = before if any(each.is_cuda for each in sums.values()) else None
    if unread is None or (unread and not torch.cuda.is_current_stream_capturing()):
        asked = sums if unread is None else unread
        unread = frozenset(name for name in asked if not bool(sums[name].any()) and bool(sums[name].signbit().all()))
    for name, parameter in parameters.items():
        parameter.grad = None if name in unread else sums[name]
    return unread


Timeline = list[tuple[str, float, float]]
"""(action, start, end) on the host's monotonic clock, seconds."""


class EngineDefaults:
    """Members of an Engine that measures nothing beforehand and has no actions to tell apart."""

    timeline: Timeline | None = None

    @property
    def profile(self) -> SavedProfile | None:
        return None


class Engine(Protocol):
    """Fully initialised; no setters, no "call setup first". All methods are collective over the ranks."""

    timeline: Timeline | None
    """Set to an empty list before an epoch, it collects the epoch's actions where the engine has some; None: off."""

    @property
    def profile(self) -> SavedProfile | None:
        """What was measured beforehand and decides on numbers; None: nothing was."""
        ...

    @property
    def node_ids(self) -> Tensor:
        """Global ids of the rows predict() returns."""
        ...

    def train_epoch(self, epoch: int, optimizer: Stepper, *, keep_gradient: bool = False) -> EpochReport:
        """Full-graph engines: one optimiser step; a sampler: many."""
        ...

    def predict(self) -> Tensor:
        """Exact logits [N, classes] of the owned nodes: no codec, no history, no dropout."""
        ...

    def exact_gradient(self, epoch: int) -> dict[str, Tensor]:
        """Return the exact gradient at the current weights with the masks of `epoch`, summed over ranks; not
        counted."""
        ...

    def drain(self) -> None:
        """Finish what is in flight: before predict, a checkpoint, the end."""
        ...

    def live_bytes(self) -> dict[str, int]:
        """Bytes held for this rank: features, structure, halo, history on the device, and what lies on the host.
        `activations`, where it is there: rows that the engine itself keeps from forward to backward, at most at a time.
        """
        ...

    def peak_elsewhere(self) -> int:
        """Most bytes of the last epoch that threads other than the caller's held at a time."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Global names, those this rank holds, frozen ones too; a shared parameter under its first name."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Any]]:  # Any: of a module's extra state
        """Yield this rank's share of the model's `weights`: parameters under all of their names, buffers, extra
        state."""
        ...

    def state_dict(self) -> StateDict:
        """All that this rank needs to continue as if it had never stopped: parameters, and whatever else the results
        or bytes of later epochs depend on (bits, traces, error feedback, history, orders, caches).

        A tree of tensors, None, bool, int, float, str, dict, list and tuple, whatever its nesting; a NamedTuple comes
        back as a tuple. It is saved per rank between epochs, after drain(), which must not change any result, and
        reaches the same rank of an equal run bit for bit. Tensors may be the live ones: they are copied at once. What
        follows from the configuration, the shard and the epoch alone is left out; randomness is keyed (ADR 0011).
        """
        ...

    def load_state_dict(self, state: StateDict) -> None:
        """Load a state of state_dict() into a new engine that has run no epoch. Its tensors become the engine's own.
        `profile`, if any, becomes the saved one."""
        ...


@runtime_checkable
class Capturable(Engine, Protocol):
    """An engine whose epoch a CUDA graph may hold: what the device does follows from keys and numbers in tensors."""

    def launch_epoch(self, epoch: int, optimizer: Stepper, keys: KeyTable) -> Tensor:
        """As `train_epoch`, but the host reads nothing back. -> the loss, [].

        With `keys` filled, and the optimizer's numbers, everything that is launched is that of any other epoch, on the
        same tensors, but for tensors made and gone within. The first epochs may set up what later ones find done.
        """
        ...


class PassGraph(Protocol):
    """A Graph of any pass."""

    def during(self, run: Pass) -> Graph: ...


class Structure(Protocol):
    """Blocks that a view holds beside the shard's."""

    @property
    def nbytes(self) -> int: ...


class FlatEngine(EngineDefaults):
    """One view, one forward, one backward, one reduction.

    `view` trains, `exact` evaluates and probes; they are the same where the strategy is exact.

    Parameters are replicated: gradients and the loss are summed over ranks in one message. `parts`: what else is kept
    between epochs, by the name under which a checkpoint has it; an exchange whose messages cross an epoch is one.
    `crosses_epochs`: messages of an epoch may be in flight while the next one computes. `facts`: metrics of the first
    epoch.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        view: PassGraph,
        exact: PassGraph,
        codecs: Sequence[Codec] = (),
        structure: Sequence[Structure] = (),
        parts: Mapping[str, Stateful | None] | None = None,
        crosses_epochs: bool = False,
        facts: JsonDict | None = None,
    ) -> None:
        shard, model, comm, seed = context.shard, context.model, context.comm, context.seed
        self._first_facts = facts or {}
        self._view, self._exact, self._shard, self._model = view, exact, shard, model
        self._comm, self._seed, self._codecs = comm, seed, tuple(codecs)
        self._structure = structure
        self._parts = {name: part for name, part in (parts or {}).items() if part is not None}
        self._crosses, self._unread = crosses_epochs, None
        if reserved := self._parts.keys() & {"model", "codecs"}:
            raise ValueError(f"parts of an engine may not be named {sorted(reserved)}: a checkpoint has these already.")
        self._objective = objective_of(context.task, shard, model, comm, seed)
        self._own_gradient = torch.empty(0)  # of shard.learned, of the last pass: it is not summed over ranks

    @property
    def node_ids(self) -> Tensor:
        return self._shard.node_ids

    def train_epoch(self, epoch: int, optimizer: Stepper, *, keep_gradient: bool = False) -> EpochReport:
        if epoch:
            self._first_facts = {}
        with self._comm.clock("compute"):
            optimizer.zero_grad()
        return self.step(self.reduced_gradient(epoch), optimizer, keep_gradient=keep_gradient)

    def launch_epoch(self, epoch: int, optimizer: Stepper, keys: KeyTable) -> Tensor:
        with self._comm.clock("compute"):
            optimizer.zero_grad()
        bucket = self.reduced_gradient(epoch, keys)
        with self._comm.clock("compute"):
            self._update(bucket, optimizer)
        return bucket[-1]

    def reduced_gradient(self, epoch: int, keys: KeyTable | None = None) -> Tensor:
        """Training pass: all gradients and the loss, summed over ranks, in one vector. `keys`: of the epoch."""
        if not all(codec.decodes_late for codec in self._codecs):
            self.drain()
        with self._comm.clock("encode"):
            for codec in self._codecs:
                codec.begin_epoch(epoch)
        with self._comm.clock("compute"):
            bucket = self._differentiate(self._view, Pass(self._seed, epoch, training=True, keys=keys))
        bucket = self.reduce(bucket, epoch)
        if not self._crosses:
            self._comm.flush(keep=0)  # all was received before the sum: buffers of a pass end with it
        return bucket

    def reduce(self, bucket: Tensor, epoch: int) -> Tensor:
        """Sum the gradients and the loss of a pass over ranks."""
        return self._comm.all_reduce(bucket, Site(epoch, -1, 0, "reduce"))

    def step(self, bucket: Tensor, optimizer: Stepper, *, keep_gradient: bool = False) -> EpochReport:
        """One optimiser step with reduced gradients."""
        with self._comm.clock("compute"):
            kept = {name: g.clone() for name, g in self.gradients_of(bucket).items()} if keep_gradient else None
            self._update(bucket, optimizer)
            mean_loss = float(bucket[-1])
        facts, self._first_facts = self._first_facts, {}
        for codec in self._codecs:
            facts = joined(facts, codec.facts())
        return EpochReport(mean_loss, kept, facts)

    def _update(self, bucket: Tensor, optimizer: Stepper) -> None:
        self._unread = set_gradients(self._trained, self.gradients_of(bucket), self._unread)
        optimizer.step(None if self._shard.learned is None else self._norm(bucket))

    @torch.no_grad()
    def predict(self) -> Tensor:
        logits = self._model(self._exact.during(Pass(self._seed)), self._shard.inputs())
        self._comm.flush(keep=0)
        return logits

    def exact_gradient(self, epoch: int) -> dict[str, Tensor]:
        return self.gradients_of(self.exact_bucket(epoch))

    def exact_bucket(self, epoch: int) -> Tensor:
        """`reduced_gradient` without codec and account."""
        bucket = self._differentiate(self._exact, Pass(self._seed, epoch, training=True, probe=True))
        bucket = self._comm.all_reduce(bucket)
        self._comm.flush(keep=0)
        return bucket

    def drain(self) -> None:
        for part in self._parts.values():
            part.drain()

    @property
    def profile(self) -> SavedProfile | None:
        return next((codec.profile for codec in self._codecs if codec.profile is not None), None)

    def live_bytes(self) -> dict[str, int]:
        return {
            "features": self._shard.features_nbytes,
            "structure": self._shard.structure_nbytes + sum(s.nbytes for s in self._structure),
            "halo": sum(p.nbytes for p in self._parts.values()) + sum(c.held_nbytes for c in self._codecs),
            "history": 0,
            "host": 0,
        }

    def peak_elsewhere(self) -> int:
        return 0

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._model.named_parameters()
        yield from self._shard.own_parameters.items()

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        yield from self._model.weights.items()
        yield from self._shard.own_weights.items()

    def state_dict(self) -> StateDict:
        codecs = [codec.state_dict() for codec in self._codecs]
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        return {"model": self._model.weights, "codecs": codecs, **parts}

    def load_state_dict(self, state: StateDict) -> None:
        self._model.load_state_dict(state["model"])
        for codec, saved in zip(self._codecs, state["codecs"], strict=True):
            codec.load_state_dict(saved)
        for name, part in self._parts.items():
            part.load_state_dict(state.get(name, {}))  # a part with nothing to save may be missing

    def _differentiate(self, view: PassGraph, run: Pass) -> Tensor:
        """Gradients of this rank's share of the loss, and the share."""
        rows = self._model(view.during(run), self._shard.inputs())
        return self.bucket_of(self._objective.loss(rows, run))

    def bucket_of(self, loss: Tensor | None) -> Tensor:
        """All gradients of a loss, as `summand` has them, and the loss, in one vector. None: this rank has none.

        The gradient of `shard.learned`, the last, stays on its rank; its square is there.
        """
        parameters = list(self._trained.values())
        gradients = (None,) * len(parameters)
        if loss is not None:
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        parts = [summand(g, p) for p, g in zip(parameters, gradients, strict=True)]
        if self._shard.learned is not None:
            self._own_gradient = parts[-1]
            parts[-1] = parts[-1].square().sum()
        parts.append(parameters[0].new_zeros(1) if loss is None else loss.detach())
        return torch.cat([each.reshape(-1) for each in parts])

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        return trained(self.named_parameters())

    def gradients_of(self, bucket: Tensor) -> dict[str, Tensor]:
        """By parameter name: pieces of the vector of a pass."""
        parameters, own = self._trained, self._shard.own_parameters
        pieces = torch.split(bucket[:-1], [1 if n in own else p.numel() for n, p in parameters.items()])
        named = zip(parameters.items(), pieces, strict=True)
        return {name: self._own_gradient if name in own else piece.view_as(p) for (name, p), piece in named}

    def _norm(self, bucket: Tensor) -> float:
        """Of the whole gradient, the rows of all ranks in it: by it ranks clip, or refuse a step, alike."""
        return float((bucket[:-2].square().sum() + bucket[-2]).sqrt())
