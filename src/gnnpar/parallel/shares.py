"""The gradient of one aggregation, collected from its blocks' shares."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands, Rows, widened


class Shares:
    """Gradients add up over blocks; those of remote sources leave for their owners instead.

    What halo blocks and inner blocks give to destinations and shared tensors is kept apart until the end: a view that
    meets the inner block first and one that meets it last get the same bits.
    """

    def __init__(self, slots: Callable[[Block], Tensor], edge: Rows) -> None:
        """`slots(block)`: positions of the block's edges among the edge operands."""
        self._slots = slots
        self._edge = tuple(torch.zeros_like(widened(t)) for t in edge)
        self._inner, self._halo = Operands(()), Operands(())

    def add_inner(self, grads: Operands, block: Block) -> None:
        self._place(grads.edge, block)
        self._inner = _sum(self._inner, grads)

    def add_halo(self, grads: Operands, block: Block) -> Rows:
        """Returns the gradients of the block's sources: they belong to another rank."""
        self._place(grads.edge, block)
        self._halo = _sum(self._halo, grads._replace(src=()))
        return grads.src

    @property
    def src(self) -> Rows:
        """Gradients of the owned source rows so far; returned ones are added in place."""
        return self._inner.src

    def total(self) -> Operands:
        return _sum(self._inner, self._halo)._replace(edge=self._edge)

    def finished(self, agg: Aggregator, prepared: Rows, grad_out: Tensor) -> Operands:
        """The total, and the destinations' gradient where it is made of what was saved."""
        total = self.total()
        return total if total.dst else total._replace(dst=agg.grad_dst(prepared, grad_out))

    def _place(self, edge: Rows, block: Block) -> None:
        """An edge is in one block: its gradient goes to its place."""
        for into, g in zip(self._edge, edge, strict=True):
            into[self._slots(block)] = g


def _sum(old: Operands, new: Operands) -> Operands:
    """In place of the old where both are there."""
    src, dst, shared = (
        tuple(a.add_(b) for a, b in zip(x, y, strict=True)) if x and y else x or y
        for x, y in ((old.src, new.src), (old.dst, new.dst), (old.shared, new.shared))
    )
    return Operands(src, dst, (), shared)


def add_returned(into: Rows, index: Tensor, grads: Rows) -> None:
    """Gradients that came back for the rows `index`, unique, added in place, in the type of the sum."""
    for total, rows in zip(into, grads, strict=True):
        total.index_add_(0, index, rows.to(total.dtype))
