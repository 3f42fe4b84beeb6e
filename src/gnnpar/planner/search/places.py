"""Placement of a grid's ranks on devices: an order of the topology's device classes, and a layout of the grid. Hosts of
one kind differ only in their links, so an order lists kinds. Each takes the nearest unused class of that kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from gnnpar.pricing.fabric import Fabric

Layout = Literal["stages", "parts"]
MOST_DECISIONS = 8


@dataclass(frozen=True, eq=False)
class Places:
    """Placements on a fabric. free=False: ranks take the devices in order."""

    fabric: Fabric
    free: bool = True

    @cached_property
    def classes(self) -> list[list[int]]:
        return self.fabric.classes() if self.free else [list(range(self.fabric.size))]

    def kind(self, number: int) -> str:
        return self.fabric.devices[self.classes[number][0]].kind

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kinds in order of appearance."""
        return tuple(dict.fromkeys(self.kind(i) for i in range(len(self.classes))))

    @cached_property
    def decisions(self) -> int:
        """Number of kinds to choose; the other classes follow in the given order."""
        return min(MOST_DECISIONS, len(self.classes) - 1) if len(self.kinds) > 1 else 0

    def order(self, chosen: Sequence[str]) -> list[int]:
        """Return devices class by class. A kind without unused classes counts as the first kind with some."""
        return [device for number in self._classes(chosen)[0] for device in self.classes[number]]

    def used_kinds(self, chosen: Sequence[str], ranks: int) -> tuple[str, ...]:
        """Return the kinds that these decisions lead to; kinds after the last used device are in the given order."""
        order, kinds = self._classes(chosen)
        used, devices = 0, 0
        while devices < ranks and used < len(kinds):
            devices += len(self.classes[order[used]])
            used += 1
        return self._classes([*kinds[:used], *[self.kinds[0]] * (len(chosen) - used)])[1]

    def _classes(self, chosen: Sequence[str]) -> tuple[list[int], tuple[str, ...]]:
        left, taken, settled = list(range(len(self.classes))), [], []
        for kind in chosen:
            of_kind = [i for i in left if self.kind(i) == kind] or [
                i for i in left if self.kind(i) == self.kind(left[0])
            ]
            if taken:
                of_kind.sort(key=lambda i: self._distance(taken[-1], i))
            settled.append(self.kind(of_kind[0]))
            taken.append(of_kind[0])
            left.remove(of_kind[0])
        return taken + left, tuple(settled)

    def _distance(self, a: int, b: int) -> tuple[float, float]:
        """Return (seconds per byte, latency) between the first devices of two classes."""
        one, other = self.classes[a][0], self.classes[b][0]
        return 1 / self.fabric.rate(one, other), self.fabric.latency(one, other)


def device_of_rank(order: Sequence[int], stages: int, parts: int, layout: Layout) -> tuple[int, ...]:
    """Return the device of each rank s x parts + p. Consecutive devices hold a stage's parts, or a part's stages."""
    if layout == "stages":
        return tuple(order[: stages * parts])
    return tuple(order[p * stages + s] for s in range(stages) for p in range(parts))
