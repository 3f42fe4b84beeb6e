"""Reductions over the rows of all nodes in a user's forward, outside convolutions.

Rows of nodes are marked tensors (`NodeRows`). A function that reduces their row dimension, such as `x.mean(0)`,
`k.t() @ v` or PyG's `scatter` into one graph, runs on the rows of this rank, and `Graph.total` sums over ranks.
Functions outside the table below run on the rank's own rows. If such a function mixes rows, its result on a probe graph
differs from one device, and an error names the model.
"""

# arguments of torch's dispatch have no types
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import cache, partial
from traceback import walk_stack
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import get_default_nowrap_functions

from gnnpar.folds.block import widened
from gnnpar.graph import Graph, Reduction
from gnnpar.models.pyg.nested import Called, leaves
from gnnpar.models.sgformer import over_all_nodes
from gnnpar.precision import unmixed

if TYPE_CHECKING:
    from torch_geometric.nn import GraphSizeNorm
    from torch_geometric.nn.attention import PolynormerAttention, SGFormerAttention

    from gnnpar.models.pyg.layout import Layout

_TURNED = frozenset({Tensor.mT.__get__, Tensor.t, torch.t, Tensor.adjoint, torch.adjoint})
_SWAPS = {"transpose", "swapaxes", "swapdims"}
_OTHERWISE = {"out", "other"}  # arguments that the table does not cover
_LARGEST = 2**62
Dim = int | Sequence[int] | None
DType = torch.dtype | None


class NodeRows(Tensor):
    """Rows of nodes of one type. Results of functions are marked too. The mark distinguishes node types, even if a rank
    has as many rows of each; no function takes rows of two types. at: the row dimension."""

    kind: ClassVar[int]
    at: int = 0

    @staticmethod
    def of(kind: int, rows: Tensor, at: int = 0) -> NodeRows:
        found = rows.as_subclass(_class_of(kind))
        found.at = at
        return found

    @classmethod
    def __torch_function__(
        cls, func: Called, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Return a function's result over all nodes if it reduces their rows, else its marked result on own rows."""
        rows, given = GLOBAL_REDUCTIONS.get(), dict(kwargs or {})
        if rows is None or not rows.active or not all(issubclass(cls, each) for each in types):
            return super().__torch_function__(func, types, args, given)
        named = {"dim" if name == "axis" else name: value for name, value in given.items() if value is not None}
        if named.keys().isdisjoint(_OTHERWISE) and (reduction := _REDUCTIONS.get(func.__name__)) is not None:
            with suppress(_OfOwnRows):
                return reduction(*args, **named)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **given)
        return out if func in get_default_nowrap_functions() else cls._of_result(func, args, given, out)

    @classmethod
    def _of_result(cls, func: Called, args: tuple, given: Mapping[str, object], out: object) -> object:
        """Mark results that are rows of nodes; on a typed graph, all results."""
        if isinstance(out, tuple | list) and any(isinstance(each, Tensor) for each in out):
            return type(out)(cls._of_result(func, args, given, each) for each in out)
        if not isinstance(out, Tensor) or isinstance(out, NodeRows):
            return out
        at = _row_dimension(func, args, given, out)
        return out if at is None and _current().layout is None else NodeRows.of(cls.kind, out, at or 0)

    def plain(self) -> Tensor:
        """Return the same tensor without the mark."""
        return self.as_subclass(Tensor)


def plain_rows(value: object) -> object:
    """Return rows of nodes without their mark, and other values unchanged."""
    return value.plain() if isinstance(value, NodeRows) else value


@cache
def _class_of(kind: int) -> type[NodeRows]:
    return type(f"NodeRowsOfType{kind}", (NodeRows,), {"kind": kind})


class _OfOwnRows(Exception):
    """Raised if a function runs on own rows: it does not reduce over rows, or has unsupported options."""


class GlobalReductions:
    """Reductions over the rows of all nodes while a forward runs on `g`.

    layout: positions of each type's rows in a typed graph. names: of modules, by id. readers: names of modules that
    reduce rows. active: intercept torch's functions, not only modules that count rows.
    """

    def __init__(
        self, g: Graph, layout: Layout | None = None, names: Mapping[int, str] | None = None, *, active: bool = True
    ) -> None:
        self.g, self.layout, self.names, self.active = g, layout, names or {}, active
        self.own = len(g.node_ids)  # number of nodes of this rank
        self.readers: dict[str, None] = {}
        self._by_type: Tensor | None = None

    def number(self, kind: int) -> int:
        """Return the number of nodes of a type in the whole graph; without types, of all nodes."""
        if self.layout is None:
            self._note()
            return self.g.num_nodes
        if self._by_type is None:
            own = [float(len(rows)) for rows in self.layout.rows]
            self._by_type = self.g.total(torch.tensor(own, dtype=torch.float64, device=self.g.node_ids.device))
        return round(float(self._by_type[kind]))

    def marked(self, value: object) -> object:
        """Mark [N, ...] rows of the nodes of a graph without types; return other values unchanged."""
        rows = self.active and self.layout is None and type(value) in (Tensor, nn.Parameter)
        rows = rows and value.is_floating_point()
        return NodeRows.of(0, value) if rows and value.ndim and len(value) == self.own else value

    def total(self, part: Tensor, how: Reduction = "sum") -> Tensor:
        """Return the sum over ranks, in fp32 at least, or the maximum, without a gradient. Shapes: [...] -> [...]."""
        self._note()
        return self.g.total(part, how)

    def _note(self) -> None:
        """Record the module of the model that reduces or counts rows."""
        if self.names:
            frames = (id(frame.f_locals.get("self")) for frame, _ in walk_stack(None))
            self.readers[next((self.names[each] for each in frames if each in self.names), "")] = None


GLOBAL_REDUCTIONS: ContextVar[GlobalReductions | None] = ContextVar("reduces", default=None)
"""Set while a forward runs; None: functions reduce a rank's own rows."""


def _row_dimension(func: Called, args: tuple, given: Mapping[str, object], out: Tensor) -> int | None:
    """Return the dimension of `out` that holds rows of nodes, or None if none is known."""
    rows = max((t for t in _marked(args) if t.ndim), key=lambda t: t.ndim, default=None)
    if rows is None:
        return None
    name, at, num = func.__name__, rows.at, rows.shape[rows.at]
    dim = given.get("dim", args[1] if len(args) > 1 else None)
    if func == Tensor.T.__get__:
        at = rows.ndim - 1 - at
    elif func in _TURNED or name in _SWAPS:
        one, other = (each % rows.ndim for each in (args[1:3] if name in _SWAPS else (-2, -1)))
        at = {one: other, other: one}.get(at, at)
    elif name == "permute":
        at = [each % rows.ndim for each in leaves(args[1:])].index(at)
    elif name in ("unsqueeze", "stack"):
        at += (dim or 0) % out.ndim <= at
    elif name == "einsum":
        at = _row_of_einsum(args)
    elif at and out.ndim < rows.ndim and (name in _REDUCTIONS or name == "squeeze"):
        at -= sum(each < at for each in _dims(rows, dim))
    elif name.startswith("new_") and out.ndim > 1:
        return None  # a table for scatter; a vector [N] holds the graph of each node
    elif out.ndim != rows.ndim and out.shape[: at + 1] != rows.shape[: at + 1]:
        at = 0
    return at if at is not None and at < out.ndim and out.shape[at] == num else None


def global_size_forwards(net: nn.Module, rows: GlobalReductions) -> Iterator[tuple[nn.Module, Callable[..., Tensor]]]:
    """Yield PyG's modules that read the number of rows, or get rows without a mark, each with a forward for all nodes.

    Other inputs than one row per node of a single graph run the class's forward. A forward set on an instance is kept.
    Shapes: attention [1, N, F] -> [1, N, F'], norm [N, F] -> [N, F].
    """
    from torch_geometric.nn import GraphSizeNorm  # late, since it takes more than a second
    from torch_geometric.nn.attention import PolynormerAttention, SGFormerAttention

    bodies = {GraphSizeNorm: _graph_size, SGFormerAttention: _sgformer, PolynormerAttention: _polynormer}
    for module in net.modules():
        if type(module) in bodies and "forward" not in vars(module):
            yield module, partial(bodies[type(module)], module, rows)


def _graph_size(
    norm: GraphSizeNorm, rows: GlobalReductions, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
) -> Tensor:
    if len(x) != rows.own or (batch is not None and bool(batch.any())):
        return type(norm).forward(norm, x, batch, batch_size)
    return x / math.sqrt(rows.number(0))


def _sgformer(conv: SGFormerAttention, rows: GlobalReductions, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return (N v + q K^T V) / (N + q K^T 1), with q, k of norm 1 per head (Wu et al. 2023, equation 3). mask [1, N]:
    from to_dense_batch."""
    if x.shape[:2] != (1, rows.own):
        return type(conv).forward(conv, x, mask)
    x = x[0].as_subclass(Tensor)
    q, k, v = (lin(x).unflatten(1, (conv.heads, conv.head_channels)) for lin in (conv.q, conv.k, conv.v))
    v = v if mask is None else v.masked_fill(~mask[0][:, None, None], 0.0)
    q, k = (torch.where(t == 0, 1e-6, t) for t in (q, k))
    q, k = (t / torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (q, k))
    number, (out, share) = rows.number(0), over_all_nodes(rows.g, q, k, v)
    return ((out + number * v) / (share + number)).mean(1).to(x.dtype)[None]


def _polynormer(conv: PolynormerAttention, rows: GlobalReductions, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Run the class's forward on marked rows, since to_dense_batch drops the mark."""
    dense = rows.active and x.shape[:2] == (1, rows.own)
    return type(conv).forward(conv, NodeRows.of(0, x, 1) if dense else x, mask)


def _marked(values: object) -> Iterator[NodeRows]:
    return (each for each in leaves(values) if isinstance(each, NodeRows))


def _dims(x: Tensor, dim: Dim) -> tuple[int, ...]:
    if dim is None or dim == ():
        return tuple(range(x.ndim))
    return tuple(each % x.ndim for each in ((dim,) if isinstance(dim, int) else dim))


def _reduced(x: object, dim: Dim) -> tuple[int, ...]:
    """Return the dimensions of `dim`. Raise _OfOwnRows unless they include the row dimension."""
    dims = _dims(x, dim) if isinstance(x, NodeRows) and x.ndim else ()
    if not isinstance(x, NodeRows) or x.at not in dims:
        raise _OfOwnRows
    return dims


def _current() -> GlobalReductions:
    rows = GLOBAL_REDUCTIONS.get()
    assert rows is not None
    return rows


def _number(x: NodeRows, dims: tuple[int, ...]) -> int:
    """Return the number of entries that reduce to one, over all nodes."""
    return _current().number(x.kind) * math.prod(x.shape[each] for each in dims if each != x.at)


def _sum(input: NodeRows, dim: Dim = None, keepdim: bool = False, *, dtype: DType = None) -> Tensor:
    dims, part = _reduced(input, dim), input.plain()
    out = _current().total((widened(part) if part.is_floating_point() else part).sum(dims, keepdim=keepdim))
    return out.to(dtype or (input.dtype if input.is_floating_point() else out.dtype))


def _mean(input: NodeRows, dim: Dim = None, keepdim: bool = False, *, dtype: DType = None) -> Tensor:
    dims = _reduced(input, dim)
    return (_sum(widened(input), dims, keepdim) / _number(input, dims)).to(dtype or input.dtype)


def _var(
    input: NodeRows, dim: Dim | bool = None, unbiased: bool = True, keepdim: bool = False, **given: float
) -> Tensor:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims, x = _reduced(input, dim), widened(input)
    around, number = x - _mean(x, dims, True), _number(x, dims)
    less = given.get("correction", unbiased)
    return (_sum(around.square(), dims, keepdim) / max(0.0, number - less)).to(input.dtype)


def _norm(
    flat: bool, input: NodeRows, p: object = None, dim: Dim = None, keepdim: bool = False, **given: object
) -> Tensor:
    """Return the Euclidean norm. flat: also of several dimensions if `p` is given, which torch.linalg.norm reads as a
    matrix norm. Raise _OfOwnRows for another `p` or a dtype."""
    dims = _reduced(input, dim)
    if p not in (2, None, "fro") or given or not (flat or p is None or isinstance(dim, int)):
        raise _OfOwnRows
    squares = _sum(widened(input).square(), dims, keepdim)
    some = squares > 0  # the gradient of an all-zero row is 0
    return torch.where(some, torch.where(some, squares, 1).sqrt(), 0).to(input.dtype)


def _softmax(log: bool, input: NodeRows, dim: Dim = None, *_: int, dtype: DType = None, **beside: int) -> Tensor:
    if dim is None:
        raise _OfOwnRows
    dims, x = _reduced(input, dim), input if dtype is None else input.to(dtype)
    largest = _or_lowest(input.plain().detach(), input.at).amax(dims, keepdim=True)
    shifted = x - _current().total(largest, "max").to(x.dtype)
    total = _sum(shifted.exp(), dims, True)
    return shifted - total.log() if log else shifted.exp() / total


def _or_lowest(x: Tensor, at: int) -> Tensor:
    """Return the rows, or one row of the lowest number if there are none."""
    if x.shape[at]:
        return x
    info = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
    return torch.cat([x, x.new_full([1 if i == at else size for i, size in enumerate(x.shape)], info.min)], at)


def _extreme(sign: int, made: Called | None, input: NodeRows, dim: Dim = None, keepdim: bool = False) -> object:
    """Return amax (sign 1) or amin (sign -1). With `made`, return max or min; over one dimension, also the smallest ids
    of nodes. The gradient is torch's: split over equal entries, or given to the node of that id."""
    rows, first = _current(), made is not None and dim is not None
    if first and (not isinstance(dim, int) or rows.layout is not None):
        raise _OfOwnRows
    dims = _reduced(input, dim)
    x, place = _or_lowest(sign * input.plain(), input.at), None
    own, index = x.max(input.at, keepdim=True) if first else (x.amax(dims, keepdim=True), None)
    best = rows.total(own.detach(), "max")
    if index is None:
        share = (x == best).sum(dims, keepdim=True).to(widened(best).dtype)
        share = share / rows.total(share) if x.is_floating_point() else share
    else:
        ids = F.pad(rows.g.node_ids, (0, 1), value=_LARGEST)[index]
        place = -rows.total(-torch.where(own == best, ids, _LARGEST), "max")
        share = ids == place
    if x.is_floating_point():
        value = rows.total(torch.where(share > 0, own, 0) * share).to(x.dtype)
        best = best + (value - value.detach())
    best = sign * best if keepdim else (sign * best).squeeze(dims)
    return best if made is None or place is None else made((best, place if keepdim else place.squeeze(dims)))


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    """Return A^T B, a sum over rows."""
    both = isinstance(input, NodeRows) and isinstance(other, NodeRows)
    if not both or input.at != input.ndim - 1 or other.at != max(0, other.ndim - 2):
        raise _OfOwnRows
    return _product(torch.matmul, input, other)


def _product(of: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """Return a product that sums over rows, computed in fp32 at least, also under autocast."""
    with unmixed(operands[0].device):
        out = _current().total(of(*(widened(t.as_subclass(Tensor)) for t in operands)))
    return out.to(next(_marked(operands)).dtype)


def _row_of_einsum(args: Sequence[object]) -> int | None:
    """Return the position of the row dimension in the output of einsum: -1 if it is summed, None if it is unknown."""
    inputs, arrow, out = str(args[0]).replace(" ", "").partition("->")
    if "..." in inputs or not arrow:
        return None
    operands = zip(inputs.split(","), leaves(args[1:]), strict=True)
    names = {name[t.at] for name, t in operands if isinstance(t, NodeRows)}
    return out.find(names.pop()) if len(names) == 1 else None


def _einsum(*args: object) -> Tensor:
    if _row_of_einsum(args) != -1:
        raise _OfOwnRows
    return _product(partial(torch.einsum, str(args[0])), *leaves(args[1:]))


def _scatter(name: str, input: Tensor, dim: int, index: Tensor, src: Tensor, **given: object) -> Tensor:
    """Return a scatter of all nodes' rows into one table, where index 0 is the row of the single graph."""
    at = dim % input.ndim
    if not isinstance(src, NodeRows) or src.at != at or given:
        raise _OfOwnRows
    if isinstance(input, NodeRows) and input.at == at and input.shape[at] == src.shape[at] != 1:
        raise ValueError(f"the model calls {name} from rows of nodes to rows of nodes outside of a convolution")
    table, values = input.as_subclass(Tensor), widened(src.plain())
    body = Tensor.index_add if name.startswith("index") else Tensor.scatter_add
    part = body(torch.zeros_like(table, dtype=values.dtype), at, index.as_subclass(Tensor), values)
    out = _current().total(part).to(table.dtype)
    return table.add_(out) if name.endswith("_") else table + out


def _scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> object:
    at, sign = dim % input.ndim, {"amax": 1, "amin": -1}.get(reduce)
    if not isinstance(src, NodeRows) or src.at != at or input.shape[at] != 1 or include_self or sign is None:
        raise _OfOwnRows
    return _extreme(sign, None, src, at, True)


def _instance_norm(
    input: NodeRows, *others: object, weight: Tensor | None = None, bias: Tensor | None = None, **given: float
) -> Tensor:
    """Return F.instance_norm of [1, F, N] without running statistics."""
    if others or "running_mean" in given or not given.get("use_input_stats", True) or input.ndim != 3:
        raise _OfOwnRows
    out = (input - _mean(input, 2, True)) * (_var(input, 2, False, True) + given.get("eps", 1e-5)).rsqrt()
    return out if weight is None or bias is None else out * weight[:, None] + bias[:, None]


_REDUCTIONS: Mapping[str, Callable[..., object]] = {
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "std": lambda *args, **given: _var(*args, **given).sqrt(),
    **dict.fromkeys(("norm", "linalg_vector_norm"), partial(_norm, True)),
    "linalg_norm": partial(_norm, False),
    "normalize": lambda input, p=2, dim=1, eps=1e-12: input / _norm(True, input, p, dim, True).clamp_min(eps),
    "instance_norm": _instance_norm,
    "softmax": partial(_softmax, False),
    "log_softmax": partial(_softmax, True),
    "amax": partial(_extreme, 1, None),
    "amin": partial(_extreme, -1, None),
    "max": partial(_extreme, 1, torch.return_types.max),
    "min": partial(_extreme, -1, torch.return_types.min),
    "einsum": _einsum,
    **dict.fromkeys(("matmul", "mm", "bmm", "__matmul__"), _matmul),
    **{name: partial(_scatter, name) for name in ("scatter_add", "scatter_add_", "index_add", "index_add_")},
    **dict.fromkeys(("scatter_reduce", "scatter_reduce_"), _scatter_reduce),
}
