"""Sum over in-edges in registers: every edge gathers its row once, the order of sums is fixed, no atomics."""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnpar_kernels.csr import accumulate_dtype, flat_rows
from gnnpar_kernels.triton_tasks import LOW, low_tile, piece_tile, tasks_of
from gnnpar_kernels.triton_tuning import ROW_SHAPES, TRAINED, Variant, distinct, row_list, row_shape

SLOTS = 8  # pieces of a cut row that are read at once


@triton.jit
def _write(place, total, mask, ACCUMULATE: tl.constexpr):
    if ACCUMULATE:
        total += tl.load(place, mask=mask, other=0.0)
    tl.store(place, total, mask=mask)


@triton.jit(do_not_specialize=["num_members"])
def _low_kernel(
    members,
    num_members,
    indptr,
    indices,
    x,
    rows,
    out,
    weights,
    W: tl.constexpr,
    R: tl.constexpr,
    BW: tl.constexpr,
    BOUND: tl.constexpr,
    ACC: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Short CSR rows, R to a program, each with at most BOUND edges."""
    member = tl.program_id(0) * R + tl.arange(0, R)
    inside = member < num_members
    row = tl.load(members + member, mask=inside, other=0).to(tl.int64)
    begin = tl.load(indptr + row, mask=inside, other=0)
    length = (tl.load(indptr + row + 1, mask=inside, other=0) - begin).to(tl.int32)
    columns = tl.program_id(1) * BW + tl.arange(0, BW)
    total = tl.zeros([R, BW], ACC)
    for k in tl.static_range(BOUND):
        here = k < length
        source = tl.load(indices + begin + k, mask=here, other=0).to(tl.int64)
        mask = here[:, None] & (columns < W)[None, :]
        tile = tl.load(x + source[:, None] * W + columns[None, :], mask=mask, other=0.0).to(ACC)
        if weights is not None:
            tile *= tl.load(weights + begin + k, mask=here, other=0.0).to(ACC)[:, None]
        total += tile
    if ACCUMULATE:
        inside = length > 0
    if rows is not None:
        row = tl.load(rows + row, mask=inside, other=0)
    _write(out + row[:, None] * W + columns[None, :], total, inside[:, None] & (columns < W)[None, :], ACCUMULATE)


@triton.jit
def _piece_kernel(
    task_row,
    task_begin,
    task_end,
    task_slot,
    indices,
    x,
    rows,
    out,
    partial,
    weights,
    W: tl.constexpr,
    BE: tl.constexpr,
    BW: tl.constexpr,
    ACC: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """One piece of a long CSR row: its sum goes to the output row, or to its slot of `partial` if the row is cut."""
    task = tl.program_id(0)
    begin, end, slot = tl.load(task_begin + task), tl.load(task_end + task), tl.load(task_slot + task)
    columns = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = columns < W
    total = tl.zeros([BW], ACC)
    edges = begin + tl.arange(0, BE)
    source = tl.load(indices + edges, mask=edges < end, other=0)
    for start in range(begin, end, BE):
        edges = start + tl.arange(0, BE)
        following = tl.load(indices + edges + BE, mask=edges + BE < end, other=0)
        mask = (edges < end)[:, None] & inside[None, :]
        tile = tl.load(x + source.to(tl.int64)[:, None] * W + columns[None, :], mask=mask, other=0.0).to(ACC)
        if weights is not None:
            tile *= tl.load(weights + edges, mask=edges < end, other=0.0).to(ACC)[:, None]
        total += tl.sum(tile, 0)
        source = following
    if slot >= 0:
        tl.store(partial + slot.to(tl.int64) * W + columns, total, mask=inside)
    else:
        row = tl.load(task_row + task).to(tl.int64)
        if rows is not None:
            row = tl.load(rows + row)
        _write(out + row * W + columns, total, inside, ACCUMULATE)


@triton.jit
def _combine_kernel(
    split_row,
    split_first,
    partial,
    rows,
    out,
    W: tl.constexpr,
    BW: tl.constexpr,
    BS: tl.constexpr,
    ACC: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Add the pieces of one cut row."""
    split = tl.program_id(0)
    first, last = tl.load(split_first + split), tl.load(split_first + split + 1)
    columns = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = columns < W
    total = tl.zeros([BW], ACC)
    for start in range(first, last, BS):
        slots = start + tl.arange(0, BS)
        mask = (slots < last)[:, None] & inside[None, :]
        total += tl.sum(tl.load(partial + slots.to(tl.int64)[:, None] * W + columns[None, :], mask=mask, other=0.0), 0)
    row = tl.load(split_row + split).to(tl.int64)
    if rows is not None:
        row = tl.load(rows + row)
    _write(out + row * W + columns, total, inside, ACCUMULATE)


def spmm(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    *,
    num_rows: int,
    rows: Tensor | None = None,
    weights: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `naive.spmm`. 16-bit rows are summed in fp32 and rounded once; the result is the same at every run."""
    assert rows is not None or indptr.shape[0] == num_rows + 1, f"{indptr.shape[0] - 1} CSR rows, {num_rows} of output"
    table, shape = flat_rows(x), (num_rows, *x.shape[1:])
    if indices.shape[0] == 0 or table.shape[1] == 0:
        return x.new_zeros(shape) if out is None else out
    if out is None:
        result = x.new_empty(shape) if rows is None else x.new_zeros(shape)
    else:
        result = out.contiguous()
    weights = None if weights is None else weights.contiguous()
    _launch(indptr, indices.contiguous(), table, rows, weights, result, accumulate=out is not None)
    return result if out is None or result is out else out.copy_(result)


def _launch(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    rows: Tensor | None,
    weights: Tensor | None,
    out: Tensor,
    *,
    accumulate: bool,
) -> None:
    """Every CSR row in one of three kernels. Shapes: x [M, W], out of N * W entries."""
    tasks, width, item = tasks_of(indptr), x.shape[1], x.element_size()
    acc = accumulate_dtype(x.dtype)
    common = {"W": width, "ACC": tl.float64 if acc == torch.float64 else tl.float32, "ACCUMULATE": accumulate}
    for members, bound in zip(tasks.low, LOW, strict=True):
        r, columns = low_tile(width, item, bound)
        if (n := members.shape[0]) > 0:
            _low_kernel[triton.cdiv(n, r), triton.cdiv(width, columns)](
                members, n, indptr, indices, x, rows, out, weights, R=r, BW=columns, BOUND=bound, **common, num_warps=1
            )
    edges, columns = piece_tile(width, item)
    tiles = triton.cdiv(width, columns)
    partial = x.new_empty((tasks.num_slots, width), dtype=acc)
    if tasks.num_pieces > 0:
        _piece_kernel[tasks.num_pieces, tiles](
            tasks.row,
            tasks.begin,
            tasks.end,
            tasks.slot,
            indices,
            x,
            rows,
            out,
            partial,
            weights,
            BE=edges,
            BW=columns,
            **common,
            num_warps=1,
        )
    if tasks.num_slots > 0:
        _combine_kernel[tasks.split_row.shape[0], tiles](
            tasks.split_row, tasks.split_first, partial, rows, out, BS=SLOTS, BW=columns, **common, num_warps=1
        )


def variants() -> list[Variant]:
    """Return the variants to compile ahead of time: every shape with short rows, pieces and combined pieces; at 128
    columns all of training."""
    cases = []
    for accumulate, (width, dtype) in enumerate(ROW_SHAPES):
        cases += _variants(width, dtype, dtype, accumulate=bool(accumulate % 2), weights=None)
    cases += _variants(128, "fp32", "fp32", accumulate=False, weights="*fp32")
    for width in (8, 10, 128):
        cases += _variants(width, "fp32", "fp32", accumulate=False, weights=None, index="*i64", which=" by int64")
    for (dtype, out), weights in itertools.product(TRAINED, (None, "*fp32")):
        for accumulate, listed in itertools.product((False, True), repeat=2):
            which = f" to {out}" * (out != dtype) + " all rows" * (not listed) + (" added" if accumulate else " fresh")
            cases += _variants(128, dtype, out, accumulate=accumulate, weights=weights, listed=listed, which=which)
    return distinct(cases)


def _variants(
    width: int,
    dtype: str,
    out: str,
    *,
    accumulate: bool,
    weights: str | None,
    listed: bool = True,
    index: str = "*i32",
    which: str = "",
) -> list[Variant]:
    cases = []
    item, constants, wide = row_shape(width, dtype)
    rows, no_rows = row_list(listed)
    constants |= {"ACCUMULATE": accumulate} | no_rows
    ends = {"x": f"*{dtype}", "out": f"*{out}"} | rows
    partial = {"partial": "*fp64" if dtype == "fp64" else "*fp32"}
    given_weights, no_weights = ({}, {"weights": None}) if weights is None else ({"weights": weights}, {})
    op, name = "spmm" if weights is None else "weighted spmm", f"{width} {dtype}{which}"
    for bound in LOW:
        r, columns = low_tile(width, item, bound)
        types = {"members": "*i32", "num_members": "i32", "indptr": index, "indices": index} | ends | given_weights
        given = constants | no_weights | {"R": r, "BW": columns, "BOUND": bound}
        cases.append(Variant(f"{op} low {bound} {name}", _low_kernel, types, given, wide=wide))
    edges, columns = piece_tile(width, item)
    types = {"task_row": "*i32", "task_begin": index, "task_end": index, "task_slot": "*i32", "indices": index}
    types |= ends | partial | given_weights
    given = constants | no_weights | {"BE": edges, "BW": columns}
    cases.append(Variant(f"{op} piece {name}", _piece_kernel, types, given, wide=wide))
    if weights is None:
        types = {"split_row": "*i32", "split_first": "*i32", "out": f"*{out}"} | rows | partial
        given = constants | {"BS": SLOTS, "BW": columns}
        cases.append(Variant(f"{op} combine {name}", _combine_kernel, types, given, wide=False))
    return cases
