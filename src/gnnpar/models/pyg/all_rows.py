"""Reductions over the rows of all nodes in a user's forward, outside convolutions.

Rows of nodes are marked tensors (`NodeRows`). A function that reduces their row dimension, such as `x.mean(0)`,
`k.t() @ v` or PyG's `scatter` into one graph, runs on the rows of this rank, and `Graph.total` sums over ranks.
Other functions run on the rank's own rows. If one of them mixes rows, its result on a probe graph differs from one
device, and an error names the model.
"""

# arguments of torch's dispatch have no types
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from traceback import walk_stack
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import get_default_nowrap_functions
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from gnnpar.folds.block import widened
from gnnpar.graph import Graph, Reduction
from gnnpar.models.pyg.nested import Called, leaves, mapped_call
from gnnpar.precision import unmixed

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
        if (reduction := rows.reductions.get(func.__name__)) is not None:
            named = {"dim" if name == "axis" else name: value for name, value in given.items() if value is not None}
            with suppress(_OfOwnRows, TypeError):  # TypeError: arguments that the reduction does not take
                return reduction(rows, func, *args, **named)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **given)

        def marked(result: Tensor) -> Tensor:
            if isinstance(result, NodeRows):
                return result
            at = _row_dimension(func, args, given, result)
            return result if at is None and rows.by_type is None else NodeRows.of(cls.kind, result, at or 0)

        return out if func in get_default_nowrap_functions() else tree_map_only(Tensor, marked, out)

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

    by_type: number of own rows of each type in a typed graph. names: of modules, by id. readers: names of modules that
    reduce or count rows. active: intercept torch's functions, not only modules that count rows.
    """

    def __init__(self, g: Graph, by_type: Sequence[int] | None, names: Mapping[int, str]) -> None:
        self.g, self.by_type, self.names, self.readers = g, by_type, names, dict[str, None]()
        self.own, self._numbers = len(g.node_ids), list[float]()
        self.active = bool(names) or by_type is not None or self.own != g.num_nodes  # others have rows

    def number(self, kind: int = 0) -> int:
        """Return the number of nodes of a type in the whole graph; without types, of all nodes."""
        self._note()
        if self.by_type is not None and not self._numbers:
            self._numbers = self.g.total(self.g.node_ids.new_tensor(self.by_type, dtype=torch.float64)).tolist()
        return self.g.num_nodes if self.by_type is None else round(self._numbers[kind])

    def marked(self, value: object) -> object:
        """Mark [N, ...] rows of the nodes of a graph without types; return other values unchanged."""
        rows = self.active and self.by_type is None and type(value) in (Tensor, nn.Parameter)
        rows = rows and value.is_floating_point() and value.ndim and len(value) == self.own
        return NodeRows.of(0, value) if rows else value

    def total(self, part: Tensor, how: Reduction = "sum") -> Tensor:
        """Return the sum over ranks, in fp32 at least, or the maximum, without a gradient. Shapes: [...] -> [...]."""
        self._note()
        return self.g.total(part, how)

    def _note(self) -> None:
        """Record the module of the model that reduces or counts rows."""
        if self.names:
            frames = (id(frame.f_locals.get("self")) for frame, _ in walk_stack(None))
            self.readers[next((self.names[each] for each in frames if each in self.names), "")] = None

    # Reductions take the function that the model calls, and its arguments. `_sum`, `_extreme`, `_product` and
    # `_scatter` read other ranks' rows, with a gradient; the others are torch's formulas on marked rows.

    def _sum(self, func: Called, input: NodeRows, dim: Dim = None, keepdim=False, *, dtype: DType = None) -> Tensor:
        """Return sum or mean."""
        dims, mean = _reduced(input, dim), func.__name__ == "mean"
        out = self.total(widened(input.plain()).sum(dims, keepdim=keepdim))
        out = out / self._number(input, dims) if mean else out
        return out.to(dtype or (input.dtype if input.is_floating_point() else out.dtype))

    def _number(self, x: NodeRows, dims: tuple[int, ...]) -> int:
        """Return the number of entries that reduce to one, over all nodes."""
        return self.number(x.kind) * math.prod(x.shape[each] for each in dims if each != x.at)

    def _var(
        self, func: Called, input: NodeRows, dim: Dim = None, unbiased=True, keepdim=False, **given: float
    ) -> Tensor:
        """Return var or std."""
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        dims, x = _reduced(input, dim), widened(input)
        number = self._number(x, dims) - given.get("correction", unbiased)
        out = (x - x.mean(dims, True)).square().sum(dims, keepdim) / max(0.0, number)
        return (out.sqrt() if func.__name__ == "std" else out).to(input.dtype)

    def _norm(self, func: Called, input: NodeRows, p: object = None, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Return the Euclidean norm. torch.linalg.norm with `p` reads several dimensions as a matrix norm."""
        dims, matrix = _reduced(input, dim), func.__name__ == "linalg_norm" and not isinstance(dim, int)
        if p not in (2, None, "fro") or (matrix and p is not None):
            raise _OfOwnRows
        squares = widened(input).square().sum(dims, keepdim)
        some = squares > 0  # the gradient of an all-zero row is 0
        return torch.where(some, torch.where(some, squares, 1).sqrt(), 0).to(input.dtype)

    def _softmax(self, func: Called, input: NodeRows, dim: int, _stacklevel: int = 3, *, dtype: DType = None) -> Tensor:
        """Return softmax or log_softmax."""
        dims, x = _reduced(input, dim), input if dtype is None else input.to(dtype)
        shifted = x - self._largest(x.plain(), x.at, dims).to(x.dtype)
        total = shifted.exp().sum(dims, True)
        return shifted - total.log() if func.__name__ == "log_softmax" else shifted.exp() / total

    def _instance_norm(
        self, func: Called, input: NodeRows, weight: Tensor | None = None, bias: Tensor | None = None, **given: float
    ) -> Tensor:
        """Return F.instance_norm of [1, F, N] without running statistics."""
        if "running_mean" in given or not given["use_input_stats"] or (input.ndim, input.at) != (3, 2):
            raise _OfOwnRows
        out = (input - input.mean(2, True)) * (input.var(2, False, True) + given["eps"]).rsqrt()
        return out if weight is None or bias is None else out * weight[:, None] + bias[:, None]

    def _extreme(self, func: Called, input: NodeRows, dim: Dim = None, keepdim: bool = False) -> object:
        """Return amax, amin, max or min. Over one dimension, max and min also return the smallest ids of nodes. The
        gradient is torch's: split over equal entries, or given to the node of that id."""
        name = func.__name__
        sign, with_ids = -1 if "min" in name else 1, name in ("max", "min") and dim is not None
        if with_ids and (not isinstance(dim, int) or self.by_type is not None):
            raise _OfOwnRows
        dims = _reduced(input, dim)
        x = sign * input.plain()
        best = self._largest(x, input.at, dims)
        taken, place = x == best, None
        if with_ids:
            ids = self.g.node_ids.view([-1 if d == input.at else 1 for d in range(x.ndim)])
            place = -self._largest(-torch.where(taken, ids, _LARGEST), input.at, dims)
            taken = ids == place
        if x.is_floating_point():
            count = self.total(taken.sum(dims, keepdim=True).to(widened(best).dtype)) if place is None else 1
            value = self.total((torch.where(taken, x, 0) / count).sum(dims, keepdim=True)).to(x.dtype)
            best = best + (value - value.detach())
        shaped = [each if each is None or keepdim else each.squeeze(dims) for each in (sign * best, place)]
        return shaped[0] if place is None else vars(torch.return_types)[name](shaped)

    def _largest(self, x: Tensor, at: int, dims: tuple[int, ...]) -> Tensor:
        """Return the largest of all nodes, without a gradient; `dims` have size 1. A rank may have no rows."""
        if not x.shape[at]:
            lowest = (torch.finfo if x.is_floating_point() else torch.iinfo)(x.dtype).min
            x = torch.full_like(x.sum(at, keepdim=True, dtype=x.dtype), lowest)
        return self.total(x.detach().amax(dims, keepdim=True), "max")

    def _product(self, func: Called, *args: object) -> Tensor:
        """Return einsum or A^T B that sums over rows, computed in fp32 at least, also under autocast."""
        rows = next(each for each in leaves(args) if isinstance(each, NodeRows))
        empty = _empty_dimensions(func, args)
        if empty is None:  # the row dimension may meet one of a tensor without a mark
            empty = _empty_dimensions(func, args, num=rows.shape[rows.at])
        if empty != []:
            raise _OfOwnRows
        args, _ = mapped_call(args, {}, lambda t: widened(t.as_subclass(Tensor)) if isinstance(t, Tensor) else t)
        with unmixed(rows.device):
            return self.total(func(*args)).to(rows.dtype)

    def _scatter(
        self, func: Called, input: Tensor, dim: int, index: Tensor, src: Tensor, reduce="", *, include_self=True
    ) -> object:
        """Return scatter_add, index_add or scatter_reduce of all rows into one table, where index 0 is the row of the
        single graph."""
        at, name = dim % input.ndim, func.__name__
        if not isinstance(src, NodeRows) or src.at != at:
            raise _OfOwnRows
        if reduce:
            if reduce not in ("amax", "amin") or input.shape[at] != 1 or include_self:
                raise _OfOwnRows
            return src.amax(at, True) if reduce == "amax" else src.amin(at, True)
        if isinstance(input, NodeRows) and input.at == at and input.shape[at] == src.shape[at] != 1:
            raise ValueError(f"the model calls {name} from rows of nodes to rows of nodes outside of a convolution")
        table, values = input.as_subclass(Tensor), widened(src.plain())
        part = func(torch.zeros_like(table, dtype=values.dtype), at, index.as_subclass(Tensor), values)
        out = self.total(part).to(table.dtype)
        return table.add_(out) if name.endswith("_") else table + out

    reductions: ClassVar[Mapping[str, Callable[..., object]]] = {
        **dict.fromkeys(("sum", "mean"), _sum),
        **dict.fromkeys(("var", "std"), _var),
        **dict.fromkeys(("norm", "linalg_vector_norm", "linalg_norm"), _norm),
        "normalize": lambda self, func, x, p=2, dim=1, eps=1e-12: x / x.norm(p, dim, True).clamp_min(eps),
        "instance_norm": _instance_norm,
        **dict.fromkeys(("softmax", "log_softmax"), _softmax),
        **dict.fromkeys(("amax", "amin", "max", "min"), _extreme),
        **dict.fromkeys(("matmul", "mm", "bmm", "__matmul__", "einsum"), _product),
        **dict.fromkeys(("scatter_add", "scatter_add_", "index_add", "index_add_"), _scatter),
        **dict.fromkeys(("scatter_reduce", "scatter_reduce_"), _scatter),
    }


GLOBAL_REDUCTIONS: ContextVar[GlobalReductions | None] = ContextVar("reduces", default=None)
"""Set while a forward runs; None: functions reduce a rank's own rows."""


def _row_dimension(func: Called, args: tuple, given: Mapping[str, object], out: Tensor) -> int | None:
    """Return the dimension of `out` that holds rows of nodes: the only one of their number, or of several the one that
    is empty if `func` is given no rows. None: none has their number."""
    marked = (each for each in leaves(args) if isinstance(each, NodeRows) and each.ndim)
    rows = max(marked, key=lambda each: each.ndim, default=None)
    if rows is None or (func.__name__.startswith("new_") and out.ndim > 1):  # a table for scatter
        return None
    places = [d for d, size in enumerate(out.shape) if size == rows.shape[rows.at]]
    if len(places) > 1 and (empty := _empty_dimensions(func, args, given)) is not None:
        places = [d for d in places if d in empty]
    if len(places) > 1 and rows.at not in places:
        raise ValueError(
            f"{func.__name__} of the model gives {list(out.shape)}, of which any may be a rank's rows: set world_size=1"
        )
    return rows.at if rows.at in places else next(iter(places), None)


def _empty_dimensions(
    func: Called, args: tuple, given: Mapping[str, object] | None = None, num: int | None = None
) -> list[int] | None:
    """Return the empty dimensions of the result of `func` if it is given no rows; None if it fails then. num: size of
    the dimensions of tensors without a mark that hold rows, too."""

    def without_rows(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        at = [value.at] if isinstance(value, NodeRows) else [d for d, size in enumerate(value.shape) if size == num]
        sizes = [0 if d in at else size for d, size in enumerate(value.shape)]
        return value.as_subclass(Tensor).new_empty(sizes) if at else value

    args, given = mapped_call(args, given, without_rows)
    with suppress(RuntimeError, IndexError), _disable_current_modes():  # a planner records operators
        return [d for d, size in enumerate(next(leaves(func(*args, **given))).shape) if size == 0]
    return None


def _reduced(x: object, dim: Dim) -> tuple[int, ...]:
    """Return the dimensions of `dim`. Raise _OfOwnRows unless they include the row dimension."""
    if isinstance(x, NodeRows) and x.ndim:
        dims = tuple(each % x.ndim for each in ((dim,) if isinstance(dim, int) else dim or range(x.ndim)))
        if x.at in dims:
            return dims
    raise _OfOwnRows
