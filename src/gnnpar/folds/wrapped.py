"""A fold around another one, equal to it except for overridden members; the fold of the in-edges of one type."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gnnpar.folds.aggregator import Aggregator, Separates
from gnnpar.folds.block import Block, Operands, Rows


@dataclass(frozen=True)
class Wrapped:
    """An `Aggregator` that delegates to `fold`. Not Pushable, even if `fold` is."""

    fold: Aggregator

    @property
    def needs_src(self) -> bool:
        return self.fold.needs_src

    @property
    def linear(self) -> bool:
        return self.fold.linear

    @property
    def summed(self) -> bool:
        return self.fold.summed

    @property
    def separates(self) -> Separates:
        return self.fold.separates

    @property
    def separates_values(self) -> bool:
        return self.fold.separates_values

    @property
    def whole_neighborhood(self) -> bool:
        return self.fold.whole_neighborhood

    @property
    def needs_edge_ids(self) -> bool:
        return self.fold.needs_edge_ids

    def init(self, num_dst: int, x: Operands) -> Rows:
        return self.fold.init(num_dst, x)

    def update(self, state: Rows, block: Block, x: Operands) -> Rows:
        return self.fold.update(state, block, x)

    def finish(self, state: Rows) -> tuple[Tensor, Rows]:
        return self.fold.finish(state)

    def prepare(self, saved: Rows, grad_out: Tensor) -> Rows:
        return self.fold.prepare(saved, grad_out)

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        return self.fold.grad(block, x, prepared, grad_out)

    def grad_dst(self, prepared: Rows, grad_out: Tensor) -> Rows:
        return self.fold.grad_dst(prepared, grad_out)


@dataclass(frozen=True)
class TypeFilteredFold(Wrapped):
    """`fold` over the edges of type `number` only, for heterogeneous models on a typed graph. Operands and results have
    all rows.

    Edge rows and their gradients are of all edges of a block; rows of other types are not read. It is not Pushable:
    under `sar`, source rows are sent again for the gradient.
    """

    number: int

    def update(self, state: Rows, block: Block, x: Operands) -> Rows:
        part, places = block.of_type(self.number)
        if state and not part.num_edges and not self.whole_neighborhood:
            return state
        return self.fold.update(state, part, x._replace(edge=tuple(rows[places] for rows in x.edge)))

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        part, places = block.of_type(self.number)
        found = self.fold.grad(part, x._replace(edge=tuple(rows[places] for rows in x.edge)), prepared, grad_out)
        edge = (g.new_zeros(block.num_edges, *g.shape[1:]).index_copy(0, places, g) for g in found.edge)
        return found._replace(edge=tuple(edge))
