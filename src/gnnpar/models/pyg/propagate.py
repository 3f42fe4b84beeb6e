"""Aggregation paths: how a PyG convolution runs on a rank's part of the graph, as its own code or through a fold.

The user's own code runs on marked tensors (marks.py). A fold replaces it only where both compute the same:

- a convolution of a class that `way_of` lists, with nothing overridden, shadowed or hooked, and the listed options;
- inside any other convolution, `propagate` on the graph's own edges, if message, aggregation and update are PyG's sum,
  mean or maximum of source rows, or a sum or mean of a message that reads one edge at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch_geometric import nn as pyg
from torch_geometric.nn import MessagePassing

from gnnpar.folds.block import Rows
from gnnpar.folds.edge_data import SelfLoops
from gnnpar.folds.generic import Generic
from gnnpar.folds.max import Max
from gnnpar.folds.softmax import Softmax, SoftmaxV2
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph, Local
from gnnpar.models.dense import dense
from gnnpar.models.pyg.dropout import no_dropout
from gnnpar.models.pyg.marks import (
    EdgeRows,
    Edges,
    Flipped,
    Given,
    Here,
    Refused,
    Types,
    Weights,
    replaced,
    running,
    unmarked,
)
from gnnpar.models.pyg.norm import in_a_fold
from gnnpar.models.rgcn import relational_product
from gnnpar.models.transformer import attend

Propagate = Callable[..., Tensor]
Forward = Callable[..., object]
Hooks = Mapping[str, Callable[..., object]]

_NORMALIZED = frozenset(  # gcn_norm, then sums
    {pyg.GCNConv, pyg.GCN2Conv, pyg.SGConv, pyg.SSGConv, pyg.TAGConv, pyg.LGConv, pyg.APPNP, pyg.ARMAConv}
    | {pyg.MixHopConv}
)
_LOOPLESS = frozenset({pyg.TAGConv, pyg.LGConv, pyg.ARMAConv})
_ATTENDS = frozenset({pyg.GATConv, pyg.GATv2Conv})
_RELATIONAL = frozenset({pyg.RGCNConv, pyg.FastRGCNConv})
_PLAIN = (MessagePassing, pyg.SAGEConv, pyg.GINConv, pyg.GraphConv, pyg.GCNConv)  # with message x_j
_MATRICES: Mapping[type[MessagePassing], tuple[str, ...]] = {
    pyg.GCNConv: ("lin",),
    pyg.SAGEConv: ("lin_l", "lin_r", "lin"),
    pyg.GraphConv: ("lin_rel", "lin_root"),
    pyg.GATConv: ("lin",),
    pyg.GATv2Conv: ("lin_l", "lin_r"),
    pyg.TransformerConv: ("lin_key", "lin_query", "lin_value", "lin_skip"),
}
"""Matrices of convolutions that only call them. The first multiplies the input (GCNConv) or output of `propagate`."""
_REDUCTIONS = {pyg.SumAggregation: "sum", pyg.MeanAggregation: "mean", pyg.MaxAggregation: "max"}
_STEPS = ("message", "aggregate", "update", "edge_update", "message_and_aggregate")
_METHODS = (*_STEPS, "propagate", "edge_updater", "forward", "collect", "_collect", "_lift", "__lift__")
_HOOKS = tuple(
    f"_{step}_forward_{when}"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("pre_hooks", "hooks")
)
_OF_ALL_EDGES = {
    "index",
    "ptr",
    "size",
    "size_i",
    "size_j",
    "dim_size",
    "edge_index",
    "edge_index_i",
    "edge_index_j",
} | {"adj_t"}


class Way(Protocol):
    """The aggregation path of a convolution."""

    @property
    def title(self) -> str:
        """Short description for the user."""
        ...

    @property
    def whole(self) -> bool:
        """Whether it reads whole neighbourhoods."""
        ...

    @property
    def loops(self) -> bool:
        """Whether the fold needs a graph with one self loop per node."""
        ...

    def forward(self, conv: MessagePassing, g: Graph, forward: Forward) -> Forward:
        """Return the convolution's forward on the rows of `g`. forward: its own."""
        ...


def way_of(conv: MessagePassing, *, self_loops: SelfLoops) -> Way:
    """Return the aggregation path of a convolution. self_loops: of the graph (one per node, none, or its own)."""
    plain, cls = is_plain(conv), type(conv)
    options, reduction = vars(conv), _reduction(conv)
    if plain and cls in _NORMALIZED and options.get("normalize", True) and reduction == "sum":
        wants = cls not in _LOOPLESS and options.get("add_self_loops", True)
        fits = not (wants and self_loops == "keep") and not (isinstance(conv, pyg.APPNP) and conv.dropout > 0)
        if fits and not (options.get("cached") and not isinstance(conv, pyg.GCNConv)):
            adds = wants and self_loops is not True
            loop = (2 if options.get("improved") else 1) if adds else 0
            return NormalizedSum(loop=loop, looped=self_loops is True, improved=bool(options.get("improved")) and wants)
    if plain and cls in _ATTENDS and reduction == "sum":
        assert isinstance(conv, pyg.GATConv | pyg.GATv2Conv)
        if conv.edge_dim is None and (self_loops is True or not conv.add_self_loops):
            return Attention(loops=bool(conv.add_self_loops))
    if plain and cls is pyg.TransformerConv and reduction == "sum":
        return DotAttention(conv.lin_edge is not None)
    if plain and cls in _RELATIONAL and reduction in ("sum", "mean"):
        return Relational(reduction)
    return AsItIs.of(conv)


def adds_loops(conv: MessagePassing) -> bool:
    """Return True if the convolution adds a self loop of weight 1 per node without one, and folds the result."""
    cls, options = type(conv), vars(conv)
    if not is_plain(conv) or not options.get("add_self_loops", True) or (options.get("dropout") and cls is pyg.APPNP):
        return False
    if cls in _ATTENDS:
        return options.get("edge_dim") is None
    return cls in _NORMALIZED - _LOOPLESS and options.get("normalize", True) and not options.get("improved")


@dataclass(frozen=True, eq=False)
class StandIn:
    """A forward that replaces the class's own while the model runs on a rank's rows."""

    run: Forward

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.run(*args, **kwargs)


def is_plain(conv: MessagePassing) -> bool:
    """Return True if the convolution has no message-passing hooks, no shadowed methods, and PyG's default direction,
    dimension and layers. (Module hooks always run.)"""
    shadowed = any(name in vars(conv) and not isinstance(vars(conv)[name], StandIn) for name in _METHODS)
    hooked = any(vars(conv).get(name) for name in _HOOKS)
    usual = conv.flow == "source_to_target" and conv.node_dim in (-2, 0) and conv.decomposed_layers == 1
    return usual and not shadowed and not hooked and not conv.explain


def _reduction(conv: MessagePassing) -> str:
    """Return the reduction if the aggregation is exactly PyG's sum, mean or maximum, else an empty string."""
    module = conv.aggr_module
    if (
        not isinstance(module, nn.Module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in vars(module)
    ):
        return ""
    return _REDUCTIONS.get(type(module), "")


def _of(cls: type, name: str) -> object:
    return inspect.getattr_static(cls, name)


def _is_pyg(function: object) -> bool:
    """Return True for PyG's `propagate`, or the code that PyG generates for it."""
    module = function.__module__ if inspect.isfunction(function) else ""
    return function is MessagePassing.propagate or module.endswith("_propagate")


def _source_and_destination(value: object) -> tuple[object, object]:
    """Return rows as `propagate` takes them: one tensor, or a pair for sources and destinations."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    return value, value


def _is_rows(value: object) -> TypeGuard[Tensor]:
    """Return True for rows of nodes."""
    return isinstance(value, Tensor) and not isinstance(value, EdgeRows | Given)


def _are_given(edges: object) -> bool:
    """Return True for the unchanged edges of the graph or of a relation."""
    return isinstance(edges, Edges) and not isinstance(edges, Flipped)


def _same(local: Local, rows: Tensor) -> Rows:
    return (rows,)


class _Folded:
    """Placeholder for edge_index in a mapped convolution, so that PyG prepares no tensor of edges."""


class _Mapped:
    """A convolution of the table: its own forward, with some methods replaced by folds."""

    title = ""
    loops = False
    own: AsItIs | None = None  # for calls with other arguments

    @property
    def whole(self) -> bool:
        return self.own is not None and self.own.whole

    def takes(self, given: Mapping[str, object]) -> bool:
        """Return True if a call's arguments are the graph's own edges and the fold reads all of them."""
        read = {"edge_index", "edge_weight", "x", "x_0"}
        others = [value for name, value in given.items() if name not in read and value is not None]
        weight = given.get("edge_weight")
        return _are_given(given["edge_index"]) and not others and (weight is None or isinstance(weight, Weights))

    def hooks(self, conv: MessagePassing, g: Graph) -> Hooks:
        raise NotImplementedError

    def forward(self, conv: MessagePassing, g: Graph, forward: Forward) -> Forward:
        asked = inspect.signature(type(conv).forward)

        def run(*args: object, **kwargs: object) -> object:
            bound = asked.bind(conv, *args, **kwargs)
            given = {name: value for name, value in bound.arguments.items() if name != "self"}
            if not self.takes(given):
                if self.loops:
                    raise Refused(
                        "is called with more than the graph's own edges and rows, while dataset.self_loops has put its "
                        "loops into the graph; set dataset.self_loops=keep"
                    )
                self.own = self.own or AsItIs.of(conv)
                return self.own.forward(conv, g, forward)(*args, **kwargs)
            bound.arguments["edge_index"] = _Folded()
            with replaced(conv, with_matrices(conv, self, self.hooks(conv, g))):
                return forward(*bound.args[1:], **bound.kwargs)

        return run


@dataclass(eq=False)
class NormalizedSum(_Mapped):
    """D^-1/2 A D^-1/2 X with the degrees of the whole graph. loop: add a self loop of this weight per node to A, which
    has none; 0: add none. looped: every node has one of weight 1 (which `improved` does not use), so no degree is 0."""

    loop: int
    looped: bool
    improved: bool = False
    title = "mapped to GCN's sum"

    @property
    def loops(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.looped

    def takes(self, given: Mapping[str, object]) -> bool:
        if self.improved and self.looped and given.get("edge_weight") is not None:
            raise Refused(
                "gives self loops the weight 2 (improved=True), and dataset.self_loops=true has added loops of weight "
                "1; set dataset.self_loops=keep"
            )
        return super().takes(given)

    def hooks(self, conv: MessagePassing, g: Graph) -> Hooks:
        def propagate(edge_index: object, size: object = None, **given: object) -> Tensor:
            weighted = given.get("edge_weight") is not None
            rows, _ = _source_and_destination(given["x"])
            assert isinstance(rows, Tensor)
            table = rows.movedim(-2, 0) if rows.ndim > 2 else rows
            out = self._sum(g, table.flatten(1), weighted).unflatten(1, table.shape[1:])
            return out.movedim(0, -2) if rows.ndim > 2 else out

        return {"propagate": propagate}

    def _sum(self, g: Graph, rows: Tensor, weighted: bool) -> Tensor:
        """Return the normalised sum. Shapes: [N, F] -> [N, F]."""
        if g.normalised:
            return g.aggregate(Sum(weighted=True), g.source(_same, rows))
        source = g.source(lambda local, h: (self._scale(local, weighted) * h,), rows)
        out = g.aggregate(Sum(weighted=weighted), source)
        loop = self._loop_of(g, weighted)
        return self._scale(g, weighted) * (out + loop * source[0] if loop else out)

    def _loop_of(self, local: Local, weighted: bool) -> int:
        """Return the weight of added loops: without edge weights, PyG adds loops of weight 1, whatever `improved`
        is."""
        return self.loop if weighted and local.in_weight is not None else min(1, self.loop)

    def _scale(self, local: Local, weighted: bool) -> Tensor:
        weight = local.in_weight if weighted else None
        degree = (local.in_degree if weight is None else weight) + self._loop_of(local, weighted)
        return torch.where(degree > 0, degree, torch.inf).rsqrt()[:, None]


@dataclass(eq=False)
class Attention(_Mapped):
    """GATConv and GATv2Conv with the fold's softmax over in-edges."""

    loops: bool = False
    title = "mapped to an online softmax"

    def hooks(self, conv: MessagePassing, g: Graph) -> Hooks:
        assert isinstance(conv, pyg.GATConv | pyg.GATv2Conv)

        def edge_updater(edge_index: object, size: object = None, **given: object) -> Mapping[str, object]:
            return given

        def propagate(edge_index: object, size: object = None, **given: object) -> Tensor:
            scores = given["alpha"]
            assert isinstance(scores, dict)
            source, destination = _source_and_destination(given["x"])
            assert isinstance(source, Tensor)
            dropout = g.edge_dropout(conv.dropout if conv.training else 0.0)
            if isinstance(conv, pyg.GATv2Conv):
                assert isinstance(destination, Tensor)
                fold = SoftmaxV2(conv.negative_slope, dropout)
                return g.aggregate(fold, g.source(_same, source), (destination,), shared=(conv.att[0],))
            of_source, of_destination = _source_and_destination(scores["alpha"])
            assert isinstance(of_source, Tensor)
            assert isinstance(of_destination, Tensor)
            rows = g.source(lambda local, x, a: (x, a), source, of_source)
            return g.aggregate(Softmax(conv.negative_slope, dropout), rows, (of_destination,))

        return {"propagate": propagate, "edge_updater": edge_updater}

    def takes(self, given: Mapping[str, object]) -> bool:
        _, destination = _source_and_destination(given["x"])
        return super().takes(given) and destination is not None


@dataclass(eq=False)
class DotAttention(_Mapped):
    """TransformerConv. `edges`: it has a matrix of rows of edges."""

    edges: bool
    title = "mapped to an online softmax"

    def hooks(self, conv: MessagePassing, g: Graph) -> Hooks:
        assert isinstance(conv, pyg.TransformerConv)

        def propagate(
            edge_index: object, size: object = None, *, query: Tensor, key: Tensor, value: Tensor, edge_attr: object
        ) -> Tensor:
            source = g.source(lambda local, *rows: rows, key, value)
            edge = (edge_attr.plain(),) if isinstance(edge_attr, EdgeRows) else ()
            matrix = conv.lin_edge.weight if edge and conv.lin_edge is not None else None
            return attend(g, source, query, edge, matrix, conv.dropout if conv.training else 0.0)

        return {"propagate": propagate}

    def takes(self, given: Mapping[str, object]) -> bool:
        source, destination = _source_and_destination(given["x"])
        edge = given.get("edge_attr")
        fits = isinstance(edge, EdgeRows) and edge.ndim == 2 if self.edges else edge is None
        rows = all(_is_rows(each) and each.ndim == 2 for each in (source, destination))
        return rows and fits and super().takes({name: each for name, each in given.items() if name != "edge_attr"})

    def forward(self, conv: MessagePassing, g: Graph, forward: Forward) -> Forward:
        if self.edges and not _is_linear(vars(conv)["_modules"].get("lin_edge")):
            self.own = self.own or AsItIs.of(conv)
            return self.own.forward(conv, g, forward)
        return super().forward(conv, g, forward)


@dataclass(eq=False)
class Relational(_Mapped):
    """RGCNConv and FastRGCNConv: sums or means of source rows by edge type, and one product for all types."""

    reduction: str
    title = "mapped to a sum by type of edge"

    def takes(self, given: Mapping[str, object]) -> bool:
        source, destination = _source_and_destination(given["x"])
        rows = isinstance(source, Tensor) and isinstance(destination, Tensor) and source.is_floating_point()
        return _are_given(given["edge_index"]) and isinstance(given.get("edge_type"), Types) and rows

    def hooks(self, conv: MessagePassing, g: Graph) -> Hooks:
        raise NotImplementedError

    def forward(self, conv: MessagePassing, g: Graph, forward: Forward) -> Forward:
        assert isinstance(conv, pyg.RGCNConv)

        def run(x: object, edge_index: object, edge_type: object = None) -> object:
            if not self.takes({"x": x, "edge_index": edge_index, "edge_type": edge_type}):
                self.own = self.own or AsItIs.of(conv)
                return self.own.forward(conv, g, forward)(x, edge_index, edge_type)
            source, destination = _source_and_destination(x)
            assert isinstance(source, Tensor)
            assert isinstance(destination, Tensor)
            degree = g.type_degree(conv.num_relations)
            rows = g.aggregate(Sum(types=conv.num_relations), g.source(_same, source))
            if self.reduction == "mean":
                rows = rows * degree.clamp_min(1).reciprocal()[..., None]
            out = relational_product(rows, conv.weight, conv.comp)
            out = out if conv.root is None else out + destination @ conv.root
            return out if conv.bias is None else out + conv.bias

        return run


@dataclass(eq=False)
class AsItIs:
    """The convolution's own code. reduction: of the sums of `propagate` that a fold may replace. message: arguments
    through which it reads one edge at a time; None: the message is the source's row."""

    title: str
    whole: bool
    reduction: str = ""
    message: tuple[str, ...] | None = None
    loops: bool = False
    apart: bool = field(default=False)  # whether `message` was tried on single edges

    @staticmethod
    def of(conv: MessagePassing) -> AsItIs:
        cls, reduction = type(conv), _reduction(conv)
        ends = all(_of(cls, name) is _of(MessagePassing, name) for name in ("aggregate", "update", "edge_update"))
        if reduction and ends and is_plain(conv) and _is_pyg(_of(cls, "propagate")):
            if any(_of(cls, "message") is _of(each, "message") for each in _PLAIN):
                return AsItIs(f"mapped to a {reduction} of source rows", False, reduction)
            names = tuple(inspect.signature(conv.message).parameters)
            one_edge = not any(name in _OF_ALL_EDGES or name == Types.name for name in names)
            counts = any(True for child in conv.children() for _ in child.buffers())  # a message may change them
            if reduction != "max" and one_edge and not counts and float(vars(conv).get("dropout") or 0) == 0:
                return AsItIs(f"its own message, {reduction} over edges", False, reduction, names)
        return AsItIs("runs as it is, on whole neighbourhoods", True)

    def forward(self, conv: MessagePassing, g: Graph, forward: Forward) -> Forward:
        def run(*args: object, **kwargs: object) -> object:
            edges = next((each for each in (*args, *kwargs.values()) if isinstance(each, Edges)), None)
            if edges is None:  # edges that the model has made on a whole graph
                return forward(*args, **kwargs)
            here = Here(g)
            args = tuple(_opened(each, here) for each in args)
            kwargs = {name: _opened(each, here) for name, each in kwargs.items()}
            own = conv.propagate
            hooks: Hooks = {"propagate": partial(self._propagate, conv, here, own)} if self.reduction else {}
            if hooks and is_plain(conv):
                hooks = with_matrices(conv, self, hooks)
            with running(here), replaced(conv, hooks):
                out = unmarked(forward(*args, **kwargs))
            if here.read and not self.whole:
                self.title, self.whole = "runs as it is, on whole neighbourhoods", True
            return out

        return run

    def _propagate(
        self, conv: MessagePassing, here: Here, own: Propagate, edge_index: object, *args: object, **given: object
    ) -> Tensor:
        size = given.pop("size", args[0] if args else None)
        if _are_given(edge_index) and size in (None, (here.num_sources, here.g.node_ids.shape[0])):
            fold = self._sum_of_rows if self.message is None else self._sum_of_messages
            if (out := fold(conv, here.g, given)) is not None:
                return out
        return own(edge_index, **given, size=size)

    def _sum_of_rows(self, conv: MessagePassing, g: Graph, given: Mapping[str, object]) -> Tensor | None:
        weight, rows = given.get("edge_weight"), _source_and_destination(given.get("x"))[0]
        others = [value for name, value in given.items() if name not in ("x", "edge_weight") and value is not None]
        if others or not _is_rows(rows) or (rows.ndim != 2 and conv.node_dim != 0) or not rows.is_floating_point():
            return None
        if weight is not None and (not isinstance(weight, Weights) or self.reduction == "max"):
            return None
        fold = Max() if self.reduction == "max" else Sum(weighted=weight is not None and "edge_weight" in _names(conv))
        out = g.aggregate(fold, g.source(_same, rows.flatten(1)))
        if self.reduction == "mean":
            out = out * g.in_degree.clamp_min(1).reciprocal()[:, None]
        return out.unflatten(1, rows.shape[1:]) if rows.ndim > 2 else out

    def _sum_of_messages(self, conv: MessagePassing, g: Graph, given: Mapping[str, object]) -> Tensor | None:
        assert self.message is not None
        operands: dict[str, list[Tensor]] = {"j": [], "i": [], "edge": []}
        read, fixed = list[tuple[str, str, int]](), dict[str, object]()
        for name in self.message:
            base, _, side = name.rpartition("_")
            value = _source_and_destination(given.get(base))[side == "i"] if side in ("i", "j") else given.get(name)
            side = side if side in ("i", "j") and base in given else "edge" if isinstance(value, EdgeRows) else ""
            if side in ("i", "j") and _is_rows(value) and (value.ndim == 2 or conv.node_dim == 0):
                rows = value
            elif side == "edge" and isinstance(value, EdgeRows):
                rows = value.plain()
            elif value is None or isinstance(value, Weights | bool | int | float | str):
                fixed[name] = value
                continue
            else:
                return None
            read.append((name, side, len(operands[side])))
            operands[side].append(rows)
        if not operands["j"]:
            return None
        weights = tuple(name for name, value in fixed.items() if isinstance(value, Weights))
        value = _EdgeValue(conv, dict(vars(conv)), tuple(read), fixed, weights, ())
        learned = self._learned(value, operands)
        if learned is None:
            return None
        value = replace(value, learned=tuple(map(id, learned)))
        source = g.source(lambda local, *rows: rows, *operands["j"])
        fold = Generic(value=value, weighted=bool(weights))
        out = g.aggregate(fold, source, tuple(operands["i"]), tuple(operands["edge"]), tuple(learned))
        if self.reduction == "mean":
            degree = g.in_degree.clamp_min(1).reciprocal()
            out = out * degree.reshape(-1, *[1] * (out.ndim - 1))
        return out

    def _learned(self, value: _EdgeValue, operands: Mapping[str, list[Tensor]]) -> list[Tensor] | None:
        """Return the parameters that the message reads, tried on four edges. None if it reads more than trained
        parameters or than one edge at a time, draws numbers, changes state, or fails."""
        four = 4

        def some(like: Tensor) -> Tensor:
            count = four * like.shape[1:].numel()
            rows = torch.arange(1.0, count + 1, dtype=torch.float64, device=like.device).mul(1.7).sin()
            rows = rows.view(four, *like.shape[1:]).to(like.dtype)
            return rows.requires_grad_(like.is_floating_point())  # a leaf, into which no message may write

        x = {side: tuple(map(some, rows)) for side, rows in operands.items()}
        before = [(each, dict(vars(each))) for each in value.conv.modules()]
        edge = (*x["edge"], x["j"][0].new_ones(four)) if value.weights else x["edge"]
        try:
            with _Reads() as reads, torch.enable_grad(), no_dropout():
                whole = value(x["j"], x["i"], edge, ())
            if len(whole) != four:
                return None
            given = {id(t) for rows in (*x.values(), edge) for t in rows}
            learned = [t for t in reads.others if t.requires_grad and id(t) not in given]
            if any(not isinstance(t, nn.Parameter) for t in learned) or any(vars(each) != was for each, was in before):
                return None
            if not self.apart:
                fixed = replace(value, learned=tuple(map(id, learned)))
                shared = tuple(t.detach() for t in learned)
                parts = list[Tensor]()
                for at in (slice(0, 1), slice(1, four)):
                    src, dst, own = (tuple(t.detach()[at] for t in rows) for rows in (x["j"], x["i"], edge))
                    parts.append(fixed(src, dst, own, shared))
                if any(part.requires_grad for part in parts):
                    return None
                joined = torch.cat(parts)
                if joined.shape != whole.shape or not torch.allclose(joined, whole.detach(), equal_nan=True):
                    return None
                self.apart = True
        except Exception:  # a message may raise anything
            return None
        finally:
            for each, was in before:
                vars(each).clear()
                vars(each).update(was)
        return learned


def _names(conv: MessagePassing) -> tuple[str, ...]:
    return tuple(inspect.signature(conv.message).parameters)


def _opened(value: object, here: Here) -> object:
    """Return an argument of a convolution as its own code reads it."""
    if isinstance(value, tuple):
        return tuple(_opened(each, here) for each in value)
    if isinstance(value, Given) and not value.inside:
        return type(value).of(here, inside=True)
    return value


class _Reads(TorchFunctionMode):
    """Record the tensors that functions read and did not make, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.others = list[Tensor]()
        self._known = dict[int, object]()

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        for each in _tensors((args, kwargs or {})):
            if id(each) not in self._known:
                self.others.append(each)
                self._known[id(each)] = each
        out = func(*args, **(kwargs or {}))
        self._known |= {id(each): each for each in _tensors(out)}
        return out


class _Instead(TorchFunctionMode):
    """Replace tensors that functions read by others."""

    def __init__(self, others: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.others = others

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        def instead(value: object) -> object:
            if isinstance(value, tuple | list):
                return type(value)(instead(each) for each in value) if type(value) in (tuple, list) else value
            return self.others.get(id(value), value) if isinstance(value, Tensor) else value

        return func(*map(instead, args), **{name: instead(value) for name, value in (kwargs or {}).items()})


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


@dataclass(frozen=True, eq=False)
class _EdgeValue:
    """The message of e edges.

    state: of the convolution at the call. read: arguments, each with its operand (source j, destination i, or edge) and
    index. weights: arguments that are edge weights. learned: ids of parameters to replace by the shared operands.
    """

    conv: MessagePassing
    state: Mapping[str, object]
    read: tuple[tuple[str, str, int], ...]
    fixed: Mapping[str, object]
    weights: tuple[str, ...]
    learned: tuple[int, ...]

    def __call__(self, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        sides = {"j": src, "i": dst, "edge": edge}
        given: dict[str, object] = dict(self.fixed)
        given |= {name: sides[side][place] for name, side, place in self.read}
        given |= dict.fromkeys(self.weights, edge[-1] if edge else None)
        now = dict(vars(self.conv))
        vars(self.conv).update(self.state)
        begun = dict(vars(self.conv))
        try:
            with no_dropout(), in_a_fold(), _Instead(dict(zip(self.learned, shared, strict=True))):
                message: Callable[..., Tensor] = self.conv.message
                out = message(**given)
            ended = vars(self.conv)
            if ended.keys() != begun.keys() or any(ended[name] is not value for name, value in begun.items()):
                raise Refused("has a message that changes the convolution")
            return out
        finally:
            vars(self.conv).clear()
            vars(self.conv).update(now)


def with_matrices(conv: MessagePassing, way: Way, hooks: Hooks) -> Hooks:
    """Add hooks for the matrices of PyG's own convolutions, with the fast body of `dense`.

    A sum and the matrix beside it are exchanged if the convolution aggregates the wider side: A (X W) = (A X) W. At
    equal widths the sum comes first, since the features then need no gradient. A matrix other than PyG's plain Linear
    (replaced, parametrized, with hooks) is kept.
    """
    names = _MATRICES.get(type(conv), ())
    plain = {name: each for name, each in conv.named_children() if name in names and _is_linear(each)}
    found = dict(hooks)
    found |= {name: _Matrix(each, partial(_product, each.weight, each.bias)) for name, each in plain.items()}
    sums = isinstance(way, NormalizedSum) or (isinstance(way, AsItIs) and way.reduction in ("sum", "mean"))
    if not names or not sums or names[0] not in plain:
        return found
    name, multiplies_first, propagate = names[0], type(conv) is pyg.GCNConv, hooks["propagate"]
    linear = plain[name]
    if multiplies_first != (linear.in_channels <= linear.out_channels):
        return found

    def sum_first(edge_index: object, size: object = None, **given: object) -> object:
        rows = propagate(edge_index, size=size, **given)
        assert isinstance(rows, Tensor)
        return _product(linear.weight, linear.bias, rows)

    def matrix_first(edge_index: object, size: object = None, **given: object) -> object:
        source, destination = _source_and_destination(given["x"])
        assert isinstance(source, Tensor)
        rows = _product(linear.weight, None, source), destination
        return propagate(edge_index, size=size, **{**given, "x": rows})

    def added(rows: Tensor) -> Tensor:
        return rows if linear.bias is None else rows + linear.bias

    if multiplies_first:
        return {**found, "propagate": sum_first, name: _Matrix(linear, lambda rows: rows)}
    return {**found, "propagate": matrix_first, name: _Matrix(linear, added)}


class _Matrix(nn.Module):
    """Replacement for a convolution's matrix."""

    def __init__(self, linear: pyg.Linear, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias, self.body = linear.weight, linear.bias, body

    def forward(self, rows: Tensor) -> Tensor:
        return self.body(rows)


def _is_linear(module: nn.Module | None) -> TypeGuard[pyg.Linear]:
    if module is None:
        return False
    hooked = module._forward_pre_hooks or module._forward_hooks or module._backward_hooks
    return type(module) is pyg.Linear and not hooked and "forward" not in vars(module)


def _product(weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """Return the product. Shapes: weight [O, F], bias [O] or None, rows [..., F] -> [..., O]."""
    return dense(rows, weight, bias) if type(rows) is Tensor else F.linear(rows, weight, bias)
