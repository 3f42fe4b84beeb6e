"""Attention weights of one head over a block of rows, in reused buffers.

Floating-point data of edges are one number per edge of a block that fits the cache; no tensor is [E, H] or [E, D]. For
the whole CSR only integers are stored: each edge's row and, with dropout, its part of the hash.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gnnpar_kernels.attend.naive import Drop
from gnnpar_kernels.cpu_bags import RowBlock, bag, row_blocks
from gnnpar_kernels.cpu_hashing import column_hash, keep_bits, row_hash

BLOCK = 1 << 18  # edges of a block: weights and sums of rows stay in cache; smaller costs calls and barriers
PLAIN = 20.0  # scores up to this size need no shift before exp: sums of exp(20) and of exp(-20) are exact enough


class Dropping(NamedTuple):
    """Attention dropout of the edges of a CSR; no dropout if `drop` is None."""

    drop: Drop | None
    edge_ids: Tensor | None
    num_heads: int


class Edges:
    """Blocks of whole CSR rows with buffers for two numbers per edge, and attention dropout."""

    def __init__(
        self, indptr: Tensor, indices: Tensor, *, edges: int, dtype: torch.dtype, dropping: Dropping | None = None
    ) -> None:
        self.blocks = row_blocks(indptr, indices, edges=edges)
        self.rows = {block.first: block.row_of_edge() for block in self.blocks}
        self.size = max((block.num_edges for block in self.blocks), default=0)
        self.places = torch.arange(self.size + 1, dtype=indices.dtype)
        self.numbers = torch.empty((2, self.size), dtype=dtype)
        self.p = 0.0
        if dropping is not None and dropping.drop is not None and dropping.drop[0] > 0:
            (self.p, key), ids = dropping.drop, dropping.edge_ids
            if ids is None:
                raise ValueError(
                    "attention dropout is keyed by global edge ids: pass edge_ids [E] beside drop=(p, key)"
                )
            self._heads = column_hash(dropping.num_heads, key=key)
            self._hashes = {b.first: row_hash(ids[b.begin : b.end], key=key) for b in self.blocks}
            self._bits = torch.empty((2, self.size), dtype=torch.int32)

    def drop_(self, block: RowBlock, head: int, *weights: Tensor) -> None:
        """Apply the dropout mask of a head and its scale, in place. Shapes: each [edges of the block]."""
        if self.p > 0:
            bits, spare = self._bits[:, : block.num_edges]
            keep_bits(self._hashes[block.first], self._heads[head], p=self.p, out=bits, scratch=spare)
            for weight in weights:
                _keep_(weight.mul_(1.0 / (1.0 - self.p)), bits)

    def spread(self, block: RowBlock, values: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the value of its CSR row for every edge. Shapes: values [R, ...] of all rows -> [edges, ...]."""
        of_rows, rows = values[block.first : block.last], self.rows[block.first]
        return torch.index_select(of_rows, 0, rows) if out is None else torch.index_select(of_rows, 0, rows, out=out)

    def sums(self, block: RowBlock, of_edges: Tensor, weights: Tensor) -> Tensor:
        """Return sums by CSR row. Shapes: of_edges [edges, W], weights [edges] -> [rows of the block, W]."""
        return bag(of_edges, self.places[: block.num_edges], block.offsets, weights)


class HeadRows(NamedTuple):
    """Scores of both ends for one head, and shifts to subtract from the score before exp, if any.

    Shapes: row, row_shift [R] by CSR row; col, col_shift [M] by index.
    """

    row: Tensor
    col: Tensor
    row_shift: Tensor | None = None
    col_shift: Tensor | None = None


def head_table(x: Tensor, head: int, *, out: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return contiguous rows of one head, times a factor per row. Bags of a strided view take 1.5 times as long.

    Shapes: x [M, H, D], scale [M, H] or None -> out [M, D].
    """
    if scale is None:
        return out.copy_(x[:, head])
    return torch.mul(x[:, head], scale[:, head, None], out=out)


def is_plain(a_src: Tensor, a_dst: Tensor, slope: float) -> bool:
    """Return True if the scores of all edges must be in [-PLAIN, PLAIN], so that exp needs no shift."""
    if a_src.numel() == 0 or a_dst.numel() == 0:
        return True
    return float(a_src.abs().max() + a_dst.abs().max()) * max(1.0, abs(slope)) <= PLAIN


class EdgeWeights(Edges):
    """The edges of one CSR: weights of a head at a time, with the activation's slope."""

    def __init__(
        self, indptr: Tensor, indices: Tensor, *, slope: float, dtype: torch.dtype, dropping: Dropping
    ) -> None:
        super().__init__(indptr, indices, edges=BLOCK, dtype=dtype, dropping=dropping)
        self.slope = slope
        self._weight, self._sloped, self._score, self._spare = *self.numbers, *torch.empty_like(self.numbers)

    def top(self, block: RowBlock, rows: HeadRows) -> Tensor:
        """Return the largest activated score of each row, -inf without an edge. Shapes: -> [rows of the block]."""
        score = self._score_of(block, rows)
        torch.ops.aten.leaky_relu.out(score, self.slope, out=score)
        return torch.segment_reduce(score, "max", offsets=block.offsets.long(), initial=-torch.inf)

    def weights(self, block: RowBlock, rows: HeadRows) -> Tensor:
        """Return exp(leaky_relu(score) - shift) of a block's edges. Shapes: -> [edges of the block], a buffer."""
        return self._activated(block, rows, self._score_of(block, rows))

    def weights_and_sloped(
        self, block: RowBlock, rows: HeadRows, *, slope: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the weights, and the weights times the activation's slope at the score. slope: for negative scores; 0
        keeps only positive scores. Shapes: -> [edges of the block] twice, buffers."""
        score = self._score_of(block, rows)
        weight, sloped = self._activated(block, rows, score), self._sloped[: block.num_edges]
        slope = self.slope if slope is None else slope
        torch.ops.aten.leaky_relu_backward.grad_input(weight, score, slope, False, grad_input=sloped)
        return weight, sloped

    def _score_of(self, block: RowBlock, rows: HeadRows) -> Tensor:
        score, spare = self._score[: block.num_edges], self._spare[: block.num_edges]
        torch.index_select(rows.col, 0, block.indices, out=score)
        row = rows.row[block.first : block.last]
        return score.add_(torch.index_select(row, 0, self.rows[block.first], out=spare))

    def _activated(self, block: RowBlock, rows: HeadRows, score: Tensor) -> Tensor:
        weight, spare = self._weight[: block.num_edges], self._spare[: block.num_edges]
        torch.ops.aten.leaky_relu.out(score, self.slope, out=weight)
        if rows.row_shift is not None:
            shift = rows.row_shift[block.first : block.last]
            weight.sub_(torch.index_select(shift, 0, self.rows[block.first], out=spare))
        if rows.col_shift is not None:
            weight.sub_(torch.index_select(rows.col_shift, 0, block.indices, out=spare))
        return weight.exp_()


def _keep_(weight: Tensor, bits: Tensor) -> None:
    if weight.dtype == torch.float32:
        weight.view(torch.int32).bitwise_and_(bits)
    else:
        weight.mul_(bits.neg())


def csr_rows(values: Tensor, rows: Tensor | None) -> Tensor:
    """Return the rows of a CSR. Shapes: [N, ...] -> [R, ...]."""
    return values if rows is None else values.index_select(0, rows)


def put(whole: Tensor, head: int, rows: Tensor | None, part: Tensor) -> None:
    """Write the rows of one head. Shapes: whole [N, H, D], part [R, D]."""
    whole[slice(None) if rows is None else rows, head] = part
