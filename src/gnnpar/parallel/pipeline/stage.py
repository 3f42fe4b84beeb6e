"""The layers of one virtual stage, and what a chunk leaves there between its forward and its backward (`remat`).

none: all that autograd saves. chunk: the rows that enter the stage; everything else is computed again just before the
chunk's backward (GPipe, Huang et al. 2019, section 2.3: re-materialization by micro-batch and partition). layer: the
rows that enter each layer, and one layer at a time is computed again.

A second forward sends nothing and gives the same bits: masks are keyed, and at its backward a chunk still finds in the
tables the rows that its folds have read, fresh ones of its slot and before, and the history in the other half. GNNPipe
keeps the results of folds instead (specification 2.7), since later chunks overwrite its one table. The price is one
more forward, less the folds' exchange: (K - 1)/K of it with `chunk`, where a chunk that turns back at once is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from gnnpar.folds.block import Rows
from gnnpar.parallel.pipeline.chunk import ChunkGraph
from gnnpar.parallel.pipeline.exact_pass import backward_through, gradients_of

Remat = Literal["none", "chunk", "layer"]
Run = Callable[[ChunkGraph, range, Rows], Rows]
"""(graph, layers, rows that enter them; none in front of the first) -> rows that leave, the loss after the last."""


@dataclass(eq=False)
class Kept:
    """Of one chunk: rows that entered each piece of the stage; the last piece's (leaves, results), where they are kept
    with what autograd saved."""

    graph: ChunkGraph
    entered: list[Rows]
    open: tuple[Rows, Rows] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the rows kept to start again from; rows that pass through a layer count once."""
        if self.open is not None:
            return 0
        rows = {t.data_ptr(): t.numel() * t.element_size() for each in self.entered for t in each}
        return sum(rows.values())


class Stage:
    """One virtual stage. `run` computes a piece of it, a range of its layers."""

    def __init__(self, layers: range, run: Run, *, remat: Remat) -> None:
        self.pieces: Sequence[range] = [layers] if remat != "layer" else [range(i, i + 1) for i in layers]
        self._run = run

    def forward(self, graph: ChunkGraph, given: Rows, *, keep: bool) -> tuple[Rows, Kept]:
        """Return the output of the stage, and the state kept for backward. `keep`: all that autograd saves, whatever
        `remat` says."""
        if keep:
            leaves = as_leaves(given)
            results = self._run(graph, range(self.pieces[0].start, self.pieces[-1].stop), leaves)
            return tuple(t.detach() for t in results), Kept(graph, [], (leaves, results))
        entered: list[Rows] = []
        with torch.no_grad():
            for piece in self.pieces:
                entered.append(given)
                given = self._run(graph, piece, given)
        return given, Kept(graph, entered)

    def backward(self, kept: Kept, arrived: Callable[[], Rows] | None) -> Rows:
        """Gradients of what entered the stage. `arrived`: waits for those of what left it; None: it was the loss."""
        leaves, results = self._reopened(kept)  # before waiting: the second forward fills the bubble
        grads = (torch.ones_like(results[0]),) if arrived is None else arrived()
        while True:
            backward_through(results, grads)
            grads = gradients_of(leaves)
            if not kept.entered:
                return grads
            leaves, results = self._reopened(kept)

    def _reopened(self, kept: Kept) -> tuple[Rows, Rows]:
        """(leaves, results) of the last piece that has not gone backward."""
        if kept.open is not None:
            last, kept.open = kept.open, None
            return last
        leaves = as_leaves(kept.entered.pop())
        piece = self.pieces[len(kept.entered)]
        return leaves, self._run(kept.graph.again(), piece, leaves)


def as_leaves(rows: Rows) -> Rows:
    return tuple(t.detach().requires_grad_() for t in rows)
