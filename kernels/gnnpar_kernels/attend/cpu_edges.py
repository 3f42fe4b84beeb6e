"""Attention of one head over blocks of CSR rows, in reused buffers: the fold, and gradients of scores by rows.

Floating-point data of edges are one number per edge of a block that fits the cache; no tensor is [E, H] or [E, D]. For
the whole CSR only integers are stored: each edge's row and, with dropout, its part of the hash.

If all scores of a block are small, exp needs no shift and the running maximum is 0; else it is the row's exact maximum.
Both are states of the same fold and can be merged.
"""

from collections.abc import Callable
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from gnnpar_kernels.attend.naive import Drop, State, Where, empty_state, keyed
from gnnpar_kernels.cpu_bags import RowBlock, bag, row_blocks, weighted_sums
from gnnpar_kernels.cpu_hashing import column_hash, keep_bits, row_hash

BLOCK = 1 << 18  # edges of a block: weights and sums of rows stay in cache; smaller costs calls and barriers
PLAIN = 20.0  # scores up to this size need no shift before exp: sums of exp(20) and of exp(-20) are exact enough


class Edges:
    """Blocks of whole CSR rows with buffers for two numbers per edge, and attention dropout if `drop` is given."""

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        dtype: torch.dtype,
        *,
        edges: int = 0,
        heads: int = 0,
        drop: Drop | None = None,
        edge_ids: Tensor | None = None,
    ) -> None:
        self.blocks = row_blocks(indptr, indices, edges=edges or BLOCK)
        self.num_rows = indptr.shape[0] - 1
        self.rows = {block.first: block.row_of_edge() for block in self.blocks}
        self.size = max((block.num_edges for block in self.blocks), default=0)
        self.places = torch.arange(self.size + 1, dtype=indices.dtype)
        self.numbers = torch.empty((2, self.size), dtype=dtype)
        self.p = 0.0
        if keys := keyed(drop, edge_ids):
            self.p, key, ids = keys
            self._heads = column_hash(heads, key=key)
            self._hashes = {b.first: row_hash(ids[b.begin : b.end], key=key) for b in self.blocks}
            self._bits = torch.empty((2, self.size), dtype=torch.int32)

    def drop_(self, block: RowBlock, head: int, *weights: Tensor) -> None:
        """Apply the dropout mask of a head and its scale, in place. Shapes: each [edges of the block]."""
        if self.p > 0:
            bits, spare = self._bits[:, : block.num_edges]
            keep_bits(self._hashes[block.first], self._heads[head], p=self.p, out=bits, scratch=spare)
            for weight in weights:
                weight.mul_(1.0 / (1.0 - self.p))
                if weight.dtype == torch.float32:
                    weight.view(torch.int32).bitwise_and_(bits)
                else:
                    weight.mul_(bits.neg())

    def spread(self, block: RowBlock, values: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the value of its CSR row for every edge. Shapes: values [R, ...] of all rows -> [edges, ...]."""
        of_rows, rows = values[block.first : block.last], self.rows[block.first]
        return torch.index_select(of_rows, 0, rows) if out is None else torch.index_select(of_rows, 0, rows, out=out)

    def sums(self, block: RowBlock, of_edges: Tensor, weights: Tensor) -> Tensor:
        """Return sums by CSR row. Shapes: of_edges [edges, W], weights [edges] -> [rows of the block, W]."""
        return bag(of_edges, self.places[: block.num_edges], block.offsets, weights)

    def exp_(self, block: RowBlock, score: Tensor, m: Tensor) -> Tensor:
        """Return exp(score - m), written over the scores. Large scores get the maximum of each row as m [R]."""
        if block.num_edges and float(torch.abs(score, out=self.numbers[1, : block.num_edges]).max()) > PLAIN:
            m[block.first : block.last] = top(block, score)
            score.sub_(self.spread(block, m, self.numbers[1, : block.num_edges]))
        return score.exp_()


def top(block: RowBlock, score: Tensor) -> Tensor:
    """Return the largest score of each row, -inf without an edge. Shapes: [edges] -> [rows of the block]."""
    return torch.segment_reduce(score, "max", offsets=block.offsets.long(), initial=-torch.inf)


def head_table(x: Tensor, head: int, *, out: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return contiguous rows of one head, times a factor per row. Bags of a strided view take 1.5 times as long.

    Shapes: x [M, H, D], scale [M, H] or None -> out [M, D].
    """
    if scale is None:
        return out.copy_(x[:, head])
    return torch.mul(x[:, head], scale[:, head, None], out=out)


def csr_rows(values: Tensor, rows: Tensor | None) -> Tensor:
    """Return the rows of a CSR. Shapes: [N, ...] -> [R, ...]."""
    return values if rows is None else values.index_select(0, rows)


def put(whole: Tensor, head: int, rows: Tensor | None, part: Tensor) -> None:
    """Write the rows of one head. Shapes: whole [N, H, D], part [R, D]."""
    whole[slice(None) if rows is None else rows, head] = part


Weigh = Callable[[RowBlock, Tensor], tuple[Tensor, ...]]
"""(block, shifts m [R]) -> weights of the block's edges; with `branch`, also those of the second sums. m is 0 at first,
and may be overwritten."""
Add = Callable[[RowBlock, Tensor], Tensor]
"""(block, weights) -> weighted sums by row."""


def fold_rows(
    edges: Edges,
    like: Tensor,
    head_of: Callable[[int], tuple[Weigh, Add]],
    *,
    branch: bool = False,
    **where: Unpack[Where],
) -> State:
    """Fold the rows of one CSR into the state, one head at a time. A given state is updated in place.

    Shapes: like [., H, W].
    """
    state, rows, num_rows = where["state"], where["rows"], where["num_rows"]
    if edges.size == 0:
        return empty_state(num_rows, like, branch) if state is None else state
    dtype, num_heads = edges.numbers.dtype, like.shape[1]
    m = torch.full((edges.num_rows, num_heads), -torch.inf, dtype=dtype)
    for block in edges.blocks:
        m[block.first : block.last][block.offsets[1:] > block.offsets[:-1]] = 0.0
    masses = [torch.empty_like(m) for _ in range(1 + branch)]
    accs = [torch.empty((edges.num_rows, *like.shape[1:]), dtype=dtype) for _ in range(1 + branch)]
    ones = torch.ones(edges.size, dtype=dtype)
    for head in range(num_heads):
        weigh, add = head_of(head)
        for block in edges.blocks:
            span, count = slice(block.first, block.last), block.num_edges
            weights = weigh(block, m[:, head])
            for mass, weight in zip(masses, weights, strict=True):
                mass[span, head] = weighted_sums(ones[:count], edges.places[:count], block.offsets, weight)
            edges.drop_(block, head, *weights)
            for acc, weight in zip(accs, weights, strict=True):
                acc[span, head] = add(block, weight)
    part = m, *(total for pair in zip(masses, accs, strict=True) for total in pair)
    if state is not None:
        _merge_(state, part, rows)
        return state
    if rows is None:
        return part
    state = empty_state(num_rows, like, branch)
    for whole, piece in zip(state, part, strict=True):
        whole.index_copy_(0, rows, piece)
    return state


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


class Back(NamedTuple):
    """One head of the gradients of a block, by functions of a block of edges.

    score(block, out): write scores. along(block, out): write <dO_i, v_ij>. near(block, ds, weights): sums by
    destination. far(block, ds): sums by source. finish(near, far, values): write the gradients, with values the sums of
    alpha K dO_i by source. Shapes: pulled [N, D], the rows dO of the head.
    """

    score: Callable[[RowBlock, Tensor], object]
    along: Callable[[RowBlock, Tensor], object]
    near: Callable[[RowBlock, Tensor, Tensor], Tensor]
    far: Callable[[RowBlock, Tensor], Tensor]
    finish: Callable[[Tensor, Tensor, Tensor], None]
    pulled: Tensor


def walk_back(
    ins: Edges,
    outs: Edges,
    order: Tensor,
    lse: Tensor,
    delta: Tensor,
    widths: tuple[int, int],
    head_of: Callable[[int], Back],
) -> None:
    """Walk over the edges by destination (`ins`), then by source (`outs`), for each head.

    The weights alpha K and ds = alpha (K <dO_i, v_ij> - Delta_i) of one head, [E] each, are kept from the first walk to
    the second. `order`: the place in the first of every edge of the second. head_of(head) -> Back.
    Shapes: lse, delta [R, H] by destination; widths: columns of sums by destination and by source.
    """
    if ins.size == 0:
        return
    weights, ds = torch.empty((2, order.shape[0]), dtype=lse.dtype)
    lse, delta = lse.t().contiguous(), delta.t().contiguous()
    near = torch.empty((ins.num_rows, widths[0]), dtype=lse.dtype)
    far, values = torch.empty((2, outs.num_rows, widths[1]), dtype=lse.dtype)
    for head in range(lse.shape[0]):
        back = head_of(head)
        for block in ins.blocks:
            alpha, spare = ins.numbers[:, : block.num_edges]
            kept, of_score = weights[block.begin : block.end], ds[block.begin : block.end]
            back.score(block, alpha)
            alpha.sub_(ins.spread(block, lse[head], spare)).exp_()
            ins.drop_(block, head, kept.copy_(alpha))
            back.along(block, of_score)
            of_score.mul_(kept).sub_(alpha.mul_(ins.spread(block, delta[head], spare)))
            near[block.first : block.last] = back.near(block, of_score, kept)
        for block in outs.blocks:
            here, places = outs.numbers[0, : block.num_edges], order[block.begin : block.end]
            far[block.first : block.last] = back.far(block, torch.index_select(ds, 0, places, out=here))
            torch.index_select(weights, 0, places, out=here)
            values[block.first : block.last] = bag(back.pulled, block.indices, block.offsets, here)
        back.finish(near, far, values)
