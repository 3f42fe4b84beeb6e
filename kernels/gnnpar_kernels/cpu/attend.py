"""GAT aggregation on a CPU: a weighted embedding bag per head.

Where all scores are small, exp needs no shift and the running maximum is 0; else it is the row's exact maximum.
Both are states of the same fold and mix freely.
"""

import torch
from torch import Tensor

from gnnpar_kernels.cpu.bags import bag, weighted_sums
from gnnpar_kernels.cpu.edges import Dropping, EdgeWeights, HeadRows, head_table, is_plain
from gnnpar_kernels.csr import accumulate_dtype
from gnnpar_kernels.naive.attend import Drop, State


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
) -> State:
    """See `naive.attend`. A given state is updated in place."""
    dtype = accumulate_dtype(x.dtype)
    if indices.shape[0] == 0:
        return _empty_state(num_rows, x, dtype) if state is None else state
    a_src, a_dst = a_src.to(dtype), a_dst.to(dtype)
    plain = is_plain(a_src, a_dst, slope)
    a_row = (a_dst if rows is None else a_dst.index_select(0, rows)).t().contiguous()
    edges = EdgeWeights(indptr, indices, slope=slope, dtype=dtype, dropping=Dropping.of(drop, edge_ids, x.shape[1]))
    part = _fold(indptr, x, a_row, a_src.t().contiguous(), edges, plain=plain)
    if state is None and rows is None:
        return part
    if state is None:
        state = _empty_state(num_rows, x, dtype)
        assert rows is not None
        for whole, piece in zip(state, part, strict=True):
            whole.index_copy_(0, rows, piece)
        return state
    _merge_(state, part, rows)
    return state


def _empty_state(num_rows: int, x: Tensor, dtype: torch.dtype) -> State:
    m = torch.full((num_rows, x.shape[1]), -torch.inf, dtype=dtype)
    return m, torch.zeros_like(m), torch.zeros((num_rows, *x.shape[1:]), dtype=dtype)


def _fold(indptr: Tensor, x: Tensor, a_row: Tensor, a_col: Tensor, edges: EdgeWeights, *, plain: bool) -> State:
    """State of the CSR's rows alone. Shapes: a_row [H, R], a_col [H, M] -> m, l [R, H], acc [R, H, D]."""
    num_rows, num_heads, dtype = indptr.shape[0] - 1, x.shape[1], a_row.dtype
    m = torch.zeros((num_rows, num_heads), dtype=dtype)
    m[indptr[1:] == indptr[:-1]] = -torch.inf
    mass = torch.empty_like(m)
    acc = torch.empty((num_rows, *x.shape[1:]), dtype=dtype)
    table, ones = torch.empty((x.shape[0], x.shape[2]), dtype=dtype), torch.ones(x.shape[0], dtype=dtype)
    for head in range(num_heads):
        head_table(x, head, out=table)
        rows = HeadRows(a_row[head], a_col[head])
        for block in edges.blocks:
            span = slice(block.first, block.last)
            if not plain:
                m[span, head] = edges.top(block, rows)
                rows = rows._replace(row_shift=m[:, head].contiguous())
            weights = edges.weights(block, rows)
            mass[span, head] = weighted_sums(ones, block.indices, block.offsets, weights)
            edges.drop_(block, head, weights)
            acc[span, head] = bag(table, block.indices, block.offsets, weights)
    return m, mass, acc


def _merge_(state: State, part: State, rows: Tensor | None) -> None:
    """Fold the part of some rows into the state."""
    where = slice(None) if rows is None else rows
    m, mass, acc = state
    m_old = m[where]
    top = torch.maximum(m_old, part[0])
    if bool(((m_old == part[0]) | m_old.isneginf() | part[0].isneginf()).all()):
        # nothing to rescale: a row with -inf on one side has nothing there
        for whole, piece in ((mass, part[1]), (acc, part[2])):
            _ = whole.add_(piece) if rows is None else whole.index_add_(0, rows, piece)
    else:
        base = top.clamp(min=torch.finfo(top.dtype).min)
        old, new = torch.exp(m_old - base), torch.exp(part[0] - base)
        mass[where] = mass[where] * old + part[1] * new
        acc[where] = (acc[where] * old[..., None]).addcmul_(part[2], new[..., None])
    m[where] = top


def attend_finish(state: State) -> tuple[Tensor, Tensor]:
    """See `naive.attend_finish`. The output is written over the state's sums."""
    m, mass, acc = state
    empty = mass == 0
    inverse = mass.reciprocal().masked_fill_(empty, 0.0)
    return acc.mul_(inverse[..., None]), (m + mass.log()).masked_fill_(empty, torch.inf)
