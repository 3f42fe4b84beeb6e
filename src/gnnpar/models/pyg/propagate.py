"""How a PyG convolution aggregates: its `forward` runs as it is, and where it calls `propagate`, a fold takes over.

So the parameters, options and code of a convolution around `propagate` are the user's own. What is inside has to be one
of four: a sum, mean or maximum of source rows; GCN's weighted sum; attention whose softmax a fold knows; or a message
that is a function of one edge.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch_geometric import nn as pyg
from torch_geometric.nn import MessagePassing

from gnnpar.folds.block import Rows
from gnnpar.folds.generic import Generic
from gnnpar.folds.max import Max
from gnnpar.folds.softmax import Softmax
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph, Local
from gnnpar.models.gatv2 import Score, source_value
from gnnpar.models.pyg.dropout import no_dropout

Propagate = Callable[..., Tensor]

_WHOLE = {"index", "ptr", "size", "size_i", "size_j", "dim_size", "edge_index", "edge_index_i", "edge_index_j", "adj_t"}
_PLAIN = (MessagePassing, pyg.SAGEConv, pyg.GINConv, pyg.GraphConv, pyg.GCNConv)  # their message is x_j
_REDUCTIONS = {pyg.SumAggregation: "sum", pyg.MeanAggregation: "mean", pyg.MaxAggregation: "max"}


class Edges:
    """What a model gets in the place of edge_index: only convolutions may use it."""

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError(
            "the model reads edge_index outside of a convolution, and a rank holds a part of the edges; hand it to "
            "convolutions alone"
        )

    __getitem__ = __iter__ = __len__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


class Way(Protocol):
    """How one convolution aggregates. `title`: for people."""

    @property
    def title(self) -> str: ...
    def hooks(self, conv: MessagePassing, g: Graph) -> Mapping[str, Propagate]:
        """The methods of the convolution that are replaced while it runs on `g`."""
        ...


def way_of(conv: MessagePassing, *, self_loops: bool) -> Way:
    """How a convolution aggregates; ValueError with the reason where no fold carries it.

    self_loops: of the graph, exactly one a node or none.
    """
    cls = type(conv)
    if conv.flow != "source_to_target" or conv.node_dim not in (-2, 0) or conv.decomposed_layers != 1:
        raise ValueError("has flow, node_dim or decomposed_layers other than PyG's defaults, which are not carried")
    if isinstance(conv, pyg.GATConv | pyg.GATv2Conv):
        return _attention(conv, self_loops)
    reduction = _REDUCTIONS.get(type(conv.aggr_module))
    if reduction is None:
        raise ValueError(f"aggregates by {conv.aggr}, which no fold computes; sum, mean and max are carried")
    for name in ("aggregate", "update", "edge_update"):
        if _of(cls, name) is not _of(MessagePassing, name):
            raise ValueError(f"has a method {name} of its own, which is not carried")
    if isinstance(conv, pyg.GCNConv) and conv.normalize:
        return _gcn(conv, reduction, self_loops)
    if any(_of(cls, "message") is _of(each, "message") for each in _PLAIN):
        return Fold(reduction)
    names = tuple(inspect.signature(conv.message).parameters)
    if whole := [name for name in names if name in _WHOLE]:
        raise ValueError(
            f"has a message that reads {', '.join(whole)}, more than one edge at a time (a softmax?); of "
            "attention, GATConv and GATv2Conv are carried"
        )
    if reduction == "max":
        raise ValueError("takes the maximum of messages of its own, which no fold computes; sum and mean are carried")
    return EdgeMessage(reduction, names)


def _of(cls: type, name: str) -> object:
    return inspect.getattr_static(cls, name)


def _gcn(conv: pyg.GCNConv, reduction: str, self_loops: bool) -> Way:
    if _of(type(conv), "forward") is not _of(pyg.GCNConv, "forward") or reduction != "sum":
        raise ValueError("is a GCNConv with a forward or an aggregation of its own, which is not carried")
    if _of(type(conv), "message") is not _of(pyg.GCNConv, "message"):
        raise ValueError("is a GCNConv with a message of its own, which is not carried")
    return NormalizedSum(adds_loop=bool(conv.add_self_loops) and not self_loops)


def _attention(conv: pyg.GATConv | pyg.GATv2Conv, self_loops: bool) -> Way:
    base = pyg.GATConv if isinstance(conv, pyg.GATConv) else pyg.GATv2Conv
    for name in ("forward", "message", "edge_update", "aggregate", "update"):
        if _of(type(conv), name) is not _of(base, name):
            raise ValueError(f"is a {base.__name__} with a method {name} of its own, which is not carried")
    if type(conv.aggr_module) is not pyg.SumAggregation:
        raise ValueError(f"aggregates by {conv.aggr}; attention is carried with a sum")
    if conv.edge_dim is not None:
        raise ValueError("has edge_dim, and models read no data on edges")
    if conv.add_self_loops and not self_loops:
        raise ValueError(
            "adds self loops, and the dataset has none; set dataset.self_loops=true, or add_self_loops=False"
        )
    return Attention(base.__name__)


def _source_and_destination(value: object, name: str) -> tuple[Tensor | None, Tensor | None]:
    """Rows as `propagate` takes them: a tensor, or one for sources and one for destinations."""
    if isinstance(value, tuple | list) and len(value) == 2:
        first, second = value
    else:
        first = second = value
    return _rows(first, name), _rows(second, name)


def _rows(value: object, name: str) -> Tensor | None:
    if value is not None and not isinstance(value, Tensor):
        raise ValueError(f"calls propagate with {name}={value!r}; give rows of nodes")
    return value


def _refuse_others(given: Mapping[str, object], read: tuple[str, ...]) -> None:
    if others := [name for name, value in given.items() if value is not None and name not in read]:
        raise ValueError(f"calls propagate with {', '.join(others)}, and models read no data on edges")


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
            _refuse_others(given, ("x",))
            rows, _ = _source_and_destination(given["x"], "x")
            assert rows is not None
            source = g.source(_same, rows.flatten(1))
            out = g.aggregate(Max() if self.reduction == "max" else Sum(), source)
            if self.reduction == "mean":
                out = out * g.in_degree.clamp_min(1).reciprocal()[:, None]
            return out.unflatten(1, rows.shape[1:]) if rows.ndim > 2 else out

        return {"propagate": propagate}


@dataclass(frozen=True)
class NormalizedSum:
    """D^-1/2 A D^-1/2 X with the degrees of the whole graph; `adds_loop`: A has none, and one a node is added."""

    adds_loop: bool
    title = "mapped to GCN's sum"

    def hooks(self, conv: MessagePassing, g: Graph) -> Mapping[str, Propagate]:
        def propagate(edge_index: object, size: object = None, **given: object) -> Tensor:
            _refuse_others(given, ("x",))
            rows, _ = _source_and_destination(given["x"], "x")
            assert rows is not None
            source = g.source(lambda local, h: (self._scale(local) * h,), rows)
            out = g.aggregate(Sum(), source)
            return self._scale(g) * (out + source[0] if self.adds_loop else out)

        return {"propagate": propagate}

    def _scale(self, local: Local) -> Tensor:
        degree = local.in_degree + int(self.adds_loop)
        return torch.where(degree > 0, degree.clamp_min(1).rsqrt(), 0.0)[:, None]


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
                score = Score(conv.negative_slope)
                fold = Generic(value=source_value, score=score, dropout=dropout, by_heads=True)
                shared = (conv.att[0],)
                return g.aggregate(fold, g.source(_same, source), (destination,), shared=shared)
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
    """The message of e edges. `read`: the argument, and the operand it is of: source or destination, and its place."""

    message: _Message
    read: tuple[tuple[str, str, int], ...]
    fixed: Mapping[str, object]
    parameters: tuple[str, ...]

    def __call__(self, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        sides = {"j": src, "i": dst}
        given: dict[str, object] = {name: sides[side][place] for name, side, place in self.read}
        given |= self.fixed
        parameters = dict(zip(self.parameters, shared, strict=True))
        with no_dropout():
            return functional_call(self.message, parameters, kwargs=given)


@dataclass(frozen=True)
class EdgeMessage:
    """The sum, or mean, of a message that is a function of one edge: of what its two ends give, and of parameters."""

    reduction: str
    names: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"its own message, {self.reduction} over edges"

    def hooks(self, conv: MessagePassing, g: Graph) -> Mapping[str, Propagate]:
        def propagate(edge_index: object, size: object = None, **given: object) -> Tensor:
            operands: dict[str, list[Tensor]] = {"j": [], "i": []}
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
            value = _EdgeValue(module, tuple(read), fixed, tuple(parameters))
            source = g.source(lambda local, *rows: rows, *operands["j"])
            shared = tuple(parameters.values())
            out = g.aggregate(Generic(value=value), source, tuple(operands["i"]), shared=shared)
            if self.reduction == "mean":
                degree = g.in_degree.clamp_min(1).reciprocal()
                out = out * degree.reshape(-1, *[1] * (out.ndim - 1))
            return out

        return {"propagate": propagate}

    def _arguments(self, given: Mapping[str, object]) -> Iterator[tuple[str, str, object]]:
        """(name, j, i or nothing, value) of every argument of the message."""
        for name in self.names:
            base, _, side = name.rpartition("_")
            if side in ("i", "j") and base in given:
                first, second = _source_and_destination(given[base], base)
                yield name, side, first if side == "j" else second
                continue
            value = given.get(name)
            if isinstance(value, Tensor):
                raise ValueError(
                    f"has a message that reads {name}, which is no row of a node; models read no data on edges"
                )
            yield name, "", value
