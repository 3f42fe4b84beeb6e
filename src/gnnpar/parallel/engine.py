"""What the runner sees of a strategy at work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from gnnpar.codecs.codec import SavedProfile


class Stepper(Protocol):
    """An optimizer with its schedule and clipping."""

    @property
    def refused(self) -> bool:
        """Was the last step none, because a gradient was not finite?"""
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
    facts: dict[str, Any] = field(default_factory=dict)


class Stateful(Protocol):
    """Something that an engine keeps between epochs, as an exchange whose messages are taken in a later one."""

    @property
    def nbytes(self) -> int:
        """Bytes of rows held on the device."""
        ...

    def drain(self) -> None:
        """Finish what is in flight, without changing any result. Collective."""
        ...

    def state_dict(self) -> dict:
        """A tree as in `Engine.state_dict`; after `drain`."""
        ...

    def load_state_dict(self, state: dict) -> None: ...


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
        """The exact gradient at the current weights with the masks of `epoch`, summed over ranks; not counted."""
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
        """Global names, those this rank holds."""
        ...

    def state_dict(self) -> dict:
        """All that this rank must know to go on as if it had never stopped: parameters, and whatever else the results
        or bytes of later epochs depend on (bits, traces, error feedback, history, orders, caches).

        A tree of tensors, None, bool, int, float, str, dict, list and tuple, whatever its nesting; a NamedTuple comes
        back as a tuple. It is saved per rank between epochs, after drain(), which must not change any result, and
        reaches the same rank of an equal run bit for bit. Tensors may be the live ones: they are copied at once. What
        follows from the configuration, the shard and the epoch alone is left out; randomness is keyed (ADR 0011).
        """
        ...

    def load_state_dict(self, state: dict) -> None:
        """What state_dict() gave, on an engine that was built anew and has run no epoch. Its tensors are the engine's
        own from here on. `profile`, where there is one, is the saved one afterwards."""
        ...
