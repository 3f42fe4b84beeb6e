"""Division of a fold's operands and result over ranks: by columns, by heads, or by values.

Notation: P ranks, N nodes, operands [N, ...]. A rank without a column or head is idle in this fold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gnnpar.comm import RowLike
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Rows

How = Literal["columns", "heads", "values"]


@dataclass(frozen=True)
class Slices:
    """Ranks share the indices [0, width) of one dimension of an operand; the first ranks have one more if P does not
    divide it. `whole`: positions of the operands (sources, then destinations) that every rank with a share reads whole.
    """

    how: How
    width: int
    ranks: int
    whole: frozenset[int] = frozenset()

    def span(self, rank: int) -> tuple[int, int]:
        """Return [first, last) of a rank; equal if it is idle."""
        size, more = divmod(self.width, self.ranks)
        first = rank * size + min(rank, more)
        return first, first + size + (rank < more)

    def works(self, rank: int) -> bool:
        first, last = self.span(rank)
        return last > first

    @property
    def classes(self) -> list[list[int]]:
        """Return the working ranks, grouped by the width of their shares."""
        size, more = divmod(self.width, self.ranks)
        found = [list(range(more)), list(range(more, self.ranks)) if size else []]
        return [members for members in found if members]

    @property
    def dim(self) -> int:
        return -1 if self.how == "values" else 1

    def rows(self, rows: Rows, rank: int) -> Rows:
        """Return a rank's slice of these operands: [n, ...] each."""
        return tuple(self.of(t, rank) if i not in self.whole else t for i, t in enumerate(rows))

    def of(self, t: Tensor, rank: int) -> Tensor:
        """Return a rank's share of one operand or of the result. Columns are those of the flattened row."""
        first, last = self.span(rank)
        flat = t.flatten(1) if self.how == "columns" else t
        return flat.narrow(self.dim, first, last - first)

    def shared(self, shared: Rows, rank: int) -> Rows:
        """Return a rank's share of replicated tensors with heads in dimension 0."""
        first, last = self.span(rank)
        return tuple(t[first:last] for t in shared) if self.how == "heads" else shared

    def like(self, like: Sequence[RowLike], rank: int) -> tuple[RowLike, ...]:
        """Return `rows` of operands of these shapes."""
        return tuple(each if i in self.whole else self._like(each, rank) for i, each in enumerate(like))

    def _like(self, each: RowLike, rank: int) -> RowLike:
        first, last = self.span(rank)
        share = last - first
        if self.how == "columns":
            return each._replace(shape=(share,))
        if self.how == "heads":
            return each._replace(shape=(share, *each.shape[1:]))
        return each._replace(shape=(*each.shape[:-1], share))


def slices_of(agg: Aggregator, src: Sequence[RowLike], num_dst: int, ranks: int, layer: int) -> Slices:
    """Return the slices of a fold. Raises ValueError if it is not separable. `num_dst`: operands of destinations."""
    if agg.separates == "columns":
        return Slices("columns", src[0].width, ranks)
    heads = src[0].shape[0] if src[0].shape else 0
    if agg.separates == "heads" and (heads >= ranks or not agg.separates_values):
        return Slices("heads", heads, ranks)
    if agg.separates_values:
        return Slices("values", src[0].shape[-1], ranks, frozenset(range(1, len(src) + num_dst)))
    raise ValueError(
        f"strategy=feature divides the columns or heads of a fold over ranks, but {type(agg).__name__} of layer "
        f"{layer} separates by neither: use strategy=graph_parallel or sar, or world_size=1"
    )
