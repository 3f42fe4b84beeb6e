"""What edges carry beside their ends: ids, weights, types and rows of attributes, which go where their edges go."""

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
"""What a graph may give its edges: a number, one of several relations, a row of numbers."""

SelfLoops = bool | Literal["keep"]
"""Of a graph: exactly one a node, none, or those that it came with."""

IN_BLOCKS: frozenset[EdgeKind] = frozenset({"weight", "type"})  # what blocks hold, as they hold columns
EDGE_KINDS: tuple[EdgeKind, ...] = ("weight", "type", "attr")  # in the order in which they are hashed
ALL_KINDS: frozenset[EdgeKind] = frozenset(EDGE_KINDS)


Degrees = tuple[tuple[int, int], ...]
"""A histogram of in-degrees: (degree, nodes that have it), ascending, degrees that no node has left out."""


_NAME = re.compile(r"[\w .:/+&-]{1,200}")


@dataclass(frozen=True)
class Schema:
    """Types of nodes and of edges of a `HeteroData` that is laid out as one graph.

    `nodes`: (type, width of its features), in the order in which nodes, and columns of features, follow each other; 0:
    the type has no features. `edges`: (source, relation, destination) of each type of edges, by its number. `target`:
    the type of nodes that has labels; None: none has.
    """

    nodes: tuple[tuple[str, int], ...]
    edges: tuple[tuple[str, str, str], ...]
    target: str | None = None

    def __post_init__(self) -> None:
        """ValueError where a name is more than a word: PyG's `to_hetero` writes them into code, which runs."""
        for name in (*self.names, *(part for edge in self.edges for part in edge), self.target):
            if isinstance(name, str) and not _NAME.fullmatch(name):
                raise ValueError(
                    f"the type {name[:60]!r} of nodes or edges has a name that is empty, long or has more in it than "
                    "letters, digits, spaces and _ - . : / + &; give it another name"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the types of nodes."""
        return tuple(name for name, _ in self.nodes)

    @property
    def width(self) -> int:
        """Of a row of features: the columns of all types, and one that says the type where there are several."""
        return sum(width for _, width in self.nodes) + (len(self.nodes) if len(self.nodes) > 1 else 0)

    @property
    def columns(self) -> tuple[slice, ...]:
        """Of a row, those of each type of nodes."""
        ends = [0, *accumulate(width for _, width in self.nodes)]
        return tuple(slice(first, last) for first, last in pairwise(ends))

    @property
    def text(self) -> str:
        """As JSON, for `of`."""
        return json.dumps([self.nodes, self.edges, self.target])

    @staticmethod
    def of(text: str) -> Schema:
        """ValueError where it is none."""
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
    """Of a whole graph: the number of types of its edges, and the width of their attributes, 0: they have none; the
    histogram of in-degrees, (): not counted; its types of nodes, None: it was no HeteroData; whether it has self loops,
    True: not counted."""

    types: int = 0
    attr: int = 0
    degrees: Degrees = ()
    schema: Schema | None = None
    loops: bool = True


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
