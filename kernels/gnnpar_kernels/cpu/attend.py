"""GAT aggregation on a CPU: weighted embedding bags, head by head, over row blocks.

Where all scores are small, exp needs no shift and the running maximum is 0; else it is the row's exact maximum.
Both are states of the same fold and mix freely.
"""

import torch
from torch import Tensor

from gnnpar_kernels.cpu.bags import bag, row_blocks, row_sums
from gnnpar_kernels.cpu.scores import (
    BLOCK,
    BlockScores,
    Buffers,
    Dropping,
    apply_keep,
    edge_hash,
    head_major,
    is_plain,
    largest,
)
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
    num_heads = x.shape[1]
    fresh = state is None
    state = _empty_state(num_rows, x, dtype) if state is None else state
    if indices.shape[0] == 0:
        return state
    a_src, a_dst = a_src.to(dtype), a_dst.to(dtype)
    plain = is_plain(a_src, a_dst, slope)
    a_row = (a_dst if rows is None else a_dst.index_select(0, rows)).t().contiguous()
    a_col, table = a_src.t().contiguous(), head_major(x, dtype)
    dropping = Dropping.of(drop, edge_ids, num_heads)
    buffers = Buffers(dtype, edges=largest(indptr))
    positions = torch.arange(largest(indptr), dtype=indices.dtype)
    for block in row_blocks(indptr, indices, edges=BLOCK):
        scores = BlockScores(block, buffers, slope=slope)
        hashed = edge_hash(dropping, edge_ids, block)
        part = _empty_state(block.num_rows, x, dtype)
        for head in range(num_heads):
            a = a_row[head, block.first : block.last]
            score = scores.raw(a, a_col[head])
            top = _row_maximum(score, scores, plain=plain)
            weight = scores.weights(score, shift_row=None if plain else top.clamp(min=torch.finfo(dtype).min))
            part[0][:, head] = top
            part[1][:, head] = row_sums(weight, block.offsets, positions[: block.num_edges])
            if dropping is not None and hashed is not None:
                bits = scores.keep(dropping, hashed, head)
                weight = apply_keep(weight, bits, scale=1.0 / (1.0 - dropping.p), out=weight)
            part[2][:, head] = bag(table[head], block.indices, block.offsets, weight)
        _merge_(state, part, slice(block.first, block.last) if rows is None else rows[block.first : block.last], fresh)
    return state


def _empty_state(num_rows: int, x: Tensor, dtype: torch.dtype) -> State:
    m = torch.full((num_rows, x.shape[1]), -torch.inf, dtype=dtype)
    return m, torch.zeros_like(m), torch.zeros((num_rows, *x.shape[1:]), dtype=dtype)


def _row_maximum(score: Tensor, scores: BlockScores, *, plain: bool) -> Tensor:
    """Shift of each row: 0 or the exact maximum, -inf where no edge. Shapes: score [E] -> [rows]."""
    offsets = scores.block.offsets
    if plain:
        top = torch.zeros(scores.block.num_rows, dtype=score.dtype)
        return top.masked_fill_(offsets[1:] == offsets[:-1], -torch.inf)
    act = torch.ops.aten.leaky_relu(score, scores.slope)
    return torch.segment_reduce(act, "max", offsets=offsets.long(), initial=-torch.inf)


def _merge_(state: State, part: State, where: slice | Tensor, fresh: bool) -> None:
    """Fold the part of some rows into the state."""
    if fresh:
        for whole, piece in zip(state, part, strict=True):
            whole[where] = piece
        return
    m, mass, acc = (tensor[where] for tensor in state)
    top = torch.maximum(m, part[0])
    base = top.clamp(min=torch.finfo(top.dtype).min)
    old, new = torch.exp(m - base), torch.exp(part[0] - base)
    state[0][where] = top
    state[1][where] = mass * old + part[1] * new
    state[2][where] = torch.addcmul(acc * old[..., None], part[2], new[..., None])


def attend_finish(state: State) -> tuple[Tensor, Tensor]:
    """See `naive.attend_finish`."""
    m, mass, acc = state
    empty = mass == 0
    inverse = mass.reciprocal().masked_fill_(empty, 0.0)
    return acc * inverse[..., None], (m + mass.log()).masked_fill_(empty, torch.inf)
