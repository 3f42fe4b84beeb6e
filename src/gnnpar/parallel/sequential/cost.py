"""What sequential aggregation takes for an epoch: a round a distance, `prefetch` rounds ahead of the fold.

Source: SAR (arXiv 2111.06483), its volume of communication. Backward sends gradients; rows that a gradient reads come
again (remat), or rows of destinations go the other way (push).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from gnnpar.files import JsonDict
from gnnpar.parallel.priced import Problem, priced
from gnnpar.parallel.row_bytes import SENDS_NOTHING, RowBytes
from gnnpar.parallel.torch_types import unique
from gnnpar.pricing.candidate import Knobs, Scope, codec_fields
from gnnpar.pricing.flat import FlatCandidate, exchanged_folds, halo_copies, pause
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.memory import rank_memory, widest_fold
from gnnpar.pricing.price import Memory, Phases, Price, Traffic
from gnnpar.pricing.tasks import TaskGraph
from gnnpar.pricing.work import Direction, Held, Piece, Work

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
    def label(self) -> str:
        words = [self.family, f"prefetch {self.prefetch}", self.backward]
        words += [] if self.remat else ["kept"]
        words += ["first layer held"] if self.held else []
        return ", ".join(words)

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

    @property
    def whole_halo(self) -> bool:
        return False

    def copies(self, work: Work, layer: int, direction: Direction) -> float:
        return transfers(self, work, layer, direction)

    def layer_phases(
        self, work: Work, machine: Machine, layer: int, direction: Direction, *, lost: float, visit: float
    ) -> Phases:
        distances, pieces = range(1, work.parts.parts), work.pieces(layer, direction)
        factor = self.copies(work, layer, direction)
        apart: dict[int, list[tuple[int, int, float]]] = {d: [] for d in distances}
        for source, target, nbytes in work.flows(layer, direction):
            reader, owner = (target, source) if direction == "forward" else (source, target)
            apart[(reader - owner) % work.parts.parts].append((source, target, nbytes * factor))
        idle = pause(pieces, overlaps=self.overlaps)
        rounds = [machine.exchange(apart[d], idle=idle if d == 1 else 0.0) for d in distances]
        folds = [max(p.halo[(i - d) % len(pieces)] for i, p in enumerate(pieces)) for d in distances]
        inner = max(p.inner for p in pieces)
        end = in_rounds(rounds, folds, inner, prefetch=self.prefetch, lost=lost)
        compute = inner + sum(folds)
        rest = max(p.before + p.after for p in pieces) + visit
        encode = max(p.pack + p.unpack for p in pieces) * max(1.0, factor)
        return Phases(compute=compute + rest, encode=encode, wire=end - compute)

    def _of_rank(self, work: Work, p: int) -> Memory:
        """Of remote rows (1 + prefetch) rounds are there at once, each of as many rows as the largest part."""
        layers, parts = range(work.ir.num_layers), work.parts
        n, halo = parts.nodes[p], sum(parts.halo[p])
        at_once = (1 + self.prefetch) * max(parts.nodes)
        moving = 2 * min(halo, at_once) * widest_fold(work, layers)
        return rank_memory(work, layers, p, columns=n if self.remat else n + halo, moving=moving)

    def fold_tasks(
        self,
        graph: TaskGraph,
        p: int,
        tag: str,
        piece: Piece,
        nbytes: Mapping[int, float],
        ready: Sequence[int],
        idle: float,
    ) -> list[int]:
        """Add the folds of the rounds, each requested once an earlier one is folded; return their numbers."""
        folded = [graph.compute(f"{tag} inner", p, piece.inner, [ready[p]])]
        for r, (q, n) in enumerate(nbytes.items()):
            before = r - self.prefetch
            asks = [] if before < 0 or (before == 0 and self.prefetch > 0) else [folded[before]]
            rested = idle if r == 0 else 0.0
            flow = graph.flow(f"{tag} {q}>{p}", q, p, n, [ready[q], *asks], idle=rested)
            seconds = piece.halo[q] + graph.machine.rates[p].message
            folded.append(graph.compute(f"{tag} halo {q}", p, seconds, [folded[-1], flow]))
        return folded


def in_rounds(rounds: Sequence[float], folds: Sequence[float], inner: float, *, prefetch: int, lost: float) -> float:
    """Seconds until all is folded. Round r is asked for when r - prefetch - 1 is folded; the first ones at once."""
    arrived, folded = 0.0, [inner]
    hidden = 0.0
    for r, seconds in enumerate(rounds):
        before = r - prefetch
        posted = 0.0 if before < 0 or (before == 0 and prefetch > 0) else folded[before]
        start = max(arrived, posted)
        arrived = start + seconds
        hidden += max(0.0, min(arrived, folded[-1]) - start)
        folded.append(max(folded[-1], arrived) + folds[r])
    return folded[-1] + lost * hidden


def transfers(candidate: SequentialCandidate, work: Work, layer: int, direction: Direction) -> float:
    """How many times the bytes of a plain exchange travel in this direction."""
    if direction == "forward":
        return 1.0
    folds = work.ir.folds(layer)
    plain = sum(f.width for f in folds if f.learned)
    needed = 0.0
    for fold in folds:
        if fold.linear or not fold.needs_src or not candidate.remat:
            needed += fold.width * fold.learned
        elif candidate.backward == "push" and fold.pushed:
            needed += fold.pushed
        else:
            needed += fold.width * (1 + fold.learned)
    return needed / plain if plain else 0.0


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
    if not rows.known:
        return Price(unpriced=rows.unknown)
    kept: Held = problem.kept if problem.kept == "result" else "no"  # features of halo nodes are never kept
    problem = replace(problem, kept=kept)
    candidate = SequentialCandidate(
        parts=problem.ranks,
        prefetch=strategy.prefetch,
        backward=strategy.backward,
        remat=strategy.remat,
        held=kept != "no",
    )
    pushed = None
    if strategy.backward == "push":
        data = problem.workload
        pushed = pushed_rows(data.dataset.edge_index, data.part_of(problem.ranks), problem.ranks)
    work = problem.work(candidate)
    traffic = traffic_of(work, rows, params=problem.params, pushed=pushed, remat=strategy.remat)
    if not rows.sends:
        return Price(traffic=traffic, unpriced=SENDS_NOTHING)
    bits, notes = rows.bits()
    if bits != 32:
        notes = ("time is that of rows as they are: the price of sar knows no codec",)
    if strategy.rounds != "part":
        notes += (f"rounds={strategy.rounds} is priced as rounds=part",)
    return priced(candidate, problem, machine, traffic, notes)


def traffic_of(work: Work, rows: RowBytes, *, params: int, pushed: int | None, remat: bool) -> Traffic:
    """`pushed`: pairs that `pushed_rows` counts, None where nothing is pushed."""
    plain = rows.halo_traffic(work, params=params)
    copies, remat_bytes, push_bytes, back = halo_copies(work), 0.0, 0.0, 0.0
    for fold in exchanged_folds(work):
        if pushed is not None and fold.pushed:
            statistics = rows.summed if rows.sends else 0
            push_bytes += pushed * (rows.row(fold.src[:1], gradient=True) + statistics * (fold.pushed - fold.src[0]))
            continue
        back += copies * rows.row(fold.src, gradient=True) * fold.learned
        if fold.needs_src and not fold.linear and remat:
            remat_bytes += copies * rows.row(fold.src)
    return replace(plain, backward=back, remat=remat_bytes, push=push_bytes)


def pushed_rows(edge_index: Tensor, part_of: Tensor, parts: int) -> int:
    """Pairs of a destination and another part with an edge to it: what SAR's push mode sends.

    Shapes: edge_index [2, E], part_of [N].
    """
    src, dst = edge_index
    crossing = part_of[src] != part_of[dst]
    return len(unique(dst[crossing] * parts + part_of[src[crossing]])[0])
