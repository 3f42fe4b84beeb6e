"""A fold around another one, equal to it except for overridden members; the fold of the in-edges of one type."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from gnnpar.folds.aggregator import Aggregator, Separates
from gnnpar.folds.block import Block, Operands, Rows


@dataclass(frozen=True)
class Wrapped:
    """An `Aggregator` with the members of `fold`; a subclass adds `update` and `grad`. Not Pushable, even if `fold`
    is."""

    fold: Aggregator
    needs_src: bool = field(init=False)
    linear: bool = field(init=False)
    summed: bool = field(init=False)
    separates: Separates = field(init=False)
    separates_values: bool = field(init=False)
    whole_neighborhood: bool = field(init=False)
    needs_edge_ids: bool = field(init=False)

    def __post_init__(self) -> None:
        vars(self).update(
            needs_src=self.fold.needs_src,
            linear=self.fold.linear,
            summed=self.fold.summed,
            separates=self.fold.separates,
            separates_values=self.fold.separates_values,
            whole_neighborhood=self.fold.whole_neighborhood,
            needs_edge_ids=self.fold.needs_edge_ids,
        )

    def init(self, num_dst: int, x: Operands) -> Rows:
        return self.fold.init(num_dst, x)

    def finish(self, state: Rows) -> tuple[Tensor, Rows]:
        return self.fold.finish(state)

    def prepare(self, saved: Rows, grad_out: Tensor) -> Rows:
        return self.fold.prepare(saved, grad_out)

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
