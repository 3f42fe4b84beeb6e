"""Closed forms of an epoch's time, by phase: the level-0 estimator that prunes and explains.

Source: specs/tag.md 8.4. Ranks wait for each other at every exchange, so a layer costs the slowest rank of each piece;
an exchange costs the most loaded link. Where messages and computing overlap, `interference` of the shorter is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gnnpar.planner.candidate import Candidate, layers_of
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Phases
from gnnpar.pricing.work import Direction, Piece, Work, wire_bytes

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def in_engine(candidate: Candidate, work: Work, setting: Machine) -> tuple[Work, Machine]:
    """With the rates that kernels have in a candidate's engine."""
    engine = candidate.engine
    there = Machine(setting.fabric, tuple(r.of_engine(engine) for r in setting.rates))
    return replace(work, rates=tuple(r.of_engine(engine) for r in work.rates)), there


def closed(candidate: Candidate, work: Work, setting: Machine) -> Phases:
    """An epoch's phases. The work is cut into candidate.parts parts."""
    assert work.parts.parts == candidate.parts
    work, setting = in_engine(candidate, work, setting)
    if candidate.stages > 1 or candidate.chunks > 1:
        return pipeline(candidate, work, setting)
    if candidate.family == "sar":
        layers = sequential(candidate, work, setting)
    else:
        layers = halo_exchange(candidate, work, setting)
    return layers + _end(candidate, work, setting, range(work.ir.num_layers), 0)


def halo_exchange(candidate: Candidate, work: Work, setting: Machine) -> Phases:
    """Graph parallelism and AdaQP: sum over layers of max(X, inner) + the rest, or X + all of it without overlap."""
    total, lost = Phases(), setting.lost(range(candidate.parts))
    visit = work.visit_seconds(candidate.engine)
    for layer, count in work.alike(range(work.ir.num_layers)):
        for direction in DIRECTIONS:
            pieces = _pieces(work, layer, direction, bits=candidate.bits)
            wire = setting.exchange(work.flows(layer, direction, candidate.bits), idle=pause(pieces, candidate))
            inner = max(p.inner for p in pieces)
            rest = max(p.compute - p.inner for p in pieces) + visit
            hidden = min(wire, inner) if candidate.overlap == "edges" else 0.0
            shown = wire - hidden * (1 - lost)
            each = Phases(compute=inner + rest, encode=max(p.pack + p.unpack for p in pieces), wire=shown)
            total += each.times(count)
    return total


def pause(pieces: Sequence[Piece], candidate: Candidate) -> float:
    """Seconds in which nothing is sent, between two exchanges: the work beside what messages pass beside."""
    beside = 0.0 if candidate.overlap == "none" and candidate.family != "sar" else 1.0
    return min(p.compute + p.pack + p.unpack - beside * p.inner for p in pieces)


def sequential(candidate: Candidate, work: Work, setting: Machine) -> Phases:
    """SAR: a round a distance, `prefetch` rounds ahead of the fold; backward sends gradients, or more (pull)."""
    total, lost = Phases(), setting.lost(range(candidate.parts))
    distances, visit = range(1, work.parts.parts), work.visit_seconds(candidate.engine)
    for layer, count in work.alike(range(work.ir.num_layers)):
        for direction in DIRECTIONS:
            pieces = _pieces(work, layer, direction)
            factors = transfers(candidate, work, layer, direction)
            flows = [(a, b, nbytes * factors) for a, b, nbytes in work.flows(layer, direction)]
            idle = pause(pieces, candidate)
            apart: dict[int, list[tuple[int, int, float]]] = {d: [] for d in distances}
            for flow in flows:
                apart[_distance(flow, direction, work)].append(flow)
            rounds = [setting.exchange(apart[d], idle=idle if d == 1 else 0.0) for d in distances]
            folds = [max(p.halo[(i - d) % len(pieces)] for i, p in enumerate(pieces)) for d in distances]
            inner = max(p.inner for p in pieces)
            end = in_rounds(rounds, folds, inner, prefetch=candidate.prefetch, lost=lost)
            compute = inner + sum(folds)
            rest = max(p.before + p.after for p in pieces) + visit
            each = Phases(
                compute=compute + rest,
                encode=max(p.pack + p.unpack for p in pieces) * max(1.0, factors),
                wire=end - compute,
            )
            total += each.times(count)
    return total


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


def transfers(candidate: Candidate, work: Work, layer: int, direction: Direction) -> float:
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


def _distance(flow: tuple[int, int, float], direction: Direction, work: Work) -> int:
    source, target, _ = flow
    if direction == "backward":
        source, target = target, source
    return (target - source) % work.parts.parts


def pipeline(candidate: Candidate, work: Work, setting: Machine) -> Phases:
    """All chunks forward, then all backward: sum t + sum c + (K - 1) max(t, boundary), per direction.

    t_s is a stage's time for a chunk with the exchange among its parts, c_s that of its boundary.
    """
    total = Phases()
    spans = layers_of(candidate.cuts, work.ir.num_layers)
    for direction in DIRECTIONS:
        stages = [stage_seconds(candidate, work, setting, s, span, direction) for s, span in enumerate(spans)]
        ways = [boundary_seconds(candidate, work, setting, s) for s in range(candidate.stages - 1)]
        seconds = chain([t.seconds for t in stages], [c for c, _ in ways], [b for _, b in ways], candidate.chunks)
        seconds += sum(order_seconds(candidate, setting.stage(work, s)) for s in range(candidate.stages))
        slowest = max(stages, key=lambda t: t.seconds)
        share = Phases(*(candidate.chunks * value for value in vars(slowest).values()))
        total += replace(share, bubble=seconds - share.seconds)
    ends = [_end(candidate, setting.stage(work, s), setting, span, s) for s, span in enumerate(spans)]
    return total + max(ends, key=lambda end: end.seconds)


def chain(stages: Sequence[float], latencies: Sequence[float], rates: Sequence[float], chunks: int) -> float:
    """Seconds of `chunks` passing stages in order. latencies: of a whole message; rates: of the link for it alone."""
    return sum(stages) + sum(latencies) + (chunks - 1) * max([*stages, *rates])


def stage_seconds(
    candidate: Candidate, work: Work, setting: Machine, s: int, layers: range, direction: Direction
) -> Phases:
    """One chunk on one stage. A chunk's sources are also written to the table that later chunks read."""
    here = setting.stage(work, s)
    share = 1.0 / candidate.chunks
    total, visit = Phases(), here.visit_seconds(candidate.engine)
    for layer, count in work.alike(layers):
        pieces = _pieces(here, layer, direction, share=share)
        flows = [(a, b, nbytes * share) for a, b, nbytes in here.flows(layer, direction)]
        wire = setting.exchange(flows, first=s * candidate.parts)
        numbers = max(table_numbers(candidate, here, p, layer, direction) for p in range(candidate.parts))
        table = max(r.gather_seconds(numbers) for r in here.rates)
        each = Phases(
            compute=max(p.compute for p in pieces) + visit,
            encode=max(p.pack + p.unpack for p in pieces) + table,
            wire=wire,
        )
        total += each.times(count)
    return total


def table_numbers(candidate: Candidate, work: Work, p: int, layer: int, direction: Direction) -> float:
    """Numbers that a chunk writes to its tables and takes out of them.

    A sum writes its rows, and adds up gradients of two ages. Other folds gather every column they read, again in
    backward, and add the gradients of all columns.
    """
    n, edges = work.parts.nodes[p], work.parts.edges(p) / candidate.chunks
    total = 0.0
    for fold in work.ir.folds(layer):
        rows = n / candidate.chunks
        if not fold.linear:
            rows += n * (1.0 - math.exp(-edges / n)) * (1.0 if direction == "forward" else 4.0)
        elif direction == "backward" and candidate.chunks > 1:
            rows *= 3.0
        total += rows * fold.width
    return total


def order_seconds(candidate: Candidate, work: Work) -> float:
    """Half of what a stage's order of chunks takes: the columns of sums, before its first chunk in each direction."""
    if candidate.chunks == 1 or not any(f.linear for g in work.ir.groups for f in g.folds):
        return 0.0
    parts = enumerate(work.rates)
    return max(r.scale * r.order * work.parts.edges(p) / 2 for p, r in parts)


def boundary_bytes(candidate: Candidate, work: Work, s: int) -> float:
    """Of one chunk of the largest part, over the cut behind stage s."""
    cut = work.ir.cuts[layers_of(candidate.cuts, work.ir.num_layers)[s].stop - 1]
    rows = max(work.parts.nodes) / candidate.chunks
    return rows * sum(wire_bytes((width,), candidate.bits) for width in cut)


def boundary_seconds(candidate: Candidate, work: Work, setting: Machine, s: int) -> tuple[float, float]:
    """(latency and bytes, bytes alone) of a chunk's message from stage s to the next, all parts at once."""
    nbytes = boundary_bytes(candidate, work, s)
    parts, first = candidate.parts, s * candidate.parts
    whole = setting.exchange([(p, p + parts, nbytes) for p in range(parts)], first=first)
    fixed = setting.exchange([(p, p + parts, 0.0) for p in range(parts)], first=first)
    return whole, whole - fixed


def _end(candidate: Candidate, work: Work, setting: Machine, layers: range, s: int) -> Phases:
    """Loss, gradient sum over the parts, and the optimizer's step."""
    params = sum(work.ir.params_of[i] for i in layers)
    parts = work.parts.parts
    ranks = range(s * parts, (s + 1) * parts)
    loss = max(work.loss_seconds) if layers.stop == work.ir.num_layers else 0.0
    step = max(work.step_seconds(p, params, candidate.engine) for p in range(parts))
    return Phases(compute=loss + step, reduce=setting.reduce(ranks, 4.0 * params))


def _pieces(work: Work, layer: int, direction: Direction, *, share: float = 1.0, bits: int = 32) -> list[Piece]:
    return [work.piece(layer, p, direction, share=share, bits=bits) for p in range(work.parts.parts)]
