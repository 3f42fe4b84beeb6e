"""The rows of each type of nodes, among the rows of a typed graph that is laid out as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gnnpar.folds.edge_data import Schema
from gnnpar.graph import Graph, Moments

Called = Callable[..., object]


class Reductions(Protocol):
    """What functions of rows of nodes give where they reduce the rows of all nodes. `active`: is it asked?"""

    active: bool

    def called(self, cls: type[NodeRows], func: Called, args: tuple, given: Mapping[str, object]) -> object: ...


REDUCES: ContextVar[Reductions | None] = ContextVar("reduces", default=None)
"""Of the forward that runs; None: functions reduce a rank's own rows."""


class NodeRows(Tensor):
    """Rows of nodes of one type: a tensor whose results are marked as it is, which sets them apart from rows of another
    type, of which a rank may hold as many. Rows of two types do not mix. `at`: the dimension in which rows stand."""

    kind: ClassVar[int]
    at: int = 0

    @staticmethod
    def of(kind: int, rows: Tensor, at: int = 0) -> NodeRows:
        found = rows.as_subclass(_marked(kind))
        found.at = at
        return found

    @classmethod
    def __torch_function__(
        cls, func: Called, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        found, given = REDUCES.get(), dict(kwargs or {})
        if found is None or not found.active or not all(issubclass(cls, each) for each in types):
            return super().__torch_function__(func, types, args, given)
        return found.called(cls, func, args, given)

    def plain(self) -> Tensor:
        """The same without the mark."""
        return self.as_subclass(Tensor)


@cache
def _marked(kind: int) -> type[NodeRows]:
    return type(f"NodeRowsOfType{kind}", (NodeRows,), {"kind": kind})


@dataclass(frozen=True, eq=False)
class Layout:
    """Which of a rank's `num_rows` rows are of which type. Shapes: rows[t] [N_t] int64, ascending."""

    schema: Schema
    rows: tuple[Tensor, ...]
    num_rows: int

    @staticmethod
    def of(schema: Schema, x: Tensor) -> Layout:
        """As the last columns of features say; kept as long as x lives. Shapes: x [N, schema.width]."""
        found = _layouts.get(x)
        if found is None or found.schema is not schema:
            kinds = len(schema.nodes)
            kind = x[:, -kinds:].argmax(1) if kinds > 1 else x.new_zeros(len(x), dtype=torch.int64)
            rows = tuple((kind == t).nonzero().flatten() for t in range(kinds))
            found = _layouts[x] = Layout(schema, rows, len(x))
        return found

    def features(self, x: Tensor) -> dict[str, Tensor]:
        """x_dict: the types that have features, each its own columns. Shapes: x [N, width] -> [N_t, width_t]."""
        columns = enumerate(zip(self.schema.nodes, self.schema.columns, strict=True))
        return {name: self.pick(t, x[:, own]) for t, ((name, width), own) in columns if width}

    def number(self, name: str) -> int:
        """Of a type of nodes."""
        return self.schema.names.index(name)

    def pick(self, kind: int, table: Tensor) -> NodeRows:
        """Rows of one type, marked. Shapes: [N, ...] -> [N_t, ...]."""
        rows = table if len(self.rows) == 1 else table.index_select(0, self.rows[kind])
        return self.of_kind(kind, rows)

    def of_kind(self, kind: int, rows: Tensor) -> NodeRows:
        """Rows of one type, with their mark. Shapes: [N_t, ...]."""
        return rows.as_subclass(_marked(kind))

    def places(self, kind: int) -> Tensor:
        """The place of each row among those of its type, [N] int64; -1: of another type."""
        found = torch.full((self.num_rows,), -1, device=self.rows[kind].device)
        found[self.rows[kind]] = torch.arange(len(self.rows[kind]), device=found.device)
        return found

    def place(self, kind: int, rows: Tensor) -> Tensor:
        """Rows of one type among those of all, zeros elsewhere, without a mark. Shapes: [N_t, ...] -> [N, ...].

        ValueError where they are rows of another type, or not one a node.
        """
        plain = rows.plain() if isinstance(rows, NodeRows) else rows
        if (isinstance(rows, NodeRows) and rows.kind != kind) or not rows.ndim or len(rows) != len(self.rows[kind]):
            raise ValueError(
                f"hands rows of shape {list(rows.shape)} to an edge type whose nodes are of type "
                f"{self.schema.names[kind]}, which they are not"
            )
        if len(self.rows) == 1:
            return plain
        return plain.new_zeros(self.num_rows, *plain.shape[1:]).index_copy(0, self.rows[kind], plain)

    def kind_of(self, rows: Tensor) -> int | None:
        """The type whose rows they are: as they are marked, or without a mark by their number, where one has so many;
        None: nothing says it."""
        if isinstance(rows, NodeRows):
            return rows.kind if rows.ndim and len(rows) == len(self.rows[rows.kind]) else None
        found = [kind for kind, own in enumerate(self.rows) if rows.ndim and len(own) == len(rows)]
        return found[0] if len(found) == 1 else None

    def marked(self, out: object) -> object:
        """A tensor of as many rows as one type has, as rows of that type."""
        kind = self.kind_of(out) if isinstance(out, Tensor) else None
        return out if kind is None or not isinstance(out, Tensor) else out.as_subclass(_marked(kind))

    def dropout(self, g: Graph, rows: Tensor, p: float, *, tag: int) -> Tensor:
        """Masks are keyed by node. Shapes: [N_t, ...] -> [N_t, ...]."""
        if (kind := self.kind_of(rows)) is None:
            raise ValueError(
                f"the model drops entries of {list(rows.shape)}, which are no rows of one type of nodes; a message has "
                "no dropout of its own"
            )
        kept = self.pick(kind, g.dropout(self.place(kind, rows), p, tag=tag))
        return kept if isinstance(rows, NodeRows) else kept.as_subclass(Tensor)

    def answers(self, out: object, width: int) -> dict[str, Tensor]:
        """What forward gives, a dictionary by type or rows of one type: by type, what has this width.

        ValueError where there are none of the type that has labels.
        """
        given: Mapping[object, object] = out if isinstance(out, dict) else {}
        if isinstance(out, NodeRows):
            given = {self.schema.names[out.kind]: out}
        elif not isinstance(out, dict):
            raise ValueError(
                f"forward gives {list(out.shape) if isinstance(out, Tensor) else type(out).__name__}, which are "
                "neither rows of one type of nodes nor a dictionary by type"
            )
        rows = {name: given[name] for name in self.schema.names if name in given}
        found = {name: t for name, t in rows.items() if isinstance(t, Tensor) and t.shape[1:] == (width,)}
        target = self.schema.target
        if (target is not None and target not in found) or not found:
            got = ", ".join(f"{n} {list(t.shape[1:]) if isinstance(t, Tensor) else t}" for n, t in rows.items())
            wanted = f"type {target}, which has the labels" if target is not None else "some type of nodes"
            raise ValueError(f"forward gives {got or 'nothing'}, and the task needs rows of {width} logits of {wanted}")
        return found

    def logits(self, out: object, width: int) -> Tensor:
        """`answers` as rows of all nodes; those of other types are 0. Shapes: [N_t, width] each -> [N, width]."""
        placed = [self.place(self.number(name), rows) for name, rows in self.answers(out, width).items()]
        return placed[0] if len(placed) == 1 else torch.stack(placed).sum(0)


_layouts: MutableMapping[Tensor, Layout] = WeakTensorKeyDictionary()


@dataclass(frozen=True, eq=False)
class OfOneType:
    """Moments of the rows of one type of nodes."""

    g: Graph
    layout: Layout
    kind: int

    def moments(self, x: Tensor) -> Moments | None:
        """Two sums over all rows of the graph: first of the rows and their number, then of squares around the mean.
        Shapes: x [N_t, F]."""
        first = self.g.moments(self.layout.place(self.kind, torch.cat([x, x.new_ones(len(x), 1)], 1)))
        if first is None:
            return None
        share = first.mean[-1].detach()  # of the rows of this type among all
        share = torch.where(share > 0, share, 1.0)
        mean = first.mean[:-1] / share
        around = self.g.moments(self.layout.place(self.kind, x - mean))
        assert around is not None
        variance = (around.variance + around.mean.square()) / share
        return Moments(mean, variance, round(float(share) * first.rows), first.probe)
