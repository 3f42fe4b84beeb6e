"""How a PyG convolution aggregates: its `forward` runs as it is, and where it calls `propagate`, a fold takes over.

So the parameters, options and code of a convolution around `propagate` are the user's own. What is inside is one of
six: a sum, mean or maximum of source rows; GCN's weighted sum; R-GCN's sums by type of edge; attention whose softmax a
fold knows; a message that is a function of one edge; or anything else, which runs as PyG runs it, on all in-edges of a
rank's rows at once. Rows of edges (edge_attr, and what the model makes of it) are edge operands: they lie on the rank
of the destination.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch_geometric import nn as pyg
from torch_geometric.nn import MessagePassing

from gnnpar.folds import neighborhood as folds
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar.folds.edge_data import SelfLoops
from gnnpar.folds.generic import Generic
from gnnpar.folds.max import Max
from gnnpar.folds.softmax import Softmax
from gnnpar.folds.softmax_v2 import SoftmaxV2
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph, Local
from gnnpar.models.dense import dense
from gnnpar.models.pyg.dropout import edge_dropout, no_dropout
from gnnpar.models.pyg.edge_rows import EdgeRows
from gnnpar.models.pyg.norm import in_a_fold
from gnnpar.models.rgcn import relational_product

Propagate = Callable[..., Tensor]
Hooks = Mapping[str, Callable[..., object]]

_WHOLE = {"index", "ptr", "size", "size_i", "size_j", "dim_size", "edge_index", "edge_index_i", "edge_index_j", "adj_t"}
_SELF_LOOPS = {"add_self_loops", "add_remaining_self_loops", "remove_self_loops"}
_OF_ALL_EDGES = frozenset({"gcn_norm", "get_laplacian", "degree", "__norm__"} | _SELF_LOOPS)
_NORMALIZED = (pyg.GCNConv, pyg.GCN2Conv, pyg.SGConv, pyg.TAGConv, pyg.LGConv, pyg.APPNP)  # gcn_norm, then sums
_PLAIN = (MessagePassing, pyg.SAGEConv, pyg.GINConv, pyg.GraphConv, pyg.GCNConv)  # their message is x_j
_MATRICES: Mapping[type[MessagePassing], tuple[str, ...]] = {
    pyg.GCNConv: ("lin",),
    pyg.SAGEConv: ("lin_l", "lin_r", "lin"),
    pyg.GraphConv: ("lin_rel", "lin_root"),
    pyg.GATConv: ("lin",),
    pyg.GATv2Conv: ("lin_l", "lin_r"),
}
"""Of convolutions whose forward only calls them; the first, where they sum: in front of `propagate` (GCNConv), or of
what it gives."""
_REDUCTIONS = {pyg.SumAggregation: "sum", pyg.MeanAggregation: "mean", pyg.MaxAggregation: "max"}


class Edges:
    """What a model gets in the place of edge_index: only convolutions may use it."""

    name = "edge_index"

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError(
            f"the model reads {self.name} outside of a convolution, and a rank holds a part of the edges; hand it to "
            "convolutions alone"
        )

    __getitem__ = __iter__ = __len__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


class Weights(Edges):
    """What a model gets in the place of edge_weight."""

    name = "edge_weight"
    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __pow__ = __neg__ = Edges._refuse


class Types(Edges):
    """What a model gets in the place of edge_type."""

    name = "edge_type"
    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __neg__ = Edges._refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = Edges._refuse  # pyright: ignore[reportAssignmentType]
    __hash__ = object.__hash__


class Way(Protocol):
    """How one convolution aggregates. `title`: for people."""

    @property
    def title(self) -> str: ...
    def hooks(self, conv: MessagePassing, g: Graph) -> Mapping[str, Propagate]:
        """The methods of the convolution that are replaced while it runs on `g`."""
        ...


def way_of(conv: MessagePassing, *, self_loops: SelfLoops) -> Way:
    """How a convolution aggregates; ValueError with the reason where no fold carries it.

    self_loops: of the graph: exactly one a node, none, or its own.
    """
    cls = type(conv)
    if conv.flow != "source_to_target" or conv.node_dim not in (-2, 0) or conv.decomposed_layers != 1:
        raise ValueError("has flow, node_dim or decomposed_layers other than PyG's defaults, which are not carried")
    if isinstance(conv, pyg.GATConv | pyg.GATv2Conv):
        return _attention(conv, self_loops)
    if isinstance(conv, pyg.RGCNConv):
        return _relational(conv)
    reduction = _REDUCTIONS.get(type(conv.aggr_module))
    if isinstance(conv, _NORMALIZED) and vars(conv).get("normalize", True):
        return _normalized(conv, reduction, self_loops)
    forward = _of(cls, "forward")
    called = forward.__code__.co_names if inspect.isfunction(forward) else ()
    all_edges = [name for name in called if name in _OF_ALL_EDGES]
    if all_edges and not isinstance(conv, _NORMALIZED):
        raise ValueError(
            f"calls {all_edges[0]} in its forward, on the edges of the whole graph; of convolutions that do, GCNConv, "
            "GCN2Conv, SGConv, TAGConv, LGConv, APPNP, GATConv and GATv2Conv are carried"
        )
    plain_ends = all(_of(cls, name) is _of(MessagePassing, name) for name in ("aggregate", "update", "edge_update"))
    if reduction is None or not plain_ends:
        return Neighborhood()
    if any(_of(cls, "message") is _of(each, "message") for each in _PLAIN):
        return Fold(reduction)
    names = tuple(inspect.signature(conv.message).parameters)
    if reduction == "max" or any(name in _WHOLE or name == Types.name for name in names):
        return Neighborhood()
    return EdgeMessage(reduction, names)


def _of(cls: type, name: str) -> object:
    return inspect.getattr_static(cls, name)


def _normalized(conv: MessagePassing, reduction: str | None, self_loops: SelfLoops) -> Way:
    base = next(each for each in _NORMALIZED if isinstance(conv, each))
    if _of(type(conv), "forward") is not _of(base, "forward") or reduction != "sum":
        raise ValueError(f"is a {base.__name__} with a forward or an aggregation of its own, which is not carried")
    if _of(type(conv), "message") is not _of(base, "message"):
        raise ValueError(f"is a {base.__name__} with a message of its own, which is not carried")
    options = vars(conv)
    if isinstance(conv, pyg.SGConv) and conv.cached:
        raise ValueError(
            "keeps the result of its first input (cached=True); leave that out, and set first_layer=cached"
        )
    if isinstance(conv, pyg.APPNP) and conv.dropout > 0:
        raise ValueError("drops edges (dropout), which is not carried; set its dropout to 0")
    wants_loops = not isinstance(conv, pyg.TAGConv | pyg.LGConv) and options.get("add_self_loops", True)
    if wants_loops and self_loops == "keep":
        raise ValueError(
            "adds a self loop where a node has none, and dataset.self_loops=keep leaves the graph its own; set it "
            "true, or false where the graph has none"
        )
    adds = wants_loops and not self_loops
    return NormalizedSum(loop=(2 if options.get("improved") else 1) if adds else 0, looped=self_loops is True)


def _attention(conv: pyg.GATConv | pyg.GATv2Conv, self_loops: SelfLoops) -> Way:
    base = pyg.GATConv if isinstance(conv, pyg.GATConv) else pyg.GATv2Conv
    for name in ("forward", "message", "edge_update", "aggregate", "update"):
        if _of(type(conv), name) is not _of(base, name):
            raise ValueError(f"is a {base.__name__} with a method {name} of its own, which is not carried")
    if type(conv.aggr_module) is not pyg.SumAggregation:
        raise ValueError(f"aggregates by {conv.aggr}; attention is carried with a sum")
    if conv.edge_dim is not None and conv.add_self_loops:
        raise ValueError("adds self loops, which have no attributes; set add_self_loops=False")
    if conv.add_self_loops and self_loops is not True:
        has = "its own" if self_loops else "none"
        raise ValueError(
            f"adds self loops, and the dataset has {has}; set dataset.self_loops=true, or add_self_loops=False"
        )
    return Attention(base.__name__) if conv.edge_dim is None else Neighborhood()


def _relational(conv: pyg.RGCNConv) -> Way:
    base = pyg.FastRGCNConv if isinstance(conv, pyg.FastRGCNConv) else pyg.RGCNConv
    for name in ("forward", "message", "aggregate", "update"):
        if _of(type(conv), name) is not _of(base, name):
            raise ValueError(f"is a {base.__name__} with a method {name} of its own, which is not carried")
    reduction = _REDUCTIONS.get(type(conv.aggr_module))
    if reduction not in ("sum", "mean"):
        raise ValueError(f"aggregates by {conv.aggr}; {base.__name__} is carried with a sum or a mean")
    return Relational(reduction)


def _source_and_destination(value: object, name: str) -> tuple[Tensor | None, Tensor | None]:
    """Rows as `propagate` takes them: a tensor, or one for sources and one for destinations."""
    if isinstance(value, tuple | list) and len(value) == 2:
        first, second = value
    else:
        first = second = value
    return _rows(first, name), _rows(second, name)


def _rows(value: object, name: str) -> Tensor | None:
    if isinstance(value, EdgeRows):
        raise ValueError(f"calls propagate with {name}, rows of nodes, which is made of rows of edges")
    if value is not None and not isinstance(value, Tensor):
        raise ValueError(f"calls propagate with {name}={value!r}; give rows of nodes")
    return value


def _refuse_others(given: Mapping[str, object], read: tuple[str, ...]) -> None:
    if others := [name for name, value in given.items() if value is not None and name not in read]:
        raise ValueError(f"calls propagate with {', '.join(others)}, which its message does not read")


def _weighted(given: Mapping[str, object]) -> bool:
    """Is the fold to use the weights of the graph's edges?"""
    weight = given.get("edge_weight")
    if weight is not None and not isinstance(weight, Weights):
        raise ValueError(
            "calls propagate with an edge_weight of its own; hand on that of forward (only GraphConv takes one that is "
            "made of edge_attr)"
        )
    return weight is not None


def _same(local: Local, rows: Tensor) -> Rows:
    return (rows,)


@dataclass(frozen=True)
class Fold:
    """Sum, mean or maximum of source rows."""

    reduction: str

    @property
    def title(self) -> str:
        return f"mapped to a {self.reduction} of source rows"

    def hooks(self, conv: MessagePassing, g: Graph) -> Mapping[str, Propagate]:
        def propagate(edge_index: object, size: object = None, **given: object) -> Tensor:
            _refuse_others(given, ("x", "edge_weight"))
            if isinstance(given.get("edge_weight"), EdgeRows):
                names = tuple(inspect.signature(conv.message).parameters)
                way = Neighborhood() if self.reduction == "max" else EdgeMessage(self.reduction, names)
                return way.hooks(conv, g)["propagate"](edge_index, size=size, **given)
            weighted = _weighted(given)
            if weighted and self.reduction == "max":
                raise ValueError("takes the maximum of weighted rows, which no fold computes")
            rows, _ = _source_and_destination(given["x"], "x")
            assert rows is not None
            source = g.source(_same, rows.flatten(1))
            out = g.aggregate(Max() if self.reduction == "max" else Sum(weighted=weighted), source)
            if self.reduction == "mean":
                out = out * g.in_degree.clamp_min(1).reciprocal()[:, None]
            return out.unflatten(1, rows.shape[1:]) if rows.ndim > 2 else out

        return {"propagate": propagate}


def with_matrices(conv: MessagePassing, way: Way, hooks: Hooks) -> Hooks:
    """`hooks` with those of the matrices of PyG's own convolutions, whose products take the fast body of `dense`.

    A sum and the matrix beside it are exchanged where a convolution has them in an order that aggregates the wider
    side: A (X W) = (A X) W. At equal widths the sum is first: of features it needs no gradient. A matrix that is more
    than PyG's Linear (replaced, parametrized, with hooks of its own) stays as it is.
    """
    base = next((each for each in _MATRICES if isinstance(conv, each)), None)
    if base is None or _of(type(conv), "forward") is not _of(base, "forward"):
        return hooks
    plain = {name: each for name, each in conv.named_children() if name in _MATRICES[base] and _is_plain(each)}
    found = dict(hooks)
    found |= {name: _Matrix(each, partial(_product, each.weight, each.bias)) for name, each in plain.items()}
    name, multiplies_first, propagate = _MATRICES[base][0], base is pyg.GCNConv, hooks["propagate"]
    sums = isinstance(way, NormalizedSum) or (isinstance(way, Fold) and way.reduction != "max")
    if not sums or name not in plain:
        return found
    linear = plain[name]
    if multiplies_first != (linear.in_channels <= linear.out_channels):
        return found

    def sum_first(edge_index: object, size: object = None, **given: object) -> object:
        rows = propagate(edge_index, size=size, **given)
        assert isinstance(rows, Tensor)
        return _product(linear.weight, linear.bias, rows)

    def matrix_first(edge_index: object, size: object = None, **given: object) -> object:
        source, destination = _source_and_destination(given["x"], "x")
        assert source is not None
        rows = _product(linear.weight, None, source), destination
        return propagate(edge_index, size=size, **{**given, "x": rows})

    def added(rows: Tensor) -> Tensor:
        return rows if linear.bias is None else rows + linear.bias

    if multiplies_first:
        return {**found, "propagate": sum_first, name: _Matrix(linear, lambda rows: rows)}
    return {**found, "propagate": matrix_first, name: _Matrix(linear, added)}


class _Matrix(nn.Module):
    """Stands where a convolution looks for its matrix; a module, as functional_call looks there for parameters, too."""

    def __init__(self, linear: pyg.Linear, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias, self.body = linear.weight, linear.bias, body

    def forward(self, rows: Tensor) -> Tensor:
        return self.body(rows)


def _is_plain(module: nn.Module) -> TypeGuard[pyg.Linear]:
    hooked = module._forward_pre_hooks or module._forward_hooks or module._backward_hooks
    return type(module) is pyg.Linear and not hooked


def _product(weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """Shapes: weight [O, F], bias [O] or None, rows [..., F] -> [..., O]."""
    return dense(rows, weight, bias) if type(rows) is Tensor else F.linear(rows, weight, bias)


@dataclass(frozen=True)
class NormalizedSum:
    """D^-1/2 A D^-1/2 X with the degrees of the whole graph. `loop`: A has no self loops, and one a node of this weight
    is added; 0: none is. `looped`: every node has one, so no degree is 0."""

    loop: int
    looped: bool
    title = "mapped to GCN's sum"

    def hooks(self, conv: MessagePassing, g: Graph) -> Mapping[str, Propagate]:
        def propagate(edge_index: object, size: object = None, **given: object) -> Tensor:
            _refuse_others(given, ("x", "edge_weight"))
            weighted = _weighted(given)
            rows, _ = _source_and_destination(given["x"], "x")
            assert rows is not None
            if g.normalised:
                return g.aggregate(Sum(weighted=True), g.source(_same, rows))
            source = g.source(lambda local, h: (self._scale(local, weighted) * h,), rows)
            out = g.aggregate(Sum(weighted=weighted), source)
            loop = self._loop_of(g, weighted)
            return self._scale(g, weighted) * (out + loop * source[0] if loop else out)

        return {"propagate": propagate}

    def _loop_of(self, local: Local, weighted: bool) -> int:
        """Without weights, PyG adds loops of weight 1 whatever `improved` says."""
        return self.loop if weighted and local.in_weight is not None else min(1, self.loop)

    def _scale(self, local: Local, weighted: bool) -> Tensor:
        weight = local.in_weight if weighted else None
        degree = (local.in_degree if weight is None else weight) + self._loop_of(local, weighted)
        return torch.where(degree > 0, degree, torch.inf).rsqrt()[:, None]


@dataclass(frozen=True)
class Relational:
    """RGCNConv and FastRGCNConv: sums, or means, of source rows by type of edge, and one product for all of them."""

    reduction: str
    title = "mapped to a sum by type of edge"

    def hooks(self, conv: MessagePassing, g: Graph) -> Mapping[str, Propagate]:
        assert isinstance(conv, pyg.RGCNConv)

        def forward(x: object, edge_index: object, edge_type: object = None) -> Tensor:
            source, destination = _source_and_destination(x, "x")
            if source is None or destination is None or not source.is_floating_point():
                raise ValueError("looks up embeddings of nodes, which are not carried; give it rows of features")
            if not isinstance(edge_type, Types):
                raise ValueError("is called without the edge_type of the model's forward; hand that on")
            degree = g.type_degree(conv.num_relations)
            rows = g.aggregate(Sum(types=conv.num_relations), g.source(_same, source))
            if self.reduction == "mean":
                rows = rows * degree.clamp_min(1).reciprocal()[..., None]
            out = relational_product(rows, conv.weight, conv.comp)
            out = out if conv.root is None else out + destination @ conv.root
            return out if conv.bias is None else out + conv.bias

        return {"forward": forward}


@dataclass(frozen=True)
class _Scores:
    """What attention's `edge_updater` is given, in the place of the scores of all edges."""

    rows: Mapping[str, object]


@dataclass(frozen=True)
class Attention:
    """GATConv, and GATv2Conv: the softmax over in-edges is the fold's."""

    kind: str

    @property
    def title(self) -> str:
        return "mapped to an online softmax"

    def hooks(self, conv: MessagePassing, g: Graph) -> Mapping[str, Propagate]:
        assert isinstance(conv, pyg.GATConv | pyg.GATv2Conv)

        def edge_updater(edge_index: object, size: object = None, **given: object) -> _Scores:
            _refuse_others(given, ("alpha", "x"))
            return _Scores(given)

        def propagate(edge_index: object, size: object = None, **given: object) -> Tensor:
            scores = given["alpha"]
            assert isinstance(scores, _Scores)
            source, destination = _source_and_destination(given["x"], "x")
            assert source is not None
            dropout = g.edge_dropout(conv.dropout if conv.training else 0.0)
            if isinstance(conv, pyg.GATv2Conv):
                assert destination is not None
                fold = SoftmaxV2(conv.negative_slope, dropout)
                return g.aggregate(fold, g.source(_same, source), (destination,), shared=(conv.att[0],))
            of_source, of_destination = _source_and_destination(scores.rows["alpha"], "alpha")
            assert of_source is not None
            assert of_destination is not None
            rows = g.source(lambda local, x, a: (x, a), source, of_source)
            return g.aggregate(Softmax(conv.negative_slope, dropout), rows, (of_destination,))

        return {"propagate": propagate, "edge_updater": edge_updater}  # pyright: ignore[reportReturnType]


class _Message(nn.Module):
    """A convolution's `message` as a module of its own, to be called with other parameters."""

    def __init__(self, conv: MessagePassing) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, **given: object) -> Tensor:
        message: Callable[..., Tensor] = self.conv.message
        return message(**given)


@dataclass(frozen=True, eq=False)
class _EdgeValue:
    """The message of e edges. `read`: the argument, and the operand it is of: source, destination or edge, and its
    place. `weights`: arguments that are the weights of the edges."""

    message: _Message
    read: tuple[tuple[str, str, int], ...]
    fixed: Mapping[str, object]
    parameters: tuple[str, ...]
    weights: tuple[str, ...]

    def __call__(self, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        sides = {"j": src, "i": dst, "edge": edge}
        given: dict[str, object] = {name: sides[side][place] for name, side, place in self.read}
        given |= self.fixed
        given |= dict.fromkeys(self.weights, edge[-1] if edge else None)
        parameters = dict(zip(self.parameters, shared, strict=True))
        with no_dropout(), in_a_fold():
            return functional_call(self.message, parameters, kwargs=given)


@dataclass(frozen=True)
class EdgeMessage:
    """The sum, or mean, of a message that is a function of one edge: of its ends, its attributes and of parameters."""

    reduction: str
    names: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"its own message, {self.reduction} over edges"

    def hooks(self, conv: MessagePassing, g: Graph) -> Mapping[str, Propagate]:
        def propagate(edge_index: object, size: object = None, **given: object) -> Tensor:
            operands: dict[str, list[Tensor]] = {"j": [], "i": [], "edge": []}
            read, fixed = [], {}
            for name, side, value in self._arguments(given):
                if side and isinstance(value, Tensor):
                    read.append((name, side, len(operands[side])))
                    operands[side].append(value)
                else:
                    fixed[name] = value
            if not operands["j"]:
                raise ValueError("has a message that reads nothing of the source (x_j), which is not carried")
            module = _Message(conv)
            parameters = dict(module.named_parameters())
            weights = tuple(name for name, value in fixed.items() if isinstance(value, Weights))
            value = _EdgeValue(module, tuple(read), fixed, tuple(parameters), weights)
            source = g.source(lambda local, *rows: rows, *operands["j"])
            shared = tuple(parameters.values())
            fold = Generic(value=value, weighted=bool(weights))
            out = g.aggregate(fold, source, tuple(operands["i"]), tuple(operands["edge"]), shared)
            if self.reduction == "mean":
                degree = g.in_degree.clamp_min(1).reciprocal()
                out = out * degree.reshape(-1, *[1] * (out.ndim - 1))
            return out

        return {"propagate": propagate}

    def _arguments(self, given: Mapping[str, object]) -> Iterator[tuple[str, str, object]]:
        """(name, j, i, edge or nothing, value) of every argument of the message."""
        for name in self.names:
            base, _, side = name.rpartition("_")
            if side in ("i", "j") and base in given:
                first, second = _source_and_destination(given[base], base)
                yield name, side, first if side == "j" else second
                continue
            value = given.get(name)
            if isinstance(value, EdgeRows):
                yield name, "edge", value.plain()
                continue
            if isinstance(value, Types):
                raise ValueError(f"has a message that reads edge_type as {name}; name the argument edge_type")
            if isinstance(value, Tensor):
                raise ValueError(
                    f"has a message that reads {name}, which is made neither of rows of nodes nor of edge_attr"
                )
            yield name, "", value


@dataclass(frozen=True)
class _Updated(Edges):
    """What `edge_updater` gives, in the place of rows of edges: its arguments, for `propagate`."""

    given: Mapping[str, object]
    name = "the result of edge_updater"


class _Propagate(nn.Module):
    """A convolution's `propagate` of PyG as a module of its own, to be called with other parameters."""

    def __init__(self, conv: MessagePassing) -> None:
        super().__init__()
        self.conv = conv

    def forward(
        self,
        edges: Tensor,
        size: tuple[int, int],
        given: Mapping[str, object],
        updated: Mapping[str, Mapping[str, object]],
    ) -> Tensor:
        """`updated`: the arguments that `edge_updater` makes, each of its own arguments."""
        conv, before = self.conv, dict(vars(self.conv))
        made = {name: type(conv).edge_updater(conv, edges, size=size, **each) for name, each in updated.items()}
        try:
            return type(conv).propagate(conv, edges, size=size, **given, **made)
        finally:  # a message may leave tensors behind (TransformerConv its scores)
            vars(conv).clear()
            vars(conv).update(before)


_Side = tuple[int | None, int | None]  # places of an argument among the operands of sources, of destinations


@dataclass(frozen=True, eq=False)
class _Arguments:
    """Of a call on a block, by place among the operands. `sides`: arguments that are read by both ends of an edge;
    `own`: those that `update` reads as rows of destinations; `rows`: rows of edges; `weights`, `types`: those of
    the graph's edges."""

    sides: Mapping[str, _Side]
    own: Mapping[str, int]
    rows: Mapping[str, int]
    fixed: Mapping[str, object]
    weights: tuple[str, ...]
    types: tuple[str, ...]

    def on(self, block: Block, x: Operands) -> dict[str, object]:
        given: dict[str, object] = {name: x.dst[place] for name, place in self.own.items()}
        for name, (j, i) in self.sides.items():
            given[name] = (None if j is None else x.src[j], None if i is None else x.dst[i])
        given |= {name: x.edge[place] for name, place in self.rows.items()}
        given |= dict(self.fixed) | dict.fromkeys(self.weights, block.weights)
        return given | dict.fromkeys(self.types, _types_of(block) if self.types else None)


def _types_of(block: Block) -> Tensor:
    return torch.zeros_like(block.edge_dst) if block.types is None else block.types


class _Operands:
    """The operands of an aggregation, as the arguments of its functions are told apart."""

    def __init__(self) -> None:
        self.src: list[Tensor] = []
        self.dst: list[Tensor] = []
        self.edge: list[Tensor] = []

    def of(self, given: Mapping[str, object], names: set[str], updates: set[str]) -> _Arguments:
        """`names`: what the functions read, `updates`: of that, what `update` reads."""
        sides: dict[str, _Side] = {}
        own: dict[str, int] = {}
        rows: dict[str, int] = {}
        fixed: dict[str, object] = {}
        weights: list[str] = []
        types: list[str] = []
        for name, value in given.items():
            if isinstance(value, Types):
                types.append(name)
            elif isinstance(value, Weights):
                weights.append(name)
            elif isinstance(value, EdgeRows):
                rows[name] = _put(self.edge, value.plain())
            elif not isinstance(value, Tensor | tuple):
                fixed[name] = value
            else:
                first, second = _source_and_destination(value, name)
                by_edge = [f"{name}_{side}" in names for side in "ji"]
                if name in names and (any(by_edge) or name not in updates or second is None):
                    raise ValueError(f"reads {name} as a whole, and a rank holds a part of its rows")
                if name in names and second is not None:
                    own[name] = _put(self.dst, second)
                else:
                    of_source = _put(self.src, first) if by_edge[0] and first is not None else None
                    of_own = _put(self.dst, second) if by_edge[1] and second is not None else None
                    sides[name] = of_source, of_own
        return _Arguments(sides, own, rows, fixed, tuple(weights), tuple(types))


@dataclass(frozen=True, eq=False)
class _OnBlock:
    """PyG's `propagate` on a block with all in-edges of its destinations. `updated`: arguments that the convolution's
    `edge_updater` makes."""

    propagate: _Propagate
    graph: Graph
    arguments: _Arguments
    updated: Mapping[str, _Arguments]
    parameters: tuple[str, ...]

    def __call__(self, block: Block, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        edges, x = torch.stack([block.indices.long(), block.edge_dst]), Operands(src, dst, edge)
        updated = {name: each.on(block, x) for name, each in self.updated.items()}
        given = edges, (block.num_src, block.num_dst), self.arguments.on(block, x), updated
        parameters = dict(zip(self.parameters, shared, strict=True))
        with edge_dropout(self.graph, block.edge_ids, block.num_edges), in_a_fold():
            return functional_call(self.propagate, parameters, given)


@dataclass(frozen=True)
class Neighborhood:
    """Any other convolution: its own message, aggregation and updates, on all in-edges of its rows at once."""

    title = "runs as it is, on whole neighbourhoods"

    def hooks(self, conv: MessagePassing, g: Graph) -> Mapping[str, Propagate]:
        names = set(conv.inspector.get_flat_param_names(["message", "aggregate", "update"]))
        of_update = set(conv.inspector.get_flat_param_names(["edge_update"]))
        updates = set(inspect.signature(conv.update).parameters)

        def edge_updater(edge_index: object, size: object = None, **given: object) -> _Updated:
            return _Updated(given)

        def propagate(edge_index: object, size: object = None, **given: object) -> Tensor:
            x = _Operands()
            later = {name: value.given for name, value in given.items() if isinstance(value, _Updated)}
            arguments = x.of({name: value for name, value in given.items() if name not in later}, names, updates)
            updated = {name: x.of(each, of_update, set()) for name, each in later.items()}
            if not x.src:
                raise ValueError("has a message that reads nothing of the source (x_j), which is not carried")
            module = _Propagate(conv)
            parameters = dict(module.named_parameters())
            run = _OnBlock(module, g, arguments, updated, tuple(parameters))
            source = g.source(lambda local, *rows: rows, *x.src)
            fold = folds.Neighborhood(run, by_edge_ids=drops_edges(conv))
            out = g.aggregate(fold, source, tuple(x.dst), tuple(x.edge), tuple(parameters.values()))
            if isinstance(conv, pyg.RGATConv):
                conv._alpha = out.new_zeros(0)  # its forward asserts that its message has left scores
            return out

        return {"propagate": propagate, "edge_updater": edge_updater}  # pyright: ignore[reportReturnType]


def _put(operands: list[Tensor], rows: Tensor) -> int:
    operands.append(rows)
    return len(operands) - 1


def drops_edges(conv: MessagePassing) -> bool:
    """Does it drop entries of rows of edges (attention dropout)?"""
    return float(vars(conv).get("dropout") or 0) > 0
