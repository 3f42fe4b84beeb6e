"""Marked edge tensors: run a user's convolution on a rank that holds a part of the graph.

The convolution's own code runs. Its `edge_index` holds the in-edges of the rank's own rows: sources in the first row,
destinations in the second. Both rows are marked, so that these operations give the same as on the whole graph:

- `rows[source]`, also by `index_select`: one row per edge; rows of other ranks are exchanged;
- `rows[destination]`: one row per edge, from the rank's own rows;
- a sum, mean, maximum or softmax by `destination`: complete, since the rank holds all in-edges of its rows;
- a sum or mean by `source`, over out-edges: rows that belong to other ranks are returned to them.

Any other use of the ends, such as arithmetic on node numbers, is refused. Rows of edges are marked too, since a rank
may have as many rows of nodes.
"""

# torch's dispatch arguments and its descriptors have no types
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportOptionalMemberAccess=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import _disable_current_modes

from gnnpar.folds.generic import SourceRows
from gnnpar.graph import Graph, InEdges, OneView, unchanged
from gnnpar.models.pyg.nested import Called, leaves, mapped, mapped_call

Arguments = tuple[object, ...]

_LOOP_IDS = 1 << 40  # ids of self loops added by a convolution follow the ids of the graph's edges
_ABOUT = frozenset(  # properties of a tensor other than its values
    {Tensor.dtype.__get__, Tensor.device.__get__, Tensor.layout.__get__, Tensor.is_cuda.__get__, Tensor.ndim.__get__}
    | {Tensor.requires_grad.__get__, Tensor.is_sparse.__get__, Tensor.dim, Tensor.is_floating_point, Tensor.is_complex}
    | {torch.is_floating_point, Tensor.is_meta.__get__, Tensor.is_quantized.__get__, Tensor.is_mkldnn.__get__}
    | {Tensor.is_sparse_csr.__get__, Tensor.grad_fn.__get__, Tensor.is_leaf.__get__, Tensor._version.__get__}
    | {Tensor.untyped_storage, Tensor.data_ptr, Tensor.element_size, Tensor.storage_offset, Tensor.__hash__}
)
_SIZES = frozenset({Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel})
_SHOWN = frozenset({"is_contiguous", "stride", "__repr__", "__format__"})
_SAME = frozenset({"to", "long", "contiguous", "clone", "detach", "cpu", "cuda", "type"})
_SELECTS = frozenset({"__getitem__", "index_select", "embedding"})
_READS = _SELECTS | {"gather", "take", "take_along_dim"}
_JOINS = frozenset({"cat", "concat", "concatenate", "hstack"})
_RESHAPES = frozenset({"view", "view_as", "reshape", "expand", "expand_as", "unsqueeze", "squeeze", "flatten"})
_SCATTERS = frozenset(
    name + ending
    for name in ("scatter_add", "scatter_reduce", "scatter", "index_add", "index_reduce", "index_put", "index_copy")
    for ending in ("", "_")
)
_WRITES = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__"})
_NEW = frozenset({"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"})


class Refused(ValueError):
    """Raised when a convolution needs more than a part of the graph. The convolution's name precedes the message."""


class Marked(Tensor):
    """A tensor of edges."""

    @classmethod
    def __torch_function__(
        cls, func: Called, types: object, args: Arguments = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        given = dict(kwargs or {})
        if func in _ABOUT or func.__name__ == "__set__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        if type(args[0]) is Edges and _flips_ends(func, args):
            turned = Edges.of(args[0].local)
            turned.flipped = not args[0].flipped
            return turned
        args, given = mapped_call(
            args, kwargs, lambda leaf: leaf.materialise(func, args) if isinstance(leaf, Placeholder) else leaf
        )
        marked, name = [leaf for leaf in leaves((args, given)) if isinstance(leaf, _Named)], func.__name__
        if marked and name in _READS:
            table, at = ("weight", 1) if name == "embedding" else ("input", 0)
            if isinstance(given.get(table, (*args, None, None)[at]), EdgeRows):
                raise Refused("reads rows of edges by numbers of nodes")
        for kind in (Ends, Source, Destination):
            if (found := next((leaf for leaf in marked if isinstance(leaf, kind)), None)) is not None:
                if func in _SIZES or name in _SHOWN:
                    return _called(func, args, given)
                return found.called(func, name, args, given)
        if name in ("view", "reshape") and isinstance(args[0], Tensor) and not args[0].numel():
            args = args[0], _shape_without_edges(args[0], args[1:])
        out = _called(func, args, given)
        return out if name in _NEW else _as_rows(out)


def _flips_ends(func: Called, args: Arguments) -> bool:
    return func.__name__ == "flip" and args[1:] in (([0],), ((0,),), (0,))


def _shape_without_edges(rows: Tensor, shape: Arguments) -> object:
    """Return the shape of a view without edges, since torch cannot infer the last dimension of (0, heads, -1)."""
    sizes = list(shape[0]) if shape and isinstance(shape[0], tuple | list) else list(shape)
    if sizes and sizes[0] == 0 and -1 in sizes and all(isinstance(each, int) for each in sizes):
        sizes[sizes.index(-1)] = math.prod(rows.shape[1:]) // math.prod(each for each in sizes[1:] if each != -1)
    return sizes


class EdgeRows(Marked):
    """One row per edge. Results are marked too."""

    @staticmethod
    def of(rows: Tensor) -> EdgeRows:
        return rows.as_subclass(EdgeRows)

    @staticmethod
    def attributes(local: LocalEdges) -> EdgeRows:
        """Return the rows of edge_attr, in ascending order of edge ids."""
        assert local.g.edge_attr is not None
        return EdgeRows.of(local.g.edge_attr)


class Placeholder(Marked):
    """A placeholder for edge data, materialised when read: in a convolution, or if the rank holds the whole graph. Its
    own shape is `no_edges`."""

    name = ""
    no_edges: ClassVar[tuple[int, ...]] = (0,)
    local: LocalEdges

    @classmethod
    def of(cls, local: LocalEdges) -> Self:
        like = local.g.in_degree if cls is Weights else local.g.node_ids
        with _disable_current_modes():  # torch.export traces with tensors that have no marks
            made = torch.empty(cls.no_edges, dtype=like.dtype, device=like.device).as_subclass(cls)
        made.local = local
        return made

    def materialise(self, func: Called, args: Arguments) -> object:
        """Return the tensor of this placeholder. ValueError if the rank holds only a part of it."""
        if func is Tensor.size and args[1:] == (0,) and isinstance(self, Edges):
            return self
        running, name = LocalEdges.current.get(), func.__name__
        if args and args[0] is self and (name in _WRITES or (name[-1] == "_" != name[0])):
            raise ValueError(f"the model writes into {self.name} ({name.strip('_')}); write into a copy")
        if running is None and not self.local.whole:
            raise ValueError(
                f"the model reads {self.name} outside of a convolution ({func.__name__.strip('_')}), and a rank holds "
                "a part of the edges; hand it to convolutions alone"
            )
        return self.tensor(running or self.local)

    def tensor(self, local: LocalEdges) -> Tensor:
        raise NotImplementedError


class Edges(Placeholder):
    """Placeholder for edge_index, or edge_index.flip([0])."""

    name = "edge_index"
    no_edges = (2, 0)
    flipped = False

    def tensor(self, local: LocalEdges) -> Tensor:
        return local.ends.flip([0]) if self.flipped else local.ends


class Weights(Placeholder):
    """Placeholder for edge_weight."""

    name = "edge_weight"

    def tensor(self, local: LocalEdges) -> Tensor:
        weight = local.edges.weight
        return EdgeRows.of(local.g.in_degree.new_ones(local.edges.row.shape[0]) if weight is None else weight)


class Types(Placeholder):
    """Placeholder for edge_type."""

    name = "edge_type"

    def tensor(self, local: LocalEdges) -> Tensor:
        if local.edges.type is None:
            raise Refused("reads edge_type, but the edges have no types")
        return EdgeRows.of(local.edges.type)


class _Named(Marked):
    """Nodes at one or both ends of edges.

    positions [e]: index of each edge among the in-edges of the own rows, or -1 - row for an edge added by the
    user from an own row. None: all in-edges in order. flipped: the first row of `Ends` holds destinations.
    """

    local: LocalEdges
    positions: Tensor | None
    flipped: bool

    @classmethod
    def of(cls, nodes: Tensor, local: LocalEdges, positions: Tensor | None, *, flipped: bool = False) -> Self:
        made = nodes.as_subclass(Tensor).as_subclass(cls)
        made.local, made.positions, made.flipped = local, positions, flipped
        return made

    def at(self, edges: object) -> Self:
        """Return the ends of selected edges: a mask, indices or a slice."""
        taken = _plain(edges)
        return self.of(self.as_subclass(Tensor)[..., taken], self.local, self.all()[taken], flipped=self.flipped)

    def same(self, out: object) -> Self:
        """Return `out` with the marks of self."""
        assert isinstance(out, Tensor)
        return self.of(out, self.local, self.positions, flipped=self.flipped)

    @classmethod
    def joined(cls, parts: Sequence[Tensor]) -> Self:
        """Concatenate edges; unmarked parts join own rows. Shapes: [..., e_1], [..., e_2], ... -> [..., e]."""
        first = next(part for part in parts if isinstance(part, _Named))
        positions = [t.all() if isinstance(t, _Named) else -1 - t.reshape(-1, t.shape[-1])[0] for t in parts]
        nodes = torch.cat([part.as_subclass(Tensor) for part in parts], -1)
        return cls.of(nodes, first.local, torch.cat(positions), flipped=first.flipped)

    def all(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return `positions` as a tensor, also for all in-edges."""
        return self.local.all_positions if self.positions is None else self.positions

    def run_unmarked(self, func: Called, args: Arguments, given: Mapping[str, object], what: str) -> object:
        """Run an unsupported call on unmarked tensors if this rank has the whole graph, else raise ValueError."""
        if not self.local.whole:
            raise Refused(
                f"calls {func.__name__.strip('_')} on {what}, which needs the edges of the whole graph, and a rank has "
                "the in-edges of its own nodes; sums by destination, rows of sources and self loops are carried"
            )
        return _called(func, *mapped_call(args, given, _plain))


class Ends(_Named):
    """edge_index, [2, e]."""

    def called(self, func: Called, name: str, args: Arguments, given: dict[str, object]) -> object:
        if name in _SAME:
            return self.same(_called(func, args, given))
        if name in ("unbind", "__iter__") and given.get("dim", (*args, 0)[1]) in (0, -2):
            pair = self[0], self[1]
            return iter(pair) if name == "__iter__" else pair
        if name == "__getitem__" and args[0] is self and (taken := self.taken(args[1])) is not None:
            return taken
        if name == "select" and args[1] in (0, -2) and args[2] in (0, 1):
            return self.taken(args[2])
        if name == "index_select" and args[1] in (1, -1):
            return self.at(args[2])
        if _flips_ends(func, args):
            return self.of(_plain(self).flip(0), self.local, self.positions, flipped=not self.flipped)
        joins = name in _JOINS and self.local.one_kind and isinstance(args[0], tuple | list)
        joins = joins and all(isinstance(part, Ends) or _are_loops(part) for part in args[0])
        if joins and (given.get("dim", args[1] if len(args) > 1 else 0) in (1, -1) or name == "hstack"):
            return self.joined(args[0])
        return self.run_unmarked(func, args, given, "edge_index")

    def taken(self, key: object) -> Tensor | None:
        """Return edge_index[key], or None if the result has no marks."""
        row, edges = key if isinstance(key, tuple) and len(key) == 2 else (key, slice(None))
        if row is Ellipsis or (isinstance(row, slice) and row == slice(None)):
            return self if _selects_all(edges) else self.at(edges)
        if not isinstance(row, int) or row not in (0, 1, -1, -2):
            return None
        kind = Source if (row in (0, -2)) != self.flipped else Destination
        nodes = kind.of(self.as_subclass(Tensor)[row], self.local, self.positions)
        return nodes if _selects_all(edges) else nodes.at(edges)


def _are_loops(part: object) -> bool:
    """Return True for unmarked self loops [2, e]."""
    return isinstance(part, Tensor) and part.ndim == 2 and len(part) == 2 and torch.equal(part[0], part[1])


def _selects_all(edges: object) -> bool:
    return edges is Ellipsis or (isinstance(edges, slice) and edges == slice(None))


class Source(_Named):
    """The first row of edge_index, [e]: indices of own rows, and higher indices for rows of other ranks."""

    def called(self, func: Called, name: str, args: Arguments, given: dict[str, object]) -> object:
        if name in _SAME or (name in _RESHAPES and args[0] is self):
            return self.same(_called(func, args, given))
        if name in ("scatter_add", "scatter_add_", "index_add", "index_add_") and len(args) == 4 and args[2] is self:
            total = self.local.sum_by(self, args[3], args[1])
            return _called(Tensor.add_ if name.endswith("_") else torch.add, (args[0], total), {})
        if name in ("eq", "ne", "__eq__", "__ne__") and self.local.one_kind:
            return _as_rows(_called(func, args, given))
        if name in _JOINS:
            return self.joined(args[0])
        if name == "stack" and isinstance(args[0], tuple | list) and given.get("dim", (*args, 0)[1]) == 0:
            first, second = args[0]
            if isinstance(first, Source) and isinstance(second, Destination):
                return Ends.of(torch.stack([_plain(first), _plain(second)]), first.local, first.positions)
        if name in ("__getitem__", "index_select") and args[0] is self:
            return self.at(args[1] if name == "__getitem__" else args[2])
        if name == "__setitem__" and bool((_plain(self) < self.local.num_sources).all()):  # writes self loops
            return _called(func, *mapped_call(args, given, _plain))
        if name in _SELECTS and (found := _selected(name, args, given)) is not None:
            return self.local.gather(*found, self)
        return self.run_unmarked(func, args, given, "the sources of edges")


class Destination(_Named):
    """The second row of edge_index, [e]: indices of own rows."""

    def called(self, func: Called, name: str, args: Arguments, given: dict[str, object]) -> object:
        if name in ("__getitem__", "index_select") and args[0] is self:
            return self.at(args[1] if name == "__getitem__" else args[2])
        if name in _JOINS and isinstance(args[0], tuple | list) and all(t.dim() == 1 for t in args[0]):
            return self.joined(args[0])
        if name == "stack":
            return self.run_unmarked(func, args, given, "edge_index")
        out = _called(func, args, given)
        if name in _SAME | _RESHAPES and args[0] is self:
            return self.same(out)
        return out if name in _SCATTERS | _NEW else _as_rows(out) if name in _SELECTS else out


def _selected(name: str, args: Arguments, given: Mapping[str, object]) -> tuple[Tensor, int] | None:
    """Return the table indexed by sources, and the dimension; None if other indices are involved."""
    if name == "embedding":
        rows, dim = args[1], 0
    elif name == "index_select":
        rows, dim = args[0], given.get("dim", args[1] if len(args) > 1 else 0)
    else:
        rows, key = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
        dim = next(i for i, each in enumerate(key) if isinstance(each, Source))
        if not all(_selects_all(each) for i, each in enumerate(key) if i != dim):
            return None
    assert isinstance(rows, Tensor)
    assert isinstance(dim, int)
    return rows, dim


class Bipartite(OneView):
    """A graph from nodes of one type to nodes of one type. num_sources: own rows of the source type. one_kind: both
    types are the same."""

    num_sources: int
    one_kind: bool


class LocalEdges:
    """The in-edges of the own rows while a convolution runs on `g`. current: of the running convolution."""

    current: ClassVar[ContextVar[LocalEdges | None]] = ContextVar("local_edges", default=None)

    def __init__(self, g: Graph) -> None:
        self.g = g
        self.num_sources = g.num_sources if isinstance(g, Bipartite) else g.node_ids.shape[0]
        self.one_kind = not isinstance(g, Bipartite) or g.one_kind
        self.read = False  # whether the edges were read one by one
        self._gathered: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._positions: dict[int, Tensor] = {}

    @cached_property
    def edges(self) -> InEdges:
        self.read = True
        return self.g.in_edges

    @cached_property
    def whole(self) -> bool:
        """True if all sources are own rows, so that no edge crosses ranks."""
        return bool((self.edges.source >= 0).all())

    @cached_property
    def all_positions(self) -> Tensor:
        return torch.arange(self.edges.row.shape[0], device=self.edges.row.device)

    @cached_property
    def ends(self) -> Ends:
        own, row = self.edges.source, self.edges.row
        source = torch.where(own < 0, self.num_sources + self.all_positions, own)
        return Ends.of(torch.stack([source, row]), self, None)

    def ids(self, num_edges: int) -> Tensor | None:
        """Return edge ids in the order of the user's code, [num_edges]; None if no edge list has this length."""
        ids = self.g.edge_ids
        if num_edges == len(ids):
            return ids
        positions = self._positions.get(num_edges)
        if positions is None:
            return None
        loops = _LOOP_IDS + self.g.node_ids[(-1 - positions).clamp_min(0)]
        return torch.where(positions < 0, loops, ids[positions.clamp_min(0)] if len(ids) else loops)

    def gather(self, rows: Tensor, dim: int, source: Source) -> EdgeRows:
        """Return the source's row for each edge. Shapes: [..., N, ...] -> [..., e, ...] at `dim`."""
        if isinstance(rows, EdgeRows) or rows.size(dim) != self.num_sources:
            raise Refused(
                f"reads rows of sources from a tensor of shape {list(rows.shape)}, and a rank has {self.num_sources} "
                "rows of nodes; for a table of one row per node set features=learned"
            )
        if not rows.is_floating_point():
            raise Refused(f"reads {rows.dtype} of sources, which are not carried; make it a column of x")
        _, version, out = self._gathered.get(id(rows), (None,) * 3)
        if out is None or version != rows._version:
            table = rows.as_subclass(Tensor).movedim(dim, 0)
            found = self.g.aggregate(SourceRows(), self.g.source(unchanged, table.reshape(table.shape[0], -1)))
            out = found.reshape(-1, *table.shape[1:])
            self._gathered[id(rows)] = rows, rows._version, out  # rows stay alive, so their id is unique
        else:
            out = out.clone()  # the user's code may write into the first result
        if source.positions is not None:
            self._positions[len(source.positions)] = source.positions
            places = torch.where(source.positions < 0, len(out) - 1 - source.positions, source.positions)
            table = rows.as_subclass(Tensor).movedim(dim, 0).to(out.dtype)  # apart: gradients are summed in this order
            out = torch.cat([out, table]).index_select(0, places)
        return EdgeRows.of(out.movedim(0, dim))

    def sum_by(self, source: Source, rows: Tensor, dim: int) -> Tensor:
        """Sum rows of edges by source, over the out-edges of own rows. Shapes: [..., e, ...] -> [..., N, ...]."""
        by_edge = rows.as_subclass(Tensor).movedim(dim, 0)
        if len(by_edge) != source.shape[-1 if source.ndim == 1 else dim] or source.local.num_sources != len(
            self.g.node_ids
        ):
            raise Refused(f"sums rows of shape {list(rows.shape)} by source, which are not one an edge")
        positions, tail = source.positions, by_edge.shape[1:]
        own = by_edge.new_zeros(self.num_sources, *tail)
        if positions is not None:
            added = positions < 0
            own = own.index_add(0, -1 - positions[added], by_edge[added])
            every = by_edge.new_zeros(self.edges.row.shape[0], *tail)
            by_edge = every.index_add(0, positions[~added], by_edge[~added])
        total = _Returned.apply(self.g, by_edge.reshape(by_edge.shape[0], -1), self.num_sources)
        assert isinstance(total, Tensor)
        return (total.reshape(self.num_sources, *tail) + own).movedim(0, dim)


class _Returned(torch.autograd.Function):
    """Sums of rows of edges by source, the adjoint of `SourceRows`. Shapes: [E, F] -> [N, F]."""

    @staticmethod
    def forward(ctx: FunctionCtx, g: Graph, rows: Tensor, num_sources: int) -> Tensor:
        ctx.g = g
        with torch.enable_grad():
            table = rows.new_zeros(num_sources, rows.shape[1], requires_grad=True)
            found = g.aggregate(SourceRows(), g.source(unchanged, table))
        return torch.autograd.grad(found, table, rows.detach())[0]

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[None, Tensor, None]:
        with torch.no_grad():
            return None, ctx.g.aggregate(SourceRows(), ctx.g.source(unchanged, grads[0])), None


def unmarked(value: object) -> object:
    """Return the value without marks of edges, also inside tuples and dictionaries."""
    return mapped(value, lambda leaf: leaf.as_subclass(Tensor) if isinstance(leaf, EdgeRows | _Named) else leaf)


def _plain(value: object) -> object:
    return value.as_subclass(Tensor) if isinstance(value, Tensor) else value


def _called(func: Called, args: Arguments, given: Mapping[str, object]) -> object:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **given)


def _as_rows(out: object) -> object:
    """Mark tensors as rows of edges."""
    return mapped(out, lambda leaf: leaf.as_subclass(EdgeRows) if isinstance(leaf, Tensor) else leaf)
