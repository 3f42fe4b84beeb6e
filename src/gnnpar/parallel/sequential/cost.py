"""Sequential aggregation: the halo in rounds, `prefetch` of them ahead of the fold.

Source: SAR (arXiv 2111.06483), its volume of communication. Backward sends gradients; rows that a gradient reads come
again (remat), or rows of destinations go the other way (push).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from gnnpar.files import JsonDict
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes, coded_price
from gnnpar.parallel.torch_types import unique
from gnnpar.pricing.candidate import Knobs, Scope, codec_fields
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price, Traffic
from gnnpar.pricing.steps import FlatCandidate, Step
from gnnpar.pricing.work import Work

if TYPE_CHECKING:
    from gnnpar.parallel.sequential.strategy import SAR


@dataclass(frozen=True, kw_only=True)
class SequentialCandidate(FlatCandidate):
    """Knobs as in `SAR`; rows travel as they are."""

    family: str = "sar"
    prefetch: int = 1
    backward: Literal["push", "pull"] = "push"
    remat: bool = True

    @property
    def step(self) -> Step:
        return Step("rounds", prefetch=self.prefetch, again=self.backward if self.remat else None)

    @property
    def words(self) -> list[str]:
        return [f"prefetch {self.prefetch}", self.backward] + ["kept"] * (not self.remat)

    @property
    def fields(self) -> JsonDict:
        return {
            "codec": codec_fields(32),
            "prefetch": self.prefetch,
            "backward": self.backward,
            "remat": self.remat,
        }

    def knobs(self, ir: ModelIR) -> Knobs:
        folds = [f for g in ir.groups for f in g.folds]
        return {
            "prefetch": (1, 0, 2),
            "backward": ("push", "pull") if any(f.pushed for f in folds) else ("push",),
            "remat": (True, False) if any(f.needs_src for f in folds) else (True,),
        }


def candidates(scope: Scope, ranks: int) -> Iterator[SequentialCandidate]:
    if ranks == 1:
        return
    knobs = SequentialCandidate().knobs(scope.ir)
    for prefetch in knobs["prefetch"]:
        yield SequentialCandidate(parts=ranks, prefetch=prefetch)
    for backward in knobs["backward"][1:]:
        yield SequentialCandidate(parts=ranks, backward=backward)
    for remat in knobs["remat"][1:]:
        yield SequentialCandidate(parts=ranks, remat=remat)


def cost(strategy: SAR, problem: Problem, machine: Machine) -> Price:
    if strategy.logical_parts is not None:
        return Price(traffic=Traffic(), unpriced="no price is known of what goes out of core (logical_parts)")
    rows = RowBytes(strategy.codec, problem.number)
    live = SequentialCandidate(prefetch=strategy.prefetch, backward=strategy.backward, remat=strategy.remat)
    notes = () if strategy.rounds == "part" else (f"rounds={strategy.rounds} is priced as rounds=part",)
    pushed, data = None, problem.workload
    if strategy.backward == "push":
        pushed = pushed_rows(data.dataset.edge_index, data.part_of(problem.ranks), problem.ranks)

    def traffic(sent: Traffic, work: Work) -> Traffic:
        return fetched_again(sent, work, rows, pushed, remat=strategy.remat)

    return coded_price(rows, live, problem, machine, traffic, notes)


def fetched_again(sent: Traffic, work: Work, rows: RowBytes, pushed: int | None, *, remat: bool) -> Traffic:
    """`pushed`: pairs that `pushed_rows` counts, None where nothing is pushed."""
    copies, remat_bytes, push_bytes, back = work.parts.copies, 0.0, 0.0, 0.0
    for fold in work.exchanged_folds:
        if pushed is not None and fold.pushed:
            statistics = rows.summed if rows.sends else 0
            push_bytes += pushed * (rows.row(fold.src[:1], gradient=True) + statistics * (fold.pushed - fold.src[0]))
            continue
        back += copies * rows.row(fold.src, gradient=True) * fold.learned
        if fold.needs_src and not fold.linear and remat:
            remat_bytes += copies * rows.row(fold.src)
    return replace(sent, backward=back, remat=remat_bytes, push=push_bytes)


def pushed_rows(edge_index: Tensor, part_of: Tensor, parts: int) -> int:
    """Pairs of a destination and another part with an edge to it: what SAR's push mode sends.

    Shapes: edge_index [2, E], part_of [N].
    """
    src, dst = edge_index
    crossing = part_of[src] != part_of[dst]
    return len(unique(dst[crossing] * parts + part_of[src[crossing]])[0])
