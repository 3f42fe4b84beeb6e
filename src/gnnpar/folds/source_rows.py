"""The rows of the sources of all in-edges, for code that folds them itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnpar.folds.aggregator import ByBlock
from gnnpar.folds.block import Block, Operands, Rows


@dataclass(frozen=True)
class SourceRows(ByBlock):
    """The source's row of each in-edge, by ascending edge id. No fold over blocks: one block holds all in-edges.
    Shapes: src ([M, ...],) -> [E, ...]."""

    needs_src = False
    linear = False
    summed = False

    @property
    def whole_neighborhood(self) -> bool:
        return True

    @property
    def needs_edge_ids(self) -> bool:
        return True

    def update(self, state: Rows, block: Block, x: Operands) -> Rows:
        """Return the rows. ValueError for a second block of the same destinations."""
        if state:
            raise ValueError(
                "a convolution reads whole neighbourhoods, and the strategy folds them in pieces: use single, "
                "graph_parallel or another that reads halo rows"
            )
        return (x.src[0].index_select(0, _by_id(block)),)

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        zeros = grad_out.new_zeros(block.num_src, *grad_out.shape[1:])
        return Operands((zeros.index_add_(0, _by_id(block), grad_out),))


def _by_id(block: Block) -> Tensor:
    """Return the column of each edge, by ascending edge id. Shapes: [E] int64."""
    columns, places = block.indices.long(), block.edge_places
    return columns if places is None else torch.empty_like(columns).index_copy_(0, places, columns)
