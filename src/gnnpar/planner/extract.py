"""From a model to its ModelIR: record its operations on meta tensors, without computing values.

The model runs on a Graph that records folds, dropout and moments as operations. The first dimension of a tensor tells
its kind: rows, edges or neither.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gnnpar.folds.aggregator import Aggregator, EdgeDropout, Pushable
from gnnpar.folds.block import Rows
from gnnpar.folds.generic import EdgeFunction, Generic
from gnnpar.folds.mergeable import merges
from gnnpar.folds.sum import Sum
from gnnpar.graph import Message, Moments, Reduction
from gnnpar.models.edge_attr import ReadsAttributes
from gnnpar.models.gnn import GNN
from gnnpar.planner.assemble import Event, FoldArguments, Seen, assemble
from gnnpar.pricing.ir import ModelIR

ROWS, EDGES = 10007, 20011  # primes that no width of a model equals
_LAYER = re.compile(r"layers\.(\d+)")


@dataclass(frozen=True)
class Tracing:
    """A Graph without structure that records the operators of a model."""

    recorder: _Recorder
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
        return x if p == 0 else self.recorder.made("dropout", x.shape, (x,))

    def moments(self, x: Tensor) -> Moments:
        mean, variance = self.recorder.made("moments", (2, *x.shape[1:]), (x,)).unbind(0)
        return Moments(mean, variance, ROWS, probe=True)

    @property
    def num_nodes(self) -> int:
        return ROWS

    def total(self, part: Tensor, how: Reduction = "sum") -> Tensor:
        return self.recorder.made("total", part.shape, (part,))

    def edge_dropout(self, p: float, *, tag: int = 0) -> EdgeDropout | None:
        return None if p == 0 else EdgeDropout(p, 0)

    def source(self, message: Message, *rows: Tensor) -> Rows:
        return message(self, *rows)

    def destinations(self, *rows: Tensor) -> tuple[Self, Rows]:
        return self, rows

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        width = sum(t[0].numel() for t in src)
        pushed = width + 2 * sum(t[0].numel() for t in dst) if isinstance(agg, Pushable) else 0
        typed = isinstance(agg, Generic) and agg.types > 0
        first = (self.edge_ids,) if typed else ()  # edge types
        tail = list(src[0].shape[1:])
        if isinstance(agg, WithValue):  # a user's function, without rows
            with self.recorder.paused():
                far, near, beside = (tuple(t[:0] for t in rows) for rows in (src, dst, (*first, *edge)))
                tail = list(agg.value(far, near, beside, shared).shape[1:])
        if (isinstance(agg, Sum) and agg.types) or (isinstance(agg, Generic) and agg.within):
            tail = [agg.types, *tail]
        flags = (int(agg.linear), int(agg.needs_src), pushed, *_split(agg, dst, edge, tail))
        counts = (len(src), len(dst), len(edge), len(shared))
        fold = FoldArguments(*counts, type(agg).__name__, flags, tuple(tail))
        return self.recorder.made("fold", (src[0].shape[0], *tail), (*src, *dst, *edge, *shared), fold)


@runtime_checkable
class WithValue(Protocol):
    """A fold with rows made by a function."""

    @property
    def value(self) -> EdgeFunction: ...


def _split(agg: Aggregator, dst: Rows, edge: Rows, tail: list[int]) -> tuple[int, ...]:
    """Return `Fold.split` without its last number; () if the fold does not merge."""
    if not merges(agg, edge):
        return ()
    types = agg.partial_types or 0
    asked = sum(t[0].numel() for t in dst)
    forward, backward = agg.exact_numbers(tail[1:] if types else tail)
    return types, forward + asked, backward + asked


def record(model: nn.Module, in_dim: int, *, learned: int = 0) -> ModelIR:
    """Run the model on meta tensors. learned: number of feature columns that are trained. ValueError with the name of a
    module that cannot be traced."""
    twin = copy.deepcopy(model).to("meta")
    recorder = _Recorder(twin)
    x = torch.empty(ROWS, in_dim, device="meta")
    graph = _graph(x, model, recorder)
    recorder.named(x, "x")
    for static in (graph.in_degree, graph.node_ids, graph.edge_attr):
        if static is not None:
            recorder.named(static, "static")
    try:
        with torch.no_grad(), recorder:
            out = twin(graph, x)
    except Exception as error:
        path = recorder.path[-1] if recorder.path else ""
        what = f"{path} ({type(twin.get_submodule(path)).__name__})" if path else type(model).__name__
        reason = " ".join(str(error).split())[:160]
        raise ValueError(
            f"the model cannot be traced: module {what} raised {type(error).__name__}: {reason}. Its forward must not "
            "read values of tensors, and must mix rows through the graph alone."
        ) from error
    out_key = recorder.key(out)
    return assemble(recorder.events, model, in_dim=in_dim, out=out_key, rows=ROWS, edges=EDGES, learned=learned)


def _graph(x: Tensor, model: nn.Module, recorder: _Recorder) -> Tracing:
    config = model.config if isinstance(model, GNN) else None
    width = (config.edge_dim or 0) if isinstance(config, ReadsAttributes) else 0
    attr = x.new_empty(EDGES, width) if width else None
    ids, edges = (x.new_empty(count, dtype=torch.int64) for count in (ROWS, EDGES))
    return Tracing(recorder, ids, x.new_empty(ROWS), edges, edge_attr=attr)


class _Recorder(TorchDispatchMode):
    """Record every operation with its shapes. path: names of the running modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.path: list[str] = []
        self._recording = True
        self._alive: list[Tensor] = []  # keeps ids unique
        self._names = {id(parameter): f"p:{name}" for name, parameter in model.named_parameters()}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self.path.append(name))
            module.register_forward_hook(self._leave)

    def _leave(self, *_: object) -> None:
        self.path.pop()

    def named(self, tensor: Tensor, name: str) -> None:
        self._alive.append(tensor)
        self._names[id(tensor)] = name

    def key(self, tensor: Tensor) -> str:
        return self._names.setdefault(id(tensor), f"t{len(self._names)}")

    def _seen(self, values: object) -> tuple[Seen, ...]:
        tensors = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
        self._alive += tensors
        return tuple(Seen(self.key(t), tuple(t.shape)) for t in tensors)

    def _add(self, name: str, inputs: object, out: object, fold: FoldArguments | None = None) -> None:
        match = _LAYER.search(self.path[-1]) if self.path else None
        layer = int(match[1]) if match else None
        self.events.append(Event(name, self._seen(inputs), self._seen(out), layer, fold))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._recording = False
        yield
        self._recording = True

    def made(self, name: str, shape: Sequence[int], inputs: Rows, fold: FoldArguments | None = None) -> Tensor:
        """Record an operation of the graph. Return its result, like the first input but of this shape."""
        with self.paused():
            out = inputs[0].new_empty(shape)
        self._add(name, inputs, out, fold)
        return out

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if self._recording:
            self._add(str(func.overloadpacket).rpartition(".")[2], (args, kwargs), out)
        return out
