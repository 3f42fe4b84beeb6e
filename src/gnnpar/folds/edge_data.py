"""Edge data: ids, weights, types and attribute rows, in the order of the edges."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

EdgeKind = Literal["weight", "type", "attr"]
"""Data of an edge: a scalar, a relation, a row of attributes."""

SelfLoops = bool | Literal["keep"]
"""Self loops of a graph: exactly one per node, none, or the given ones."""

IN_BLOCKS: frozenset[EdgeKind] = frozenset({"weight", "type"})  # data that blocks hold, like columns
EDGE_KINDS: tuple[EdgeKind, ...] = ("weight", "type", "attr")  # in hashing order
ALL_KINDS: frozenset[EdgeKind] = frozenset(EDGE_KINDS)


Degrees = tuple[tuple[int, int], ...]
"""A histogram of in-degrees: (degree, number of nodes), ascending, without zero counts."""


_NAME = re.compile(r"[\w .:/+&-]{1,200}")


@dataclass(frozen=True)
class Schema:
    """Types of nodes and edges of a `HeteroData` that is laid out as one graph.

    nodes: (type, width of its features), in the order of nodes and of feature columns; 0: no features. edges: (source,
    relation, destination) of each edge type, by number. target: the node type with labels, or None.
    """

    nodes: tuple[tuple[str, int], ...]
    edges: tuple[tuple[str, str, str], ...]
    target: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a name with other characters, since PyG's `to_hetero` writes names into code."""
        for name in (*self.names, *(part for edge in self.edges for part in edge), self.target):
            if isinstance(name, str) and not _NAME.fullmatch(name):
                raise ValueError(
                    f"the type {name[:60]!r} of nodes or edges has a name that is empty, long or has more in it than "
                    "letters, digits, spaces and _ - . : / + &; give it another name"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the node types."""
        return tuple(name for name, _ in self.nodes)

    @property
    def width(self) -> int:
        """Width of a feature row: the columns of all types, and a one-hot column per type if there are several."""
        return sum(width for _, width in self.nodes) + (len(self.nodes) if len(self.nodes) > 1 else 0)

    @property
    def columns(self) -> tuple[slice, ...]:
        """Columns of each node type."""
        ends = [0, *accumulate(width for _, width in self.nodes)]
        return tuple(slice(first, last) for first, last in pairwise(ends))

    @property
    def text(self) -> str:
        """Return JSON, for `of`."""
        return json.dumps([self.nodes, self.edges, self.target])

    @staticmethod
    def of(text: str) -> Schema:
        """Parse JSON. ValueError for other text."""
        try:
            listed, joined, target = json.loads(text)
            nodes, edges = tuple((name, width) for name, width in listed), tuple((a, r, b) for a, r, b in joined)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{text[:40]} does not list the types of nodes and of edges") from error
        found = Schema(nodes, edges, target)
        names = [*found.names, *(name for edge in found.edges for name in edge), *([] if target is None else [target])]
        alone = all(isinstance(name, str) for name in names) and len(set(found.names)) == len(found.nodes)
        if not alone or not found.nodes or not found.edges:
            raise ValueError(f"{text[:40]} has a type without a name of its own")
        kinds = dict(found.nodes)
        if not all(type(width) is int and 0 <= width < 1 << 31 for width in kinds.values()):
            raise ValueError(f"{text[:40]} has a type whose width is no number")
        if not {name for a, _, b in found.edges for name in (a, b)} | {target or found.nodes[0][0]} <= kinds.keys():
            raise ValueError(f"{text[:40]} has edges or labels of a type of nodes that it does not list")
        return found


class EdgeSizes(NamedTuple):
    """Sizes of a whole graph's edge data: number of edge types; width of attributes, 0 without; histogram of
    in-degrees, () if not counted; node types, None without a HeteroData; whether it has self loops, True if not
    counted."""

    types: int = 0
    attr: int = 0
    degrees: Degrees = ()
    schema: Schema | None = None
    loops: bool = True


def degree_histogram(in_degree: Tensor) -> Degrees:
    """Return the histogram of the in-degrees of all nodes. Shapes: in_degree [N], whole numbers."""
    counts = torch.bincount(in_degree.long())
    present = counts.nonzero().flatten()
    return tuple((int(degree), int(counts[degree])) for degree in present)


def merged_histogram(parts: Iterable[Degrees]) -> Degrees:
    """Return the histogram of the nodes of all parts."""
    total = Counter[int]()
    for part in parts:
        total.update(dict(part))
    return tuple(sorted(total.items()))


@dataclass(frozen=True, eq=False)
class EdgeData:
    """Data of E edges in order; None: no such data. Shapes: ids [E] int64, global; weight [E] floating-point (None: all
    are 1); type [E] int64, from 0; attr [E, D] floating-point. All but `ids` are constants of the graph."""

    ids: Tensor | None = None
    weight: Tensor | None = None
    type: Tensor | None = None
    attr: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by field."""
        named = {"ids": self.ids, "weight": self.weight, "type": self.type, "attr": self.attr}
        return {name: t for name, t in named.items() if t is not None}

    @property
    def kinds(self) -> frozenset[EdgeKind]:
        """Return the kinds of data."""
        return frozenset(kind for kind in EDGE_KINDS if kind in self.tensors)

    def at(self, edges: Tensor | slice) -> EdgeData:
        """Return the data of selected edges: indices, a mask, a slice or a new order."""
        return EdgeData(**{name: t[edges] for name, t in self.tensors.items()})

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> EdgeData:
        """Return the data on a device, floating-point numbers in `dtype`."""
        return EdgeData(
            **{name: t.to(device, dtype if t.is_floating_point() else None) for name, t in self.tensors.items()}
        )

    @staticmethod
    def cat(parts: Sequence[EdgeData]) -> EdgeData:
        """Concatenate the data of parts, which all have the same kinds. [e_1], [e_2], ... -> [E]."""
        names = parts[0].tensors if parts else {}
        return EdgeData(**{name: torch.cat([part.tensors[name] for part in parts]) for name in names})
