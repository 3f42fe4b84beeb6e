"""Rows as messages: their shape, senders and readers, and the interface of a codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gnnpar.comm.communicator import MessageTag
from gnnpar.folds.block import Block, Rows
from gnnpar_kernels.csr import accumulate_dtype


class RowLike(NamedTuple):
    """Shape and type of one operand's rows: [n, *shape]."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(rows: Sequence[Tensor]) -> tuple[RowLike, ...]:
        return tuple(RowLike(tuple(t.shape[1:]), t.dtype, t.device) for t in rows)

    @property
    def width(self) -> int:
        """Number of elements in a row."""
        return torch.Size(self.shape).numel()

    @property
    def widened(self) -> RowLike:
        """The same shape in the type of its sums."""
        return self._replace(dtype=accumulate_dtype(self.dtype))

    def nbytes(self, num_rows: int) -> int:
        return num_rows * self.width * self.dtype.itemsize

    def empty(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, *self.shape, dtype=self.dtype, device=self.device)


def row_nbytes(like: Sequence[RowLike]) -> int:
    """Return the bytes of one row of all operands in memory."""
    return sum(each.nbytes(1) for each in like)


@dataclass(frozen=True, eq=False)
class RowLists:
    """Rows that a rank sends and reads, by peer: the graph data that a codec needs.

    Rank `part` of `parts` exchanges them. Shapes: node_ids [N] global ids of its rows; sent: reader -> [b] rows that it
    reads; read: sender -> [h] global ids of its rows that are read here. edges: the in-edges, if the lists belong to a
    part of a graph.
    """

    part: int
    parts: int
    node_ids: Tensor
    sent: Mapping[int, Tensor]
    read: Mapping[int, Tensor]
    edges: PartEdges | None = None

    @property
    def num_rows(self) -> int:
        """Number of own rows, N."""
        return len(self.node_ids)


@dataclass(frozen=True, eq=False)
class PartEdges:
    """In-edges of a part: between its own rows, and from the rows of each sender. Shapes: in_degree [N], read_in_degree
    of the rows read, senders in ascending order; both global."""

    inner: Block
    halo: Mapping[int, Block]
    in_degree: Tensor
    read_in_degree: Tensor


@dataclass(frozen=True, eq=False)
class Outgoing:
    """Rows for one peer: rows[index] of every operand, or all rows if `index` is None. `first`: position in the
    list of rows that the peer reads; for gradients, in the list read from the peer."""

    rows: Rows
    index: Tensor | None = None
    first: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.rows[0]) if self.index is None else len(self.index)


class Incoming(NamedTuple):
    """Rows of one peer: their number, and the start of the piece in their list."""

    num_rows: int
    first: int = 0


Decoder = Callable[[Tensor], Rows]
"""A buffer -> its rows, which may be views of it."""


class Wire(Protocol):
    """Encode rows as bytes, and decode them. By default for one peer after the other, without metadata."""

    def nbytes(self, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> int:
        """Return the bytes of the buffer that `peer` sends here. Both ends compute it, so no size is sent."""
        ...

    def metadata_nbytes(self, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> int:
        """Return the bytes of the buffer to `peer` that are not payload (scales, zero points)."""
        return 0

    def encode(self, rows: Rows, index: Tensor | None, tag: MessageTag, peer: int) -> Tensor:
        """Return rows[index] (all rows for None) of every operand as one flat uint8 buffer. Without an index they are
        the halo rows of `peer` from tag.first on."""
        ...

    def encode_all(self, outgoing: Mapping[int, Outgoing], tag: MessageTag) -> Mapping[int, Tensor]:
        """Call `encode` for every peer, in one launch if the codec supports it."""
        return {
            peer: self.encode(out.rows, out.index, tag._replace(first=out.first), peer)
            for peer, out in outgoing.items()
        }

    def decode(self, buffer: Tensor, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> Rows:
        """Return the rows that `peer` encoded; they may be views of the buffer."""
        ...

    def decoder(self, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> Decoder:
        """Return `decode` for a message that is posted now, valid at any later time."""
        return lambda buffer: self.decode(buffer, num_rows, like, tag, peer)

    def as_received(self, rows: Rows, index: Tensor, tag: MessageTag, peer: int) -> Rows:
        """Return rows[index] as `peer` decodes them, in any phase."""
        return self.decode(self.encode(rows, index, tag, peer), len(index), RowLike.of(rows), tag, peer)
