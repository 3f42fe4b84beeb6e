"""GATv2 aggregation in one pass over in-edges, and its gradients in one pass from either side: no edge tensor.

Every edge's score needs both ends' rows. A program holds the row of its own side; the other side's is gathered, from
the source's side with the gradient of the result as well. With z = x_j + y_i, s' the slope of the activation at z,
K the dropout mask, ds_ij = alpha_ij (K <dO_i, x_j> - Delta_i):
    dy_i = a sum_j ds s'(z)                          forward CSR
    dx_j = a sum_i ds s'(z) + sum_i alpha K dO_i     reverse CSR
    da   = sum_i <y_i, dy_i / a> + sum_j <x_j, sum_i ds s'(z)>, by column: from rows, without an edge or an atomic
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnpar_kernels.attend.naive import Drop, State, empty_state
from gnnpar_kernels.attend.triton import run_fold, shift_of
from gnnpar_kernels.attend.triton_grad import run_pull
from gnnpar_kernels.attend.triton_tiles import (
    LAUNCHES,
    RUNTIME,
    Dims,
    Shape,
    dropped,
    dropping,
    edges_per_step,
    rows_per_program,
    span,
    tile_width,
    trained,
)
from gnnpar_kernels.csr import Csr, accumulate_dtype
from gnnpar_kernels.triton_tasks import LOW
from gnnpar_kernels.triton_tuning import Variant, configs, distinct, tuned

TILES = configs({"TILE": 256}, {"TILE": 512})  # elements gathered by a warp at once: rows of both ends are held


@triton.jit
def _score(far, near, a_ptr, weigh, SLOPE: tl.constexpr):
    """Return a . leaky_relu(far + near), or <far, near> without `a`. Shapes: rows [..., D] -> [..., 1]."""
    if a_ptr is None:
        return tl.sum(far * near, 3, keep_dims=True)
    else:
        z = far + near
        return tl.sum(tl.where(z > 0, z, z * SLOPE) * weigh, 3, keep_dims=True)


@tuned(TILES, key=["H", "D", "BOUND", "SPLIT"], types=["x_ptr"], restores=["m_ptr", "mass_ptr", "acc_ptr"])
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
    key_ptr,
    y_ptr,
    a_ptr,
    edge_ptr,
    edge_query_ptr,
    m_ptr,
    mass_ptr,
    acc_ptr,
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
    A: tl.constexpr,
    AP: tl.constexpr,
    BOUND: tl.constexpr,
    SPLIT: tl.constexpr,
    FRESH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fold the edges of R rows into their states, or the edges of a piece into its own state (SPLIT).

    Scores and values are x_j (GATv2), or, without `a`, those of keys and of x_j, with A attributes an edge beside them.
    """
    B: tl.constexpr = edges_per_step(TILE, tile_width(D, HG, DP), BOUND)
    R: tl.constexpr = rows_per_program(TILE, tile_width(D, HG, DP), BOUND)
    dtype: tl.constexpr = m_ptr.dtype.element_ty
    piece, row, begin, end = span(row_ptr, begin_ptr, end_ptr, first, last, R, BOUND)
    name = row.to(tl.int64) if rows_ptr is None else tl.load(rows_ptr + row)
    head = (tl.program_id(1) * HG + tl.arange(0, HG))[None, None, :, None]
    column = tl.arange(0, DP)[None, None, None, :]
    wide = (head < H) & (column < D)
    own_head = (name * H)[:, None, None, None] + head
    near = tl.load(y_ptr + (own_head * D + column), mask=wide, other=0.0).to(dtype)
    weigh = near if a_ptr is None else tl.load(a_ptr + (head * D + column), mask=wide, other=0.0).to(dtype)
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
    edge = begin[:, None] + tl.arange(0, B)[None, :]
    index = tl.load(indices_ptr + edge, mask=edge < end[:, None], other=0)
    for _ in range(0, tl.max(end - begin, 0), B):
        valid = edge < end[:, None]
        source = index.to(tl.int64)[:, :, None, None] * H + head
        index = tl.load(indices_ptr + edge + B, mask=edge + B < end[:, None], other=0)
        mask = valid[:, :, None, None] & (head < H)
        tile = tl.load(x_ptr + (source * D + column), mask=mask & (column < D), other=0.0).to(dtype)
        far = tile
        if key_ptr is not None:
            far = tl.load(key_ptr + (source * D + column), mask=mask & (column < D), other=0.0).to(dtype)
        score = _score(far, near, a_ptr, weigh, SLOPE)
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
        kept = dropped(weight, ids_ptr, edge, valid, head, k0, k1, k2, limit, SCALE)
        acc = acc * shrink + tl.sum(kept * tile, 1, keep_dims=True)
        if edge_ptr is not None:
            edge_acc = edge_acc * shrink + tl.sum(kept * edge_row, 1, keep_dims=True)
        m = top
        edge += B
    if edge_ptr is not None:
        tl.store(acc_ptr + own_beside, edge_acc, mask=here_beside)
    tl.store(m_ptr + own_head, m, mask=here)
    tl.store(mass_ptr + own_head, mass, mask=here)
    tl.store(acc_ptr + own, acc, mask=here_wide)


@tuned(TILES, key=["H", "D", "BOUND", "SPLIT", "SOURCE"], types=["x_ptr"])
@triton.jit(do_not_specialize=RUNTIME)
def _pull(
    row_ptr,
    begin_ptr,
    end_ptr,
    first,
    last,
    rows_ptr,
    indices_ptr,
    ids_ptr,
    x_ptr,
    key_ptr,
    y_ptr,
    a_ptr,
    edge_ptr,
    edge_query_ptr,
    grad_out_ptr,
    ends_ptr,
    sums_ptr,
    values_ptr,
    edge_sums_ptr,
    edge_grad_ptr,
    num_edges,
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
    A: tl.constexpr,
    AP: tl.constexpr,
    BOUND: tl.constexpr,
    SPLIT: tl.constexpr,
    SOURCE: tl.constexpr,
    TILE: tl.constexpr,
):
    """sum ds s'(z) over the edges of R rows, destinations, or sources with sum alpha K dO (SOURCE).

    Without `a`, sum ds k_j of destinations and sum ds e_ij, or sum ds y_i of sources.
    Shapes: x, key [M, H, D], y [N, H, D], grad_out [N, H, D + A], ends [N, 2, H] (logsumexp, Delta), sums, values
    [rows, H, D], edge [E, A] in this CSR's order, edge_query [N, H, A], edge_sums [N, H, A], edge_grad
    [groups of heads, E, A].
    """
    B: tl.constexpr = edges_per_step(TILE, tile_width(D, HG, DP), BOUND)
    R: tl.constexpr = rows_per_program(TILE, tile_width(D, HG, DP), BOUND)
    dtype: tl.constexpr = ends_ptr.dtype.element_ty
    piece, row, begin, end = span(row_ptr, begin_ptr, end_ptr, first, last, R, BOUND)
    name = (row.to(tl.int64) if rows_ptr is None else tl.load(rows_ptr + row))[:, None, None, None]
    head = (tl.program_id(1) * HG + tl.arange(0, HG))[None, None, :, None]
    column = tl.arange(0, DP)[None, None, None, :]
    wide = (head < H) & (column < D)
    own = (name * H + head) * D + column
    weigh = None if a_ptr is None else tl.load(a_ptr + (head * D + column), mask=wide, other=0.0).to(dtype)
    if edge_ptr is not None:
        attribute = tl.arange(0, AP)[None, None, None, :]
        beside = (head < H) & (attribute < A)
        edge_sums = tl.zeros([R, 1, HG, AP], dtype)
    if SOURCE:
        value = tl.load(x_ptr + own, mask=wide, other=0.0).to(dtype)
        far = value
        if key_ptr is not None:
            far = tl.load(key_ptr + own, mask=wide, other=0.0).to(dtype)
    else:
        near = tl.load(y_ptr + own, mask=wide, other=0.0).to(dtype)
        own_out = (name * H + head) * (D + A) + column
        pulled = tl.load(grad_out_ptr + own_out, mask=wide, other=0.0).to(dtype)
        if edge_ptr is not None:
            own_beside = (name * H + head) * A + attribute
            edge_near = tl.load(edge_query_ptr + own_beside, mask=beside, other=0.0).to(dtype)
            at_beside = (name * H + head) * (D + A) + D + attribute
            edge_pulled = tl.load(grad_out_ptr + at_beside, mask=beside, other=0.0).to(dtype)
        lse = tl.load(ends_ptr + name * (2 * H) + head, mask=head < H, other=0.0)
        delta = tl.load(ends_ptr + name * (2 * H) + H + head, mask=head < H, other=0.0)
    sums = tl.zeros([R, 1, HG, DP], dtype)
    values = tl.zeros([R, 1, HG, DP], dtype)
    edge = begin[:, None] + tl.arange(0, B)[None, :]
    index = tl.load(indices_ptr + edge, mask=edge < end[:, None], other=0)
    for _ in range(0, tl.max(end - begin, 0), B):
        valid = edge < end[:, None]
        mask = valid[:, :, None, None] & (head < H)
        other = index.to(tl.int64)[:, :, None, None]
        index = tl.load(indices_ptr + edge + B, mask=edge + B < end[:, None], other=0)
        at = (other * H + head) * D + column
        if SOURCE:
            near = tl.load(y_ptr + at, mask=mask & (column < D), other=0.0).to(dtype)
            at_out = (other * H + head) * (D + A) + column
            pulled = tl.load(grad_out_ptr + at_out, mask=mask & (column < D), other=0.0).to(dtype)
            if edge_ptr is not None:
                here_beside, there = mask & (attribute < A), (other * H + head) * A + attribute
                edge_near = tl.load(edge_query_ptr + there, mask=here_beside, other=0.0).to(dtype)
                there = (other * H + head) * (D + A) + D + attribute
                edge_pulled = tl.load(grad_out_ptr + there, mask=here_beside, other=0.0).to(dtype)
            lse = tl.load(ends_ptr + other * (2 * H) + head, mask=mask, other=0.0)
            delta = tl.load(ends_ptr + other * (2 * H) + H + head, mask=mask, other=0.0)
        else:
            value = tl.load(x_ptr + at, mask=mask & (column < D), other=0.0).to(dtype)
            far = value
            if key_ptr is not None:
                far = tl.load(key_ptr + at, mask=mask & (column < D), other=0.0).to(dtype)
        score = _score(far, near, a_ptr, weigh, SLOPE)
        if edge_ptr is not None:
            row_mask = valid[:, :, None, None] & (attribute < A)
            at_edge = edge.to(tl.int64)[:, :, None, None] * A + attribute
            edge_row = tl.load(edge_ptr + at_edge, mask=row_mask, other=0.0).to(dtype)
            score += tl.sum(edge_row * edge_near, 3, keep_dims=True)
        alpha = tl.exp(tl.where(mask, score - lse, float("-inf")))
        kept = dropped(alpha, ids_ptr, edge, valid, head, k0, k1, k2, limit, SCALE)
        along = tl.sum(pulled * value, 3, keep_dims=True)
        if edge_ptr is not None:
            along += tl.sum(edge_row * edge_pulled, 3, keep_dims=True)
        ds = kept * along - alpha * delta
        if a_ptr is not None:
            sums += tl.sum(tl.where(far + near > 0, ds, ds * SLOPE), 1, keep_dims=True)
        elif SOURCE:
            sums += tl.sum(ds * near, 1, keep_dims=True)
        else:
            sums += tl.sum(ds * far, 1, keep_dims=True)
        if SOURCE:
            values += tl.sum(kept * pulled, 1, keep_dims=True)
        elif edge_ptr is not None:
            edge_sums += tl.sum(ds * edge_row, 1, keep_dims=True)
            if edge_grad_ptr is not None:  # the heads of a program, of which there may be several an edge
                of_row = tl.sum(tl.where(mask, ds * edge_near + kept * edge_pulled, 0.0), 2, keep_dims=True)
                tl.store(
                    edge_grad_ptr + (tl.program_id(1).to(tl.int64) * num_edges * A + at_edge), of_row, mask=row_mask
                )
        edge += B
    to = ((piece.to(tl.int64)[:, None, None, None] if SPLIT else name) * H + head) * D + column
    here = (piece < last)[:, None, None, None] & wide
    tl.store(sums_ptr + to, sums, mask=here)
    if SOURCE:
        tl.store(values_ptr + to, values, mask=here)
    elif edge_ptr is not None:
        to = ((piece.to(tl.int64)[:, None, None, None] if SPLIT else name) * H + head) * A + attribute
        tl.store(edge_sums_ptr + to, edge_sums, mask=(piece < last)[:, None, None, None] & beside)


NO_EDGES: dict[str, object] = {"edge_ptr": None, "edge_query_ptr": None, "A": 0, "AP": 1}
NO_EDGE_GRADS: dict[str, object] = {"edge_sums_ptr": None, "edge_grad_ptr": None, "num_edges": 0}


def attend_v2(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    y: Tensor,
    a: Tensor,
    *,
    slope: float,
    num_rows: int,
    rows: Tensor | None = None,
    state: State | None = None,
    drop: Drop | None = None,
    edge_ids: Tensor | None = None,
) -> State:
    """See `naive.attend_v2`. A given state is updated in place."""
    arguments = {
        "indices_ptr": indices.contiguous(),
        "x_ptr": x.contiguous(),
        "key_ptr": None,
        "y_ptr": y.contiguous(),
        "a_ptr": a.contiguous(),
        "SLOPE": slope,
        **NO_EDGES,
        **dropping(drop, edge_ids),
    }
    if indices.shape[0] == 0:
        return empty_state(num_rows, x, accumulate_dtype(x.dtype), False) if state is None else state
    return run_fold(_fold, indptr, x, rows=rows, num_rows=num_rows, state=state, branch=False, **arguments)


def attend_v2_grad(
    forward: Csr,
    reverse: Csr,
    order: Tensor,
    x: Tensor,
    y: Tensor,
    a: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    *,
    slope: float,
    drop: Drop | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `naive.attend_v2_grad`. `order` is not read: weights are computed again from the source's side."""
    dims, dtype = Dims.of(x), lse.dtype
    common = {
        "x_ptr": x.contiguous(),
        "key_ptr": None,
        "y_ptr": y.contiguous(),
        "a_ptr": a.contiguous(),
        "grad_out_ptr": grad_out.contiguous(),
        "ends_ptr": torch.stack([lse, delta.to(dtype)], 1),
        "SLOPE": slope,
        **NO_EDGES,
        **NO_EDGE_GRADS,
    }

    def pull(csr: Csr, like: Tensor, names: tuple[str, ...], **how: object) -> list[Tensor]:
        """Return sums over the edges of each row of `like`, fp32 at least."""
        made = torch.empty if csr.rows is None else torch.zeros
        whole = {name: made(like.shape, dtype=dtype, device=like.device) for name in names}
        mine = {"indices_ptr": csr.indices.contiguous(), **dropping(drop, csr.edge_ids)}
        run_pull(_pull, csr.indptr.contiguous(), csr.rows, dims, whole, dtype=dtype, **mine, **how, **common)
        return list(whole.values())

    (by_destination,) = pull(forward, y, ("sums_ptr",), SOURCE=False, values_ptr=None)
    by_source, values = pull(reverse, x, ("sums_ptr", "values_ptr"), SOURCE=True)
    wide = a.to(dtype)
    grad_a = (by_destination * y).sum(0) + (by_source * x).sum(0)
    grad_x, grad_y = values.addcmul_(by_source, wide), by_destination.mul_(wide)
    return grad_x.to(x.dtype), grad_y.to(y.dtype), grad_a.to(a.dtype)


GATV2: dict[str, object] = {"key_ptr": None, **NO_EDGES}


def variants() -> list[Variant]:
    """Return the variants of the ahead-of-time test: main shapes, and all shapes of training, with all tiles."""
    cases: list[Variant] = []
    shapes = [Shape(h, d, t) for t in ("bf16", "fp32") for h, d in ((4, 64), (4, 128), (4, 32), (1, 47))]
    shapes += [Shape(1, 512, "bf16", drop=True), Shape(4, 64, "fp16")]
    shapes += [Shape(4, 64, t, drop=d, whole=True) for t in ("fp32", "bf16") for d in (False, True)]
    for shape, config, bound in itertools.product(shapes, TILES, (0, *LOW)):
        how = GATV2 | {"BOUND": bound, "SPLIT": shape.whole and bound == 0, "FRESH": bound > 0 or shape.whole}
        cases.append(shape.variant("fold v2", _fold.fn, _types(shape), how, config))
        cases += [_pulled(shape, config, (bound, False), source=source) for source in (True, False)]
    for shape, (bound, split) in itertools.product(trained(branches=False, mixed=True), LAUNCHES):
        cases += [_pulled(shape, config, (bound, split), source=source) for config in TILES for source in (True, False)]
        for fresh in (True, False):
            if fresh or not split:  # a piece has a state of its own
                how = GATV2 | {"BOUND": bound, "SPLIT": split, "FRESH": fresh}
                which = " split" * split + (" fresh" if fresh else " added")
                for config in TILES:
                    cases.append(shape.variant("fold v2", _fold.fn, _types(shape), how, config, which))
    return distinct(cases)


def _types(shape: Shape) -> dict[str, str]:
    rows = "*" + shape.dtype
    state = dict.fromkeys(["m_ptr", "mass_ptr", "acc_ptr"], "*fp32")
    return {"x_ptr": rows, "y_ptr": rows, "a_ptr": "*fp32"} | state


def _pulled(shape: Shape, config: triton.Config, launch: tuple[int, bool], *, source: bool) -> Variant:
    bound, split = launch
    types = _types(shape) | dict.fromkeys(["ends_ptr", "sums_ptr", "values_ptr"], "*fp32")
    types |= {"grad_out_ptr": "*" + (shape.grad or shape.dtype)}
    how = GATV2 | NO_EDGE_GRADS | {"BOUND": bound, "SPLIT": split, "SOURCE": source}
    how |= {} if source else {"values_ptr": None}
    name = "source v2" if source else "destination v2"
    return shape.variant(name, _pull.fn, types, how, config, " split" * split)
