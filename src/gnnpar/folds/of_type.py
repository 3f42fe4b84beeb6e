"""A fold over the in-edges of one type, for models of dictionaries by type on a typed graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gnnpar.folds.block import Block, Operands, Rows
from gnnpar.folds.wrapped import Wrapped


@dataclass(frozen=True)
class OfType(Wrapped):
    """`fold` without the edges of other types than `number`. Operands and results are those of all rows.

    Edge rows and their gradients are of all edges of a block; those of other types are not read. It is not Pushable:
    under `sar`, sources' rows are sent again for the gradient.
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
