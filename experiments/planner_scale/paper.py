"""The prices of candidates for many equal devices and equal parts, without a table a pair: thousands of ranks on paper.

Hosts of `per_host` devices, each device with a port on its host's switch, each host with a port on the spine. Ranks and
parts are powers of two, so that every rank does the same and one of them stands for all. Equal to what candidates price
themselves where that can be counted (tests/planner/test_costs.py). Source: specs/tag.md 8.4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gnnpar.parallel.declared import DeclaredCandidate
from gnnpar.parallel.pipeline.cost import PipelineCandidate, chain, table_numbers
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.price import Phases
from gnnpar.pricing.rates import Rates
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.steps import in_rounds
from gnnpar.pricing.work import DIRECTIONS, Direction, Work, wire_bytes

Candidate = DeclaredCandidate | PipelineCandidate
Law = Callable[[int], tuple[float, float]]
"""Parts -> (alpha, share of the edges that are cut)."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`port` and `nic`: bytes/s and seconds of the link of a device and of a host."""

    per_host: int
    port: tuple[float, float]
    nic: tuple[float, float]
    rates: Rates

    def all_to_all(self, ranks: int, nbytes: float) -> float:
        """Every rank sends so much to every other one of `ranks` neighbours."""
        inside, others = min(self.per_host, ranks), ranks - 1
        load = [others * nbytes / self.port[0]]
        if ranks > inside:
            load.append(inside * (ranks - inside) * nbytes / self.nic[0])
        return max(load) + self._latency(ranks > inside) + 2 * others * self.rates.message

    def shifted(self, ranks: int, distance: int, nbytes: float) -> float:
        """Every rank sends so much to the one `distance` further, around."""
        inside = min(self.per_host, ranks)
        crossing = min(distance, ranks - distance, inside) if ranks > inside else 0
        wire = max(nbytes / self.port[0], crossing * nbytes / self.nic[0])
        return wire + self._latency(crossing > 0) + 2 * self.rates.message

    def handed_on(self, parts: int, nbytes: float, *, crossing: bool) -> float:
        """A stage's parts each send so much to the next stage's."""
        pairs = min(parts, self.per_host)
        wire = max(nbytes / self.port[0], pairs * nbytes / self.nic[0] if crossing else 0.0)
        return wire + self._latency(crossing) + self.rates.message

    def reduce(self, ranks: int, nbytes: float) -> float:
        if ranks < 2:
            return 0.0
        crossing = ranks > self.per_host
        rate = min(self.port[0], self.nic[0]) if crossing else self.port[0]
        const, byte = self.rates.reduce
        wire = 2 * (ranks - 1) / ranks * nbytes / rate
        return const + max(wire, byte * nbytes) + 2 * (ranks - 1) * self._latency(crossing)

    def _latency(self, crossing: bool) -> float:
        return 2 * self.port[1] + (2 * self.nic[1] if crossing else 0.0)


@dataclass(frozen=True)
class _Rank:
    """What one of `parts` equal ranks does in a layer: `halo` of one peer's rows."""

    inner: float
    halo: float
    rest: float
    moves: float
    pair_bytes: float


@dataclass(frozen=True)
class Paper:
    """A model on a graph of which only laws are known, on a cluster."""

    ir: ModelIR
    graph: GraphStats
    law: Law
    cluster: Cluster

    def epoch(self, candidate: Candidate) -> Phases:
        """As `candidate.phases` of even parts."""
        if isinstance(candidate, PipelineCandidate):
            return self._pipeline(candidate)
        total = Phases()
        for layer, count in self.ir.layer_kinds(range(self.ir.num_layers)):
            for direction in DIRECTIONS:
                total += self._flat(candidate, layer, direction).times(count)
        return total + self._end(range(self.ir.num_layers), candidate.parts)

    def peak_bytes(self, candidate: Candidate) -> float:
        """Of the fullest rank."""
        work = self._work(candidate.parts, together=True)
        return max(m.total for m in replace(candidate, parts=1).memory(work))

    def _work(self, parts: int, *, together: bool = False) -> Work:
        """Two parts that stand for one rank and a peer, or (`together`) for one rank and all of its peers."""
        if parts == 1:
            one = PartStats.even(self.graph.nodes, self.graph.edges, 1, alpha=0.0, cut_share=0.0)
            return Work(self.ir, self.graph, one, (self.cluster.rates,))
        alpha, share = self.law(parts)
        others, nodes, edges = parts - 1, self.graph.nodes / parts, self.graph.edges / parts
        times = 1 if together else others
        cut, halo = edges * share / times, alpha * nodes / times
        pair = PartStats((nodes,) * 2, (edges * (1 - share),) * 2, ((0.0, cut), (cut, 0.0)), ((0.0, halo), (halo, 0.0)))
        return Work(self.ir, self.graph, pair, (self.cluster.rates,) * 2)

    def _rank(self, parts: int, layer: int, direction: Direction, *, share: float = 1.0, bits: int = 32) -> _Rank:
        work = self._work(parts)
        piece = work.piece(layer, 0, direction, share=share, bits=bits)
        halo = piece.halo[1] if parts > 1 else 0.0
        nbytes = work.parts.halo[0][-1] * work.row_bytes(layer, direction, bits) * share
        moves = (parts - 1) * (piece.pack + piece.unpack)
        return _Rank(piece.inner, halo, piece.before + piece.after, moves, nbytes)

    def _flat(self, candidate: DeclaredCandidate, layer: int, direction: Direction) -> Phases:
        if candidate.declared.step.kind == "rounds":
            return self._sequential(candidate, layer, direction)
        return self._exchange(candidate, layer, direction)

    def _exchange(self, candidate: DeclaredCandidate, layer: int, direction: Direction) -> Phases:
        parts = candidate.parts
        rank = self._rank(parts, layer, direction, bits=candidate.bits)
        wire = self.cluster.all_to_all(parts, rank.pair_bytes) if rank.pair_bytes else 0.0
        hidden = min(wire, rank.inner) if candidate.declared.step.overlap == "inner" else 0.0
        shown = wire - hidden * (1 - self.cluster.rates.interference)
        return Phases(compute=rank.inner + (parts - 1) * rank.halo + rank.rest, encode=rank.moves, wire=shown)

    def _sequential(self, candidate: DeclaredCandidate, layer: int, direction: Direction) -> Phases:
        parts, rank = candidate.parts, self._rank(candidate.parts, layer, direction)
        times = candidate.declared.step.times(self._work(parts), layer, direction)
        nbytes = rank.pair_bytes * times
        rounds = [self.cluster.shifted(parts, d, nbytes) if rank.pair_bytes else 0.0 for d in range(1, parts)]
        end = in_rounds(
            rounds,
            [rank.halo] * (parts - 1),
            rank.inner,
            prefetch=candidate.declared.step.prefetch,
            lost=self.cluster.rates.interference,
        )
        compute = rank.inner + (parts - 1) * rank.halo
        return Phases(compute=compute + rank.rest, encode=rank.moves * max(1.0, times), wire=end - compute)

    def _pipeline(self, candidate: PipelineCandidate) -> Phases:
        spans, parts, chunks = candidate.layers_of(self.ir.num_layers), candidate.parts, candidate.chunks
        total = Phases()
        for direction in DIRECTIONS:
            stages = [self._stage(candidate, span, direction) for span in spans]
            whole, alone = [], []
            for s, span in enumerate(spans[:-1]):
                crossing = (s + 1) * parts // self.cluster.per_host != s * parts // self.cluster.per_host
                widths = self.ir.cuts[span.stop - 1]
                nbytes = self.graph.nodes / parts / chunks * sum(wire_bytes((w,), candidate.bits) for w in widths)
                message = self.cluster.handed_on(parts, nbytes, crossing=crossing)
                whole.append(message)
                alone.append(message - self.cluster.handed_on(parts, 0.0, crossing=crossing))
            seconds = chain([t.seconds for t in stages], whole, alone, chunks)
            slowest = max(stages, key=lambda t: t.seconds).times(chunks)
            total += replace(slowest, bubble=seconds - slowest.seconds)
        ends = [self._end(span, parts) for span in spans]
        return total + max(ends, key=lambda end: end.seconds)

    def _stage(self, candidate: PipelineCandidate, layers: range, direction: Direction) -> Phases:
        """One chunk of a stage."""
        share, parts, total = 1.0 / candidate.chunks, candidate.parts, Phases()
        for layer, count in self.ir.layer_kinds(layers):
            rank = self._rank(parts, layer, direction, share=share)
            wire = self.cluster.all_to_all(parts, rank.pair_bytes) if rank.pair_bytes else 0.0
            work = self._work(parts, together=True)
            table = self.cluster.rates.gather_seconds(table_numbers(candidate, work, 0, layer, direction))
            compute = rank.inner + (parts - 1) * rank.halo + rank.rest
            total += Phases(compute=compute, encode=rank.moves + table, wire=wire).times(count)
        return total

    def _end(self, layers: range, parts: int) -> Phases:
        params = sum(self.ir.params_of[i] for i in layers)
        work = self._work(parts)
        loss = work.loss_seconds[0] if layers.stop == self.ir.num_layers else 0.0
        return Phases(compute=loss + work.step_seconds(0, params), reduce=self.cluster.reduce(parts, 4.0 * params))
