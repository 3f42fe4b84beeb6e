"""From a model to its ModelIR, two ways that must agree: recording what it dispatches, and torch.export.

Both run the model on a Graph whose aggregate and dropout are custom operators of torch, opaque to tracing, and both
give the same stream of operations: `record` sees them as they are dispatched on meta tensors, `export` reads them off
the exported program. Nothing is computed. A tensor's first dimension tells what it is about: rows, edges or neither.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gnnpar.folds.aggregator import Aggregator, EdgeDropout, Pushable
from gnnpar.folds.block import Rows
from gnnpar.folds.generic import EdgeFunction, Generic
from gnnpar.folds.sum import Sum
from gnnpar.graph import Message, Moments
from gnnpar.models.edge_attr import ReadsAttributes
from gnnpar.models.gnn import GNN
from gnnpar.planner.assemble import Event, FoldArguments, Seen, assemble
from gnnpar.pricing.ir import ModelIR

ROWS, EDGES = 10007, 20011  # primes: no width of a model is as large by chance
_LAYER = re.compile(r"layers\.(\d+)")


@torch.library.custom_op("gnnpar_trace::fold", mutates_args=())
def _fold(
    src: Sequence[Tensor],
    dst: Sequence[Tensor],
    edge: Sequence[Tensor],
    shared: Sequence[Tensor],
    kind: str,
    flags: Sequence[int],
    tail: Sequence[int],
) -> Tensor:
    """kind: of aggregator. flags: linear, needs_src, pushed numbers. tail: shape of a row of the result."""
    return src[0].new_zeros([src[0].shape[0], *tail])


@_fold.register_fake
def _(src, dst, edge, shared, kind, flags, tail) -> Tensor:
    return src[0].new_empty([src[0].shape[0], *tail])


@torch.library.custom_op("gnnpar_trace::dropout", mutates_args=())
def _dropout(x: Tensor, p: float) -> Tensor:
    return x.clone()


@_dropout.register_fake
def _(x, p) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("gnnpar_trace::moments", mutates_args=())
def _moments(x: Tensor) -> Tensor:
    """Mean and variance of columns, [2, F]."""
    return x.new_zeros([2, *x.shape[1:]])


@_moments.register_fake
def _(x) -> Tensor:
    return x.new_empty([2, *x.shape[1:]])


@dataclass(frozen=True)
class Tracing:
    """The Graph of a model that is traced: no structure, only operators that say what was asked."""

    node_ids: Tensor
    in_degree: Tensor
    edge_ids: Tensor
    layer: int = 0
    in_weight: None = None  # weights change no shape
    normalised: bool = False
    edge_attr: Tensor | None = None

    def type_degree(self, types: int) -> Tensor:
        return self.in_degree[:, None].expand(-1, types)

    def at(self, layer: int) -> Self:
        return replace(self, layer=layer)

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        return x if p == 0 else _dropout(x, p)

    def moments(self, x: Tensor) -> Moments:
        mean, variance = _moments(x).unbind(0)
        return Moments(mean, variance, ROWS, probe=True)

    def edge_dropout(self, p: float, *, tag: int = 0) -> EdgeDropout | None:
        return None if p == 0 else EdgeDropout(p, 0)

    def source(self, message: Message, *rows: Tensor) -> Rows:
        return message(self, *rows)

    def destinations(self, *rows: Tensor) -> tuple[Self, Rows]:
        return self, rows

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        width = sum(t[0].numel() for t in src)
        pushed = width + 2 * sum(t[0].numel() for t in dst) if isinstance(agg, Pushable) else 0
        flags = [int(agg.linear), int(agg.needs_src), pushed]
        typed = isinstance(agg, Generic) and agg.types > 0
        first = (self.edge_ids,) if typed else ()  # types of edges
        tail = _tail(agg, src, dst, (*first, *edge), shared) if isinstance(agg, WithValue) else list(src[0].shape[1:])
        if (isinstance(agg, Sum) and agg.types) or (isinstance(agg, Generic) and agg.within):
            tail = [agg.types, *tail]
        kind = type(agg).__name__
        return _fold(list(src), list(dst), list(edge), list(shared), kind, flags, tail)


@runtime_checkable
class WithValue(Protocol):
    """A fold whose rows a function makes."""

    @property
    def value(self) -> EdgeFunction: ...


def _tail(agg: WithValue, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> list[int]:
    """Shape of a row of the result of a user's value function, of tensors that a trace does not know."""
    none = [tuple(_unknown(t, 0, *t.shape[1:]) for t in rows) for rows in (src, dst, edge)]
    return list(agg.value(none[0], none[1], none[2], tuple(_unknown(t, *t.shape) for t in shared)).shape[1:])


def _unknown(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


@dataclass
class _Where:
    """The stack of modules that are running."""

    path: list[str] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    failed: str = ""

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            if not name:
                continue
            self.kinds[name] = type(module).__name__
            handles.append(module.register_forward_pre_hook(self._enter(name)))
            handles.append(module.register_forward_hook(lambda *_: self.path.pop() and None))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self.path.append(name)


def record(model: nn.Module, in_dim: int, *, learned: int = 0) -> ModelIR:
    """By running the model on meta tensors. ValueError names the module that cannot be traced. `learned`: so many of
    the features train."""
    twin = copy.deepcopy(model).to("meta")
    where, recorder = _Where(), _Recorder()
    recorder.where = where
    for name, parameter in twin.named_parameters():
        recorder.parameters[id(parameter)] = name
    x = torch.empty(ROWS, in_dim, device="meta")
    graph = _graph(x, model)
    recorder.named(x, "x")
    recorder.named(graph.in_degree, "static")
    recorder.named(graph.node_ids, "static")
    if graph.edge_attr is not None:
        recorder.named(graph.edge_attr, "static")
    try:
        with torch.no_grad(), where.watching(twin), recorder:
            out = twin(graph, x)
    except Exception as error:
        raise _untraceable(where.path[-1] if where.path else "", where.kinds, model, error) from error
    out_key = recorder.key(out)
    return assemble(recorder.events, model, in_dim=in_dim, out=out_key, rows=ROWS, edges=EDGES, learned=learned)


def _untraceable(path: str, kinds: dict[str, str], model: nn.Module, error: Exception) -> ValueError:
    what = f"{path} ({kinds.get(path)})" if path else type(model).__name__
    reason = " ".join(str(error).split())[:160]
    return ValueError(
        f"the model cannot be traced: module {what} raised {type(error).__name__}: {reason}. Its forward must not read "
        "values of tensors, and must mix rows through the graph alone."
    )


def _graph(x: Tensor, model: nn.Module) -> Tracing:
    device = x.device
    config = model.config if isinstance(model, GNN) else None
    width = (config.edge_dim or 0) if isinstance(config, ReadsAttributes) else 0
    attr = torch.empty(EDGES, width, device=device) if width else None
    ids = torch.empty(ROWS, dtype=torch.int64, device=device)
    return Tracing(
        ids, torch.empty(ROWS, device=device), torch.empty(EDGES, dtype=torch.int64, device=device), edge_attr=attr
    )


class _Recorder(TorchDispatchMode):
    """Writes down every operation with the shapes it saw."""

    where: _Where

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.parameters: dict[int, str] = {}
        self._alive: list[Tensor] = []  # so that an id stands for one tensor
        self._names: dict[int, str] = {}

    def named(self, tensor: Tensor, name: str) -> None:
        self._alive.append(tensor)
        self._names[id(tensor)] = name

    def key(self, tensor: Tensor) -> str:
        if id(tensor) in self.parameters:
            return f"p:{self.parameters[id(tensor)]}"
        return self._names.setdefault(id(tensor), f"t{len(self._names)}")

    def _seen(self, values: object) -> tuple[Seen, ...]:
        tensors = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
        self._alive += tensors
        return tuple(Seen(self.key(t), tuple(t.shape)) for t in tensors)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        path = self.where.path[-1] if self.where.path else ""
        inputs, fold = self._seen((args, kwargs)), _fold_arguments(func, args)
        self.events.append(Event(_name(func), inputs, self._seen(out), _layer_of(path), fold))
        return out


def _name(func: object) -> str:
    return str(func.overloadpacket if isinstance(func, OpOverload) else func).rpartition(".")[2]


def _fold_arguments(func: object, args: Sequence[Any]) -> FoldArguments | None:  # Any: whatever an operation takes
    """What says which fold it is; None: it is none."""
    if _name(func) != "fold":
        return None
    src, dst, edge, shared, kind, flags, tail = args
    return FoldArguments(len(src), len(dst), len(edge), len(shared), kind, tuple(flags), tuple(tail))


def _layer_of(path: str) -> int | None:
    match = _LAYER.search(path)
    return int(match[1]) if match else None


class _Exportable(nn.Module):
    """The model as a function of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, x: Tensor, node_ids: Tensor, in_degree: Tensor, edge_ids: Tensor, edge_attr: Tensor | None
    ) -> Tensor:
        return self.model(Tracing(node_ids, in_degree, edge_ids, edge_attr=edge_attr), x)


def export(model: nn.Module, in_dim: int) -> ModelIR:
    """By torch.export, decomposed to the operations that run."""
    twin = copy.deepcopy(model).to("meta")
    x = torch.empty(ROWS, in_dim, device="meta")
    graph = _graph(x, model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of itself
        given = (x, graph.node_ids, graph.in_degree, graph.edge_ids, graph.edge_attr)
        program = torch.export.export(_Exportable(twin), given)
        program = program.run_decompositions({})
    program.graph.eliminate_dead_code()
    names = _input_names(program)
    events, out = [], ""
    for node in program.graph.nodes:
        if node.op == "output":
            out = str(names.get(node.args[0][0].name, node.args[0][0].name))
        if node.op != "call_function" or str(node.target).startswith("<built-in function getitem"):
            continue
        fold, outputs = _fold_arguments(node.target, node.args), (Seen(node.name, _shape(node)),)
        events.append(Event(_name(node.target), _inputs(node, names), outputs, _stack_layer(node), fold))
    return assemble(events, model, in_dim=in_dim, out=out, rows=ROWS, edges=EDGES)


def _inputs(node: torch.fx.Node, names: dict[str, str]) -> tuple[Seen, ...]:
    """Tensor arguments in their order; results of getitem stand for what they take from."""
    nodes = [n for n in tree_leaves((node.args, node.kwargs)) if isinstance(n, torch.fx.Node)]
    sources = [n.args[0] if str(n.target).startswith("<built-in function getitem") else n for n in nodes]
    return tuple(Seen(names.get(n.name, n.name), _shape(n)) for n in sources)  # type: ignore[union-attr]


def _shape(node: torch.fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) else value
    return tuple(int(d) for d in first.shape) if isinstance(first, Tensor) else ()


def _input_names(program: torch.export.ExportedProgram) -> dict[str, str]:
    """Placeholder -> the name that `record` gives the same tensor."""
    names = {}
    given = iter(("x", "static", "static", "static", "static"))
    for spec in program.graph_signature.input_specs:
        kind = spec.kind.name
        if kind == "PARAMETER":
            assert spec.target is not None
            names[spec.arg.name] = f"p:{spec.target.removeprefix('model.')}"
        elif kind == "USER_INPUT":
            names[spec.arg.name] = next(given)
    return names


def _stack_layer(node: torch.fx.Node) -> int | None:
    for path, _ in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
        if (layer := _layer_of(str(path))) is not None:
            return layer
    return None
