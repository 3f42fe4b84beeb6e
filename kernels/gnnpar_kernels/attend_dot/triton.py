"""Dot-product attention in one pass over in-edges, and its gradients in one pass from either side: no edge tensor.

The kernels are GATv2's with another score and with keys separate from values. Edge attributes, A elements per
edge, are read in the order of edges; their gradient is written once per edge.
"""

# pyright: reportArgumentType=false

import torch
from torch import Tensor

from gnnpar_kernels.attend.naive import Drop, State
from gnnpar_kernels.attend.triton import STATE, fold, fold_rows
from gnnpar_kernels.attend.triton_tiles import Dims, dot_score, padded, pointers
from gnnpar_kernels.attend_v2.triton import KEY, NAMES, TILES, Pulls, dot_grad, ends_of, pull
from gnnpar_kernels.csr import Csr
from gnnpar_kernels.triton_tuning import Tuned

_fold = Tuned(fold, TILES, key=[*KEY, "A"], types=["x_ptr"], restores=STATE, name=NAMES[0])
_pull = Tuned(pull, TILES, key=[*KEY, "SOURCE", "A"], types=["x_ptr"], name=NAMES[1])


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
    operands = {"far": key, "near": query, "edge": edge, "edge_query": edge_query, "SCORE": dot_score, "SLOPE": 0.0}
    where = {"num_rows": num_rows, "rows": rows, "state": state, "drop": drop, "edge_ids": edge_ids}
    return fold_rows(_fold, indptr, indices, value, **operands, **where)


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
    """See `naive.attend_dot_grad`. Only edge attributes need `order`: weights are recomputed on the source side."""
    dims, extra = Dims.of(value), 0 if edge is None else edge.shape[1]
    operands = pointers(x=value, key=key, y=query, a=None, edge=edge, edge_query=edge_query)
    operands |= pointers(grad_out=grad_out, ends=ends_of(lse, delta))
    operands |= {"SCORE": dot_score, "GRAD": dot_grad, "SLOPE": 0.0, **padded("A", extra)}
    pulls, of_edges, grad_edge = Pulls(_pull, dims, lse.dtype, drop, **operands), {}, None
    if edge is not None and of_edge:
        grad_edge = torch.zeros((dims.groups, *edge.shape), dtype=lse.dtype, device=edge.device)
        of_edges = {"edge_grad_ptr": grad_edge, "num_edges": edge.shape[0]}
    beside = {} if edge_query is None else {"edge_sums_ptr": edge_query}
    of_query = pulls.sums(forward, source=False, rest=of_edges, sums_ptr=query, **beside)
    in_order = {} if edge is None else pointers(edge=edge.index_select(0, order))
    of_source = pulls.sums(reverse, source=True, rest=in_order, sums_ptr=key, values_ptr=value)
    grads = [g.to(value.dtype) for g in (*of_source, *of_query)]
    if edge is not None and grad_edge is not None:
        grads.append(grad_edge.sum(0).to(edge.dtype))
    return tuple(grads)
