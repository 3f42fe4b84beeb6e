"""Forward and backward on one part of a vertex cut, a loss weight for every copy, and one sum over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from gnnpar.comm import Site
from gnnpar.parallel.cofree.view import PartGraph
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.engine import FlatEngine, PassGraph, Stateful
from gnnpar.parallel.keys import KeyTable
from gnnpar.parallel.local import Pass
from gnnpar.partition.shard import Copies

Reweight = Literal["degree", "copies", "none"]


class VertexCutEngine(FlatEngine):
    """Train on `copies`, evaluate the rank's own nodes on `exact`. `reweight`: the weight of a copy's loss."""

    def __init__(
        self,
        context: BuildContext,
        *,
        copies: Copies,
        view: PartGraph,
        reweight: Reweight,
        exact: PassGraph,
        parts: Mapping[str, Stateful | None] | None = None,
    ) -> None:
        super().__init__(context, view=view, exact=exact, structure=(copies.shard.inner, view), parts=parts)
        self._copies, self._task = copies, context.task
        self._rows = copies.shard.rows_of_split["train"]
        self._labels = copies.shard.y[self._rows]
        self._weights = weights_of(copies, self._rows, reweight)
        total = self._weights.sum().reshape(1)
        self._total = float(context.shard.num_train if reweight != "none" else context.comm.all_reduce(total))

    def reduced_gradient(self, epoch: int, keys: KeyTable | None = None) -> Tensor:
        with self._comm.clock("compute"):
            bucket = self._of_copies(Pass(self._seed, epoch, training=True, keys=keys))
        bucket = self._comm.all_reduce(bucket, Site(epoch, -1, 0, "reduce"))
        self._comm.flush(keep=0)
        return bucket

    def live_bytes(self) -> dict[str, int]:
        held = super().live_bytes()
        held["features"] += self._copies.shard.features_nbytes + self._weights.nbytes
        return held

    def _of_copies(self, run: Pass) -> Tensor:
        """Return the gradients of this part's weighted losses, and their sum."""
        if not len(self._rows):
            return self.bucket_of(None)
        logits = self._model(self._view.during(run), self._copies.shard.x)
        loss = self._task.loss_sum(logits[self._rows], self._labels, self._weights)
        return self.bucket_of(loss / self._total)


def weights_of(copies: Copies, rows: Tensor, reweight: Reweight) -> Tensor:
    """Return the weights of copies in the loss. Shapes: rows [t] -> [t]."""
    share = copies.share[rows]
    if reweight == "degree":
        return share
    return torch.ones_like(share) if reweight == "none" else 1 / copies.number[rows].to(share.dtype)
