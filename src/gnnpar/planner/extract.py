"""Trace a model into a ModelIR: run it on meta tensors, without computing values, and record its operations.

The model runs on a Graph that records folds, dropout and moments as operations. The size of a tensor's first dimension
tells whether it holds rows, edges or neither.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gnnpar.folds.aggregator import Aggregator, EdgeDropout
from gnnpar.folds.block import Operands, Rows
from gnnpar.folds.generic import EdgeFunction, Generic
from gnnpar.folds.sum import Sum
from gnnpar.graph import Moments, OneView, Reduction
from gnnpar.models.gnn import GNN, ReadsAttributes
from gnnpar.models.pyg.probe_graph import ProbeGraph
from gnnpar.planner.assemble import Event, Seen, assemble
from gnnpar.pricing.ir import Fold, ModelIR

ROWS, EDGES = 10007, 20011  # primes that no width of a model equals
_LAYER = re.compile(r"layers\.(\d+)")


@dataclass(frozen=True)
class Tracing(OneView):
    """A Graph without structure that records the operators of a model."""

    recorder: Recorder
    node_ids: Tensor
    in_degree: Tensor
    edge_ids: Tensor
    layer: int = 0
    num_nodes: int = ROWS
    in_weight: None = None  # weights change no shape
    edge_attr: Tensor | None = None

    def type_degree(self, types: int) -> Tensor:
        return self.in_degree[:, None].expand(-1, types)

    def at(self, layer: int) -> Self:
        return replace(self, layer=layer)

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        return x if p == 0 else self.recorder.record_new("dropout", x.shape, (x,))

    def moments(self, x: Tensor) -> Moments:
        mean, variance = self.recorder.record_new("moments", (2, *x.shape[1:]), (x,)).unbind(0)
        return Moments(mean, variance, ROWS, probe=True)

    def total(self, part: Tensor, how: Reduction = "sum") -> Tensor:
        return self.recorder.record_new("total", part.shape, (part,))

    def edge_dropout(self, p: float, *, tag: int = 0) -> EdgeDropout | None:
        return None if p == 0 else EdgeDropout(p, 0)

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        typed = isinstance(agg, Generic) and agg.types > 0
        first = (self.edge_ids,) if typed else ()  # types of edges
        tail = list(src[0].shape[1:])
        if isinstance(agg, WithValue):  # run the user's function on zero rows
            with self.recorder.paused():
                far, near, beside = (tuple(t[:0] for t in rows) for rows in (src, dst, (*first, *edge)))
                tail = list(agg.value(far, near, beside, shared).shape[1:])
        if (isinstance(agg, Sum) and agg.types) or (isinstance(agg, Generic) and agg.within):
            tail = [agg.types, *tail]
        x = Operands(src, dst, edge, shared)
        return self.recorder.record_new("fold", (src[0].shape[0], *tail), _flat(x), Fold.of(agg, x, tail))


def _flat(x: Operands) -> Rows:
    return tuple(t for rows in x for t in rows)


@runtime_checkable
class WithValue(Protocol):
    """A fold that computes values with a function."""

    @property
    def value(self) -> EdgeFunction: ...


def record(model: nn.Module, in_dim: int, *, learned: int = 0) -> ModelIR:
    """Run the model on meta tensors. learned: number of feature columns that are trained. ValueError with the name of a
    module that cannot be traced."""
    twin = copy.deepcopy(model).to("meta")
    recorder = Recorder(twin, _layer_of)
    x = torch.empty(ROWS, in_dim, device="meta")
    fix = "Its forward must not read values of tensors, and must mix rows through the graph alone."
    return recorder.ir(twin, _graph(x, model, recorder), x, edges={EDGES: 1.0}, learned=learned, fix=fix)


def _layer_of(path: str) -> int | None:
    match = _LAYER.search(path)
    return int(match[1]) if match else None


def _graph(x: Tensor, model: nn.Module, recorder: Recorder) -> Tracing:
    config = model.config if isinstance(model, GNN) else None
    width = (config.edge_dim or 0) if isinstance(config, ReadsAttributes) else 0
    attr = x.new_empty(EDGES, width) if width else None
    ids, edges = (x.new_empty(count, dtype=torch.int64) for count in (ROWS, EDGES))
    return Tracing(recorder, ids, x.new_empty(ROWS), edges, edge_attr=attr)


class Recorder(TorchDispatchMode):
    """Record every operation with its shapes. path: names of the running modules. layer_of: path -> layer; None:
    outside of all layers."""

    def __init__(self, model: nn.Module, layer_of: Callable[[str], int | None]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.path: list[str] = []
        self._model, self._layer_of = model, layer_of
        self._recording = True
        self._alive: list[Tensor] = []  # keeps identities unique
        self._names = {_identity(parameter): f"p:{name}" for name, parameter in model.named_parameters()}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self.path.append(name))
            module.register_forward_hook(self._leave)

    def ir(
        self,
        twin: nn.Module,
        graph: Tracing | ProbeGraph,
        x: Tensor,
        *,
        edges: Mapping[int, float],
        learned: int,
        fix: str,
    ) -> ModelIR:
        """Run the model on x and return its IR. edges: as in `assemble`. ValueError if a module cannot be traced, with
        its name and ending in `fix`."""
        self.named(x, "x")
        for static in (graph.in_degree, graph.node_ids, graph.edge_attr, graph.in_weight):
            if static is not None:
                self.named(static, "static")
        try:
            with torch.no_grad(), self:
                out = twin(graph, x)
        except Exception as error:  # forward may raise anything
            raise ValueError(f"{self.why(error)} {fix}") from error
        rows, in_dim = x.shape
        return assemble(self.events, twin, in_dim=in_dim, out=self.key(out), rows=rows, edges=edges, learned=learned)

    def why(self, error: Exception) -> str:
        """Return the error message for a model that cannot be traced."""
        path = self.path[-1] if self.path else ""
        module = self._model.get_submodule(path)
        what = f"{path} ({type(module).__name__})" if path else type(module).__name__
        reason = " ".join(str(error).split())[:160]
        return f"the model cannot be traced: module {what} raised {type(error).__name__}: {reason}."

    def _leave(self, *_: object) -> None:
        self.path.pop()

    def named(self, tensor: Tensor, name: str) -> None:
        self._alive.append(tensor)
        self._names[_identity(tensor)] = name

    def key(self, tensor: Tensor) -> str:
        return self._names.setdefault(_identity(tensor), f"t{len(self._names)}")

    def _as_seen(self, values: object) -> tuple[Seen, ...]:
        tensors = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
        self._alive += tensors
        return tuple(Seen(self.key(t), tuple(t.shape)) for t in tensors)

    def _add(self, name: str, inputs: object, out: object, fold: Fold | None = None) -> None:
        layer = self._layer_of(self.path[-1]) if self.path else None
        self.events.append(Event(name, self._as_seen(inputs), self._as_seen(out), layer, fold))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._recording = False
        yield
        self._recording = True

    def record_new(self, name: str, shape: Sequence[int], inputs: Rows, fold: Fold | None = None) -> Tensor:
        """Record an operation of the graph. Return an uninitialised result of this shape, else like the first input."""
        with self.paused():
            return self.record_result(name, inputs, inputs[0].new_empty(shape), fold)

    def record_result(self, name: str, inputs: Rows, out: Tensor, fold: Fold | None = None) -> Tensor:
        """Record an operation of the graph with the result `out`. Return `out`."""
        self._add(name, inputs, out, fold)
        return out

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if self._recording:
            self._add(str(func.overloadpacket).rpartition(".")[2], (args, kwargs), out)
        return out


def _identity(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which its views share; on meta, the id of the tensor."""
    return id(tensor) if tensor.is_meta else tensor.untyped_storage().data_ptr()
