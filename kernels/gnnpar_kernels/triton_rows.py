"""Reductions of whole rows over in-edges, sums and maxima: three shared kernels, without atomics.

Every edge gathers its row once, and the order of a row's edges is fixed. Short CSR rows share a program; long rows are
cut into pieces and the results combined. A reduction is two jit functions: `fold` adds rows and their sources to the
state of a CSR row, `write` stores the state. A program covers some columns, so a wide row has several programs.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from gnnpar_kernels.csr import accumulate_dtype, flat_rows
from gnnpar_kernels.triton_tasks import LOW, low_tile, piece_tile, tasks_of

NO_SOURCE: tl.constexpr = tl.constexpr(2**31 - 1)  # above every source


class Reduction(NamedTuple):
    """A reduction of the rows of edges.

    fold(value, source, tile, other, TILE): states [R, BW] and a row for each, or [BW] and rows [BE, BW] (TILE).
    write(out, arg, ids, place, mask, value, source, FRESH): write results (FRESH), or merge them into given ones.
    `empty`: the value of a row without edges. `slots`: pieces of a cut row that are read at once. `bound`: the bound of
    LOW that sets the tile of all short rows, for large states; 0: each class has its own tile.
    """

    fold: JITFunction
    write: JITFunction
    empty: float
    slots: int
    bound: int = 0


@triton.jit(do_not_specialize=["num_members"])
def _low(
    members,
    num_members,
    indptr,
    indices,
    x,
    weights,
    rows,
    ids,
    out,
    arg,
    W: tl.constexpr,
    R: tl.constexpr,
    BW: tl.constexpr,
    BOUND: tl.constexpr,
    ACC: tl.constexpr,
    FRESH: tl.constexpr,
    FOLD: tl.constexpr,
    WRITE: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Reduce short CSR rows, R per program, each with at most BOUND edges."""
    member = tl.program_id(0) * R + tl.arange(0, R)
    inside = member < num_members
    row = tl.load(members + member, mask=inside, other=0).to(tl.int64)
    begin = tl.load(indptr + row, mask=inside, other=0)
    length = (tl.load(indptr + row + 1, mask=inside, other=0) - begin).to(tl.int32)
    columns = tl.program_id(1) * BW + tl.arange(0, BW)
    value = tl.full([R, BW], EMPTY, ACC)
    source = tl.full([R, BW], NO_SOURCE, tl.int32)
    for k in tl.static_range(BOUND):
        here = k < length
        other = tl.load(indices + begin + k, mask=here, other=NO_SOURCE)
        mask = here[:, None] & (columns < W)[None, :]
        place = x + other.to(tl.int64)[:, None] * W + columns[None, :]
        tile = tl.load(place, mask=mask, other=EMPTY).to(ACC)
        if weights is not None:
            tile *= tl.load(weights + begin + k, mask=here, other=0.0).to(ACC)[:, None]
        value, source = FOLD(value, source, tile, other[:, None], False)
    if not FRESH:
        inside = length > 0
    if rows is not None:
        row = tl.load(rows + row, mask=inside, other=0)
    mask = inside[:, None] & (columns < W)[None, :]
    WRITE(out, arg, ids, row[:, None] * W + columns[None, :], mask, value, source, FRESH)


@triton.jit
def _piece(
    task_row,
    task_begin,
    task_end,
    task_slot,
    indices,
    x,
    weights,
    rows,
    ids,
    out,
    arg,
    part,
    part_source,
    W: tl.constexpr,
    BE: tl.constexpr,
    BW: tl.constexpr,
    ACC: tl.constexpr,
    FRESH: tl.constexpr,
    FOLD: tl.constexpr,
    WRITE: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Reduce one piece of a long CSR row to the output row, or to its slot of `part` if the row is cut."""
    task = tl.program_id(0)
    begin, end, slot = tl.load(task_begin + task), tl.load(task_end + task), tl.load(task_slot + task)
    columns = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = columns < W
    value = tl.full([BW], EMPTY, ACC)
    source = tl.full([BW], NO_SOURCE, tl.int32)
    edges = begin + tl.arange(0, BE)
    other = tl.load(indices + edges, mask=edges < end, other=NO_SOURCE)
    for start in range(begin, end, BE):
        edges = start + tl.arange(0, BE)
        following = tl.load(indices + edges + BE, mask=edges + BE < end, other=NO_SOURCE)
        mask = (edges < end)[:, None] & inside[None, :]
        place = x + other.to(tl.int64)[:, None] * W + columns[None, :]
        tile = tl.load(place, mask=mask, other=EMPTY).to(ACC)
        if weights is not None:
            tile *= tl.load(weights + edges, mask=edges < end, other=0.0).to(ACC)[:, None]
        value, source = FOLD(value, source, tile, other[:, None], True)
        other = following
    if slot >= 0:
        place = slot.to(tl.int64) * W + columns
        tl.store(part + place, value, mask=inside)
        if part_source is not None:
            tl.store(part_source + place, source, mask=inside)
    else:
        row = tl.load(task_row + task).to(tl.int64)
        if rows is not None:
            row = tl.load(rows + row)
        WRITE(out, arg, ids, row * W + columns, inside, value, source, FRESH)


@triton.jit
def _combine(
    split_row,
    split_first,
    part,
    part_source,
    rows,
    ids,
    out,
    arg,
    W: tl.constexpr,
    BS: tl.constexpr,
    BW: tl.constexpr,
    ACC: tl.constexpr,
    FRESH: tl.constexpr,
    FOLD: tl.constexpr,
    WRITE: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Combine the pieces of one cut row."""
    split = tl.program_id(0)
    first, last = tl.load(split_first + split), tl.load(split_first + split + 1)
    columns = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = columns < W
    value = tl.full([BW], EMPTY, ACC)
    source = tl.full([BW], NO_SOURCE, tl.int32)
    for start in range(first, last, BS):
        slots = start + tl.arange(0, BS)
        mask = (slots < last)[:, None] & inside[None, :]
        place = slots.to(tl.int64)[:, None] * W + columns[None, :]
        tile = tl.load(part + place, mask=mask, other=EMPTY)
        other = place if part_source is None else tl.load(part_source + place, mask=mask, other=NO_SOURCE)
        value, source = FOLD(value, source, tile, other, True)
    row = tl.load(split_row + split).to(tl.int64)
    if rows is not None:
        row = tl.load(rows + row)
    WRITE(out, arg, ids, row * W + columns, inside, value, source, FRESH)


def reduce_rows(
    how: Reduction,
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    out: Tensor,
    *,
    fresh: bool,
    rows: Tensor | None,
    weights: Tensor | None = None,
    arg: Tensor | None = None,
    ids: Tensor | None = None,
) -> None:
    """Reduce CSR rows to `out`, with ids of their sources in `arg`. Shapes: x [M, ...], out, arg [N, ...], ids [M]."""
    table, acc = flat_rows(x), accumulate_dtype(x.dtype)
    tasks, width, item = tasks_of(indptr), table.shape[1], x.element_size()
    ends = {"indices": indices.contiguous(), "x": table, "weights": weights, "rows": rows, "ids": ids}
    ends |= {"out": out, "arg": arg}
    common = {"W": width, "ACC": tl.float64 if acc == torch.float64 else tl.float32, "FRESH": fresh, "num_warps": 1}
    common |= {"FOLD": how.fold, "WRITE": how.write, "EMPTY": how.empty}
    for members, bound in zip(tasks.low, LOW, strict=True):
        r, columns = low_tile(width, item, how.bound or bound)
        if (n := members.shape[0]) > 0:
            grid = triton.cdiv(n, r), triton.cdiv(width, columns)
            _low[grid](members, n, indptr, **ends, R=r, BW=columns, BOUND=bound, **common)
    edges, columns = piece_tile(width, item)
    tiles = triton.cdiv(width, columns)
    part = table.new_empty((tasks.num_slots, width), dtype=acc)
    parts = {"part": part, "part_source": None if arg is None else tasks.row.new_empty(part.shape)}
    if tasks.num_pieces > 0:
        pieces = tasks.row, tasks.begin, tasks.end, tasks.slot
        _piece[tasks.num_pieces, tiles](*pieces, **ends, **parts, BE=edges, BW=columns, **common)
    if tasks.num_slots > 0:
        ends = {name: ends[name] for name in ("rows", "ids", "out", "arg")}
        splits = tasks.split_row, tasks.split_first
        _combine[splits[0].shape[0], tiles](*splits, **ends, **parts, BS=how.slots, BW=columns, **common)
