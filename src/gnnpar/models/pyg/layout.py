"""Positions of each node type's rows in a typed graph laid out as one graph."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gnnpar.folds.edge_data import Schema
from gnnpar.graph import Graph, Moments
from gnnpar.models.pyg.all_rows import NodeRows


@dataclass(frozen=True, eq=False)
class Layout:
    """The type of each of a rank's `num_rows` rows. Shapes: rows[t] [N_t] int64, ascending."""

    schema: Schema
    rows: tuple[Tensor, ...]
    num_rows: int

    @staticmethod
    def of(schema: Schema, x: Tensor) -> Layout:
        """Read the layout from the last columns of the features; cached while x lives. Shapes: x [N, schema.width]."""
        found = _layouts.get(x)
        if found is None or found.schema is not schema:
            kinds = len(schema.nodes)
            kind = x[:, -kinds:].argmax(1) if kinds > 1 else x.new_zeros(len(x), dtype=torch.int64)
            rows = tuple((kind == t).nonzero().flatten() for t in range(kinds))
            found = _layouts[x] = Layout(schema, rows, len(x))
        return found

    def features(self, x: Tensor) -> dict[str, Tensor]:
        """Return x_dict of the types that have features. Shapes: x [N, width] -> [N_t, width_t]."""
        columns = enumerate(zip(self.schema.nodes, self.schema.columns, strict=True))
        return {name: self.pick(t, x[:, own]) for t, ((name, width), own) in columns if width}

    def number(self, name: str) -> int:
        """Return the number of a node type."""
        return self.schema.names.index(name)

    def pick(self, kind: int, table: Tensor) -> NodeRows:
        """Return rows of one type, marked. Shapes: [N, ...] -> [N_t, ...]."""
        rows = table if len(self.rows) == 1 else table.index_select(0, self.rows[kind])
        return NodeRows.of(kind, rows)

    def places(self, kind: int) -> Tensor:
        """Return the index of each row among those of the type, [N] int64, -1 for rows of other types."""
        found = torch.full((self.num_rows,), -1, device=self.rows[kind].device)
        found[self.rows[kind]] = torch.arange(len(self.rows[kind]), device=found.device)
        return found

    def place(self, kind: int, rows: Tensor) -> Tensor:
        """Scatter rows of one type into all rows, zeros elsewhere, without a mark. Shapes: [N_t, ...] -> [N, ...].
        ValueError if they are rows of another type, or not one per node."""
        plain = rows.plain() if isinstance(rows, NodeRows) else rows
        if (isinstance(rows, NodeRows) and rows.kind != kind) or not rows.ndim or len(rows) != len(self.rows[kind]):
            raise ValueError(
                f"passes rows of shape {list(rows.shape)} to an edge type with nodes of type "
                f"{self.schema.names[kind]}, which have other rows"
            )
        if len(self.rows) == 1:
            return plain
        return plain.new_zeros(self.num_rows, *plain.shape[1:]).index_copy(0, self.rows[kind], plain)

    def kind_of(self, rows: Tensor) -> int | None:
        """Return the type of rows, from their mark, or from their number if it matches only one type; else None."""
        if isinstance(rows, NodeRows):
            return rows.kind if rows.ndim and len(rows) == len(self.rows[rows.kind]) else None
        found = [kind for kind, own in enumerate(self.rows) if rows.ndim and len(own) == len(rows)]
        return found[0] if len(found) == 1 else None

    def marked(self, out: object) -> object:
        """Mark a tensor if its number of rows matches only one type."""
        kind = self.kind_of(out) if isinstance(out, Tensor) else None
        return out if kind is None or not isinstance(out, Tensor) else NodeRows.of(kind, out)

    def dropout(self, g: Graph, rows: Tensor, p: float, *, tag: int) -> Tensor:
        """Apply dropout with masks keyed by node. Shapes: [N_t, ...] -> [N_t, ...]."""
        if (kind := self.kind_of(rows)) is None:
            raise ValueError(
                f"the model drops entries of {list(rows.shape)}, which are no rows of one type of nodes; a message has "
                "no dropout of its own"
            )
        kept = self.pick(kind, g.dropout(self.place(kind, rows), p, tag=tag))
        return kept if isinstance(rows, NodeRows) else kept.as_subclass(Tensor)

    def answers(self, out: object, width: int) -> dict[str, Tensor]:
        """Return the rows of this width in the output of forward (a dictionary, or rows of one type), by type.
        ValueError without rows of the type that has labels."""
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
        """Return `answers` as rows of all nodes, 0 for other types. Shapes: [N_t, width] each -> [N, width]."""
        placed = [self.place(self.number(name), rows) for name, rows in self.answers(out, width).items()]
        return placed[0] if len(placed) == 1 else torch.stack(placed).sum(0)


_layouts: MutableMapping[Tensor, Layout] = WeakTensorKeyDictionary()


@dataclass(frozen=True, eq=False)
class TypeMoments:
    """Moments of the rows of one node type."""

    g: Graph
    layout: Layout
    kind: int

    def moments(self, x: Tensor) -> Moments | None:
        """Return the moments from two sums over the graph: of the type's rows and their number, then of squared
        deviations. Shapes: x [N_t, F]."""
        first = self.g.moments(self.layout.place(self.kind, torch.cat([x, x.new_ones(len(x), 1)], 1)))
        if first is None:
            return None
        share = first.mean[-1].detach()  # share of this type's rows among all
        share = torch.where(share > 0, share, 1.0)
        mean = first.mean[:-1] / share
        around = self.g.moments(self.layout.place(self.kind, x - mean))
        assert around is not None
        variance = (around.variance + around.mean.square()) / share
        return Moments(mean, variance, round(float(share) * first.rows), first.probe)
