"""GAT aggregation on a CPU: a weighted embedding bag per head.

If all scores are small, exp needs no shift and the running maximum is 0; else it is the row's exact maximum. Both are
states of the same fold and can be merged.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gnnpar_kernels.attend.cpu_edges import PLAIN, Dropping, Edges, EdgeWeights, HeadRows, head_table, is_plain
from gnnpar_kernels.attend.cpu_grad import attend_grad, attend_grad_dst, attend_grad_dst_of, attend_grad_src, row_dots
from gnnpar_kernels.attend.naive import Drop, State, empty_state
from gnnpar_kernels.cpu_bags import RowBlock, bag, weighted_sums
from gnnpar_kernels.csr import accumulate_dtype

__all__ = [
    "attend",
    "attend_finish",
    "attend_grad",
    "attend_grad_dst",
    "attend_grad_dst_of",
    "attend_grad_src",
    "row_dots",
]


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
    dtype = accumulate_dtype(x.dtype)
    if indices.shape[0] == 0:
        return empty_state(num_rows, x, dtype, branch) if state is None else state
    a_src, a_dst = a_src.to(dtype), a_dst.to(dtype)
    plain = is_plain(a_src, a_dst, slope)
    a_row = (a_dst if rows is None else a_dst.index_select(0, rows)).t().contiguous()
    dropping = Dropping(drop, edge_ids, x.shape[1])
    edges = EdgeWeights(indptr, indices, slope=slope, dtype=dtype, dropping=dropping)
    part = _fold(indptr, x, a_row, a_src.t().contiguous(), edges, plain=plain, branch=branch)
    return chain(part, x, state=state, rows=rows, num_rows=num_rows)


def chain(part: State, x: Tensor, *, state: State | None, rows: Tensor | None, num_rows: int) -> State:
    """Return the state of all rows after folding in `part`, the state of the rows of one CSR. Update a given state in
    place."""
    if state is None and rows is None:
        return part
    if state is None:
        state = empty_state(num_rows, x, part[0].dtype, len(part) == 5)
        assert rows is not None
        for whole, piece in zip(state, part, strict=True):
            whole.index_copy_(0, rows, piece)
        return state
    _merge_(state, part, rows)
    return state


def _fold(
    indptr: Tensor, x: Tensor, a_row: Tensor, a_col: Tensor, edges: EdgeWeights, *, plain: bool, branch: bool
) -> State:
    """Return the state of the CSR's rows. Shapes: a_row [H, R], a_col [H, M] -> m, l [R, H], acc [R, H, D], ..."""
    num_rows, num_heads, dtype = indptr.shape[0] - 1, x.shape[1], a_row.dtype
    m = torch.zeros((num_rows, num_heads), dtype=dtype)
    m[indptr[1:] == indptr[:-1]] = -torch.inf
    masses = [torch.empty_like(m) for _ in range(1 + branch)]
    accs = [torch.empty((num_rows, *x.shape[1:]), dtype=dtype) for _ in range(1 + branch)]
    table, ones = torch.empty((x.shape[0], x.shape[2]), dtype=dtype), torch.ones(x.shape[0], dtype=dtype)
    for head in range(num_heads):
        head_table(x, head, out=table)
        rows = HeadRows(a_row[head], a_col[head])
        for block in edges.blocks:
            span = slice(block.first, block.last)
            if not plain:
                m[span, head] = edges.top(block, rows)
                rows = rows._replace(row_shift=m[:, head].contiguous())
            weights = edges.weights_and_sloped(block, rows, slope=0.0) if branch else (edges.weights(block, rows),)
            for mass, weight in zip(masses, weights, strict=True):
                mass[span, head] = weighted_sums(ones, block.indices, block.offsets, weight)
            edges.drop_(block, head, *weights)
            for acc, weight in zip(accs, weights, strict=True):
                acc[span, head] = bag(table, block.indices, block.offsets, weight)
    return m, *(total for pair in zip(masses, accs, strict=True) for total in pair)


Scores = Callable[[RowBlock, Tensor], Tensor]  # write the scores of a block, return edge rows for `Sums`
Sums = Callable[[RowBlock, Tensor, Tensor], Tensor]  # (block, edge rows of `Scores`, weights) -> weighted sums by row


def softmax_rows(
    edges: Edges,
    like: Tensor,
    head_of: Callable[[int], tuple[Scores, Sums]],
    *,
    num_listed: int,
    state: State | None,
    rows: Tensor | None,
    num_rows: int,
) -> State:
    """Fold the rows of one CSR, one head at a time, with scores that read a row per edge. Shapes: like [., H, W]."""
    dtype, num_heads = edges.numbers.dtype, like.shape[1]
    m = torch.full((num_listed, num_heads), -torch.inf, dtype=dtype)
    mass, acc = torch.empty_like(m), torch.empty((num_listed, *like.shape[1:]), dtype=dtype)
    ones = torch.ones(edges.places.shape[0], dtype=dtype)
    for block in edges.blocks:
        m[block.first : block.last][block.offsets[1:] > block.offsets[:-1]] = 0.0
    for head in range(num_heads):
        scores, sums = head_of(head)
        for block in edges.blocks:
            span, count = slice(block.first, block.last), block.num_edges
            score, spare = edges.numbers[:, :count]
            of_edges = scores(block, score)
            if count and float(torch.abs(score, out=spare).max()) > PLAIN:
                m[span, head] = torch.segment_reduce(score, "max", offsets=block.offsets.long(), initial=-torch.inf)
                score.sub_(edges.spread(block, m[:, head], spare))
            weights = score.exp_()
            mass[span, head] = weighted_sums(ones[:count], edges.places[:count], block.offsets, weights)
            edges.drop_(block, head, weights)
            acc[span, head] = sums(block, of_edges, weights)
    return chain((m, mass, acc), like, state=state, rows=rows, num_rows=num_rows)


def _merge_(state: State, part: State, rows: Tensor | None) -> None:
    """Fold the part of some rows into the state."""
    where = slice(None) if rows is None else rows
    m, *sums = state
    m_part, *parts = part
    m_old = m[where]
    top = torch.maximum(m_old, m_part)
    if bool(((m_old == m_part) | m_old.isneginf() | m_part.isneginf()).all()):
        # nothing to rescale: a row with -inf on one side has zero sums there
        for whole, piece in zip(sums, parts, strict=True):
            _ = whole.add_(piece) if rows is None else whole.index_add_(0, rows, piece)
    else:
        base = top.clamp(min=torch.finfo(top.dtype).min)
        old, new = torch.exp(m_old - base), torch.exp(m_part - base)
        for whole, piece in zip(sums, parts, strict=True):
            shape = (*old.shape, *[1] * (whole.dim() - 2))
            whole[where] = (whole[where] * old.view(shape)).addcmul_(piece, new.view(shape))
    m[where] = top


def attend_finish(state: State) -> tuple[Tensor, ...]:
    """See `naive.attend_finish`. The output overwrites the state's sums of rows."""
    m, mass, acc, *positive = state
    empty = mass == 0
    inverse = mass.reciprocal().masked_fill_(empty, 0.0)
    lse = (m + mass.log()).masked_fill_(empty, torch.inf)
    acc.mul_(inverse[..., None])
    if not positive:
        return acc, lse
    mass_pos, pos = positive
    return acc, lse, mass_pos * inverse, pos.mul_(inverse[..., None])
