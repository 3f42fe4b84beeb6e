"""Attention weights of one row block and head at a time, in buffers that are written over and over.

A block is walked head by head: everything of edge size is [edges of the block], nothing is [E, H] or [E, D].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gnnpar_kernels.cpu.bags import RowBlock
from gnnpar_kernels.cpu.dropout import column_hash, keep_bits, row_hash

BLOCK = 1 << 16  # edges of a row block: about five buffers of it live in the second-level cache
PLAIN = 20.0  # scores up to this size are exponentiated as they are: sums of exp(20) and of exp(-20) are exact enough


class Dropping(NamedTuple):
    """Attention dropout with the head's part of the hash."""

    p: float
    key: int
    heads: Tensor

    @classmethod
    def of(cls, drop: tuple[float, int] | None, edge_ids: Tensor | None, num_heads: int) -> "Dropping | None":
        """None where nothing is dropped."""
        if drop is None or drop[0] == 0.0:
            return None
        if edge_ids is None:
            raise ValueError("attention dropout is keyed by global edge ids: pass edge_ids [E] beside drop=(p, key)")
        return cls(drop[0], drop[1], column_hash(num_heads, key=drop[1]))


class Buffers:
    """Scratch of one op call: a few tensors of the largest block's size."""

    def __init__(self, dtype: torch.dtype, *, edges: int) -> None:
        self.score, self.weight, self.kept, self.spare = (torch.empty(edges, dtype=dtype) for _ in range(4))
        self.bits, self.bits_spare = (torch.empty(edges, dtype=torch.int32) for _ in range(2))


def largest(indptr: Tensor) -> int:
    """Edges of the largest row block."""
    if indptr.shape[0] < 2:
        return 0
    return min(int(indptr[-1]), BLOCK + int((indptr[1:] - indptr[:-1]).max()))


def head_major(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Contiguous rows per head, times a factor per row and head.

    Shapes: x [M, H, D], scale [M, H] or None -> [H, M, D].
    """
    table = torch.empty((x.shape[1], x.shape[0], x.shape[2]), dtype=dtype)
    if scale is None:
        return table.copy_(x.transpose(0, 1))
    return torch.mul(x.transpose(0, 1), scale.t()[..., None], out=table)


def is_plain(a_src: Tensor, a_dst: Tensor, slope: float) -> bool:
    """Whether no score of any edge can leave [-PLAIN, PLAIN], so that exp needs no shift."""
    if a_src.numel() == 0 or a_dst.numel() == 0:
        return True
    return float(a_src.abs().max() + a_dst.abs().max()) * max(1.0, abs(slope)) <= PLAIN


class BlockScores:
    """Scores of one row block: a_row of its rows plus a_col of its edges' other ends."""

    def __init__(self, block: RowBlock, buffers: Buffers, *, slope: float) -> None:
        self.block, self.buffers, self.slope = block, buffers, slope
        self.row = block.row_of_edge()

    def raw(self, a_row: Tensor, a_col: Tensor) -> Tensor:
        """a_row_r + a_col_c of every edge, before the activation. Shapes: a_row [rows], a_col [M] -> [E]."""
        size = self.block.num_edges
        score, spare = self.buffers.score[:size], self.buffers.spare[:size]
        torch.index_select(a_col, 0, self.block.indices, out=score)
        return score.add_(torch.index_select(a_row, 0, self.row, out=spare))

    def weights(self, score: Tensor, *, shift_row: Tensor | None = None, shift_col: Tensor | None = None) -> Tensor:
        """exp(leaky_relu(score) - shift). Shapes: score [E], shift_row [rows], shift_col [M] -> [E]."""
        size = self.block.num_edges
        weight, spare = self.buffers.weight[:size], self.buffers.spare[:size]
        torch.ops.aten.leaky_relu.out(score, self.slope, out=weight)
        if shift_row is not None:
            weight.sub_(torch.index_select(shift_row, 0, self.row, out=spare))
        if shift_col is not None:
            weight.sub_(torch.index_select(shift_col, 0, self.block.indices, out=spare))
        return weight.exp_()

    def keep(self, dropping: Dropping, hashed: Tensor, head: int) -> Tensor:
        """Bits of the edges' dropout mask. Shapes: hashed = row_hash(edge ids) [E] -> [E] int32."""
        size = self.block.num_edges
        buffers = self.buffers
        return keep_bits(
            hashed, dropping.heads[head], p=dropping.p, out=buffers.bits[:size], scratch=buffers.bits_spare[:size]
        )


def edge_hash(dropping: Dropping | None, edge_ids: Tensor | None, block: RowBlock) -> Tensor | None:
    """The edges' part of the dropout hash of one block, shared by all heads."""
    if dropping is None or edge_ids is None:
        return None
    return row_hash(edge_ids[block.begin : block.end], key=dropping.key)


def apply_keep(weight: Tensor, bits: Tensor, *, scale: float, out: Tensor) -> Tensor:
    """weight * K. Shapes: weight [E], bits [E] int32 -> out [E]."""
    torch.mul(weight, scale, out=out)
    if out.dtype == torch.float32:
        out.view(torch.int32).bitwise_and_(bits)
    else:
        out.mul_(bits.neg())
    return out
