"""GAT aggregation in one pass over in-edges: scores, online softmax and weighted sum in registers, no edge tensor."""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false

import itertools

import triton
import triton.language as tl
from torch import Tensor

from gnnpar_kernels.attend.cpu import attend_finish
from gnnpar_kernels.attend.naive import Drop, State, empty_state, uninitialised_state
from gnnpar_kernels.attend.triton_grad import (
    attend_grad,
    attend_grad_dst,
    attend_grad_dst_of,
    attend_grad_src,
    row_dots,
)
from gnnpar_kernels.attend.triton_tiles import (
    LAUNCHES,
    RUNTIME,
    SHAPES,
    TILES,
    Dims,
    Shape,
    dropped,
    dropping,
    edges_per_step,
    rows_per_program,
    run_tasks,
    score,
    span,
    tile_width,
    trained,
)
from gnnpar_kernels.csr import accumulate_dtype
from gnnpar_kernels.triton_tasks import LOW, tasks_of
from gnnpar_kernels.triton_tuning import Tuned, Variant, distinct, tuned

__all__ = [
    "attend",
    "attend_finish",  # three passes over nodes: plain torch, in place
    "attend_grad",
    "attend_grad_dst",
    "attend_grad_dst_of",
    "attend_grad_src",
    "row_dots",
    "variants",
]

STATE = ["m_ptr", "mass_ptr", "acc_ptr", "mass_pos_ptr", "acc_pos_ptr"]


@triton.jit
def shift_of(m):
    """Return the reference of exponents: the maximum, or 0 without an edge."""
    return tl.where(m == float("-inf"), 0.0, m)


@tuned(TILES, key=["H", "D", "BOUND", "SPLIT", "BRANCH"], types=["x_ptr"], restores=STATE)
@triton.jit(do_not_specialize=RUNTIME)
def _fold(
    row_ptr,
    begin_ptr,
    end_ptr,
    first,
    last,
    rows_ptr,
    indices_ptr,
    ids_ptr,
    x_ptr,
    a_src_ptr,
    a_dst_ptr,
    m_ptr,
    mass_ptr,
    acc_ptr,
    mass_pos_ptr,
    acc_pos_ptr,
    k0,
    k1,
    k2,
    limit,
    SCALE: tl.constexpr,
    SLOPE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    HG: tl.constexpr,
    DP: tl.constexpr,
    BOUND: tl.constexpr,
    SPLIT: tl.constexpr,
    FRESH: tl.constexpr,
    BRANCH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fold the edges of R rows into their states, or the edges of a piece into its own state (SPLIT)."""
    B: tl.constexpr = edges_per_step(TILE, tile_width(D, HG, DP), BOUND)
    R: tl.constexpr = rows_per_program(TILE, tile_width(D, HG, DP), BOUND)
    piece, row, begin, end = span(row_ptr, begin_ptr, end_ptr, first, last, R, BOUND)
    name = row.to(tl.int64) if rows_ptr is None else tl.load(rows_ptr + row)
    head = (tl.program_id(1) * HG + tl.arange(0, HG))[None, None, :, None]
    column = tl.arange(0, DP)[None, None, None, :]
    own_head = (name * H)[:, None, None, None] + head
    near = tl.load(a_dst_ptr + own_head, mask=head < H, other=0.0).to(m_ptr.dtype.element_ty)
    if SPLIT:
        own_head = (piece.to(tl.int64) * H)[:, None, None, None] + head
    live = (piece < last) if FRESH else (begin < end)
    here = live[:, None, None, None] & (head < H)
    own, here_wide = own_head * D + column, here & (column < D)
    if FRESH:
        m = tl.full([R, 1, HG, 1], float("-inf"), m_ptr.dtype.element_ty)
        mass = tl.zeros([R, 1, HG, 1], m.dtype)
        acc = tl.zeros([R, 1, HG, DP], m.dtype)
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
        tile = tl.load(x_ptr + (source * D + column), mask=mask & (column < D), other=0.0).to(m.dtype)
        raw, activated = score(tl.load(a_src_ptr + source, mask=mask, other=0.0).to(m.dtype), near, SLOPE)
        activated = tl.where(mask, activated, float("-inf"))
        top = tl.maximum(m, tl.max(activated, 1, keep_dims=True))
        shrink = tl.exp(m - shift_of(top))
        weight = tl.exp(activated - shift_of(top))
        mass = mass * shrink + tl.sum(weight, 1, keep_dims=True)
        kept = dropped(weight, ids_ptr, edge, valid, head, k0, k1, k2, limit, SCALE)
        acc = acc * shrink + tl.sum(kept * tile, 1, keep_dims=True)
        if BRANCH:
            mass_pos = mass_pos * shrink + tl.sum(tl.where(raw > 0, weight, 0.0), 1, keep_dims=True)
            acc_pos = acc_pos * shrink + tl.sum(tl.where(raw > 0, kept, 0.0) * tile, 1, keep_dims=True)
        m = top
        edge += B
    tl.store(m_ptr + own_head, m, mask=here)
    tl.store(mass_ptr + own_head, mass, mask=here)
    tl.store(acc_ptr + own, acc, mask=here_wide)
    if BRANCH:
        tl.store(mass_pos_ptr + own_head, mass_pos, mask=here)
        tl.store(acc_pos_ptr + own, acc_pos, mask=here_wide)


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
    """Merge the states of one split row's pieces, in order, into the row's own."""
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


def attend(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    *,
    slope: float,
    num_rows: int,
    rows: Tensor | None = None,
    state: State | None = None,
    drop: Drop | None = None,
    edge_ids: Tensor | None = None,
    branch: bool = False,
) -> State:
    """See `naive.attend`. A given state is updated in place."""
    arguments = {
        "indices_ptr": indices.contiguous(),
        "x_ptr": x.contiguous(),
        "SLOPE": slope,
        "a_src_ptr": a_src.contiguous(),
        "a_dst_ptr": a_dst.contiguous(),
        "BRANCH": branch,
        **dropping(drop, edge_ids),
    }
    if indices.shape[0] == 0:
        return empty_state(num_rows, x, accumulate_dtype(x.dtype), branch) if state is None else state
    return run_fold(_fold, indptr, x, rows=rows, num_rows=num_rows, state=state, branch=branch, **arguments)


def run_fold(
    kernel: Tuned,
    indptr: Tensor,
    x: Tensor,
    *,
    rows: Tensor | None,
    num_rows: int,
    state: State | None,
    branch: bool,
    extra: int = 0,
    **arguments: object,
) -> State:
    """Launch a fold over the rows of a CSR with edges, pieces of split rows apart, which are then combined.

    `extra`: columns of the result beside those of x.
    """
    dims, indptr = Dims.of(x), indptr.contiguous()
    x = x.new_empty((0, dims.H, dims.D + extra)) if extra else x
    fresh, tasks = state is None, tasks_of(indptr)
    if state is not None:
        result = state
    elif rows is None:
        result = uninitialised_state(num_rows, x, branch)
    else:
        result = empty_state(num_rows, x, accumulate_dtype(x.dtype), branch)
    work = tuple(t.contiguous() for t in result)
    parts = uninitialised_state(tasks.num_slots, x, branch)

    def own(state: State) -> dict[str, Tensor | None]:
        return {name: t for name, t in _named(state).items() if name in kernel.fn.arg_names}

    run_tasks(
        kernel,
        indptr,
        dims,
        rows_ptr=rows,
        **arguments,
        whole={**own(work), "FRESH": fresh},
        parts={**own(parts), "FRESH": True},
    )
    dims = Dims.of(x)
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


def variants() -> list[Variant]:
    """Return the variants of the ahead-of-time test: main shapes, and all shapes of training, with all tiles."""
    cases = []
    training = [Shape(4, 64, t, drop=d, branch=True, whole=True) for t in ("fp32", "bf16") for d in (False, True)]
    for shape in [*SHAPES, Shape(4, 64, "bf16", branch=True), Shape(4, 64, "bf16", drop=True, branch=True), *training]:
        types, constants = _given(shape)
        for config, bound in itertools.product(TILES, (0, *LOW)):
            how = {"BOUND": bound, "SPLIT": shape.whole and bound == 0, "FRESH": bound > 0 or shape.whole}
            cases.append(shape.variant("fold", _fold.fn, types, constants | how, config))
        cases.append(_combined(shape, fresh=False))
    for shape in trained(branches=True, mixed=False):
        types, constants = _given(shape)
        for (bound, split), fresh in itertools.product(LAUNCHES, (True, False)):
            if fresh or not split:  # a piece has a state of its own
                how = {"BOUND": bound, "SPLIT": split, "FRESH": fresh}
                which = " split" * split + (" fresh" if fresh else " added")
                for config in TILES:
                    cases.append(shape.variant("fold", _fold.fn, types, constants | how, config, which))
        cases += [_combined(shape, fresh=fresh, which=" fresh" if fresh else " added") for fresh in (True, False)]
    return distinct(cases)


def _given(shape: Shape) -> tuple[dict[str, str], dict[str, object]]:
    """(types, constants) of a fold."""
    state = dict.fromkeys(STATE if shape.branch else STATE[:3], "*fp32")
    types = {"x_ptr": "*" + shape.dtype, "a_src_ptr": "*fp32", "a_dst_ptr": "*fp32", **state}
    return types, {"BRANCH": shape.branch, **dict.fromkeys(STATE[len(state) :])}


def _combined(shape: Shape, *, fresh: bool, which: str = "") -> Variant:
    state = {name: kind for name, kind in _given(shape)[0].items() if name in STATE}
    parts = {"part_" + name: value for name, value in state.items()}
    constants = _given(shape)[1] | {"FRESH": fresh} | {"part_" + name: None for name in STATE[len(state) :]}
    combine = shape.variant("combine", _combine, {**state, **parts}, constants, None, which)
    return combine._replace(wide=False)  # once per piece
