"""Aggregation paths: how a PyG convolution runs on a rank's part of the graph, as its own code or through a fold.

The user's code runs on marked tensors (marks.py). A fold replaces it where both compute the same values:

- a convolution of a class in `lowering_of`, with nothing overridden, shadowed or hooked, and supported options;
- in any other convolution, `propagate` on the graph's own edges, if message, aggregation and update are PyG's sum,
  mean or maximum of source rows, or a sum or mean of a message that reads one edge at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn import MessagePassing

from gnnpar.folds.block import Rows
from gnnpar.folds.edge_data import SelfLoops
from gnnpar.folds.generic import Generic
from gnnpar.folds.max import Max
from gnnpar.folds.softmax import Softmax, SoftmaxV2
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph, Local, unchanged
from gnnpar.models.dense import dense
from gnnpar.models.pyg.marks import EdgeRows, Edges, LocalEdges, Placeholder, Refused, Types, Weights, unmarked
from gnnpar.models.pyg.nested import (
    Called,
    Intercepting,
    holding,
    kept_tensors,
    leaves,
    mapped_call,
    python_state,
    replaced,
)
from gnnpar.models.pyg.substitutes import IN_A_FOLD, no_dropout
from gnnpar.models.rgcn import relational_product
from gnnpar.models.transformer import attend

Propagate = Callable[..., Tensor]
Forward = Callable[..., object]

_NORMALIZED = frozenset(  # gcn_norm, then sums
    {pyg.GCNConv, pyg.GCN2Conv, pyg.SGConv, pyg.SSGConv, pyg.APPNP, pyg.MixHopConv}
    | {pyg.TAGConv, pyg.LGConv, pyg.ARMAConv}  # without self loops
)
_ATTENDS = frozenset({pyg.GATConv, pyg.GATv2Conv})
_RELATIONAL = frozenset({pyg.RGCNConv, pyg.FastRGCNConv})
_PLAIN = {  # messages x_j
    inspect.getattr_static(cls, "message")
    for cls in (MessagePassing, pyg.SAGEConv, pyg.GINConv, pyg.GraphConv, pyg.GCNConv)
}
_MATRICES: Mapping[type[MessagePassing], tuple[str, ...]] = {
    pyg.GCNConv: ("lin",),
    pyg.SAGEConv: ("lin_l", "lin_r", "lin"),
    pyg.GraphConv: ("lin_rel", "lin_root"),
    pyg.GATConv: ("lin",),
    pyg.GATv2Conv: ("lin_l", "lin_r"),
    pyg.TransformerConv: ("lin_key", "lin_query", "lin_value", "lin_skip"),
}
"""Linear submodules by class. The first multiplies the input (GCNConv) or the output of `propagate`."""
_WHOLE = "runs as it is, on whole neighbourhoods"
_REDUCTIONS = {pyg.SumAggregation: "sum", pyg.MeanAggregation: "mean", pyg.MaxAggregation: "max"}
_HOOKED = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
_HOOKS = tuple(f"_{step}_forward_{when}" for step in _HOOKED for when in ("pre_hooks", "hooks"))
_GATHER = ("_lift", "_collect", "_index_select", "_index_select_safe", "_set_size", "_check_input")
_METHODS = (*_HOOKED, "update", "edge_updater", "forward", *_GATHER)
_OF_ALL_EDGES = MessagePassing.special_args | {Types.name}


def lowering_of(conv: MessagePassing, *, self_loops: SelfLoops) -> Lowering:
    """Return the aggregation path of a convolution. self_loops: of the graph (one per node, none, or as given)."""
    cls, options, reduction, own = type(conv), vars(conv), _reduction(conv), _own_code(conv)
    wants, kept = bool(options.get("add_self_loops")), (own.reduction, own.message)
    if not is_plain(conv) or not reduction:
        return own
    if cls in _ATTENDS and reduction == "sum" and _may_fold(conv) and (self_loops is True or not wants):
        return Attention("mapped to an online softmax", *kept, loops=wants)
    keeps = (wants and self_loops == "keep") or (options.get("cached") and cls is not pyg.GCNConv)
    if cls in _NORMALIZED and reduction == "sum" and _may_fold(conv) and not keeps:
        adds, improved = wants and self_loops is not True, bool(options.get("improved"))
        loops = {"loop": 1 + improved if adds else 0, "loops": self_loops is True, "improved": improved and wants}
        return NormalizedSum("mapped to GCN's sum", *kept, **loops)
    if cls is pyg.TransformerConv and reduction == "sum":
        return DotAttention("mapped to an online softmax", *kept)
    if cls in _RELATIONAL and reduction != "max":
        return Relational("mapped to a sum by type of edge", *kept)
    return own


def adds_loops(conv: MessagePassing) -> bool:
    """Return True if the convolution adds a self loop of weight 1 to nodes without one and can run as a fold."""
    options = vars(conv)
    return is_plain(conv) and bool(options.get("add_self_loops")) and _may_fold(conv) and not options.get("improved")


def _may_fold(conv: MessagePassing) -> bool:
    """Return True for attention and normalised sums with options that a fold has."""
    cls, options = type(conv), vars(conv)
    if cls in _ATTENDS:
        return options["edge_dim"] is None
    return cls in _NORMALIZED and options.get("normalize", True) and not (cls is pyg.APPNP and options["dropout"] > 0)


class StandIn(partial[object]):
    """A forward that replaces the class's own while the model runs on a rank's rows."""


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
    return _REDUCTIONS.get(type(module), "") if isinstance(module, nn.Module) and is_untouched(module) else ""


def is_untouched(module: nn.Module) -> bool:
    """Return True if a module has no hooks and runs the forward of its class."""
    hooked = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return not hooked and "forward" not in vars(module)


def _is_linear(module: nn.Module) -> TypeGuard[pyg.Linear]:
    return type(module) is pyg.Linear and is_untouched(module)


def _ends(value: object) -> tuple[Tensor, Tensor]:
    """Return the rows of sources and of destinations, as `propagate` takes them: one tensor or a pair."""
    return cast("tuple[Tensor, Tensor]", value if isinstance(value, tuple | list) and len(value) == 2 else (value,) * 2)


def _is_rows(value: object) -> TypeGuard[Tensor]:
    """Return True for rows of nodes."""
    return isinstance(value, Tensor) and not isinstance(value, EdgeRows | Placeholder)


def _are_given(edges: object) -> bool:
    """Return True for the unchanged edges of the graph or of a relation."""
    return isinstance(edges, Edges) and not edges.flipped


def _own_code(conv: MessagePassing) -> Lowering:
    """Return the path of a convolution's own code."""
    cls, reduction = type(conv), _reduction(conv)
    own, of_pyg = partial(inspect.getattr_static, cls), partial(inspect.getattr_static, MessagePassing)
    ends = all(own(each) is of_pyg(each) for each in ("aggregate", "update", "edge_update", *_GATHER))
    propagate = own("propagate")
    generated = inspect.isfunction(propagate) and propagate.__module__.endswith("_propagate")  # by PyG
    if reduction and ends and is_plain(conv) and (generated or propagate is MessagePassing.propagate):
        if own("message") in _PLAIN:
            return Lowering(f"mapped to a {reduction} of source rows", reduction)
        names = tuple(inspect.signature(conv.message).parameters)
        counts = any(True for child in conv.children() for _ in child.buffers())  # a message may change buffers
        drops = float(vars(conv).get("dropout") or 0) > 0
        if reduction != "max" and _OF_ALL_EDGES.isdisjoint(names) and not counts and not drops:
            return Lowering(f"its own message, {reduction} over edges", reduction, names)
    return Lowering()


@dataclass(eq=False)
class Lowering:
    """The aggregation path of a convolution: its own code, with folds in place of `propagate`.

    title: shown to the user. reduction: aggregation of `propagate` that a fold may
    replace; empty: none. message: argument names of a message that reads one edge at a time; None: the message is the
    source's row. apart: `message` was tried on single edges. loops: the graph must have one self loop per node, which
    only the fold of a subclass leaves out.
    """

    title: str = _WHOLE
    reduction: str = ""
    message: tuple[str, ...] | None = None
    apart: bool = False
    loops: bool = False

    @property
    def whole(self) -> bool:
        """True if the convolution reads whole neighbourhoods."""
        return self.title == _WHOLE

    def forward(self, conv: MessagePassing, g: Graph, forward: Forward) -> Forward:
        """Return the convolution's forward on the rows of `g`. forward: its own forward."""

        def run(*args: object, **kwargs: object) -> object:
            if self.loops:
                raise Refused(
                    "is called with more than the graph's own edges and rows, while dataset.self_loops has put its "
                    "loops into the graph; set dataset.self_loops=keep"
                )
            if not any(isinstance(each, Edges) for each in (*args, *kwargs.values())):
                return forward(*args, **kwargs)  # on edges made by the model, on a whole graph
            local = LocalEdges(g)
            with holding(LocalEdges.current, local), ExitStack() as stack:
                if self.reduction and is_plain(conv):
                    propagate = partial(self._propagate, conv, local, conv.propagate)
                    stack.enter_context(with_matrices(conv, self, propagate))
                out = unmarked(forward(*args, **kwargs))
            if local.read:
                self.title = _WHOLE
            return out

        return run

    def _propagate(
        self,
        conv: MessagePassing,
        local: LocalEdges,
        own: Propagate,
        /,  # a user's message may have arguments of these names
        edge_index: object,
        size: object = None,
        **more: object,
    ) -> Tensor:
        if _are_given(edge_index) and size in (None, (local.num_sources, local.g.node_ids.shape[0])):
            fold = self._sum_of_rows if self.message is None else self._sum_of_messages
            if (out := fold(conv, local.g, more)) is not None:
                share = local.g.in_degree.clamp_min(1).reciprocal().view(-1, *[1] * (out.ndim - 1))
                return out * share if self.reduction == "mean" else out
        return own(edge_index, **more, size=size)

    def _sum_of_rows(self, conv: MessagePassing, g: Graph, given: Mapping[str, object]) -> Tensor | None:
        weight, rows = given.get("edge_weight"), _ends(given.get("x"))[0]
        others = [value for name, value in given.items() if name not in ("x", "edge_weight") and value is not None]
        if others or not _is_rows(rows) or (rows.ndim != 2 and conv.node_dim != 0) or not rows.is_floating_point():
            return None
        if weight is not None and (not isinstance(weight, Weights) or self.reduction == "max"):
            return None
        weighted = weight is not None and "edge_weight" in inspect.signature(conv.message).parameters
        fold = Max() if self.reduction == "max" else Sum(weighted=weighted)
        return g.aggregate(fold, g.source(unchanged, rows.flatten(1))).unflatten(1, rows.shape[1:])

    def _sum_of_messages(self, conv: MessagePassing, g: Graph, given: Mapping[str, object]) -> Tensor | None:
        operands: tuple[list[Tensor], ...] = [], [], []  # of sources, destinations and edges
        read, fixed = list[tuple[str, int, int]](), dict[str, object]()
        for name in self.message or ():
            base, _, end = name.rpartition("_")
            side = {"j": 0, "i": 1}.get(end, 2)
            value: object = given.get(name) if side == 2 else _ends(given.get(base))[side]
            if isinstance(value, Weights):
                read.append((name, 2, _WEIGHT))
            elif value is None or isinstance(value, bool | int | float | str):
                fixed[name] = value
            elif isinstance(value, EdgeRows) and side == 2:
                read.append((name, 2, len(operands[2])))
                operands[2].append(value.as_subclass(Tensor))
            elif _is_rows(value) and side < 2 and (value.ndim == 2 or conv.node_dim == 0):
                read.append((name, side, len(operands[side])))
                operands[side].append(value)
            else:
                return None
        far, near, edge = map(tuple, operands)
        if not far:
            return None
        value, weighted = _EdgeValue(conv, dict(vars(conv)), tuple(read), fixed, ()), any(at < 0 for *_, at in read)
        learned = self._learned(value, operands, weighted)
        if learned is None:
            return None
        fold = Generic(value=replace(value, learned=tuple(map(id, learned))), weighted=weighted)
        return g.aggregate(fold, g.source(unchanged, *far), near, edge, tuple(learned))

    def _learned(self, value: _EdgeValue, operands: Iterable[list[Tensor]], weighted: bool) -> list[Tensor] | None:
        """Run the message on four edges and return the parameters it reads. Return None if it reads other tensors that
        need gradients, mixes edges, draws random numbers, changes state, keeps tensors, or fails."""
        far, near, edge = (tuple(map(_probe_rows, rows)) for rows in operands)
        rows = far, near, (*edge, far[0].new_ones(_PROBE_EDGES)) if weighted else edge
        before = [(each, dict(vars(each))) for each in value.conv.modules()]
        numbers, tensors = python_state(value.conv), kept_tensors(value.conv)
        try:
            with _Reads() as reads, torch.enable_grad():
                whole = value(*rows, ()).detach().clone()
            if kept_tensors(value.conv) != tensors or python_state(value.conv) != numbers:
                self.reduction = ""  # for good, since each probe leaves more of it
                return None
            given = {id(t) for side in rows for t in side}
            learned = [t for t in reads.others.values() if t.requires_grad and id(t) not in given]
            changed = any(vars(each) != was for each, was in before)
            if changed or len(whole) != _PROBE_EDGES or not all(isinstance(t, nn.Parameter) for t in learned):
                return None
            if not self.apart:
                fixed, shared = replace(value, learned=tuple(map(id, learned))), tuple(t.detach() for t in learned)
                parts = list[Tensor]()
                for at in (slice(0, 1), slice(1, _PROBE_EDGES)):
                    src, dst, own = (tuple(t.detach()[at] for t in side) for side in rows)
                    parts.append(fixed(src, dst, own, shared))
                joined = torch.cat(parts)
                self.apart = joined.shape == whole.shape and torch.allclose(joined, whole, equal_nan=True)
                self.apart &= not joined.requires_grad
            return learned if self.apart else None
        except Exception:  # a message may raise anything
            return None
        finally:
            for each, was in before:
                vars(each).clear()
                vars(each).update(was)


class _Mapped(Lowering):
    """The convolution's own forward with `propagate` replaced by a fold; its own code for calls with other
    arguments."""

    reads = frozenset({"edge_index", "edge_weight", "x", "x_0"})

    def takes(self, conv: MessagePassing, given: Mapping[str, object]) -> bool:
        """Return True if a call's arguments are the graph's own edges and the fold reads all of them."""
        others = [value for name, value in given.items() if name not in self.reads and value is not None]
        weight = given.get("edge_weight")
        return _are_given(given["edge_index"]) and not others and (weight is None or isinstance(weight, Weights))

    def fold(self, conv: MessagePassing, g: Graph, given: Mapping[str, object]) -> Tensor:
        """Return the result of `propagate` with the arguments `given`."""
        raise NotImplementedError

    def run(self, conv: MessagePassing, g: Graph, forward: Forward, call: inspect.BoundArguments) -> object:
        """Return the result of the convolution's own forward."""

        def propagate(edge_index: object, size: object = None, **given: object) -> Tensor:
            return self.fold(conv, g, given)

        def edge_updater(edge_index: object, size: object = None, **given: object) -> object:
            return given

        call.arguments["edge_index"] = object()  # keep PyG from preparing a tensor of edges
        with with_matrices(conv, self, propagate, edge_updater=edge_updater):
            return forward(*call.args[1:], **call.kwargs)

    def forward(self, conv: MessagePassing, g: Graph, forward: Forward) -> Forward:
        asked, own = inspect.signature(type(conv).forward), super().forward(conv, g, forward)

        def run(*args: object, **kwargs: object) -> object:
            call = asked.bind(conv, *args, **kwargs)
            if self.takes(conv, {name: value for name, value in call.arguments.items() if name != "self"}):
                return self.run(conv, g, forward, call)
            return own(*args, **kwargs)

        return run


@dataclass(eq=False)
class NormalizedSum(_Mapped):
    """D^-1/2 A D^-1/2 X with the degrees of the whole graph. loop: weight of the self loop to add per node; 0: add
    none. loops: the graph has a self loop of weight 1 per node, so no degree is 0. improved: PyG's option, which needs
    loops of weight 2."""

    loop: int = 0
    improved: bool = False

    def takes(self, conv: MessagePassing, given: Mapping[str, object]) -> bool:
        if self.improved and self.loops and given.get("edge_weight") is not None:
            raise Refused(
                "gives self loops the weight 2 (improved=True), and dataset.self_loops=true has added loops of weight "
                "1; set dataset.self_loops=keep"
            )
        return super().takes(conv, given)

    def fold(self, conv: MessagePassing, g: Graph, given: Mapping[str, object]) -> Tensor:
        weighted, rows = given.get("edge_weight") is not None, _ends(given["x"])[0]
        table = rows.movedim(-2, 0) if rows.ndim > 2 else rows
        out = self._sum(g, table.flatten(1), weighted).unflatten(1, table.shape[1:])
        return out.movedim(0, -2) if rows.ndim > 2 else out

    def _sum(self, g: Graph, rows: Tensor, weighted: bool) -> Tensor:
        """Return the normalised sum. Shapes: [N, F] -> [N, F]."""
        if g.normalised:
            return g.aggregate(Sum(weighted=True), g.source(unchanged, rows))
        source = g.source(lambda local, h: (self._scale(local, weighted) * h,), rows)
        out = g.aggregate(Sum(weighted=weighted), source)
        loop = self._loop_of(g, weighted)
        return self._scale(g, weighted) * (out + loop * source[0] if loop else out)

    def _loop_of(self, local: Local, weighted: bool) -> int:
        """Return the weight of added loops. Without edge weights PyG ignores `improved` and adds loops of weight 1."""
        return self.loop if weighted and local.in_weight is not None else min(1, self.loop)

    def _scale(self, local: Local, weighted: bool) -> Tensor:
        weight = local.in_weight if weighted else None
        degree = (local.in_degree if weight is None else weight) + self._loop_of(local, weighted)
        return torch.where(degree > 0, degree, torch.inf).rsqrt()[:, None]


class Attention(_Mapped):
    """GATConv and GATv2Conv through a softmax fold over in-edges."""

    def takes(self, conv: MessagePassing, given: Mapping[str, object]) -> bool:
        return super().takes(conv, given) and _ends(given["x"])[1] is not None

    def fold(self, conv: MessagePassing, g: Graph, given: Mapping[str, object]) -> Tensor:
        assert isinstance(conv, pyg.GATConv | pyg.GATv2Conv)
        source, destination = _ends(given["x"])
        dropout = g.edge_dropout(conv.dropout if conv.training else 0.0)
        if isinstance(conv, pyg.GATv2Conv):
            fold = SoftmaxV2(conv.negative_slope, dropout)
            return g.aggregate(fold, g.source(unchanged, source), (destination,), shared=(conv.att[0],))
        scores = given["alpha"]
        assert isinstance(scores, dict)
        of_source, of_destination = _ends(scores["alpha"])
        rows = g.source(unchanged, source, of_source)
        return g.aggregate(Softmax(conv.negative_slope, dropout), rows, (of_destination,))


class DotAttention(_Mapped):
    """TransformerConv, with or without `lin_edge`."""

    reads = _Mapped.reads | {"edge_attr"}

    def takes(self, conv: MessagePassing, given: Mapping[str, object]) -> bool:
        edge, matrix = given.get("edge_attr"), vars(conv)["_modules"].get("lin_edge")
        fits = edge is None if matrix is None else isinstance(edge, EdgeRows) and edge.ndim == 2 and _is_linear(matrix)
        rows = all(_is_rows(each) and each.ndim == 2 for each in _ends(given["x"]))
        return rows and fits and super().takes(conv, given)

    def fold(self, conv: MessagePassing, g: Graph, given: Mapping[str, object]) -> Tensor:
        assert isinstance(conv, pyg.TransformerConv)
        query, key, value = (cast("Tensor", given[name]) for name in ("query", "key", "value"))
        edge = (rows.as_subclass(Tensor),) if isinstance(rows := given["edge_attr"], EdgeRows) else ()
        matrix = conv.lin_edge.weight if edge and conv.lin_edge is not None else None
        return attend(g, g.source(unchanged, key, value), query, edge, matrix, conv.dropout if conv.training else 0.0)


class Relational(_Mapped):
    """RGCNConv and FastRGCNConv: sums or means of source rows by edge type, and one product for all types."""

    def takes(self, conv: MessagePassing, given: Mapping[str, object]) -> bool:
        rows = all(isinstance(each, Tensor) for each in _ends(given["x"])) and _ends(given["x"])[0].is_floating_point()
        return _are_given(given["edge_index"]) and isinstance(given.get("edge_type"), Types) and rows

    def run(self, conv: MessagePassing, g: Graph, forward: Forward, call: inspect.BoundArguments) -> object:
        assert isinstance(conv, pyg.RGCNConv)
        source, destination = _ends(call.arguments["x"])
        degree = g.type_degree(conv.num_relations)
        rows = g.aggregate(Sum(types=conv.num_relations), g.source(unchanged, source))
        if _reduction(conv) == "mean":
            rows = rows * degree.clamp_min(1).reciprocal()[..., None]
        out = relational_product(rows, conv.weight, conv.comp)
        out = out if conv.root is None else out + destination @ conv.root
        return out if conv.bias is None else out + conv.bias


_PROBE_EDGES = 4  # edges on which a message is probed
_WEIGHT = -1  # index of edge weights, which a fold appends to the rows of edges


def _probe_rows(like: Tensor) -> Tensor:
    """Return sample rows as autograd leaves, so that in-place writes fail. Shapes: [., ...] -> [4, ...]."""
    count = _PROBE_EDGES * like.shape[1:].numel()
    rows = torch.arange(1.0, count + 1, dtype=torch.float64, device=like.device).mul(1.7).sin()
    return rows.view(_PROBE_EDGES, *like.shape[1:]).to(like.dtype).requires_grad_(like.is_floating_point())


class _Reads(Intercepting):
    """Record the tensors that functions read and did not create, by id."""

    def __init__(self) -> None:
        super().__init__(self._recorded)
        self.others, self._made = dict[int, Tensor](), dict[int, Tensor]()

    def _recorded(self, func: Called, args: tuple, given: dict[str, object]) -> object:
        self.others |= {id(t): t for t in leaves((args, given)) if isinstance(t, Tensor) and id(t) not in self._made}
        out = func(*args, **given)
        self._made |= {id(t): t for t in leaves(out) if isinstance(t, Tensor) and id(t) not in self.others}
        return out


@dataclass(frozen=True, eq=False)
class _EdgeValue:
    """The message of e edges.

    state: attributes of the convolution at the call. read: (argument, operand, index), with operand 0 (source), 1
    (destination) or 2 (edge). fixed: constant arguments. learned: ids of parameters to replace by the shared operands.
    """

    conv: MessagePassing
    state: Mapping[str, object]
    read: tuple[tuple[str, int, int], ...]
    fixed: Mapping[str, object]
    learned: tuple[int, ...]

    def __call__(self, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        given = {**self.fixed, **{name: (src, dst, edge)[side][place] for name, side, place in self.read}}
        others = dict(zip(self.learned, shared, strict=True))

        def reading(func: Called, args: tuple, given: dict[str, object]) -> object:
            args, given = mapped_call(args, given, lambda leaf: others.get(id(leaf), leaf))
            return func(*args, **given)

        with replaced(self.conv, self.state), no_dropout(), holding(IN_A_FOLD, True), Intercepting(reading):
            begun, message = dict(vars(self.conv)), cast("Callable[..., Tensor]", self.conv.message)
            out = message(**given)
            ended = vars(self.conv)
            if ended.keys() != begun.keys() or any(ended[name] is not value for name, value in begun.items()):
                raise Refused("has a message that changes the convolution")
            return out


@contextmanager
def with_matrices(conv: MessagePassing, path: Lowering, propagate: Propagate, **others: object) -> Iterator[None]:
    """Within the context, replace methods, and run the linear submodules of PyG's own convolutions with `dense`.

    Exchange the sum and the product if the convolution would aggregate the wider side: A (X W) = (A X) W. At equal
    widths sum first, since the features then need no gradient. Leave a submodule other than PyG's plain Linear
    (replaced, parametrized, with hooks) as it is.
    """
    names, multiplies_first = _MATRICES.get(type(conv), ()), type(conv) is pyg.GCNConv
    plain = {name: each for name, each in conv.named_children() if name in names and _is_linear(each)}
    bodies: dict[nn.Module, Forward] = {each: partial(_product, each.weight, each.bias) for each in plain.values()}
    sums = isinstance(path, NormalizedSum) or (type(path) is Lowering and path.reduction in ("sum", "mean"))
    first = plain.get(names[0]) if names and sums else None

    def sum_first(edge_index: object, size: object = None, **given: object) -> object:
        assert first is not None
        return _product(first.weight, first.bias, propagate(edge_index, size=size, **given))

    def matrix_first(edge_index: object, size: object = None, **given: object) -> object:
        assert first is not None
        source, destination = _ends(given["x"])
        rows = _product(first.weight, None, source), destination
        return propagate(edge_index, size=size, **{**given, "x": rows})

    methods: dict[str, object] = {"propagate": propagate, **others}
    if first is not None and multiplies_first == (first.in_channels <= first.out_channels):
        bias, methods["propagate"] = first.bias, sum_first if multiplies_first else matrix_first
        bodies[first] = lambda rows: rows if multiplies_first or bias is None else rows + bias
    with ExitStack() as stack:
        stack.enter_context(replaced(conv, methods))
        for linear, body in bodies.items():
            stack.enter_context(replaced(linear, {"forward": body}))
        yield


def _product(weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """Return rows W^T + bias. Shapes: weight [O, F], bias [O] or None, rows [..., F] -> [..., O]."""
    return dense(rows, weight, bias) if type(rows) is Tensor else F.linear(rows, weight, bias)
