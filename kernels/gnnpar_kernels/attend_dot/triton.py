"""Dot-product attention in one pass over in-edges, and its gradients in one pass from either side: no edge tensor.

The kernels are GATv2's with another score and with keys separate from values. Edge attributes, A elements per
edge, are read in the order of edges; their gradient is written once per edge.
"""

# pyright: reportArgumentType=false

from typing import Unpack

import torch
from torch import Tensor

from gnnpar_kernels.attend import triton_tiles as tiles
from gnnpar_kernels.attend.naive import Drop, State, Where
from gnnpar_kernels.attend.triton import STATE, fold, fold_rows
from gnnpar_kernels.attend.triton_grad import run_pull
from gnnpar_kernels.attend_dot import naive
from gnnpar_kernels.attend_v2.triton import KEY, NAMES, dot_grad, ends_of, pull
from gnnpar_kernels.csr import Csr
from gnnpar_kernels.dispatch import specified
from gnnpar_kernels.triton_tuning import Tuned

_fold = Tuned(fold, tiles.TILES, key=[*KEY, "A"], types=["x_ptr"], restores=STATE, name=NAMES[0])
_pull = Tuned(pull, tiles.TILES, key=[*KEY, "SOURCE", "A"], types=["x_ptr"], name=NAMES[1])


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
    score = {"SCORE": tiles.dot_score, "SLOPE": 0.0, "near": query, "operands": {"far": key, "edge_query": edge_query}}
    return fold_rows(_fold, indptr, indices, value, **score, edge=edge, **where)


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
    key, value, query, lse, grad_out, delta = tensors  # of `order`, only edge attributes need it
    dims, extra = tiles.Dims.of(value), 0 if edge is None else edge.shape[1]
    how = {"dtype": lse.dtype, "wide": True, "SCORE": tiles.dot_score, "GRAD": dot_grad, "SLOPE": 0.0}
    how |= tiles.pointers(x=value, key=key, y=query, edge_query=edge_query, grad_out=grad_out, ends=ends_of(lse, delta))
    how |= tiles.padded("A", extra)
    of_edges, grad_edge, likes = {"num_edges": 0}, None, {"sums_ptr": query}
    if edge is not None and edge_query is not None:
        likes["edge_sums_ptr"] = edge_query
        if of_edge:
            grad_edge = torch.zeros((dims.groups, *edge.shape), dtype=lse.dtype, device=edge.device)
            of_edges = {"edge_grad_ptr": grad_edge, "num_edges": edge.shape[0]}
    of_query = run_pull(_pull, forward, dims, drop, likes, SOURCE=False, **how, **of_edges, **tiles.pointers(edge=edge))
    in_order = tiles.pointers(edge=None if edge is None else edge.index_select(0, order))
    likes = {"sums_ptr": key, "values_ptr": value}
    of_source = run_pull(_pull, reverse, dims, drop, likes, SOURCE=True, **how, num_edges=0, **in_order)
    grads = [g.to(value.dtype) for g in (*of_source, *of_query)]
    if edge is not None and grad_edge is not None:
        grads.append(grad_edge.sum(0).to(edge.dtype))
    return tuple(grads)
