"""The machine of a candidate: devices, links between them, and the rates of each device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gnnpar.pricing.fabric import Fabric
from gnnpar.pricing.price import Phases
from gnnpar.pricing.rates import Rates
from gnnpar.pricing.work import Flow, Work


@dataclass(frozen=True)
class Machine:
    """Device `fabric.devices[r]` and rates `rates[r]` of each rank r. Part p of stage s of a grid is rank s * parts +
    p."""

    fabric: Fabric
    rates: tuple[Rates, ...]

    def stage(self, work: Work, s: int) -> Work:
        """Return the work with the rates of a stage's ranks."""
        return replace(work, rates=self.rates[s * work.parts.parts : (s + 1) * work.parts.parts])

    def lost(self, ranks: Sequence[int]) -> float:
        """Return the share of hidden communication that slows computing, among these ranks."""
        pairs = [(a, b) for a in ranks for b in ranks if a != b]
        rate = min((self.fabric.rate(a, b) for a, b in pairs), default=float("inf"))
        return max((self.rates[r].lost(rate) for r in ranks), default=0.0)

    def choose(self, devices: Iterable[int]) -> Machine:
        """Return the machine of these devices in this order."""
        chosen = tuple(devices)
        return Machine(self.fabric.choose(chosen), tuple(self.rates[d] for d in chosen))

    def exchange(self, flows: Sequence[Flow], *, first: int = 0, idle: float = 0.0) -> float:
        """Return the seconds of one exchange. `first`: rank of index 0 in `flows`. `idle`: seconds of computing since
        the last exchange."""
        if not flows:
            return 0.0
        load: dict[int, float] = {}
        links = self.fabric.links
        posts: dict[int, int] = {}
        latency = 0.0
        for source, target, nbytes in flows:
            a, b = source + first, target + first
            late = 0.0
            for link in self.fabric.routes[a][b]:
                load[link] = load.get(link, 0.0) + nbytes
                late += links[link].latency
            latency = max(latency, late)
            for end in (a, b):
                posts[end] = posts.get(end, 0) + 1
        loads = ((self.fabric.links[link], nbytes) for link, nbytes in load.items())
        wire = max((max(0.0, n / k.rate - min(k.burst / k.rate, idle)) for k, n in loads), default=0.0)
        return wire + latency + max(count * self.rates[end].message for end, count in posts.items())

    def reduce(self, ranks: Sequence[int], nbytes: float) -> float:
        """Return the seconds of a ring sum over ranks."""
        size = len(ranks)
        if size < 2:
            return 0.0
        ring = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
        rate = min(self.fabric.rate(a, b) for a, b in ring)
        latency = max(self.fabric.latency(a, b) for a, b in ring)
        const, byte = self.rates[ranks[0]].reduce
        wire = 2 * (size - 1) / size * nbytes / rate
        return const + max(wire, byte * nbytes) + 2 * (size - 1) * latency

    def end(self, work: Work, engine: str, layers: range, s: int = 0) -> Phases:
        """Return the seconds of the end of stage s's epoch: loss, sum of gradients over parts, optimizer step,
        moments."""
        params = sum(work.ir.params_of[i] for i in layers)
        parts = work.parts.parts
        loss = max(work.loss_seconds) if layers.stop == work.ir.num_layers else 0.0
        step = max(work.step_seconds(p, params, engine) for p in range(parts))
        ranks = range(s * parts, (s + 1) * parts)
        return Phases(compute=loss + step, reduce=self.reduce(ranks, 4.0 * params) + self.moments(work, ranks))

    def moments(self, work: Work, ranks: Sequence[int]) -> float:
        """Return the seconds of the sums over ranks for moments (two forward, one of twice the size backward) and
        totals (one in each direction)."""
        sums = [n * numbers for n in work.ir.moments for numbers in (4.0, 4.0, 8.0)]
        sums += [4.0 * n for n in work.ir.totals for _ in range(2)]
        return sum(self.reduce(ranks, nbytes) for nbytes in sums)
