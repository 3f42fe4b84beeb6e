"""Dot-product attention in one pass over in-edges, and its gradients in one pass from either side: no edge tensor.

The kernels are those of GATv2 with another score: without `a` it is the product of both ends' rows, and keys are not
the values. Attributes of edges are read where their edge is, A numbers each; their gradient is written once an edge.
"""

import itertools

import torch
import triton
from torch import Tensor

from gnnpar_kernels.attend.naive import Drop, State, empty_state
from gnnpar_kernels.attend.triton import run_fold
from gnnpar_kernels.attend.triton_grad import run_pull
from gnnpar_kernels.attend.triton_tiles import LAUNCHES, Dims, Shape, dropping, trained
from gnnpar_kernels.attend_dot.naive import widths
from gnnpar_kernels.attend_v2 import triton as both
from gnnpar_kernels.csr import Csr, accumulate_dtype
from gnnpar_kernels.triton_tuning import Tuned, Variant, distinct

_FOLD, _PULL = (
    Tuned(each.fn, both.TILES, key=[*each.key, "A"], types=each.types, restores=each.restores)
    for each in (both._fold, both._pull)
)
_STATE = ("m_ptr", "mass_ptr", "acc_ptr")


def _operands(
    key: Tensor, value: Tensor, query: Tensor, edge: Tensor | None, edge_query: Tensor | None
) -> dict[str, object]:
    """Return the kernel arguments of the rows of nodes and edges."""
    rows = {"x_ptr": value, "key_ptr": key, "y_ptr": query, "edge_ptr": edge, "edge_query_ptr": edge_query}
    width = 0 if edge is None else edge.shape[1]
    found: dict[str, object] = {name: None if t is None else t.contiguous() for name, t in rows.items()}
    return found | {"a_ptr": None, "SLOPE": 0.0, "A": width, "AP": triton.next_power_of_2(max(width, 1))}


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
    arguments = {"indices_ptr": indices.contiguous(), **dropping(drop, edge_ids)}
    arguments |= _operands(key, value, query, edge, edge_query)
    if indices.shape[0] == 0:
        like, dtype = widths(value, edge), accumulate_dtype(value.dtype)
        return empty_state(num_rows, like, dtype, False) if state is None else state
    extra = 0 if edge is None else edge.shape[1]
    how = {"rows": rows, "num_rows": num_rows, "state": state, "branch": False, "extra": extra}
    return run_fold(_FOLD, indptr, value, **how, **arguments)


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
    """See `naive.attend_dot_grad`. `order` is read with edges alone: weights are computed again from the other side."""
    dims, dtype, num_edges = Dims.of(value), lse.dtype, forward.indices.shape[0]
    common = _operands(key, value, query, edge, edge_query) | both.NO_EDGE_GRADS
    common |= {"grad_out_ptr": grad_out.contiguous(), "ends_ptr": torch.stack([lse, delta.to(dtype)], 1)}

    def pull(csr: Csr, likes: dict[str, Tensor], **how: object) -> list[Tensor]:
        """Return sums over the edges of each row, fp32 at least, of the shapes of `likes`."""
        made = torch.empty if csr.rows is None else torch.zeros
        whole = {name: made(like.shape, dtype=dtype, device=like.device) for name, like in likes.items()}
        mine = {"indices_ptr": csr.indices.contiguous(), **dropping(drop, csr.edge_ids)}
        given = {name: each for name, each in {**common, **mine, **how}.items() if name not in whole}
        run_pull(_PULL, csr.indptr.contiguous(), csr.rows, dims, whole, dtype=dtype, **given)
        return list(whole.values())

    grad_edge = None
    if edge is not None and of_edge:
        grad_edge = torch.zeros((dims.groups, *edge.shape), dtype=dtype, device=edge.device)
    of_edges: dict[str, object] = {"edge_grad_ptr": grad_edge, "num_edges": num_edges if of_edge else 0}
    destinations = {"sums_ptr": query} | ({} if edge_query is None else {"edge_sums_ptr": edge_query})
    of_query = pull(forward, destinations, SOURCE=False, values_ptr=None, **of_edges)
    if edge is not None:
        common["edge_ptr"] = edge.index_select(0, order)
    of_source = pull(reverse, {"sums_ptr": key, "values_ptr": value}, SOURCE=True)
    grads = [g.to(value.dtype) for g in (*of_source, *of_query)]
    if edge is not None and grad_edge is not None:
        grads.append(grad_edge.sum(0).to(edge.dtype))
    return tuple(grads)


def variants() -> list[Variant]:
    """Return the variants of the ahead-of-time test: main shapes, and all shapes of training, with all tiles."""
    cases: list[Variant] = []
    shapes = [Shape(h, d, t) for t in ("bf16", "fp32") for h, d in ((4, 64), (4, 32), (1, 47))]
    plain = [(shape, (bound, False), 0) for shape in shapes for bound in (0, *_low())]
    training = itertools.product(trained(branches=False, mixed=True), LAUNCHES, (0,))
    beside = itertools.product(trained(branches=False, mixed=True), LAUNCHES, (4,))
    for shape, launch, width in (*plain, *training, *beside):
        cases += [_pulled(shape, config, launch, width, what) for config in both.TILES for what in _PULLS]
        for fresh in (True, False):
            if fresh or not launch[1]:  # a piece has a state of its own
                types, how = _given(shape, launch, width)
                types, how = types | dict.fromkeys(_STATE, "*fp32"), how | {"FRESH": fresh}
                which = " split" * launch[1] + (" fresh" if fresh else " added")
                for config in both.TILES:
                    name = "fold dot" + f" edges {width}" * bool(width)
                    cases.append(shape.variant(name, both._fold.fn, types, how, config, which))
    return distinct(cases)


_PULLS = ("source", "destination", "destination and edges")


def _low() -> tuple[int, ...]:
    """Return the bounds of the classes of short rows."""
    return tuple(sorted({bound for bound, _ in LAUNCHES} - {0}))


def _given(shape: Shape, launch: tuple[int, bool], width: int) -> tuple[dict[str, str], dict[str, object]]:
    """(types, constants) of operands."""
    names = ["x_ptr", "key_ptr", "y_ptr", *(["edge_ptr", "edge_query_ptr"] if width else [])]
    constants: dict[str, object] = {} if width else dict(both.NO_EDGES)
    constants |= {"a_ptr": None, "A": width, "AP": max(width, 1), "BOUND": launch[0], "SPLIT": launch[1]}
    return dict.fromkeys(names, "*" + shape.dtype), constants


def _pulled(shape: Shape, config: triton.Config, launch: tuple[int, bool], width: int, what: str) -> Variant:
    types, how = _given(shape, launch, width)
    types |= dict.fromkeys(["ends_ptr", "sums_ptr"], "*fp32") | {"grad_out_ptr": "*" + (shape.grad or shape.dtype)}
    how |= {"SOURCE": what == "source"} | both.NO_EDGE_GRADS
    given = ["values_ptr"] if what == "source" else ["edge_sums_ptr"] if width else []
    given += ["edge_grad_ptr"] if what == "destination and edges" and width else []
    types |= dict.fromkeys(given, "*fp32") | ({"num_edges": "i32"} if "edge_grad_ptr" in given else {})
    how |= {} if what == "source" else {"values_ptr": None}
    how = {name: value for name, value in how.items() if name not in types}
    name = f"{what} dot" + f" edges {width}" * bool(width)
    return shape.variant(name, both._pull.fn, types, how, config, " split" * launch[1])
