"""Any function of all in-edges of its destinations: no fold over blocks, so one block has to hold them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnpar.folds.aggregator import ByBlock
from gnnpar.folds.block import Block, Operands, Rows, widened

BlockFunction = Callable[[Block, Rows, Rows, Rows, Rows], Tensor]
"""(block, src rows [M, ...], dst rows [N, ...], edge rows [E, ...] in the order of the block's edges, shared) ->
[N, ...]: each row from its own in-edges alone."""


@dataclass(frozen=True, eq=False)
class Neighborhood(ByBlock):
    """out = function(block, src, dst, edge, shared), computed again for its gradient.

    A function must not close over a tensor that requires grad. Rows of 16 bits are read in fp32.
    `by_edge_ids`: it reads Block.edge_ids.

    Shapes: src (any [M, ...]), dst (any [N, ...]), edge (any [E, ...]) -> out [N, ...].
    """

    function: BlockFunction
    by_edge_ids: bool = False
    needs_src = True
    linear = False
    summed = False

    @property
    def whole_neighborhood(self) -> bool:
        return True

    @property
    def needs_edge_ids(self) -> bool:
        return self.by_edge_ids

    def init(self, num_dst: int, x: Operands) -> Rows:
        return ()

    def update(self, state: Rows, block: Block, x: Operands) -> Rows:
        """ValueError where a block of the same destinations came before."""
        if state:
            raise ValueError(
                "an aggregation reads whole neighbourhoods, and the strategy folds them in pieces: use single, "
                "graph_parallel or another that reads halo rows"
            )
        return (self.function(block, *(tuple(map(widened, rows)) for rows in x)),)

    def finish(self, state: Rows) -> tuple[Tensor, Rows]:
        return state[0], ()

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        wide = (tuple(widened(t.detach()) for t in rows) for rows in x)
        leaves = Operands(*(tuple(t.requires_grad_(t.is_floating_point()) for t in rows) for rows in wide))
        wanted = [t for rows in leaves for t in rows if t.requires_grad]
        with torch.enable_grad():
            out = self.function(block, *leaves)
        found = (None,) * len(wanted)
        if out.requires_grad:
            found = torch.autograd.grad(out, wanted, grad_out, allow_unused=True)
        by_leaf = {id(t): g for t, g in zip(wanted, found, strict=True)}

        def gradients(rows: Rows) -> Rows:
            given = ((t, by_leaf.get(id(t))) for t in rows)
            return tuple(torch.zeros_like(t) if g is None else g for t, g in given)

        return Operands(*(gradients(rows) for rows in leaves))
