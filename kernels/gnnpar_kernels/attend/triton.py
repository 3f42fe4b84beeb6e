"""GAT aggregation in one pass over in-edges: scores, online softmax and weighted sum in registers, no edge tensor."""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from gnnpar_kernels.attend import naive
from gnnpar_kernels.attend import triton_tiles as tiles
from gnnpar_kernels.attend.cpu import attend_finish  # noqa: F401 - three passes over nodes: plain torch, in place
from gnnpar_kernels.attend.naive import Drop, State, Where, empty_state, uninitialised_state
from gnnpar_kernels.attend.triton_grad import _pull, row_dots, run_pull
from gnnpar_kernels.csr import Csr
from gnnpar_kernels.dispatch import specified
from gnnpar_kernels.triton_tasks import tasks_of
from gnnpar_kernels.triton_tuning import Tuned

GATV1 = "attend.triton._fold"  # in tables of tiles
STATE = ["m_ptr", "mass_ptr", "acc_ptr", "mass_pos_ptr", "acc_pos_ptr"]


@triton.jit
def shift_of(m):
    """Return the shift of exponents: the maximum, or 0 without an edge."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit(do_not_specialize=tiles.RUNTIME)
def fold(
    row_ptr,
    begin_ptr,
    end_ptr,
    first,
    last,
    rows_ptr,
    indices_ptr,
    ids_ptr,
    x_ptr,
    far_ptr,
    near_ptr,
    a_ptr,
    edge_ptr,
    edge_query_ptr,
    m_ptr,
    mass_ptr,
    acc_ptr,
    mass_pos_ptr,
    acc_pos_ptr,
    k0,
    k1,
    k2,
    limit,
    SCORE: tl.constexpr,
    SCALE: tl.constexpr,
    SLOPE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    HG: tl.constexpr,
    DP: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    A: tl.constexpr,
    AP: tl.constexpr,
    BOUND: tl.constexpr,
    SPLIT: tl.constexpr,
    FRESH: tl.constexpr,
    BRANCH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fold the edges of R rows into their states, or the edges of a piece into its own state (SPLIT).

    Scores read S columns of both ends: far [M, H, S] (None: x) and near [N, H, S]. A attributes per edge are summed as
    further columns.
    """
    B: tl.constexpr = tiles.edges_per_step(TILE, tiles.tile_width(D, HG, DP), BOUND)
    R: tl.constexpr = tiles.rows_per_program(TILE, tiles.tile_width(D, HG, DP), BOUND)
    dtype: tl.constexpr = m_ptr.dtype.element_ty
    piece, row, begin, end = tiles.span(row_ptr, begin_ptr, end_ptr, first, last, R, BOUND)
    name = row.to(tl.int64) if rows_ptr is None else tl.load(rows_ptr + row)
    head = (tl.program_id(1) * HG + tl.arange(0, HG))[None, None, :, None]
    column = tl.arange(0, DP)[None, None, None, :]
    part = tl.arange(0, SP)[None, None, None, :]
    own_head = (name * H)[:, None, None, None] + head
    near = tl.load(near_ptr + (own_head * S + part), mask=(head < H) & (part < S), other=0.0).to(dtype)
    weigh = near
    if a_ptr is not None:
        weigh = tl.load(a_ptr + (head * D + column), mask=(head < H) & (column < D), other=0.0).to(dtype)
    if edge_ptr is not None:
        attribute = tl.arange(0, AP)[None, None, None, :]
        beside = (head < H) & (attribute < A)
        edge_near = tl.load(edge_query_ptr + (own_head * A + attribute), mask=beside, other=0.0).to(dtype)
    if SPLIT:
        own_head = (piece.to(tl.int64) * H)[:, None, None, None] + head
    live = (piece < last) if FRESH else (begin < end)
    here = live[:, None, None, None] & (head < H)
    own, here_wide = own_head * (D + A) + column, here & (column < D)
    if edge_ptr is not None:
        own_beside, here_beside = own_head * (D + A) + D + attribute, here & (attribute < A)
        edge_acc = tl.zeros([R, 1, HG, AP], dtype)
        if not FRESH:
            edge_acc = tl.load(acc_ptr + own_beside, mask=here_beside, other=0.0)
    if FRESH:
        m = tl.full([R, 1, HG, 1], float("-inf"), dtype)
        mass = tl.zeros([R, 1, HG, 1], dtype)
        acc = tl.zeros([R, 1, HG, DP], dtype)
    else:
        m = tl.load(m_ptr + own_head, mask=here, other=float("-inf"))
        mass = tl.load(mass_ptr + own_head, mask=here, other=0.0)
        acc = tl.load(acc_ptr + own, mask=here_wide, other=0.0)
    if BRANCH:
        if FRESH:
            mass_pos = tl.zeros_like(mass)
            acc_pos = tl.zeros_like(acc)
        else:
            mass_pos = tl.load(mass_pos_ptr + own_head, mask=here, other=0.0)
            acc_pos = tl.load(acc_pos_ptr + own, mask=here_wide, other=0.0)
    edge = begin[:, None] + tl.arange(0, B)[None, :]
    index = tl.load(indices_ptr + edge, mask=edge < end[:, None], other=0)
    for _ in range(0, tl.max(end - begin, 0), B):
        valid = edge < end[:, None]
        source = index.to(tl.int64)[:, :, None, None] * H + head
        index = tl.load(indices_ptr + edge + B, mask=edge + B < end[:, None], other=0)
        mask = valid[:, :, None, None] & (head < H)
        tile = tl.load(x_ptr + (source * D + column), mask=mask & (column < D), other=0.0).to(dtype)
        far = tile
        if far_ptr is not None:
            far = tl.load(far_ptr + (source * S + part), mask=mask & (part < S), other=0.0).to(dtype)
        raw, score = SCORE(far, near, weigh, SLOPE)
        if edge_ptr is not None:
            row_mask = valid[:, :, None, None] & (attribute < A)
            at_edge = edge.to(tl.int64)[:, :, None, None] * A + attribute
            edge_row = tl.load(edge_ptr + at_edge, mask=row_mask, other=0.0).to(dtype)
            score += tl.sum(edge_row * edge_near, 3, keep_dims=True)
        score = tl.where(mask, score, float("-inf"))
        top = tl.maximum(m, tl.max(score, 1, keep_dims=True))
        shrink = tl.exp(m - shift_of(top))
        weight = tl.exp(score - shift_of(top))
        mass = mass * shrink + tl.sum(weight, 1, keep_dims=True)
        kept = tiles.dropped(weight, ids_ptr, edge, valid, head, k0, k1, k2, limit, SCALE)
        acc = acc * shrink + tl.sum(kept * tile, 1, keep_dims=True)
        if edge_ptr is not None:
            edge_acc = edge_acc * shrink + tl.sum(kept * edge_row, 1, keep_dims=True)
        if BRANCH:
            mass_pos = mass_pos * shrink + tl.sum(tl.where(raw > 0, weight, 0.0), 1, keep_dims=True)
            acc_pos = acc_pos * shrink + tl.sum(tl.where(raw > 0, kept, 0.0) * tile, 1, keep_dims=True)
        m = top
        edge += B
    if edge_ptr is not None:
        tl.store(acc_ptr + own_beside, edge_acc, mask=here_beside)
    tl.store(m_ptr + own_head, m, mask=here)
    tl.store(mass_ptr + own_head, mass, mask=here)
    tl.store(acc_ptr + own, acc, mask=here_wide)
    if BRANCH:
        tl.store(mass_pos_ptr + own_head, mass_pos, mask=here)
        tl.store(acc_pos_ptr + own, acc_pos, mask=here_wide)


_fold = Tuned(
    fold, tiles.TILES, key=["H", "D", "BOUND", "SPLIT", "BRANCH"], types=["x_ptr"], restores=STATE, name=GATV1
)


@triton.jit
def _combine(
    split_row_ptr,
    split_first_ptr,
    rows_ptr,
    m_ptr,
    mass_ptr,
    acc_ptr,
    mass_pos_ptr,
    acc_pos_ptr,
    part_m_ptr,
    part_mass_ptr,
    part_acc_ptr,
    part_mass_pos_ptr,
    part_acc_pos_ptr,
    H: tl.constexpr,
    D: tl.constexpr,
    HG: tl.constexpr,
    DP: tl.constexpr,
    FRESH: tl.constexpr,
    BRANCH: tl.constexpr,
):
    """Merge the states of one split row's pieces, in order, into the state of the row."""
    split = tl.program_id(0)
    first, last = tl.load(split_first_ptr + split), tl.load(split_first_ptr + split + 1)
    name = tl.load(split_row_ptr + split).to(tl.int64)
    if rows_ptr is not None:
        name = tl.load(rows_ptr + name)
    head = (tl.program_id(1) * HG + tl.arange(0, HG))[:, None]
    column = tl.arange(0, DP)[None, :]
    here, wide = head < H, (head < H) & (column < D)
    own_head = name * H + head
    own = own_head * D + column
    m = tl.full([HG, 1], float("-inf"), m_ptr.dtype.element_ty)
    mass = tl.zeros([HG, 1], m.dtype)
    acc = tl.zeros([HG, DP], m.dtype)
    mass_pos, acc_pos = mass, acc
    if not FRESH:
        m = tl.load(m_ptr + own_head, mask=here, other=float("-inf"))
        mass = tl.load(mass_ptr + own_head, mask=here, other=0.0)
        acc = tl.load(acc_ptr + own, mask=wide, other=0.0)
        if BRANCH:
            mass_pos = tl.load(mass_pos_ptr + own_head, mask=here, other=0.0)
            acc_pos = tl.load(acc_pos_ptr + own, mask=wide, other=0.0)
    at_head = first.to(tl.int64) * H + head
    for _ in range(first, last):
        at = at_head * D + column
        part_m = tl.load(part_m_ptr + at_head, mask=here, other=float("-inf"))
        top = tl.maximum(m, part_m)
        old, new = tl.exp(m - shift_of(top)), tl.exp(part_m - shift_of(top))
        mass = mass * old + tl.load(part_mass_ptr + at_head, mask=here, other=0.0) * new
        acc = acc * old + tl.load(part_acc_ptr + at, mask=wide, other=0.0) * new
        if BRANCH:
            mass_pos = mass_pos * old + tl.load(part_mass_pos_ptr + at_head, mask=here, other=0.0) * new
            acc_pos = acc_pos * old + tl.load(part_acc_pos_ptr + at, mask=wide, other=0.0) * new
        m = top
        at_head += H
    tl.store(m_ptr + own_head, m, mask=here)
    tl.store(mass_ptr + own_head, mass, mask=here)
    tl.store(acc_ptr + own, acc, mask=wide)
    if BRANCH:
        tl.store(mass_pos_ptr + own_head, mass_pos, mask=here)
        tl.store(acc_pos_ptr + own, acc_pos, mask=wide)


@specified(naive.attend)
def attend(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    *,
    slope: float,
    branch: bool,
    **where: Unpack[Where],
) -> State:
    score = {"SCORE": tiles.sum_score, "SLOPE": slope, "near": a_dst, "operands": {"far": a_src}}
    return fold_rows(_fold, indptr, indices, x, **score, branch=branch, **where)


def fold_rows(
    kernel: Tuned,
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    *,
    SCORE: JITFunction,
    SLOPE: float,
    near: Tensor,
    edge: Tensor | None = None,
    branch: bool = False,
    operands: dict[str, Tensor | None] | None = None,
    **where: Unpack[Where],
) -> State:
    """Launch a fold over the rows of a CSR with edges. Pieces of split rows have separate states, combined at the end.

    The columns of `edge` [E, A] are summed as further columns of x. `operands`: other tensors that scores read.
    """
    dims, extra = tiles.Dims.of(x), 0 if edge is None else edge.shape[1]
    arguments = tiles.pointers(indices=indices, x=x, near=near, edge=edge, rows=where["rows"], **(operands or {}))
    arguments |= {"SCORE": SCORE, "SLOPE": SLOPE, "BRANCH": branch} | tiles.dropping(where["drop"], where["edge_ids"])
    arguments |= tiles.padded("S", dims.D if near.dim() == 3 else 1) | tiles.padded("A", extra)
    x = x.new_empty((0, dims.H, dims.D + extra)) if extra else x
    state, rows, num_rows = where["state"], where["rows"], where["num_rows"]
    if indices.shape[0] == 0:
        return empty_state(num_rows, x, branch) if state is None else state
    indptr = indptr.contiguous()
    fresh, tasks = state is None, tasks_of(indptr)
    result = state or (uninitialised_state if rows is None else empty_state)(num_rows, x, branch)
    work = tuple(t.contiguous() for t in result)
    parts = uninitialised_state(tasks.num_slots, x, branch)
    whole = {**_named(work), "FRESH": fresh}
    tiles.run_tasks(kernel, indptr, dims, whole=whole, parts={**_named(parts), "FRESH": True}, **arguments)
    dims = tiles.Dims.of(x)
    if tasks.num_slots and dims.groups:
        _combine[tasks.split_row.shape[0], dims.groups](
            tasks.split_row,
            tasks.split_first,
            rows,
            **_named(work),
            **_named(parts, "part_"),
            **dims._asdict(),
            FRESH=fresh,
            BRANCH=branch,
            num_warps=1,
        )
    for given, updated in zip(result, work, strict=True):
        if given is not updated:
            given.copy_(updated)
    return result


def _named(state: State, prefix: str = "") -> dict[str, Tensor | None]:
    """Return the tensors of a state as kernel arguments."""
    return dict(zip((prefix + name for name in STATE), (*state, None, None), strict=False))


def _gradients(
    indptr: Tensor,
    indices: Tensor,
    tensors: tuple[Tensor, ...],
    *,
    source: bool,
    slope: float,
    rows: Tensor | None,
    drop: Drop | None,
    edge_ids: Tensor | None,
    delta: Tensor,
) -> list[Tensor]:
    """Return the gradients of one side, see `naive.sides`."""
    x, a_src, a_dst, _, lse, grad_out = tensors
    ends = torch.stack([a_dst.to(lse.dtype), lse, delta], 1)  # [N, 3, H], of a destination
    table, own = (grad_out, x) if source else (x, grad_out)
    operands = {**tiles.pointers(table=table, own=own, a_src=a_src, ends=ends), "SOURCE": source, "SLOPE": slope}
    likes = {"grad_rows_ptr": x, "grad_ptr": a_src} if source else {"grad_ptr": a_dst}
    csr = Csr(indptr, indices, rows, edge_ids)
    return run_pull(_pull, csr, tiles.Dims.of(x), drop, likes, dtype=lse.dtype, **operands)


attend_grad_src, attend_grad_dst, attend_grad = naive.sides(_gradients, row_dots)


@specified(naive.attend_grad_dst_of)
def attend_grad_dst_of(
    grad_out: Tensor, out: Tensor, pos: Tensor, mass_pos: Tensor, *, slope: float, delta: Tensor | None
) -> Tensor:
    dtype = mass_pos.dtype
    delta = row_dots(grad_out, out, dtype=dtype) if delta is None else delta.to(dtype)
    return row_dots(grad_out, pos, dtype=dtype).sub_(mass_pos * delta).mul_(1.0 - slope)
