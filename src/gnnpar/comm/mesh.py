"""Ranks as a grid, stage x part; groups are its slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["stage", "part"]


@dataclass(frozen=True)
class Mesh:
    """ranks[stage][part]: layers are cut along the stage axis, nodes along the part axis."""

    ranks: tuple[tuple[int, ...], ...]

    @staticmethod
    def grid(world_size: int, *, stages: int = 1, parts: int | None = None) -> Mesh:
        """Return a full grid; parts=None: as many as the world allows. Raise ValueError if it does not fit."""
        if parts is None:
            parts = max(1, world_size // stages)
        if stages * parts != world_size:
            raise ValueError(
                f"{world_size} ranks cannot form stages={stages} x parts={parts} (needs {stages * parts}). "
                f"Set strategy.stages and strategy.parts so that their product is {world_size}, "
                f"or launch {stages * parts} ranks."
            )
        return Mesh(tuple(tuple(range(s * parts, (s + 1) * parts)) for s in range(stages)))

    @property
    def world_size(self) -> int:
        return sum(map(len, self.ranks))

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """Return all groups along an axis; along "stage" the mesh must be a full grid."""
        if axis == "part":
            return list(self.ranks)
        widths = {len(row) for row in self.ranks}
        if len(widths) > 1:
            raise ValueError(f"stages of different widths {sorted(widths)} have no slices along the stage axis")
        return [tuple(column) for column in zip(*self.ranks, strict=True)]
