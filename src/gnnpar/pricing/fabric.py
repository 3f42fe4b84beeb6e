"""Devices and the graph of links over which the cost model and the simulator send bytes.

A link is one direction of a wire (both directions if it is half duplex); a route is the links of a message, in order.
Routes are shortest paths by latency, then by number of links, then by name.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from gnnpar.placement import Topology
from gnnpar.pricing.quantity import bytes_text, rate_text


@dataclass(frozen=True, kw_only=True)
class Device:
    """A place for one rank. `speed` flop/s and `memory_rate` bytes/s; None: as measured on this machine."""

    name: str
    host: str
    kind: str
    type: Literal["cpu", "cuda"]
    memory_bytes: float
    speed: float | None = None
    memory_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link of `rate` bytes/s and `latency` seconds. `burst`: most bytes that pass at once after a pause; a pause of t
    seconds allows rate * t of them."""

    name: str
    rate: float
    latency: float
    burst: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A connection of two points, devices or switches. A half-duplex wire is one link for both directions.

    Wires with the same `shared` name are one medium: messages in the same direction share its rate.
    """

    ends: tuple[str, str]
    rate: float
    latency: float
    duplex: bool = True
    shared: str | None = None
    burst: float = 0.0


@dataclass(frozen=True)
class Fabric:
    """Devices and links. `routes[i][j]`: numbers of the links from device i to device j; () for i = j."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    routes: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def size(self) -> int:
        return len(self.devices)

    def path(self, source: int, target: int) -> list[Link]:
        return [self.links[i] for i in self.routes[source][target]]

    def rate(self, source: int, target: int) -> float:
        """Return the bytes/s of a message alone on its route; infinite inside a device."""
        return min((link.rate for link in self.path(source, target)), default=float("inf"))

    def burst(self, source: int, target: int, idle: float) -> float:
        """Return the bytes of a message that pass at once after `idle` seconds without messages."""
        return min((min(link.burst, idle * link.rate) for link in self.path(source, target)), default=0.0)

    def latency(self, source: int, target: int) -> float:
        return sum(link.latency for link in self.path(source, target))

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(d.host for d in self.devices))

    def first(self, count: int) -> Fabric:
        """Return the first `count` devices; ranks are devices in their order."""
        if count > self.size:
            raise ValueError(
                f"{count} ranks do not fit on the topology's {self.size} devices: set world_size={self.size}"
            )
        return self.choose(range(count))

    def choose(self, order: Iterable[int]) -> Fabric:
        """Return these devices in this order, with all links."""
        chosen = tuple(order)
        routes = tuple(tuple(self.routes[i][j] for j in chosen) for i in chosen)
        return Fabric(tuple(self.devices[i] for i in chosen), self.links, routes)

    def classes(self) -> list[list[int]]:
        """Return groups of interchangeable devices: of one kind, on one host."""
        groups: dict[tuple[str, str], list[int]] = {}
        for i, device in enumerate(self.devices):
            groups.setdefault((device.host, device.kind), []).append(i)
        return list(groups.values())

    def topology(self, num_ranks: int) -> Topology:
        """Return the topology for strategies: number of ranks, and number of ranks per host."""
        used = [d.host for d in self.devices[:num_ranks]]
        hosts = tuple(used.count(h) for h in dict.fromkeys(used))
        return Topology(num_ranks, hosts if len(hosts) > 1 else ())

    def describe(self) -> str:
        """Return one line: devices by kind, hosts, and the slowest and fastest route between two devices."""
        kinds: dict[str, int] = {}
        for d in self.devices:
            kinds[d.kind] = kinds.get(d.kind, 0) + 1
        what = ", ".join(f"{n} x {kind}" for kind, n in kinds.items())
        memory = {bytes_text(d.memory_bytes) for d in self.devices}
        line = f"{what} ({', '.join(sorted(memory))}) on {len(self.hosts)} host{'s' * (len(self.hosts) > 1)}"
        rates = [self.rate(i, j) for i in range(self.size) for j in range(self.size) if i != j]
        if rates:
            low, high = rate_text(min(rates)), rate_text(max(rates))
            line += f", {low}" if low == high else f", {low} to {high}"
        return line


def build(devices: Sequence[Device], wires: Sequence[Wire]) -> Fabric:
    """Return links and routes of a wired graph. Raises ValueError if a device cannot reach another one."""
    links: list[Link] = []
    leaving: dict[str, list[tuple[str, int]]] = {}
    number: dict[str, int] = {}
    for wire in wires:
        a, b = wire.ends
        for source, target in ((a, b), (b, a)):
            resources = (f"{wire.shared}.{'up' if source == a else 'down'}", wire.shared)
            one_way, both = resources if wire.shared else (f"{source}->{target}", f"{a}<->{b}")
            name = str(one_way if wire.duplex else both)
            if name not in number:
                number[name] = len(links)
                links.append(Link(name=name, rate=wire.rate, latency=wire.latency, burst=wire.burst))
            leaving.setdefault(source, []).append((target, number[name]))
    names = [d.name for d in devices]
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise ValueError(f"{len(twice)} device names stand twice ({', '.join(twice[:3])}); give hosts different names")
    routes = tuple(_routes(name, names, leaving, links) for name in names)
    return Fabric(tuple(devices), tuple(links), routes)


def _routes(
    source: str, targets: Sequence[str], leaving: dict[str, list[tuple[str, int]]], links: Sequence[Link]
) -> tuple[tuple[int, ...], ...]:
    """Return the routes from one device to all: Dijkstra by (latency, links, name). Devices forward nothing."""
    ends = set(targets)
    best: dict[str, tuple[int, ...]] = {}
    heap: list[tuple[float, int, str, tuple[int, ...]]] = [(0.0, 0, source, ())]
    while heap:
        latency, hops, point, path = heapq.heappop(heap)
        if point in best:
            continue
        best[point] = path
        if point in ends and point != source:
            continue
        for target, link in leaving.get(point, ()):
            if target not in best:
                heapq.heappush(heap, (latency + links[link].latency, hops + 1, target, (*path, link)))
    for target in targets:
        if target not in best:
            raise ValueError(
                f"device {target} cannot be reached from {source}: join their hosts by a nic, a rack's uplink or a wire"
            )
    return tuple(tuple(dict.fromkeys(best[target])) for target in targets)  # a shared medium is crossed once
