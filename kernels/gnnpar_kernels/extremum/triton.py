"""Maximum over in-edges with its winner: value and source compared in registers, ties to the smaller source.

Ids ascend with sources, so winners within a block are decided by local numbers; an id is read once per winner, to
compare it with the state.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnpar_kernels.csr import accumulate_dtype, flat_rows
from gnnpar_kernels.extremum import naive
from gnnpar_kernels.extremum.naive import State
from gnnpar_kernels.triton_tasks import LOW, low_tile, piece_tile, tasks_of
from gnnpar_kernels.triton_tuning import ROW_SHAPES, Variant, distinct, row_list, row_shape

SLOTS = 4  # pieces of a cut row that are read at once
NO_WINNER: tl.constexpr = tl.constexpr(2**31 - 1)  # above every source


@triton.jit
def _fold(best, source, value, other):
    """Return the larger of two values with its source, the smaller source if they are equal."""
    top = tl.maximum(best, value)
    return top, tl.minimum(tl.where(best == top, source, NO_WINNER), tl.where(value == top, other, NO_WINNER))


@triton.jit
def _fold_tile(best, source, value, other):
    """Fold the edges of a tile. Shapes: best and source [BW], value and other [BE, BW]."""
    top = tl.max(value, 0)
    return _fold(best, source, top, tl.min(tl.where(value == top[None, :], other, NO_WINNER), 0))


@triton.jit
def _write(best, arg, src_ids, place, mask, top, source, FRESH: tl.constexpr):
    """Merge the winners of this block into the state."""
    won = mask & (source != NO_WINNER)
    if FRESH:
        winner = tl.load(src_ids + source, mask=won, other=-1)
    else:  # what cannot win needs no id
        best_before, arg_before = tl.load(best + place, mask=won, other=0.0), tl.load(arg + place, mask=won, other=0)
        won &= (top >= best_before) | (arg_before < 0)
        winner = tl.load(src_ids + source, mask=won, other=-1)
        mask = won & ((top != best_before) | (winner < arg_before) | (arg_before < 0))
    tl.store(best + place, top, mask=mask)
    tl.store(arg + place, winner, mask=mask)


@triton.jit(do_not_specialize=["num_members"])
def _low_kernel(
    members,
    num_members,
    indptr,
    indices,
    x,
    src_ids,
    rows,
    best,
    arg,
    W: tl.constexpr,
    R: tl.constexpr,
    BW: tl.constexpr,
    BOUND: tl.constexpr,
    ACC: tl.constexpr,
    FRESH: tl.constexpr,
):
    """Short CSR rows, several to a program, each with at most BOUND edges."""
    member = tl.program_id(0) * R + tl.arange(0, R)
    inside = member < num_members
    row = tl.load(members + member, mask=inside, other=0).to(tl.int64)
    begin = tl.load(indptr + row, mask=inside, other=0)
    length = (tl.load(indptr + row + 1, mask=inside, other=0) - begin).to(tl.int32)
    columns = tl.program_id(1) * BW + tl.arange(0, BW)
    top = tl.full([R, BW], -float("inf"), ACC)
    source = tl.full([R, BW], NO_WINNER, tl.int32)
    for k in tl.static_range(BOUND):
        here = k < length
        other = tl.load(indices + begin + k, mask=here, other=NO_WINNER).to(tl.int32)
        mask = here[:, None] & (columns < W)[None, :]
        place = x + other.to(tl.int64)[:, None] * W + columns[None, :]
        top, source = _fold(top, source, tl.load(place, mask=mask, other=-float("inf")).to(ACC), other[:, None])
    if rows is not None:
        row = tl.load(rows + row, mask=inside, other=0)
    mask = inside[:, None] & (columns < W)[None, :]
    _write(best, arg, src_ids, row[:, None] * W + columns[None, :], mask, top, source, FRESH)


@triton.jit
def _piece_kernel(
    task_row,
    task_begin,
    task_end,
    task_slot,
    indices,
    x,
    src_ids,
    rows,
    best,
    arg,
    part_best,
    part_source,
    W: tl.constexpr,
    BE: tl.constexpr,
    BW: tl.constexpr,
    ACC: tl.constexpr,
    FRESH: tl.constexpr,
):
    """One piece of a long CSR row: its winners are merged into the state, or go to its slot if the row is cut."""
    task = tl.program_id(0)
    begin, end, slot = tl.load(task_begin + task), tl.load(task_end + task), tl.load(task_slot + task)
    columns = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = columns < W
    top = tl.full([BW], -float("inf"), ACC)
    source = tl.full([BW], NO_WINNER, tl.int32)
    edges = begin + tl.arange(0, BE)
    other = tl.load(indices + edges, mask=edges < end, other=NO_WINNER).to(tl.int32)
    for start in range(begin, end, BE):
        edges = start + tl.arange(0, BE)
        following = tl.load(indices + edges + BE, mask=edges + BE < end, other=NO_WINNER).to(tl.int32)
        mask = (edges < end)[:, None] & inside[None, :]
        tile = tl.load(x + other.to(tl.int64)[:, None] * W + columns[None, :], mask=mask, other=-float("inf"))
        top, source = _fold_tile(top, source, tile.to(ACC), other[:, None])
        other = following
    if slot >= 0:
        place = slot.to(tl.int64) * W + columns
        tl.store(part_best + place, top, mask=inside)
        tl.store(part_source + place, source, mask=inside)
    else:
        row = tl.load(task_row + task).to(tl.int64)
        if rows is not None:
            row = tl.load(rows + row)
        _write(best, arg, src_ids, row * W + columns, inside, top, source, FRESH)


@triton.jit
def _combine_kernel(
    split_row,
    split_first,
    part_best,
    part_source,
    src_ids,
    rows,
    best,
    arg,
    W: tl.constexpr,
    BS: tl.constexpr,
    BW: tl.constexpr,
    ACC: tl.constexpr,
    FRESH: tl.constexpr,
):
    """Return the winners among the pieces of one cut row."""
    split = tl.program_id(0)
    first, last = tl.load(split_first + split), tl.load(split_first + split + 1)
    columns = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = columns < W
    top = tl.full([BW], -float("inf"), ACC)
    source = tl.full([BW], NO_WINNER, tl.int32)
    for start in range(first, last, BS):
        slots = start + tl.arange(0, BS)
        mask = (slots < last)[:, None] & inside[None, :]
        place = slots.to(tl.int64)[:, None] * W + columns[None, :]
        values = tl.load(part_best + place, mask=mask, other=-float("inf"))
        top, source = _fold_tile(top, source, values, tl.load(part_source + place, mask=mask, other=NO_WINNER))
    row = tl.load(split_row + split).to(tl.int64)
    if rows is not None:
        row = tl.load(rows + row)
    _write(best, arg, src_ids, row * W + columns, inside, top, source, FRESH)


def _low_tile(width: int, itemsize: int) -> tuple[int, int]:
    """As for sums of the longest short rows: winners and state take registers too, so shorter rows are not more."""
    return low_tile(width, itemsize, LOW[-1])


def extremum(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    src_ids: Tensor,
    *,
    num_rows: int,
    rows: Tensor | None = None,
    state: State | None = None,
) -> State:
    """See `naive.extremum`. A given state is updated in place."""
    assert rows is not None or indptr.shape[0] == num_rows + 1, f"{indptr.shape[0] - 1} CSR rows, {num_rows} of output"
    table, shape = flat_rows(x), (num_rows, *x.shape[1:])
    empty = indices.shape[0] == 0 or table.shape[1] == 0
    fresh = state is None and rows is None and not empty
    if fresh:
        result = x.new_empty(shape), src_ids.new_empty(shape)
    elif state is None:
        result = x.new_full(shape, -torch.inf), src_ids.new_full(shape, -1)
    else:
        result = state[0].contiguous(), state[1].contiguous()
    if not empty:
        _launch(indptr, indices.contiguous(), table, src_ids.contiguous(), rows, result, fresh=fresh)
    if state is None:
        return result
    for given, updated in zip(state, result, strict=True):
        if given is not updated:
            given.copy_(updated)
    return state


def _launch(
    indptr: Tensor, indices: Tensor, x: Tensor, src_ids: Tensor, rows: Tensor | None, state: State, *, fresh: bool
) -> None:
    """Every CSR row in one of three kernels. Shapes: x [M, W], state tensors of N * W entries each."""
    tasks, width, item = tasks_of(indptr), x.shape[1], x.element_size()
    acc = accumulate_dtype(x.dtype)
    common = {"W": width, "ACC": tl.float64 if acc == torch.float64 else tl.float32, "FRESH": fresh, "num_warps": 1}
    r, columns = _low_tile(width, item)
    for members, bound in zip(tasks.low, LOW, strict=True):
        if (n := members.shape[0]) > 0:
            _low_kernel[triton.cdiv(n, r), triton.cdiv(width, columns)](
                members, n, indptr, indices, x, src_ids, rows, *state, R=r, BW=columns, BOUND=bound, **common
            )
    edges, columns = piece_tile(width, item)
    tiles = triton.cdiv(width, columns)
    parts = x.new_empty((tasks.num_slots, width), dtype=acc), tasks.row.new_empty((tasks.num_slots, width))
    if tasks.num_pieces > 0:
        _piece_kernel[tasks.num_pieces, tiles](
            tasks.row,
            tasks.begin,
            tasks.end,
            tasks.slot,
            indices,
            x,
            src_ids,
            rows,
            *state,
            *parts,
            BE=edges,
            BW=columns,
            **common,
        )
    if tasks.num_slots > 0:
        _combine_kernel[tasks.split_row.shape[0], tiles](
            tasks.split_row, tasks.split_first, *parts, src_ids, rows, *state, BS=SLOTS, BW=columns, **common
        )


def extremum_grad(arg: Tensor, src_ids: Tensor, grad_out: Tensor) -> Tensor:
    """See `naive.extremum_grad`, summed in fp32 at least. torch's atomics: their order, so the last bits, may vary."""
    grad_x = naive.extremum_grad(arg, src_ids, grad_out.to(accumulate_dtype(grad_out.dtype)))
    return grad_x.to(grad_out.dtype)


def variants() -> list[Variant]:
    """Return the variants to compile ahead of time: every shape with short rows, pieces and combined pieces; at 128
    columns all of training."""
    cases = []
    for fresh, (width, dtype) in enumerate(ROW_SHAPES):
        cases += _variants(width, dtype, fresh=bool(fresh % 2), listed=True)
    for width in (8, 10, 128):
        cases += _variants(width, "fp32", fresh=True, listed=True, index="*i64", which=" by int64")
    for dtype, fresh, listed in itertools.product(("fp32", "bf16"), (False, True), (False, True)):
        which = " all rows" * (not listed) + (" fresh" if fresh else " added")
        cases += _variants(128, dtype, fresh=fresh, listed=listed, which=which)
    return distinct(cases)


def _variants(
    width: int, dtype: str, *, fresh: bool, listed: bool, index: str = "*i32", which: str = ""
) -> list[Variant]:
    cases = []
    item, constants, wide = row_shape(width, dtype)
    rows, no_rows = row_list(listed)
    constants |= {"FRESH": fresh} | no_rows
    ends = {"src_ids": "*i64", "best": f"*{dtype}", "arg": "*i64"} | rows
    parts = {"part_best": "*fp64" if dtype == "fp64" else "*fp32", "part_source": "*i32"}
    graph, name = {"indices": index, "x": f"*{dtype}"} | ends, f"{width} {dtype}{which}"
    for bound in LOW:
        r, columns = _low_tile(width, item)
        types = {"members": "*i32", "num_members": "i32", "indptr": index} | graph
        given = constants | {"R": r, "BW": columns, "BOUND": bound}
        cases.append(Variant(f"extremum low {bound} {name}", _low_kernel, types, given, wide=wide))
    edges, columns = piece_tile(width, item)
    types = {"task_row": "*i32", "task_begin": index, "task_end": index, "task_slot": "*i32"} | graph | parts
    given = constants | {"BE": edges, "BW": columns}
    cases.append(Variant(f"extremum piece {name}", _piece_kernel, types, given, wide=wide))
    types = {"split_row": "*i32", "split_first": "*i32"} | parts | ends
    given = constants | {"BS": SLOTS, "BW": columns}
    cases.append(Variant(f"extremum combine {name}", _combine_kernel, types, given, wide=False))
    return cases
