"""What edges carry beside their ends: ids, weights, types and rows of attributes, which go where their edges go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

EdgeKind = Literal["weight", "type", "attr"]
"""What a graph may give its edges: a number, one of several relations, a row of numbers."""

SelfLoops = bool | Literal["keep"]
"""Of a graph: exactly one a node, none, or those that it came with."""

IN_BLOCKS: frozenset[EdgeKind] = frozenset({"weight", "type"})  # what blocks hold, as they hold columns
EDGE_KINDS: tuple[EdgeKind, ...] = ("weight", "type", "attr")  # in the order in which they are hashed
ALL_KINDS: frozenset[EdgeKind] = frozenset(EDGE_KINDS)


Degrees = tuple[tuple[int, int], ...]
"""A histogram of in-degrees: (degree, nodes that have it), ascending, degrees that no node has left out."""


class EdgeSizes(NamedTuple):
    """Of a whole graph: the number of types of its edges, and the width of their attributes, 0: they have none; and the
    histogram of in-degrees, (): not counted."""

    types: int = 0
    attr: int = 0
    degrees: Degrees = ()


def degree_histogram(in_degree: Tensor) -> Degrees:
    """Of the in-degrees of all nodes. Shapes: in_degree [N], whole numbers."""
    counts = torch.bincount(in_degree.long())
    present = counts.nonzero().flatten()
    return tuple((int(degree), int(counts[degree])) for degree in present)


def merged_histogram(parts: Iterable[Degrees]) -> Degrees:
    """Of the nodes of all parts."""
    total = Counter[int]()
    for part in parts:
        total.update(dict(part))
    return tuple(sorted(total.items()))


@dataclass(frozen=True, eq=False)
class EdgeData:
    """Of E edges, in their order; None: they have none.

    Shapes: ids [E] int64, global; weight [E] floating-point (None: all are 1); type [E] int64, from 0; attr [E, D]
    floating-point. All but `ids` are constants of the graph.
    """

    ids: Tensor | None = None
    weight: Tensor | None = None
    type: Tensor | None = None
    attr: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What there is, by the name of the field."""
        named = {"ids": self.ids, "weight": self.weight, "type": self.type, "attr": self.attr}
        return {name: t for name, t in named.items() if t is not None}

    @property
    def kinds(self) -> frozenset[EdgeKind]:
        """What the graph gives these edges."""
        return frozenset(kind for kind in EDGE_KINDS if kind in self.tensors)

    def at(self, edges: Tensor | slice) -> EdgeData:
        """Of some edges: their places, a mask, a slice or a new order."""
        return EdgeData(**{name: t[edges] for name, t in self.tensors.items()})

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> EdgeData:
        """On a device, floating-point numbers in `dtype`."""
        return EdgeData(
            **{name: t.to(device, dtype if t.is_floating_point() else None) for name, t in self.tensors.items()}
        )

    @staticmethod
    def cat(parts: Sequence[EdgeData]) -> EdgeData:
        """Of the edges of all parts, one part after the other; each part has the same. [e_1], [e_2], ... -> [E]."""
        names = parts[0].tensors if parts else {}
        return EdgeData(**{name: torch.cat([part.tensors[name] for part in parts]) for name in names})
