"""The prices of candidates for many equal devices and equal parts, without a table a pair: thousands of ranks on paper.

Hosts of `per_host` devices, each device with a port on its host's switch, each host with a port on the spine. Ranks and
parts are powers of two, so that every rank does the same: a candidate prices the work of one as that of all, and
exchanges have closed forms. Equal to prices that count every pair (tests/planner/test_costs.py). Source: specs/tag.md
8.4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gnnpar.parallel.declared import DeclaredCandidate
from gnnpar.parallel.pipeline.cost import PipelineCandidate
from gnnpar.pricing.fabric import Fabric
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Phases
from gnnpar.pricing.rates import Rates
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.work import Direction, Flow, LayerSeconds, Work

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

    def latency(self, crosses: bool) -> float:
        return 2 * self.port[1] + 2 * self.nic[1] * crosses


class EvenStats(PartStats):
    """Statistics of equal parts: every part has the halo of part 0."""

    def sent(self, q: int) -> float:
        return sum(self.halo[0])


class EvenWork(Work):
    """Work of equal parts: pieces are those of part 0; flows are of one reader, forward part 0, backward the last."""

    def pieces(self, layer: int, direction: Direction, *, share: float = 1.0, bits: int = 32) -> list[LayerSeconds]:
        return [self.piece(layer, 0, direction, share=share, bits=bits)] * self.parts.parts

    def flows(self, layer: int, direction: Direction, bits: int = 32) -> list[Flow]:
        nbytes, last = self.parts.halo[0][-1] * self.row_bytes(layer, direction, bits), self.parts.parts - 1
        others = range(1, last + 1) if nbytes else ()
        return [(d, 0, nbytes) if direction == "forward" else (last, last - d, nbytes) for d in others]


@dataclass(frozen=True)
class EvenMachine(Machine):
    """The ranks of a stage, on a cluster: exchanges in closed form."""

    cluster: Cluster

    def stage(self, work: Work, s: int) -> Work:
        return work

    def lost(self, ranks: Sequence[int]) -> float:
        return self.cluster.rates.interference

    def exchange(self, flows: Sequence[Flow], *, first: int = 0, idle: float = 0.0) -> float:
        """Of flows down: every rank sends so much to every other one, or, of one flow, to the one so far from it,
        around. Of flows up: the parts of a stage send so much each to the next stage's."""
        if not flows:
            return 0.0
        source, target, nbytes = flows[0]
        parts, per_host, cluster = len(self.rates), self.cluster.per_host, self.cluster
        inside = min(per_host, parts)
        if target > source:
            own, through, posts = nbytes, inside * nbytes, 1
            crosses = (first + parts) // per_host != first // per_host
        elif len(flows) == 1:
            own, through, posts = nbytes, min(source - target, parts - source + target, inside) * nbytes, 2
            crosses = parts > inside
        else:
            own, through, posts = len(flows) * nbytes, inside * (parts - inside) * nbytes, 2 * len(flows)
            crosses = parts > inside
        wire = max(own / cluster.port[0], through / cluster.nic[0] * crosses)
        return wire + cluster.latency(crosses) + posts * cluster.rates.message

    def reduce(self, ranks: Sequence[int], nbytes: float) -> float:
        """Of a ring."""
        if (size := len(ranks)) < 2:
            return 0.0
        cluster, crosses = self.cluster, size > self.cluster.per_host
        rate = min(cluster.port[0], cluster.nic[0]) if crosses else cluster.port[0]
        const, byte = cluster.rates.reduce
        wire = 2 * (size - 1) / size * nbytes / rate
        return const + max(wire, byte * nbytes) + 2 * (size - 1) * cluster.latency(crosses)


@dataclass(frozen=True)
class Paper:
    """A model on a graph of which only laws are known, on a cluster."""

    ir: ModelIR
    graph: GraphStats
    law: Law
    cluster: Cluster

    def epoch(self, candidate: Candidate) -> Phases:
        parts = candidate.parts
        machine = EvenMachine(Fabric((), (), ()), (self.cluster.rates,) * parts, self.cluster)
        return candidate.phases(self._work(parts, parts), machine)

    def peak_bytes(self, candidate: Candidate) -> float:
        """Of the fullest rank."""
        return max(m.total for m in replace(candidate, parts=1).memory(self._work(candidate.parts, 1)))

    def _work(self, parts: int, shown: int) -> Work:
        """Work of parts, of which the first are shown."""
        (alpha, share), nodes, edges = self.law(parts), self.graph.nodes / parts, self.graph.edges / parts
        others = max(1, parts - 1)
        cut, halo = ((0.0, *[each / others] * (parts - 1)) for each in (edges * share, alpha * nodes))
        inner = edges * (1 - share) if parts > 1 else edges
        stats = EvenStats((nodes,) * shown, (inner,) * shown, (cut,) * shown, (halo,) * shown)
        return EvenWork(self.ir, self.graph, stats, (self.cluster.rates,) * shown)
