"""Split a CSR into pieces of similar length: short rows share a program, long rows are cut and combined."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

LOW = (4, 16)  # bounds on the degrees of rows that share a program with others
SPLIT = 256  # edges of the longest piece, which ends last: a warp takes about 0.1 us per edge


class Tasks(NamedTuple):
    """Each CSR row is in one class of `low`, or is one piece with slot -1, or several pieces with consecutive slots.

    low: per bound of LOW, CSR rows [n] int32 of at most that degree; rows without edges are in the first class.
    row [T] int32, begin, end [T] of indptr's type, slot [T] int32: the pieces, first of cut rows, then others in
    the order of rows, so that neighbouring rows share the cache. A piece writes to its row if slot is -1, else to a
    workspace [num_slots, ...]. split_row [S] int32, split_first [S + 1] int32: cut row split_row[s] is the combination
    of slots split_first[s] to split_first[s + 1], in this order.
    """

    low: tuple[Tensor, ...]
    row: Tensor
    begin: Tensor
    end: Tensor
    slot: Tensor
    split_row: Tensor
    split_first: Tensor
    num_slots: int

    @property
    def num_pieces(self) -> int:
        return self.row.shape[0]


_cached: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def tasks_of(indptr: Tensor) -> Tasks:
    """Return the tasks of a CSR, cached as long as the tensor lives; the first call synchronizes with the device."""
    cached = _cached.get(indptr)
    if cached is None or cached[0] != SPLIT:
        cached = _cached[indptr] = SPLIT, _cut(indptr, SPLIT)
    return cached[1]


def _cut(indptr: Tensor, split: int) -> Tasks:
    degree = indptr.diff()
    low, above = [], -1
    for bound in LOW:
        low.append(((degree > above) & (degree <= bound)).nonzero()[:, 0].int())
        above = bound
    high = (degree > above).nonzero()[:, 0]
    to_cut = torch.where(degree[high] > split, degree[high], 0)
    high = high[
        torch.sort(to_cut, descending=True, stable=True).indices
    ]  # others in their order: neighbours share rows
    count = (degree[high] + split - 1) // split
    owner = torch.repeat_interleave(torch.arange(len(high), device=indptr.device), count)
    first = count.cumsum(0) - count
    begin = (
        indptr[high][owner] + (torch.arange(len(owner), device=indptr.device) - first[owner]).to(indptr.dtype) * split
    )
    end = torch.minimum(begin + split, indptr[high + 1][owner])
    cut = count > 1  # these come first, so their pieces are the first slots
    num_slots = int(count[cut].sum())
    slot = torch.arange(len(owner), device=indptr.device)
    split_first = torch.cat([first.new_zeros(1), count[cut].cumsum(0)])
    return Tasks(
        tuple(low),
        high[owner].int(),
        begin,
        end,
        torch.where(slot < num_slots, slot, -1).int(),
        high[cut].int(),
        split_first.int(),
        num_slots,
    )


def _in_flight(nbytes: int, width: int, itemsize: int) -> int:
    """Return the bytes gathered at once; fewer if rows are no multiple of 16 bytes: then an entry takes a register."""
    return nbytes if width * itemsize % 16 == 0 else min(nbytes, 1024 * itemsize)


def low_tile(width: int, itemsize: int, bound: int) -> tuple[int, int]:
    """Return (CSR rows, columns) of a program over short rows: 16 bytes per lane and edge, 8 KB for all edges."""
    columns = min(triton.next_power_of_2(width), 512 // itemsize)
    rows = _in_flight(8192, width, itemsize) // (bound * columns * itemsize)
    return max(1, min(128, rows)), columns


def piece_tile(width: int, itemsize: int) -> tuple[int, int]:
    """Return (edges, columns) gathered at once from a piece of a long row: 4 KB, and at most 64 edges."""
    columns = min(triton.next_power_of_2(width), 2048 // max(itemsize, 4))
    edges = _in_flight(4096, width, itemsize) // (columns * itemsize)
    return max(1, min(64, edges)), columns
