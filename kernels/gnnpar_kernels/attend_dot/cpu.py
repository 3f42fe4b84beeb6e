"""Dot-product attention on a CPU: one head at a time, products sampled at the edges, sums of rows as weighted bags.

A sampled product (torch.sparse.sampled_addmm) reads the rows of both ends and writes one number per edge, so no edge
rows are in memory. Per head, with ds as in `walk_back`:
    dq_i = sum_j ds k_j,  dr_i = sum_j ds e_ij                  forward CSR
    dk_j = sum_i ds q_i,  dv_j = sum_i alpha K dO_i             reverse CSR
"""

from typing import Unpack

import torch
from torch import Tensor

from gnnpar_kernels.attend.cpu_edges import Add, Back, Edges, Weigh, csr_rows, fold_rows, head_table, put, walk_back
from gnnpar_kernels.attend.naive import Drop, State, Where
from gnnpar_kernels.attend_dot import naive
from gnnpar_kernels.attend_dot.naive import widths
from gnnpar_kernels.cpu_bags import RowBlock, bag, refuse_outside
from gnnpar_kernels.csr import Csr, accumulate_dtype
from gnnpar_kernels.dispatch import specified


class _Edges(Edges):
    """Blocks of whole CSR rows, and the computations of one head on their edges."""

    def __init__(
        self, indptr: Tensor, indices: Tensor, dtype: torch.dtype, *, edge: Tensor | None = None, **dropping
    ) -> None:
        super().__init__(indptr, indices, dtype, **dropping)
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


@specified(naive.attend_dot)
def attend_dot(
    indptr: Tensor,
    indices: Tensor,
    key: Tensor,
    value: Tensor,
    query: Tensor,
    *,
    edge: Tensor | None,
    edge_query: Tensor | None,
    **where: Unpack[Where],
) -> State:
    dtype, rows = accumulate_dtype(value.dtype), where["rows"]
    dropping = {"heads": value.shape[1], "drop": where["drop"], "edge_ids": where["edge_ids"]}
    edges = _Edges(indptr, indices, dtype, edge=edge, **dropping)
    near, near_edge = csr_rows(query, rows), None if edge_query is None else csr_rows(edge_query, rows).to(dtype)
    keys, values, queries = (torch.empty((t.shape[0], t.shape[2]), dtype=dtype) for t in (key, value, near))

    def head_of(head: int) -> tuple[Weigh, Add]:
        for table, whole in ((keys, key), (values, value), (queries, near)):
            head_table(whole, head, out=table)
        own_edge = None if near_edge is None else near_edge[:, head]

        def weigh(block: RowBlock, m: Tensor) -> tuple[Tensor, ...]:
            score = edges.dots(block, queries, keys, own_edge, edges.numbers[0, : block.num_edges])
            return (edges.exp_(block, score, m),)

        return weigh, lambda block, weights: edges.weighted(block, values, weights)

    return fold_rows(edges, widths(value, edge), head_of, **where)


@specified(naive.attend_dot_grad)
def attend_dot_grad(
    forward: Csr,
    reverse: Csr,
    order: Tensor,
    *tensors: Tensor,
    drop: Drop | None,
    edge: Tensor | None,
    edge_query: Tensor | None,
    of_edge: bool,
) -> tuple[Tensor, ...]:
    key, value, query, lse, grad_out, delta = tensors
    dtype, (heads, width) = lse.dtype, value.shape[1:]
    inputs = naive.inputs(key, value, query, edge, edge_query, of_edge)
    grads = [torch.zeros(t.shape, dtype=dtype) for t in inputs]
    ins = _Edges(forward.indptr, forward.indices, dtype, edge=edge, heads=heads, drop=drop, edge_ids=forward.edge_ids)
    outs = _Edges(reverse.indptr, reverse.indices, dtype)
    tables = tuple(torch.empty((t.shape[0], width), dtype=dtype) for t in (key, value, query, grad_out))
    keys, values, queries, pulled = tables

    def head_of(head: int) -> Back:
        for table, whole in zip(tables, (key, value, query, grad_out[..., :width]), strict=True):
            head_table(whole, head, out=table)
        own, own_pulled = csr_rows(queries, forward.rows), csr_rows(pulled, forward.rows)
        own_edge, pulled_edge = None, None
        if edge_query is not None:
            own_edge = csr_rows(edge_query[:, head].to(dtype), forward.rows)
            pulled_edge = csr_rows(grad_out[:, head, width:].to(dtype), forward.rows)

        def by_destination(block: RowBlock, ds: Tensor, weights: Tensor) -> Tensor:
            if of_edge and own_edge is not None and pulled_edge is not None:
                of_rows = ins.spread(block, own_edge).mul_(ds[:, None])
                grads[4][block.begin : block.end] += of_rows.addcmul_(ins.spread(block, pulled_edge), weights[:, None])
            return ins.weighted(block, keys, ds)

        def finish(near_sums: Tensor, far_sums: Tensor, value_sums: Tensor) -> None:
            put(grads[0], head, reverse.rows, far_sums)
            put(grads[1], head, reverse.rows, value_sums)
            put(grads[2], head, forward.rows, near_sums[:, :width])
            if own_edge is not None:
                put(grads[3], head, forward.rows, near_sums[:, width:])

        return Back(
            lambda block, out: ins.dots(block, own, keys, own_edge, out),
            lambda block, out: ins.dots(block, own_pulled, values, pulled_edge, out),
            by_destination,
            lambda block, ds: bag(queries, block.indices, block.offsets, ds),
            finish,
            pulled,
        )

    lse_row, delta_row = (csr_rows(t.to(dtype), forward.rows) for t in (lse, delta))
    walk_back(ins, outs, order, lse_row, delta_row, (grad_out.shape[2], width), head_of)
    return tuple(g.to(t.dtype) for g, t in zip(grads, inputs, strict=True))
