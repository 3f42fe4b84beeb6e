"""The Engine protocol of training, and the engine of every strategy without pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gnnpar.codecs.codec import Codec, SavedProfile
from gnnpar.comm import MessageTag
from gnnpar.files import JsonDict, StateDict
from gnnpar.graph import Graph
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.local import KeyTable, Pass
from gnnpar.parallel.objective import objective_of


class Stepper(Protocol):
    """An optimizer with its schedule and clipping."""

    @property
    def refused(self) -> bool:
        """Return True if the last step was refused because a gradient was not finite. Waits for a GPU."""
        ...

    def zero_grad(self) -> None: ...
    def step(self, norm: float | None = None) -> None:
        """Take a step. `norm`: of the whole gradient, from an engine with parts of it on its ranks."""
        ...


@dataclass(frozen=True, eq=False)
class EpochReport:
    """Report of one epoch. `loss`: global mean over training nodes. `gradient`: by parameter name, before clipping, if
    asked for. `facts`: further metrics by their names in track.keys, on rank 0 (for example a codec's bits)."""

    loss: float
    gradient: dict[str, Tensor] | None = None
    facts: JsonDict = field(default_factory=JsonDict)


def joined(facts: JsonDict, more: JsonDict) -> JsonDict:
    """Return the metrics of two codecs: tables by exchange merged, mean bits of both, seconds added."""
    both = facts.keys() & more.keys()
    total: JsonDict = {**facts, **more}
    for name in both:
        total[name] = {**facts[name], **more[name]} if isinstance(facts[name], dict) else facts[name] + more[name]
    if (mean := "assign/mean_bits") in both:
        of = "assign/numbers"
        total[mean] = (facts[mean] * facts[of] + more[mean] * more[of]) / max(1, total[of])
    return total


class Stateful(Protocol):
    """State that an engine keeps between epochs, for example an exchange with messages of an earlier epoch. Defaults:
    nothing is in flight between epochs, nothing is saved."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of rows held on the device."""
        ...

    def drain(self) -> None:
        """Finish messages in flight without changing any result. Collective."""

    def state_dict(self) -> StateDict:
        """Return a tree as in `Engine.state_dict`; call `drain` first."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Load a state of `state_dict`."""


def trained(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Return the parameters that train (requires_grad is True)."""
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def summand(gradient: Tensor | None, of: Tensor) -> Tensor:
    """Return this rank's summand of a parameter's gradient. A missing gradient is -0.0, which remains in the sum only
    if no rank has one; a zero gradient is +0.0."""
    return torch.full_like(of, -0.0) if gradient is None else gradient + 0.0


def set_gradients(
    parameters: Mapping[str, nn.Parameter], sums: Mapping[str, Tensor], before: frozenset[str] | None = None
) -> frozenset[str]:
    """Set the sums of `summand` as gradients, and None for parameters that the loss reads on no rank: as in a torch
    loop, weight decay does not change these. Return their names. `before`: the names of the last step; on a GPU only
    these are checked again, so that the host does not wait, and none while a CUDA graph is captured."""
    unread = before if any(each.is_cuda for each in sums.values()) else None
    if unread is None or (unread and not torch.cuda.is_current_stream_capturing()):
        asked = sums if unread is None else unread
        unread = frozenset(name for name in asked if not bool(sums[name].any()) and bool(sums[name].signbit().all()))
    for name, parameter in parameters.items():
        parameter.grad = None if name in unread else sums[name]
    return unread


Timeline = list[tuple[str, float, float]]
"""(action, start, end) on the host's monotonic clock, seconds."""


class Engine(Protocol):
    """A fully initialised engine: no setters, no set-up call. All methods are collective over the ranks.

    `_codecs`, `_parts`: codecs, and state kept between epochs by its name in a checkpoint, of an engine that inherits.
    """

    timeline: Timeline | None = None
    """Set to an empty list before an epoch to record its actions, if the engine has some; None: off."""
    _codecs: Sequence[Codec] = ()
    _parts: Mapping[str, Stateful] = {}

    @property
    def profile(self) -> SavedProfile | None:
        """Return the measurements that later numbers depend on, or None."""
        return next((codec.profile for codec in self._codecs if codec.profile is not None), None)

    @property
    def node_ids(self) -> Tensor:
        """Return the global ids of the rows of predict()."""
        ...

    def train_epoch(self, epoch: int, optimizer: Stepper, *, keep_gradient: bool = False) -> EpochReport:
        """Train one epoch: one optimizer step for a full-graph engine, many for a sampler."""
        ...

    def predict(self) -> Tensor:
        """Return the exact logits [N, classes] of the owned nodes: no codec, no history, no dropout."""
        ...

    def exact_gradient(self, epoch: int) -> dict[str, Tensor]:
        """Return the exact gradient at the current weights with the masks of `epoch`, summed over ranks, not
        counted."""
        ...

    def drain(self) -> None:
        """Finish messages in flight: before predict, a checkpoint, the end."""
        for part in self._parts.values():
            part.drain()

    def live_bytes(self) -> dict[str, int]:
        """Return the bytes held for this rank: features, structure, halo, history (device), host. `activations`, if
        present: peak bytes of rows that the engine keeps from forward to backward."""
        ...

    def peak_elsewhere(self) -> int:
        """Return the peak bytes of the last epoch held by threads other than the caller's."""
        return 0

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield global names and parameters of this rank, frozen ones too; a shared parameter under its first name."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Any]]:  # Any: a module's extra state
        """Yield this rank's share of the model's `weights`: parameters under all of their names, buffers, extra
        state."""
        ...

    def state_dict(self) -> StateDict:
        """Return the state from which this rank continues bit for bit: parameters, and everything else that results or
        bytes of later epochs depend on (bits, traces, error feedback, history, orders, caches).

        The state is a tree of tensors, None, bool, int, float, str, dict, list and tuple; a NamedTuple comes back as a
        tuple. It is saved per rank between epochs, after drain(), which must not change any result. Tensors may be
        live: they are copied at once. Leave out values that follow from configuration, shard and epoch; randomness is
        keyed (ADR 0011).
        """
        ...

    def load_state_dict(self, state: StateDict) -> None:
        """Load a state of state_dict() into a new engine that has run no epoch. The engine takes over its tensors. A
        saved `profile` becomes the engine's."""
        ...

    def kept(self) -> StateDict:
        """Return the state of codecs and parts."""
        codecs = [codec.state_dict() for codec in self._codecs]
        return {"codecs": codecs, **{name: part.state_dict() for name, part in self._parts.items()}}

    def load_kept(self, state: StateDict) -> None:
        for codec, saved in zip(self._codecs, state["codecs"], strict=True):
            codec.load_state_dict(saved)
        for name, part in self._parts.items():
            part.load_state_dict(state.get(name, {}))  # a part with nothing to save may be missing


class PassGraph(Protocol):
    """A Graph for any pass."""

    def during(self, run: Pass) -> Graph: ...


class Structure(Protocol):
    """Blocks that a view holds in addition to the shard's."""

    @property
    def nbytes(self) -> int: ...


class FlatEngine(Engine):
    """One view, one forward, one backward, one reduction.

    `view` trains; `exact` evaluates and probes. They are the same object if the strategy is exact. Parameters are
    replicated: gradients and the loss are summed over ranks in one message. `parts`: further state kept between epochs,
    by its name in a checkpoint, for example an exchange with messages that cross an epoch. `crosses_epochs`: messages
    may be in flight while the next epoch computes. `facts`: metrics of the first epoch.
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
        self._own_gradient = torch.empty(0)  # of shard.learned in the last pass, not summed over ranks

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
        """Run `train_epoch` without reading anything back to the host, so that a CUDA graph can hold it if the strategy
        can be captured. Return the loss, shape [].

        With `keys` and the optimizer's numbers filled in, the launched work is that of any other epoch and uses the
        same tensors, apart from temporaries. The first epochs may prepare state for later ones.
        """
        with self._comm.clock("compute"):
            optimizer.zero_grad()
        bucket = self.reduced_gradient(epoch, keys)
        with self._comm.clock("compute"):
            self._update(bucket, optimizer)
        return bucket[-1]

    def reduced_gradient(self, epoch: int, keys: KeyTable | None = None) -> Tensor:
        """Return the gradients and the loss of a training pass, summed over ranks, in one vector. `keys`: of the
        epoch."""
        if not all(codec.decodes_late for codec in self._codecs):
            self.drain()
        with self._comm.clock("encode"):
            for codec in self._codecs:
                codec.begin_epoch(epoch)
        with self._comm.clock("compute"):
            bucket = self._differentiate(self._view, Pass(self._seed, epoch, training=True, keys=keys))
        bucket = self.reduce(bucket, epoch)
        if not self._crosses:
            self._comm.flush(keep=0)  # all messages arrived before the sum: free the buffers of the pass
        return bucket

    def reduce(self, bucket: Tensor, epoch: int) -> Tensor:
        """Sum the gradients and the loss of a pass over ranks."""
        return self._comm.all_reduce(bucket, MessageTag(epoch, -1, 0, "reduce"))

    def step(self, bucket: Tensor, optimizer: Stepper, *, keep_gradient: bool = False) -> EpochReport:
        """Take one optimizer step with reduced gradients."""
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
        """Return `reduced_gradient` of the exact view: no codec, not counted."""
        bucket = self._differentiate(self._exact, Pass(self._seed, epoch, training=True, probe=True))
        bucket = self._comm.all_reduce(bucket)
        self._comm.flush(keep=0)
        return bucket

    def live_bytes(self) -> dict[str, int]:
        return {
            "features": self._shard.features_nbytes,
            "structure": self._shard.structure_nbytes + sum(s.nbytes for s in self._structure),
            "halo": sum(p.nbytes for p in self._parts.values()) + sum(c.held_nbytes for c in self._codecs),
            "history": 0,
            "host": 0,
        }

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._model.named_parameters()
        yield from self._shard.own_parameters.items()

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        yield from self._model.weights.items()
        yield from self._shard.own_weights.items()

    def state_dict(self) -> StateDict:
        return {"model": self._model.weights, **self.kept()}

    def load_state_dict(self, state: StateDict) -> None:
        self._model.load_state_dict(state["model"])
        self.load_kept(state)

    def _differentiate(self, view: PassGraph, run: Pass) -> Tensor:
        """Return this rank's share of the gradients and of the loss."""
        rows = self._model(view.during(run), self._shard.inputs())
        return self.bucket_of(self._objective.loss(rows, run))

    def bucket_of(self, loss: Tensor | None) -> Tensor:
        """Return the `summand` of each gradient of a loss, and the loss, in one vector. None: this rank has no loss.

        The last gradient, of `shard.learned`, stays on its rank; the vector has its squared norm.
        """
        parameters = list(self._trained.values())
        gradients = (None,) * len(parameters)
        if loss is not None and parameters:
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
        """Return the pieces of a pass's vector by parameter name."""
        parameters, own = self._trained, self._shard.own_parameters
        pieces = torch.split(bucket[:-1], [1 if n in own else p.numel() for n, p in parameters.items()])
        named = zip(parameters.items(), pieces, strict=True)
        return {name: self._own_gradient if name in own else piece.view_as(p) for (name, p), piece in named}

    def _norm(self, bucket: Tensor) -> float:
        """Return the norm of the whole gradient with the rows of all ranks, so that all ranks clip or refuse the same
        step."""
        return float((bucket[:-2].square().sum() + bucket[-2]).sqrt())
