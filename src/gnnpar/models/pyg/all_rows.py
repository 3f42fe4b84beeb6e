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
from gnnpar.graph import Graph
from gnnpar.models.pyg.nested import Called, leaves
from gnnpar.precision import unmixed

if TYPE_CHECKING:
    from torch_geometric.nn import GraphSizeNorm
    from torch_geometric.nn.attention import PolynormerAttention, SGFormerAttention

    from gnnpar.models.pyg.layout import Layout

_TURNED = frozenset({Tensor.T.__get__, Tensor.mT.__get__, Tensor.t, torch.t, Tensor.adjoint, torch.adjoint})
_OTHERWISE = {"out", "other"}  # arguments that the table does not cover
_LARGEST = 2**62
Dim = int | Sequence[int] | None
DType = torch.dtype | None
Reduction = Callable[..., object]


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
        found, given = GLOBAL_REDUCTIONS.get(), dict(kwargs or {})
        if found is None or not found.active or not all(issubclass(cls, each) for each in types):
            return super().__torch_function__(func, types, args, given)
        return found.called(cls, func, args, given)

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
        self.readers: dict[str, None] = {}
        self._by_type: Tensor | None = None

    @property
    def own(self) -> int:
        """Number of nodes of this rank."""
        return len(self.g.node_ids)

    def number(self, kind: int) -> int:
        """Return the number of nodes of a type in the whole graph; without types, of all nodes."""
        if self.layout is None:
            return self.g.num_nodes
        if self._by_type is None:
            own = [float(len(rows)) for rows in self.layout.rows]
            self._by_type = self.g.total(torch.tensor(own, dtype=torch.float64, device=self.g.node_ids.device))
        return round(float(self._by_type[kind]))

    def counted(self, reader: nn.Module) -> int:
        """Return the number of nodes of a graph without types, and record `reader`."""
        if (name := self.names.get(id(reader))) is not None:
            self.readers[name] = None
        return self.number(0)

    def ids(self, kind: int) -> Tensor:
        """Return the global ids of the own rows of a type, [N]."""
        return self.g.node_ids if self.layout is None else self.g.node_ids[self.layout.rows[kind]]

    def marked(self, value: object) -> object:
        """Mark [N, ...] rows of the nodes of a graph without types; return other values unchanged."""
        rows = self.active and self.layout is None and type(value) in (Tensor, nn.Parameter)
        rows = rows and value.is_floating_point()
        return NodeRows.of(0, value) if rows and value.ndim and len(value) == self.own else value

    def total(self, part: Tensor) -> Tensor:
        """Return the sum over ranks, in fp32 at least. Shapes: [...] -> [...]."""
        self._note()
        return self.g.total(part)

    def largest(self, part: Tensor) -> Tensor:
        """Return the maximum over ranks, without a gradient. Shapes: [...] -> [...]."""
        self._note()
        return self.g.total(part.detach(), "max")

    def _note(self) -> None:
        """Record the module of the model that reduces rows."""
        if self.names:
            frames = (id(frame.f_locals.get("self")) for frame, _ in walk_stack(None))
            self.readers[next((self.names[each] for each in frames if each in self.names), "")] = None

    def called(self, cls: type[NodeRows], func: Called, args: tuple, given: Mapping[str, object]) -> object:
        """Return a function's result over all nodes if it reduces their rows, else its marked result on own rows."""
        named = {"dim" if name == "axis" else name: value for name, value in given.items() if value is not None}
        reduction = _REDUCTIONS.get(func.__name__) if named.keys().isdisjoint(_OTHERWISE) else None
        if reduction is not None:
            with suppress(_OfOwnRows):
                return reduction(self, *args, **named)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **given)
        return out if func in get_default_nowrap_functions() else self._marked(cls, func, args, given, out)

    def _marked(
        self, cls: type[NodeRows], func: Called, args: tuple, given: Mapping[str, object], out: object
    ) -> object:
        """Mark results that are rows of nodes; on a typed graph, all results."""
        if isinstance(out, tuple | list) and any(isinstance(each, Tensor) for each in out):
            return type(out)(self._marked(cls, func, args, given, each) for each in out)
        if not isinstance(out, Tensor) or isinstance(out, NodeRows):
            return out
        at = self._place(func, args, given, out)
        return out if at is None and self.layout is None else NodeRows.of(cls.kind, out, at or 0)

    def _place(self, func: Called, args: tuple, given: Mapping[str, object], out: Tensor) -> int | None:
        """Return the dimension of `out` that holds rows of nodes, or None if none is known."""
        rows = max((t for t in _marked(args) if t.ndim), key=lambda t: t.ndim, default=None)
        if rows is None:
            return None
        name, at, num = func.__name__, rows.at, rows.shape[rows.at]
        dim = given.get("dim", args[1] if len(args) > 1 else None)
        if func in _TURNED:
            at = rows.ndim - 1 - at if func is Tensor.T.__get__ or rows.ndim == 2 else _swapped(at, -1, -2, rows.ndim)
        elif name in ("transpose", "swapaxes", "swapdims"):
            at = _swapped(at, args[1], args[2], rows.ndim)
        elif name == "permute":
            at = [each % rows.ndim for each in _flat(args[1:])].index(at)
        elif name in ("unsqueeze", "stack"):
            at += (dim or 0) % out.ndim <= at
        elif at and out.ndim < rows.ndim and (name in _REDUCTIONS or name == "squeeze"):
            at -= sum(each < at for each in _dims(rows, dim))
        elif name == "einsum":
            at = _of_equation(args)[1]
        elif name.startswith("new_") and out.ndim > 1:
            return None  # a table for scatter; a vector [N] holds the graph of each node
        elif out.ndim != rows.ndim:
            at = 0
        return at if at is not None and at < out.ndim and out.shape[at] == num else None


GLOBAL_REDUCTIONS: ContextVar[GlobalReductions | None] = ContextVar("reduces", default=None)
"""Set while a forward runs; None: functions reduce a rank's own rows."""


def global_size_forwards(net: nn.Module, rows: GlobalReductions) -> Iterator[tuple[nn.Module, Callable[..., Tensor]]]:
    """Yield PyG's modules that read the number of rows, each with a forward that reads the number of all nodes.

    Other inputs than one row per node of a single graph run the class's forward. A forward set on an instance is kept.
    Shapes: attention [1, N, F] -> [1, N, F'], norm [N, F] -> [N, F].
    """
    for module in net.modules():
        body = _global_size_bodies().get(type(module))
        if body is not None and "forward" not in vars(module):
            yield module, partial(body, module, rows)


def _graph_size(
    norm: GraphSizeNorm, rows: GlobalReductions, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
) -> Tensor:
    if len(x) != rows.own or (batch is not None and bool(batch.any())):
        return type(norm).forward(norm, x, batch, batch_size)
    return x / math.sqrt(rows.counted(norm))


def _sgformer(conv: SGFormerAttention, rows: GlobalReductions, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return (N v + q K^T V) / (N + q K^T 1), with q, k of norm 1 per head (Wu et al. 2023, equation 3)."""
    if x.shape[:2] != (1, rows.own):
        return type(conv).forward(conv, x, mask)
    x = x[0].as_subclass(Tensor)
    q, k, v = (lin(x).unflatten(1, (conv.heads, conv.head_channels)) for lin in (conv.q, conv.k, conv.v))
    v = _without(v, mask)
    q, k = (torch.where(t == 0, 1e-6, t) for t in (q, k))
    q, k = (t / torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (q, k))
    number = rows.counted(conv)
    products = _product(rows, "nhm,nhd->hmd", k, v).to(x.dtype)
    keys = _product(rows, "nhm->hm", k).to(x.dtype)
    above = torch.einsum("nhm,hmd->nhd", q, products) + number * v
    return (above / (torch.einsum("nhm,hm->nh", q, keys) + number)[..., None]).mean(1)[None]


def _polynormer(conv: PolynormerAttention, rows: GlobalReductions, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return q K^T V / (q K^T 1) of sigmoids, times the gate (Deng et al. 2024, section 3.2)."""
    if x.shape[:2] != (1, rows.own):
        return type(conv).forward(conv, x, mask)
    x = x[0].as_subclass(Tensor)

    def by_head(lin: nn.Module) -> Tensor:
        return lin(x).unflatten(1, (conv.head_channels, conv.heads))

    k, v = by_head(conv.k).sigmoid(), _without(by_head(conv.v), mask)
    q = k if conv.qk_shared else by_head(conv.q).sigmoid()
    products = _product(rows, "ndh,nmh->dmh", k, v).to(x.dtype)
    keys = _product(rows, "ndh->dh", k).to(x.dtype)
    out = torch.einsum("ndh,dmh->nmh", q, products) / (torch.einsum("ndh,dh->nh", q, keys)[:, None] + 1e-6)
    out = conv.lns(out.flatten(1)) * (conv.h_lins(x) + conv.beta)
    return conv.dropout(F.relu(conv.lin_out(out)))[None]


def _without(values: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the rows where the mask of to_dense_batch is False. Shapes: values [N, ., .], mask [1, N]."""
    return values if mask is None else values.masked_fill(~mask[0][:, None, None], 0.0)


@cache
def _global_size_bodies() -> Mapping[type[nn.Module], Callable[..., Tensor]]:
    """Return replacements of forward by class. Import PyG late, since it takes more than a second."""
    from torch_geometric.nn import GraphSizeNorm
    from torch_geometric.nn.attention import PolynormerAttention, SGFormerAttention

    return {GraphSizeNorm: _graph_size, SGFormerAttention: _sgformer, PolynormerAttention: _polynormer}


def _flat(values: Sequence[object]) -> list[int]:
    return list(values[0]) if len(values) == 1 and isinstance(values[0], Sequence) else list(values)


def _marked(values: object) -> Iterator[NodeRows]:
    return (each for each in leaves(values) if isinstance(each, NodeRows))


def _swapped(at: int, one: int, other: int, ndim: int) -> int:
    one, other = one % ndim, other % ndim
    return {one: other, other: one}.get(at, at)


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


def _sums(rows: GlobalReductions, x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    part = x.as_subclass(Tensor)
    return rows.total((widened(part) if part.is_floating_point() else part).sum(dims, keepdim=keepdim))


def _number(rows: GlobalReductions, x: NodeRows, dims: tuple[int, ...]) -> int:
    """Return the number of entries that reduce to one, over all nodes."""
    return rows.number(x.kind) * math.prod(x.shape[each] for each in dims if each != x.at)


def _sum(
    rows: GlobalReductions, input: NodeRows, dim: Dim = None, keepdim: bool = False, *, dtype: DType = None
) -> Tensor:
    out = _sums(rows, input, _reduced(input, dim), keepdim)
    return out.to(dtype or (input.dtype if input.is_floating_point() else out.dtype))


def _mean(
    rows: GlobalReductions, input: NodeRows, dim: Dim = None, keepdim: bool = False, *, dtype: DType = None
) -> Tensor:
    dims = _reduced(input, dim)
    return (_sums(rows, input, dims, keepdim) / _number(rows, input, dims)).to(dtype or input.dtype)


def _var(
    rows: GlobalReductions,
    input: NodeRows,
    dim: Dim | bool = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims = _reduced(input, dim)
    number, x = _number(rows, input, dims), widened(input.plain())
    around = x - _sums(rows, x, dims, True) / number
    less = float(unbiased) if correction is None else correction
    return (_sums(rows, around.square(), dims, keepdim) / max(0.0, number - less)).to(input.dtype)


def _std(rows: GlobalReductions, *args: object, **given: object) -> Tensor:
    return _var(rows, *args, **given).sqrt()


def _norm(
    rows: GlobalReductions, input: NodeRows, p: object = 2, dim: Dim = None, keepdim: bool = False, **given: object
) -> Tensor:
    """Return the Euclidean norm. Raise _OfOwnRows for another `p` or a dtype."""
    dims = _reduced(input, dim)
    if p not in (2, None, "fro") or given:
        raise _OfOwnRows
    squares = _sums(rows, widened(input.plain()).square(), dims, keepdim)
    some = squares > 0  # the gradient of an all-zero row is 0
    return torch.where(some, torch.where(some, squares, 1).sqrt(), 0).to(input.dtype)


def _linalg_norm(
    rows: GlobalReductions, input: NodeRows, ord: object = None, dim: Dim = None, *rest: bool, **given: object
) -> Tensor:
    """Return the norm over one dimension; without `ord`, also over several or all."""
    if ord is not None and not isinstance(dim, int):
        raise _OfOwnRows
    return _norm(rows, input, ord, dim, *rest, **given)


def _normalize(rows: GlobalReductions, input: NodeRows, p: float = 2, dim: int = 1, eps: float = 1e-12) -> Tensor:
    return input / _norm(rows, input, p, dim, keepdim=True).clamp_min(eps)


def _softmax(
    log: bool, rows: GlobalReductions, input: NodeRows, dim: Dim = None, *_: int, dtype: DType = None, **beside: int
) -> Tensor:
    if dim is None:
        raise _OfOwnRows
    dims, x = _reduced(input, dim), input if dtype is None else input.to(dtype)
    shifted = x - rows.largest(_extreme_of(input.plain(), dims, torch.amax)).to(x.dtype)
    total = _sums(rows, shifted.exp(), dims, True).to(x.dtype)
    return shifted - total.log() if log else shifted.exp() / total


def _extreme_of(x: Tensor, dims: tuple[int, ...], reduce: Callable[..., Tensor]) -> Tensor:
    """Return torch's amax or amin with kept dimensions; without rows, the identity of the reduction."""
    if all(x.shape[each] for each in dims):
        return reduce(x, dims, keepdim=True)
    info = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
    shape = [1 if i in dims else size for i, size in enumerate(x.shape)]
    return x.new_full(shape, info.min if reduce is torch.amax else info.max)


def _chosen(
    rows: GlobalReductions, input: NodeRows, dims: tuple[int, ...], keepdim: bool, sign: int, *, first: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the largest (sign 1) or smallest (sign -1) entries, and the smallest ids of nodes with them. The gradient
    is torch's: split over equal entries, or given to the `first`."""
    x = input.plain()
    best = sign * rows.largest(sign * _extreme_of(x, dims, torch.amax if sign > 0 else torch.amin))
    equal, ids = x == best, rows.ids(input.kind).view([-1 if i == input.at else 1 for i in range(x.ndim)])
    places = torch.where(equal, ids, _LARGEST)
    place = -rows.largest(-_extreme_of(places, dims, torch.amin)) if first else places.new_zeros(best.shape)
    if x.is_floating_point():
        equal = places == place if first else equal
        share = equal / rows.total(equal.sum(dims, keepdim=True).to(best.dtype))
        value = rows.total((torch.where(equal, x, 0) * share).sum(dims, keepdim=True)).to(x.dtype)
        best = best + (value - value.detach())
    return (best, place) if keepdim else (best.squeeze(dims), place.squeeze(dims))


def _extreme(
    sign: int, made: Called | None, rows: GlobalReductions, input: NodeRows, dim: Dim = None, keepdim: bool = False
) -> object:
    """Return amax or amin. With `made`, return max or min; over one dimension, also the first index."""
    if made is None or dim is None:
        return _chosen(rows, input, _reduced(input, dim), keepdim, sign)[0]
    if not isinstance(dim, int) or rows.layout is not None:
        raise _OfOwnRows
    return made(_chosen(rows, input, _reduced(input, dim), keepdim, sign, first=True))


def _matmul(rows: GlobalReductions, input: Tensor, other: Tensor) -> Tensor:
    """Return A^T B, a sum over rows."""
    both = isinstance(input, NodeRows) and isinstance(other, NodeRows)
    if not both or input.at != input.ndim - 1 or other.at != max(0, other.ndim - 2):
        raise _OfOwnRows
    return _product(rows, torch.matmul, input, other).to(input.dtype)


def _product(rows: GlobalReductions, of: str | Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """Return a product that sums over rows, or an einsum, in fp32 at least, also under autocast."""
    with unmixed(operands[0].device):
        plain = [widened(t.as_subclass(Tensor)) for t in operands]
        return rows.total(torch.einsum(of, *plain) if isinstance(of, str) else of(*plain))


def _of_equation(args: Sequence[object]) -> tuple[set[str], int | None]:
    """Return the names of the row dimensions in an einsum equation, and the position of one in its output."""
    equation, operands = str(args[0]).replace(" ", ""), _flat(args[1:])
    inputs, _, out = equation.partition("->")
    if "..." in equation or "->" not in equation:
        return set(), None
    names = {name[t.at] for name, t in zip(inputs.split(","), operands, strict=True) if isinstance(t, NodeRows)}
    return names, out.find(next(iter(names))) if len(names) == 1 else None


def _einsum(rows: GlobalReductions, *args: object) -> Tensor:
    names, at = _of_equation(args)
    if len(names) != 1 or at != -1:
        raise _OfOwnRows
    return _product(rows, str(args[0]), *_flat(args[1:])).to(next(_marked(args)).dtype)


def _scatter(
    name: str, rows: GlobalReductions, input: Tensor, dim: int, index: Tensor, src: Tensor, **given: object
) -> Tensor:
    """Return a scatter of all nodes' rows into one table, where index 0 is the row of the single graph."""
    at = dim % input.ndim
    if not isinstance(src, NodeRows) or src.at != at or given:
        raise _OfOwnRows
    if isinstance(input, NodeRows) and input.at == at and input.shape[at] == src.shape[at] != 1:
        raise ValueError(f"the model calls {name} from rows of nodes to rows of nodes outside of a convolution")
    table, values = input.as_subclass(Tensor), widened(src.plain())
    body = Tensor.index_add if name.startswith("index") else Tensor.scatter_add
    part = body(torch.zeros_like(table, dtype=values.dtype), at, index.as_subclass(Tensor), values)
    out = rows.total(part).to(table.dtype)
    return table.add_(out) if name.endswith("_") else table + out


def _scatter_reduce(
    rows: GlobalReductions,
    input: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    at, signs = dim % input.ndim, {"amax": 1, "amin": -1}
    if not isinstance(src, NodeRows) or src.at != at or input.shape[at] != 1 or include_self or reduce not in signs:
        raise _OfOwnRows
    return _chosen(rows, src, (at,), True, signs[reduce])[0]


def _instance_norm(
    rows: GlobalReductions,
    input: NodeRows,
    *others: object,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    eps: float = 1e-5,
    **beside: object,
) -> Tensor:
    """Return F.instance_norm without running statistics. beside: its momentum."""
    columns = isinstance(input, NodeRows) and (input.ndim, input.at) == (3, 2)  # [1, F, N]
    if not columns or not use_input_stats or others or "running_mean" in beside:
        raise _OfOwnRows
    mean, variance = _mean(rows, input, input.at, True), _var(rows, input, input.at, False, True)
    out = (input - mean) * (variance + eps).rsqrt()
    return out if weight is None or bias is None else out * weight[:, None] + bias[:, None]


_REDUCTIONS: Mapping[str, Reduction] = {
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "std": _std,
    "norm": _norm,
    "linalg_vector_norm": _norm,
    "linalg_norm": _linalg_norm,
    "normalize": _normalize,
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
