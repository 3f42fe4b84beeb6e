"""SANCUS: Y[N_P, F] = sum_q A[N_P, N_q] X'[N_q, F], X'[N_q] the rows of part q's last broadcast.

Peng, Chen, Shao, Shen, Chen, Cao, SANCUS: Staleness-Aware Communication-Avoiding Full-Graph Decentralized Training in
Large-Scale Graph Neural Networks, PVLDB 15(9), 2022 (doi:10.14778/3538598.3538614). Specification, bytes and deviations
from the paper and the public code: docs/strategies/sancus.md.

Every rank knows the decision of all: ages follow from earlier decisions, and changes are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, NamedTuple, Self

import torch
from annotated_types import Ge
from torch import Tensor

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.delta import refuse_delta
from gnnpar.comm import Communicator, Incoming, MessageTag, Posted, RowLike
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Rows
from gnnpar.parallel.broadcast import BroadcastGraph, broadcast_engine
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.declared import Declaration, Problem, Proposes
from gnnpar.parallel.engine import Engine, PassGraph, Stateful
from gnnpar.parallel.local import Pass
from gnnpar.parallel.oracle import PartByPart, mask_like
from gnnpar.parallel.row_bytes import RowBytes
from gnnpar.parallel.strategy import HALO, Capabilities, CodedStrategy, name_of
from gnnpar.parallel.torch_types import floats
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan
from gnnpar.pricing.price import Traffic
from gnnpar.pricing.steps import Step
from gnnpar.pricing.work import Work

Call = tuple[int, int]  # layer, number of the aggregation in it


class Rule(NamedTuple):
    """A part broadcasts if its copies are `period` epochs old, or its rows have changed by more than `bound`."""

    period: int | None
    bound: float | None

    def due(self, age: int) -> bool:
        return self.period is not None and age >= self.period

    def skips(self, age: int, change: float) -> bool:
        """Return True if the change is small; NaN never skips."""
        return not self.due(age) and (self.bound is None or change <= self.bound)


def change_of(rows: Rows, before: Rows) -> Tensor:
    """Return |X - X'| / |X'| over all operands, Frobenius norms; infinite if X' is zero and X is not. Shape: []."""
    moved = sum((a - b).square().sum(dtype=torch.float64) for a, b in zip(rows, before, strict=True))
    size = sum(b.square().sum(dtype=torch.float64) for b in before)
    assert isinstance(moved, Tensor)
    assert isinstance(size, Tensor)
    return torch.where(moved > 0, (moved / size).sqrt(), moved).float()


@dataclass(eq=False)
class Kept:
    """Copies of one aggregation. `sent`: this rank's rows as last sent, from which their change is measured;
    `since[q]`: the epoch of part q's last broadcast; `rows[q]`: the rows received then."""

    since: list[int]
    sent: Rows = ()
    rows: dict[int, Rows] = field(default_factory=dict[int, Rows])

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.sent, *(t for rows in self.rows.values() for t in rows)]


class CachedParts(Stateful):
    """Copies of all aggregations. A part of an engine."""

    def __init__(self, comm: Communicator, rule: Rule) -> None:
        self._comm, self._rule = comm, rule
        self.kept: dict[Call, Kept] = {}

    def broadcasting(self, rows: Rows, tag: MessageTag) -> frozenset[int]:
        """Return the parts that broadcast at this tag. Collective."""
        at, rank, size = (tag.layer, tag.call), self._comm.rank, self._comm.size
        every = range(size)
        if at not in self.kept:
            self.kept[at], chosen = Kept([tag.epoch] * size), frozenset(every)
        else:
            ages = [tag.epoch - since for since in self.kept[at].since]
            changes = self._changes(rows, ages, tag)
            chosen = frozenset(q for q in every if not self._rule.skips(ages[q], changes[q]))
        kept = self.kept[at]
        for q in chosen:
            kept.since[q] = tag.epoch
        if rank in chosen and self._rule.bound is not None:
            kept.sent = tuple(t.detach().clone() for t in rows)
        return chosen

    def _changes(self, rows: Rows, ages: Sequence[int], tag: MessageTag) -> list[float]:
        """Return the change of every part; without a message if all are due or no bound is set."""
        if self._rule.bound is None or all(self._rule.due(age) for age in ages):
            return [0.0] * len(ages)
        mine = torch.zeros(len(ages), device=rows[0].device)
        mine[self._comm.rank] = change_of(rows, self.kept[tag.layer, tag.call].sent)
        return floats(self._comm.all_reduce(mine, tag._replace(phase="assign")))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for kept in self.kept.values() for t in kept.tensors)

    def state_dict(self) -> dict[Hashable, tuple[Call, list[int], Rows, dict[int, Rows]]]:
        return {at: (at, list(kept.since), kept.sent, dict(kept.rows)) for at, kept in self.kept.items()}

    def load_state_dict(self, state: Mapping[Hashable, tuple[Call, Sequence[int], Rows, Mapping[int, Rows]]]) -> None:
        for (layer, call), since, sent, rows in state.values():
            self.kept[layer, call] = Kept(list(since), sent, dict(rows))


@dataclass(eq=False)
class SkippingGraph(BroadcastGraph):
    """A rank's part and the rows of all parts: Y[N_P, F] = sum_q A[N_P, N_q] X'[N_q, F].

    X' are the rows of this epoch if q broadcasts, else its last ones. Gradients go to the owner of q in every epoch, as
    if X' were its rows. `copies`: of the parts that do not broadcast; None: all do.
    """

    copies: CachedParts | None = field(kw_only=True)
    _broadcasting: frozenset[int] = field(default=frozenset(), init=False)

    def exactly(self) -> Self:
        return self if self.once is None else replace(self, exchange=self.once, copies=None)

    def stages(self, src: Rows, tag: MessageTag) -> Iterator[tuple[int, Rows]]:
        if self.copies is None:
            yield from super().stages(src, tag)
            return
        self._broadcasting = self.copies.broadcasting(src, tag)
        for part, rows in super().stages(src, tag):
            if part != self.rank and part in self._broadcasting:
                self.copies.kept[tag.layer, tag.call].rows[part] = rows
            yield part, rows

    def post_part(self, stage: int, src: Rows, tag: MessageTag) -> Posted:
        part = self.first + stage
        if self.copies is None or part in self._broadcasting:
            return super().post_part(stage, src, tag)
        like, rows = RowLike.of(src), self.copies.kept[tag.layer, tag.call].rows
        incoming = {} if part == self.rank else {part: Incoming(self.block(part).num_src)}
        return Posted(tag, like, incoming, {}, {q: rows[q] for q in incoming})


@dataclass(eq=False)
class SkippingWhole(PartByPart):
    """The oracle on one device: other parts read the last broadcast rows of a part, with the gradient of this epoch's
    rows."""

    rule: Rule = field(kw_only=True)
    since: dict[Call, list[int]] = field(default_factory=dict[Call, list[int]])
    last: dict[Call, Rows] = field(default_factory=dict[Call, Rows])  # [N, ...] as last sent

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        at, epoch = (self.layer, self.next_call()), self.run.epoch
        now = tuple(t.detach().clone() for t in src)
        if at not in self.last:
            self.last[at], self.since[at] = now, [epoch] * self.num_parts
        for q, since in enumerate(self.since[at]):
            mine = self.part_of == q
            change = change_of(tuple(t[mine] for t in now), tuple(t[mine] for t in self.last[at]))
            if not self.rule.skips(epoch - since, float(change)):
                pairs = zip(now, self.last[at], strict=True)
                self.last[at] = tuple(torch.where(mask_like(mine, a), a, b) for a, b in pairs)
                self.since[at][q] = epoch
        others = tuple(fresh + (copy - fresh).detach() for fresh, copy in zip(src, self.last[at], strict=True))
        return self.fold_parts(agg, src, others, dst, edge, shared)


_CHOSEN = "broadcasts are skipped while it trains: bytes and time are those of all, without what measuring takes"


@dataclass(frozen=True, kw_only=True)
class Sancus(CodedStrategy, Proposes):
    """Parameters of SANCUS. `period`: epochs after which a part broadcasts in any case. `bound`: relative change of its
    rows above which it does; null: changes are not measured. `period=1`: all parts broadcast in every epoch (CAGNET).

    `prefetch`, `codec`: as for CAGNET. Gradients are sent in every epoch. Evaluation is exact.
    """

    period: Annotated[int, Ge(1)] | None = 2
    bound: Annotated[float, Ge(0)] | None = None
    prefetch: Annotated[int, Ge(0)] = 1
    limit = {"period": 1}
    mode = "broadcast copies"

    def __post_init__(self) -> None:
        if self.period is None and self.bound is None:
            raise ValueError(
                "strategy.period=null strategy.bound=null would read the rows of the initial weights to the end: set "
                "strategy.period (epochs), strategy.bound (relative change), or both"
            )
        refuse_delta(self.codec, "sancus", "sends whole parts, and not in every epoch")
        if isinstance(self.codec, Adaptive):
            raise ValueError(
                "codec=adaptive weighs halo rows by the edges that read them, and strategy=sancus sends all rows, read "
                "or not: use codec=uniform, random, bf16, drop or identity"
            )

    @property
    def capabilities(self) -> Capabilities:
        return replace(HALO, whole_neighborhoods=False, row_order=False, crosses_epochs=self.period != 1)

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        super().check(num_ranks, num_layers, epochs)
        if self.bound is None and self.period is not None and self.period > epochs:
            raise ValueError(
                f"strategy.period={self.period} in a run of {epochs} epochs: copies would be those of the initial "
                f"weights to its end; set it to {epochs} or less, set strategy.bound, or raise epochs"
            )

    def oracle(self, plan: Plan, whole: Shard, *, seed: int) -> PassGraph:
        return SkippingWhole(whole, Pass(seed), part_of=plan.part_of, rule=Rule(self.period, self.bound))

    def declared(self) -> Declaration:
        """Declare the price without skips: with a bound, skipped broadcasts are known only in training."""
        measured = self.bound is not None
        period = 1 if measured or self.period is None else self.period

        def sent(traffic: Traffic, work: Work, rows: RowBytes, problem: Problem) -> Traffic:
            chosen = measured and self.period != 1 and problem.ranks > 1 and traffic.bound == "exact"
            return replace(traffic, bound="most") if chosen else traffic

        return Declaration(
            family="sancus",
            step=Step("parts", prefetch=self.prefetch, sends=(1 / period, 1.0), kept=(1.0, 0.0), kept_own=measured),
            words=[f"every {period} epochs"],
            options={"prefetch": self.prefetch, "period": self.period},
            notes=(_CHOSEN,) if measured else (),
            sent=sent,
        )

    @property
    def how(self) -> str:
        when = [] if self.period is None else [f"every {self.period} epochs"]
        when += [] if self.bound is None else [f"changes above {self.bound:g}"]
        return f"{name_of(self.codec)}, {' and '.join(when)}"

    def build(self, context: BuildContext) -> Engine:
        copies = None if self.period == 1 else CachedParts(context.comm, Rule(self.period, self.bound))
        return broadcast_engine(
            context,
            self,
            prefetch=self.prefetch,
            training=partial(SkippingGraph, copies=copies),
            parts={"copies": copies},
        )
