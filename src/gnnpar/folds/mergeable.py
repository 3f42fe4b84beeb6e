"""Partial aggregation: fold some in-edges of a destination on the rank of their sources, and merge the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Rows


@dataclass(frozen=True)
class Merging:
    """How results of a fold over some of the edges merge; here of a sum: a partial row is a sum, and its gradient that
    of the result.

    The rank of the sources folds its own block and sends `partial` rows. The rank of the destinations merges them into
    its state. Merging is row-local, so backward sends the gradient of the partial rows only, which the rank of the
    sources differentiates. types: 0: one partial row per destination. Else the number of types: one row per pair,
    numbered destination * types + type. at_source: the fold of the sources' rank, if another one; its block has no
    types if partial rows are of pairs.
    """

    types: int = 0
    at_source: Aggregator | None = None

    def partial(self, out: Tensor, saved: Rows, dtype: torch.dtype) -> Rows:
        """Return the partial rows of the result of `finish`: values in `dtype`, then exact operands."""
        return (out.to(dtype),)

    def exact_numbers(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the exact elements of a row of (`partial`, `grad_partial`), beyond values. shape: of a result row."""
        return 0, 0

    def merge(self, state: Rows, at: Tensor, partial: Rows) -> Rows:
        """Merge partial rows into the state, in place. at: their distinct destinations or pairs."""
        flat = self._by_row(state[0])
        flat.index_add_(0, at, partial[0].to(flat.dtype))
        return state

    def grad_partial(self, exact: Rows, at: Tensor, prepared: Rows, grad_out: Tensor) -> Rows:
        """Return the gradients of the partial rows of `at` with exact operands `exact`."""
        return (self._by_row(grad_out).index_select(0, at),)

    def prepare_partial(self, saved: Rows, back: Rows) -> tuple[Rows, Tensor]:
        """Return (prepared, grad_out) for the gradient of the fold at the source. back: rows of `grad_partial`."""
        return saved, back[0]

    def _by_row(self, rows: Tensor) -> Tensor:
        return rows.flatten(0, 1) if self.types else rows


class MergingSoftmax(Merging):
    """A softmax over in-edges: a partial row is the output o_q and the logsumexp l_q of some of the edges.

    With w = exp(l_q - l), where l is the logsumexp of all: out = sum_q w o_q. An edge's weight is w times its weight
    within its part, so the partial fold has the gradients of the whole with grad_out and <grad_out, out>
    scaled by w: F + H elements per row in each direction, for F values of H heads. Prepared rows start with (l,
    <grad_out, out>), saved rows with (out, l).
    """

    def partial(self, out: Tensor, saved: Rows, dtype: torch.dtype) -> Rows:
        return out.to(dtype), saved[1]

    def exact_numbers(self, shape: Sequence[int]) -> tuple[int, int]:
        return shape[0], shape[0]

    def merge(self, state: Rows, at: Tensor, partial: Rows) -> Rows:
        maximum, *sums = state
        values, logsumexp = partial
        old = maximum.index_select(0, at)
        new = torch.maximum(old, logsumexp)
        kept, added = (old - new).exp_(), (logsumexp - new).exp_()
        maximum.index_copy_(0, at, new)
        for i, total in enumerate(sums):  # mass, values, then mass and values of the positive branch, which gets 0
            rows = total.index_select(0, at) * (kept if total.dim() == 2 else kept[..., None])
            if i < 2:
                rows += added if i == 0 else added[..., None] * values
            total.index_copy_(0, at, rows)
        return state

    def grad_partial(self, exact: Rows, at: Tensor, prepared: Rows, grad_out: Tensor) -> Rows:
        logsumexp, delta = (each.index_select(0, at) for each in prepared[:2])
        weight = (exact[0] - logsumexp).exp_()
        return weight[..., None] * grad_out.index_select(0, at), weight * delta

    def prepare_partial(self, saved: Rows, back: Rows) -> tuple[Rows, Tensor]:
        _, logsumexp, *others = saved
        return (logsumexp, back[1], *others), back[0]


@runtime_checkable
class Mergeable(Aggregator, Protocol):
    """A fold that may be split over ranks by its edges. `merging`: None if this configuration does not merge."""

    @property
    def merging(self) -> Merging | None: ...


def merging_of(agg: Aggregator, edge: Rows) -> Merging | None:
    """Return how the results of a fold merge; None: it may not be split. Rows of edges are not sent."""
    return agg.merging if isinstance(agg, Mergeable) and not edge else None
