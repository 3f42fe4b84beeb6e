"""Partial aggregation: fold some in-edges of a destination on the rank of their sources, and merge the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Rows


@runtime_checkable
class Mergeable(Aggregator, Protocol):
    """A fold that may be split over ranks by its edges.

    The rank of the sources folds its own block (`at_source`) and sends `partial` rows, one per destination. The rank of
    the destinations merges them into its state. Merging is row-local, so backward sends the gradient of the partial
    rows only, which the rank of the sources differentiates.
    """

    @property
    def partial_types(self) -> int | None:
        """0: one partial row per destination. Else the number of types: one row per pair, numbered destination * types
        + type. None: the fold, as configured, does not merge."""
        ...

    def at_source(self) -> Aggregator:
        """Return the fold for the rank of the sources. Its block has no types if partial rows are of pairs."""
        ...

    def partial(self, out: Tensor, saved: Rows, dtype: torch.dtype) -> Rows:
        """Return the partial rows of the result of `at_source().finish`: values in `dtype`, then exact operands."""
        ...

    def exact_numbers(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the exact elements of a row of (`partial`, `grad_partial`), beyond values. shape: of a result row."""
        ...

    def merge(self, state: Rows, at: Tensor, partial: Rows) -> Rows:
        """Merge partial rows into the state, in place. at: their distinct destinations or pairs."""
        ...

    def grad_partial(self, exact: Rows, at: Tensor, prepared: Rows, grad_out: Tensor) -> Rows:
        """Return the gradients of the partial rows of `at` with exact operands `exact`."""
        ...

    def prepare_partial(self, saved: Rows, back: Rows) -> tuple[Rows, Tensor]:
        """Return (prepared, grad_out) for `at_source().grad`. back: rows of `grad_partial`."""
        ...


def merges(agg: Aggregator, edge: Rows) -> TypeGuard[Mergeable]:
    """Return True if the fold may be split over ranks. A fold with edge rows may not, since they are not sent."""
    return not edge and isinstance(agg, Mergeable) and agg.partial_types is not None


class Merges:
    """Defaults of a mergeable fold: one partial row per destination, from the same fold, without exact operands."""

    @property
    def partial_types(self) -> int | None:
        return 0

    def at_source(self) -> Self:
        return self

    def partial(self, out: Tensor, saved: Rows, dtype: torch.dtype) -> Rows:
        return (out.to(dtype),)

    def exact_numbers(self, shape: Sequence[int]) -> tuple[int, int]:
        return 0, 0

    def prepare_partial(self, saved: Rows, back: Rows) -> tuple[Rows, Tensor]:
        return saved, back[0]


class MergesSums(Merges):
    """A sum: a partial row is a sum, and its gradient is that of the result."""

    def merge(self, state: Rows, at: Tensor, partial: Rows) -> Rows:
        flat = self._by_row(state[0])
        flat.index_add_(0, at, partial[0].to(flat.dtype))
        return state

    def grad_partial(self, exact: Rows, at: Tensor, prepared: Rows, grad_out: Tensor) -> Rows:
        return (self._by_row(grad_out).index_select(0, at),)

    def _by_row(self, rows: Tensor) -> Tensor:
        return rows.flatten(0, 1) if self.partial_types else rows


class MergesSoftmax(Merges):
    """A softmax over in-edges: a partial row is the output o_q and the logsumexp l_q of some of the edges.

    With w = exp(l_q - l), where l is the logsumexp of all: out = sum_q w o_q. An edge's weight is w times its weight
    within its part, so the gradients of the partial fold are those of the whole with grad_out and <grad_out, out>
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
