"""The layers of one virtual stage, and the state of a batch between its forward and its backward (`remat`).

none: all that autograd saves. chunk: the rows that enter the stage; the rest is computed again just before the chunk's
backward (GPipe, Huang et al. 2019, section 2.3: re-materialization by micro-batch and partition). layer: the rows that
enter each layer; one layer at a time is computed again.

A second forward sends nothing and gives the same bits: masks are keyed, and at its backward a chunk still finds in the
tables the rows that its folds have read, fresh ones of its slot and before, and the history in the other half. GNNPipe
keeps the results of folds instead (specification 2.7), since later chunks overwrite its one table. The price is one
more forward without the exchange of its folds: (K - 1)/K of it with `chunk`, where a chunk that turns back at once is
kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gnnpar.data.tasks import Task
from gnnpar.folds.block import Rows
from gnnpar.models.gnn import GNN
from gnnpar.parallel.pipeline.chunk import ChunkGraph
from gnnpar.parallel.pipeline.chunks import RowRange
from gnnpar.parallel.view import View
from gnnpar.partition.shard import Shard

Remat = Literal["none", "chunk", "layer"]


class Batch(NamedTuple):
    """Rows that pass all stages together: a chunk, or all rows of a part.

    Shapes: rows [n] of the shard; span: the same rows in the table; train [t]: training nodes among them, labels
    [t, ...] (None: the last stage gives logits, not the loss).
    """

    graph: ChunkGraph | View
    rows: Tensor | slice
    span: RowRange
    train: Tensor | None = None
    labels: Tensor | None = None


@dataclass(eq=False)
class Kept:
    """State of one batch: rows that entered each piece of the stage, and the (leaves, results) of its last piece while
    they are held with what autograd saved."""

    batch: Batch
    entered: list[Rows]
    open: tuple[Rows, Rows] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the rows to start again from; rows that pass through a layer count once."""
        if self.open is not None:
            return 0
        rows = {t.data_ptr(): t.numel() * t.element_size() for each in self.entered for t in each}
        return sum(rows.values())


@dataclass(frozen=True, eq=False)
class Stage:
    """One virtual stage, with the encoder in front of the first layer, and the decoder and the loss behind the last."""

    model: GNN
    task: Task
    shard: Shard
    layers: range
    remat: Remat = "none"

    @property
    def pieces(self) -> Sequence[range]:
        return [range(i, i + 1) for i in self.layers] if self.remat == "layer" else [self.layers]

    def forward(self, batch: Batch, given: Rows, *, keep: bool) -> tuple[Rows, Kept]:
        """Return the output of the stage, and the state for backward. `keep`: all that autograd saves."""
        if keep:
            leaves = as_leaves(given) if torch.is_grad_enabled() else given
            results = self._run(batch, self.layers, leaves)
            return tuple(t.detach() for t in results), Kept(batch, [], (leaves, results))
        entered: list[Rows] = []
        with torch.no_grad():
            for piece in self.pieces:
                entered.append(given)
                given = self._run(batch, piece, given)
        return given, Kept(batch, entered)

    def reopen(self, kept: Kept) -> None:
        """Compute the last piece again that has not gone backward, unless autograd still holds it."""
        if kept.open is None:
            leaves, graph = as_leaves(kept.entered.pop()), kept.batch.graph
            assert isinstance(graph, ChunkGraph)
            again = kept.batch._replace(graph=replace(graph, published=True))
            kept.open = leaves, self._run(again, self.pieces[len(kept.entered)], leaves)

    def backward(self, kept: Kept, grads: Rows) -> Rows:
        """Return the gradients of the stage's input rows. `grads`: of its output rows."""
        while True:
            self.reopen(kept)
            assert kept.open is not None
            (leaves, results), kept.open = kept.open, None
            if pairs := [(t, g) for t, g in zip(results, grads, strict=True) if t.requires_grad]:  # none if frozen
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            grads = tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)
            if not kept.entered:
                return grads

    def _run(self, batch: Batch, layers: range, activations: Rows) -> Rows:
        """Return the rows that leave some layers: activations, after the last layer the loss or the logits."""
        if layers.start == 0:
            activations = self.model.begin(batch.graph, self.shard.inputs(batch.rows))
        for i in layers:
            activations = self.model.run_layer(i, batch.graph, activations)
        if layers.stop < self.model.num_layers:
            return activations
        logits = self.model.end(batch.graph, activations)
        if batch.train is None or batch.labels is None:
            return (logits,)
        return (self.task.loss_sum(logits[batch.train], batch.labels) / self.shard.num_train,)


def as_leaves(rows: Rows) -> Rows:
    return tuple(t.detach().requires_grad_() for t in rows)
