"""Dot-product attention on a CPU: one head at a time, products sampled at the edges, sums of rows as weighted bags.

A sampled product (torch.sparse.sampled_addmm) reads the rows of both ends and writes one number per edge, so no edge
rows are in memory. Per head, with K the dropout mask:
    ds_ij = alpha_ij (K <dO_i, [v_j, e_ij]> - Delta_i)
    dq_i = sum_j ds k_j,  dr_i = sum_j ds e_ij                  forward CSR
    dk_j = sum_i ds q_i,  dv_j = sum_i alpha K dO_i             reverse CSR
The weights and ds of one head, [E] each, are kept from the forward to the reverse pass.
"""

import torch
from torch import Tensor

from gnnpar_kernels.attend.cpu import Scores, Sums, softmax_rows
from gnnpar_kernels.attend.cpu_edges import BLOCK, Dropping, Edges, csr_rows, head_table, put
from gnnpar_kernels.attend.naive import Drop, State, empty_state
from gnnpar_kernels.attend_dot.naive import widths
from gnnpar_kernels.cpu_bags import RowBlock, bag, refuse_outside
from gnnpar_kernels.csr import Csr, accumulate_dtype


class _Edges(Edges):
    """Blocks of whole CSR rows, and the computations of one head on their edges."""

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        edge: Tensor | None,
        dtype: torch.dtype,
        dropping: Dropping | None = None,
    ) -> None:
        super().__init__(indptr, indices, edges=BLOCK, dtype=dtype, dropping=dropping)
        self.edge = None if edge is None else edge.to(dtype)

    def dots(self, block: RowBlock, near: Tensor, far: Tensor, near_edge: Tensor | None, out: Tensor) -> Tensor:
        """Write <near_i, far_j> + <near_edge_i, e_ij> to `out`. Shapes: near [R, D], far [M, D], near_edge [R, A]."""
        size = (block.num_rows, far.shape[0])
        if block.num_edges > size[0] * size[1]:  # repeated edges: more than torch allows in a sampled product
            torch.sum(self.spread(block, near).mul_(far.index_select(0, block.indices)), -1, out=out)
        elif block.num_edges:
            refuse_outside(block.indices, far.shape[0])
            at = torch.sparse_csr_tensor(block.offsets, block.indices, out.zero_(), size, check_invariants=False)
            torch.sparse.sampled_addmm(at, near[block.first : block.last], far.t(), out=at)
        if near_edge is not None:
            out.add_(self.spread(block, near_edge).mul_(self.attributes(block)).sum(-1))
        return out

    def attributes(self, block: RowBlock) -> Tensor:
        """Return the attributes of a block's edges. Shapes: -> [edges, A]."""
        assert self.edge is not None
        return self.edge[block.begin : block.end]

    def weighted(self, block: RowBlock, far: Tensor, weights: Tensor) -> Tensor:
        """Return a block's sums of rows, and of attributes. Shapes: far [M, D] -> [rows of the block, D or D + A]."""
        rows = bag(far, block.indices, block.offsets, weights)
        return rows if self.edge is None else torch.cat([rows, self.sums(block, self.attributes(block), weights)], -1)


def attend_dot(
    indptr: Tensor,
    indices: Tensor,
    key: Tensor,
    value: Tensor,
    query: Tensor,
    *,
    num_rows: int,
    rows: Tensor | None = None,
    state: State | None = None,
    drop: Drop | None = None,
    edge_ids: Tensor | None = None,
    edge: Tensor | None = None,
    edge_query: Tensor | None = None,
) -> State:
    """See `naive.attend_dot`. A given state is updated in place."""
    dtype, like = accumulate_dtype(value.dtype), widths(value, edge)
    edges = _Edges(indptr, indices, edge, dtype, Dropping(drop, edge_ids, value.shape[1]))
    if indices.shape[0] == 0:
        return empty_state(num_rows, like, dtype, False) if state is None else state
    near, near_edge = csr_rows(query, rows), None if edge_query is None else csr_rows(edge_query, rows).to(dtype)
    keys, values, queries = (torch.empty((t.shape[0], t.shape[2]), dtype=dtype) for t in (key, value, near))

    def head_of(head: int) -> tuple[Scores, Sums]:
        for table, whole in ((keys, key), (values, value), (queries, near)):
            head_table(whole, head, out=table)
        own_edge = None if near_edge is None else near_edge[:, head]

        def sums(block: RowBlock, scores: Tensor, weights: Tensor) -> Tensor:
            return edges.weighted(block, values, weights)

        return lambda block, out: edges.dots(block, queries, keys, own_edge, out), sums

    num_listed = indptr.shape[0] - 1
    return softmax_rows(edges, like, head_of, num_listed=num_listed, state=state, rows=rows, num_rows=num_rows)


def attend_dot_grad(
    forward: Csr,
    reverse: Csr,
    order: Tensor,
    key: Tensor,
    value: Tensor,
    query: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    *,
    drop: Drop | None = None,
    edge: Tensor | None = None,
    edge_query: Tensor | None = None,
    of_edge: bool = False,
) -> tuple[Tensor, ...]:
    """See `naive.attend_dot_grad`."""
    dtype, num_edges, (num_heads, width) = lse.dtype, forward.indices.shape[0], value.shape[1:]
    edge_inputs = () if edge is None or edge_query is None else (edge_query, edge)[: 1 + of_edge]
    inputs = (key, value, query, *edge_inputs)
    grads = tuple(torch.zeros(t.shape, dtype=dtype) for t in inputs)
    if num_edges > 0:
        dropping = Dropping(drop, forward.edge_ids, num_heads)
        ins = _Edges(forward.indptr, forward.indices, edge, dtype, dropping)
        outs = _Edges(reverse.indptr, reverse.indices, None, dtype)
        lse_row, delta_row = (csr_rows(t.to(dtype), forward.rows).t().contiguous() for t in (lse, delta))
        tables = tuple(torch.empty((t.shape[0], t.shape[2]), dtype=dtype) for t in (key, value, query))
        keys, values, queries = tables
        pulled, pulled_edge = torch.empty(queries.shape, dtype=dtype), None
        of_scores, weights = torch.empty((2, num_edges), dtype=dtype)
        for head in range(num_heads):
            for table, whole in zip((*tables, pulled), (key, value, query, grad_out[..., :width]), strict=True):
                head_table(whole, head, out=table)
            own, own_pulled, own_edge = csr_rows(queries, forward.rows), csr_rows(pulled, forward.rows), None
            if edge_query is not None:
                own_edge = csr_rows(edge_query[:, head].to(dtype), forward.rows)
                pulled_edge = csr_rows(grad_out[:, head, width:].to(dtype), forward.rows)
            of_near = torch.empty((own.shape[0], width + (0 if own_edge is None else own_edge.shape[1])), dtype=dtype)
            for block in ins.blocks:
                span = slice(block.begin, block.end)
                alpha, spare = ins.numbers[:, : block.num_edges]
                ins.dots(block, own, keys, own_edge, alpha)
                alpha.sub_(ins.spread(block, lse_row[head], spare)).exp_()
                ins.drop_(block, head, kept := weights[span].copy_(alpha))
                ds = ins.dots(block, own_pulled, values, pulled_edge, of_scores[span]).mul_(kept)
                ds.sub_(alpha.mul_(ins.spread(block, delta_row[head], spare)))
                of_near[block.first : block.last] = ins.weighted(block, keys, ds)
                if of_edge and own_edge is not None and pulled_edge is not None:
                    of_rows = ins.spread(block, own_edge).mul_(ds[:, None])
                    grads[4][span] += of_rows.addcmul_(ins.spread(block, pulled_edge), kept[:, None])
            put(grads[2], head, forward.rows, of_near[:, :width])
            if own_edge is not None:
                put(grads[3], head, forward.rows, of_near[:, width:])
            of_far = torch.empty((2, reverse.indptr.shape[0] - 1, width), dtype=dtype)
            for block in outs.blocks:
                here, places = outs.numbers[0, : block.num_edges], order[block.begin : block.end]
                for numbers_of, table, into in ((of_scores, queries, of_far[0]), (weights, pulled, of_far[1])):
                    chosen = torch.index_select(numbers_of, 0, places, out=here)
                    into[block.first : block.last] = bag(table, block.indices, block.offsets, chosen)
            put(grads[0], head, reverse.rows, of_far[0])
            put(grads[1], head, reverse.rows, of_far[1])
    return tuple(g.to(t.dtype) for g, t in zip(grads, inputs, strict=True))
