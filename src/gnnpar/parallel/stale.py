"""Halo rows of earlier epochs: a policy gives their age, one exchange sends, keeps and returns them.

`StaleWhole` is the oracle of every policy: the same mathematics on one device.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Communicator, Incoming, MessageTag, Outgoing, Posted, RowLike, Wire
from gnnpar.comm.communicator import Phase, SavedTag
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Rows
from gnnpar.parallel.oracle import PartByPart
from gnnpar.parallel.torch_types import Context, apply_to_rows
from gnnpar_kernels.csr import accumulate_dtype

Call = tuple[Phase, int, int]  # phase, layer, number of the aggregation in the layer


class RowPolicy:
    """Age of halo rows, and the epochs in which they are sent. Phase 'backward': gradients of halo rows, sent to their
    owners.

    The base class reads rows of this epoch. Messages of epochs before the first are zeros.
    """

    def travels(self, phase: Phase, epoch: int) -> bool:
        """Return True if messages are sent in this epoch."""
        return True

    def age(self, phase: Phase, epoch: int) -> int | None:
        """Return the age in epochs of the rows that are read in this epoch; None: none are read."""
        return 0

    def decay(self, phase: Phase) -> float | None:
        """Return d if folds read the running mean d mean + (1 - d) rows, started with the first rows; None: they read
        rows."""
        return None


@dataclass(eq=False)
class _Again(Posted):
    """Rows that are read again, or zeros if none were sent yet."""


class StaleExchange(CodedExchange):
    """Exchange that returns the rows that `policy` asks for. Raises ValueError for a negative age."""

    def __init__(self, comm: Communicator, codec: Wire, policy: RowPolicy) -> None:
        super().__init__(comm, codec)
        self.policy, self._epoch = policy, 0
        self._kept: dict[Call, dict[int, Rows]] = {}  # peer -> rows that are read again, or means

    def post(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        like: Sequence[RowLike],
        tag: MessageTag,
        *,
        counted: MessageTag | None = None,
    ) -> Posted:
        """Send this epoch's rows if the policy sends them, and return the message that is read in it."""
        at: Call = (tag.phase, tag.layer, tag.call)
        epoch = tag.epoch
        self._epoch = epoch
        age = self.policy.age(tag.phase, epoch)
        if age is not None and age < 0:
            raise ValueError(f"{type(self.policy).__name__}.age is {age} in epoch {epoch}: give 0 or more epochs")
        if self.policy.travels(tag.phase, epoch):
            posted = super().post(outgoing, incoming, like, tag, counted=counted)
            if age == 0:
                if self.policy.decay(tag.phase) is None:
                    self._kept.pop(at, None)  # freed before the new rows arrive
                return posted
            self.store((*at, epoch), posted)
        if age is None:
            return Posted(tag, tuple(like), {}, {})
        late = self.retrieve((*at, epoch - age))
        if late is not None:
            return late
        rows = self._kept.get(at) if self.policy.decay(tag.phase) is None else None
        zeros = {p: tuple(each.empty(part.num_rows).zero_() for each in like) for p, part in incoming.items()}
        return _Again(tag, tuple(like), incoming, {}, zeros if rows is None else dict(rows))

    def take(self, posted: Posted, peer: int) -> Rows:
        rows, phase = super().take(posted, peer), posted.tag.phase
        if isinstance(posted, _Again):
            return rows
        at: Call = (phase, posted.tag.layer, posted.tag.call)
        decay = self.policy.decay(phase)
        if decay is not None:
            return self._mean(self._kept.setdefault(at, {}), peer, rows, decay)
        age, next_age = (self.policy.age(phase, epoch) for epoch in (self._epoch, self._epoch + 1))
        if age is not None and next_age == age + 1:  # the next epoch reads the same rows
            self._kept.setdefault(at, {})[peer] = rows
        return rows

    @staticmethod
    def _mean(means: dict[int, Rows], peer: int, rows: Rows, decay: float) -> Rows:
        if peer not in means:
            means[peer] = tuple(t.to(accumulate_dtype(t.dtype), copy=True) for t in rows)
        else:
            for mean, new in zip(means[peer], rows, strict=True):
                mean.lerp_(new.to(mean.dtype), 1 - decay)
        return tuple(mean.to(t.dtype) for mean, t in zip(means[peer], rows, strict=True))

    @property
    def nbytes(self) -> int:
        """Return the bytes of waiting rows, of messages in flight (as decoded rows), and of kept rows."""
        flying = sum(
            each.nbytes(posted.incoming[p].num_rows)
            for posted in self._stored.values()
            for p in posted.pending
            for each in posted.like
        )
        kept = (t for by_peer in self._kept.values() for rows in by_peer.values() for t in rows)
        return super().nbytes + flying + sum(t.nbytes for t in kept)

    def state_dict(self) -> dict[Hashable, tuple[MessageTag, dict[int, Rows]]]:
        """Return the stored messages, and kept rows by tag."""
        kept = {("kept", *at): (MessageTag(0, at[1], at[2], at[0]), dict(rows)) for at, rows in self._kept.items()}
        return super().state_dict() | kept

    def load_state_dict(self, state: Mapping[Hashable, tuple[SavedTag, Mapping[int, Rows]]]) -> None:
        messages: dict[Hashable, tuple[SavedTag, Mapping[int, Rows]]] = {}
        for key, (tag, rows) in state.items():
            if isinstance(key, tuple) and key[0] in ("forward", "backward"):
                messages[key] = (tag, rows)
            else:
                of = MessageTag(*tag)
                self._kept[of.phase, of.layer, of.call] = dict(rows)
        super().load_state_dict(messages)


@dataclass(eq=False)
class StaleWhole(PartByPart):
    """The whole graph, folded part by part. A part reads its own rows of this epoch and other parts' rows of `policy`'s
    age.

    The gradient of rows that other parts read returns with the age that the policy gives.
    """

    policy: RowPolicy = field(kw_only=True)
    sent: dict[tuple[Call, int], Rows] = field(default_factory=dict[tuple[Call, int], Rows])  # (call, epoch) -> rows
    means: dict[Call, Rows] = field(default_factory=dict[Call, Rows])

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        call = self.next_call()
        old = self.read(("forward", self.layer, call), src)
        both = apply_to_rows(_Late, self, (self.layer, call), *src, *old)
        return self.fold_parts(agg, both[: len(src)], both[len(src) :], dst, edge, shared)

    def read(self, at: Call, rows: Rows) -> Rows:
        """Return the rows that other parts read in this epoch."""
        (phase, _, _), epoch, policy = at, self.run.epoch, self.policy
        if policy.travels(phase, epoch):
            self.sent[at, epoch] = tuple(t.detach().clone() for t in rows)
        age = policy.age(phase, epoch)
        old = None if age is None else self.sent.get((at, epoch - age))
        if old is None:
            return tuple(torch.zeros_like(t) for t in rows)
        if (decay := policy.decay(phase)) is not None:
            mean = self.means.get(at, old)
            old = self.means[at] = tuple(decay * a + (1 - decay) * b for a, b in zip(mean, old, strict=True))
        return old


class _Context(Context):
    view: StaleWhole
    call: tuple[int, int]


class _Late(torch.autograd.Function):
    """Rows of this epoch, and the rows that other parts read. Backward: add the returned gradient of the second to the
    gradient of the first."""

    @staticmethod
    def forward(ctx: _Context, view: StaleWhole, call: tuple[int, int], *rows: Tensor) -> Rows:
        ctx.view, ctx.call = view, call
        return tuple(t.clone() for t in rows)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = len(grads) // 2
        learned = [i for i in range(count) if ctx.needs_input_grad[2 + i]]
        late = ctx.view.read(("backward", *ctx.call), tuple(grads[count + i] for i in learned))
        total: list[Tensor | None] = [None] * len(grads)
        for i, earlier in zip(learned, late, strict=True):
            total[i] = grads[i] + earlier
        return (None, None, *total)
