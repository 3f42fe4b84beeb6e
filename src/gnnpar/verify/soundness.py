"""Checks of a model that every strategy relies on: not dead, row-local, differentiable, deterministic.

A dead model equals the single device under every strategy, so equality alone proves nothing. All checks run on one
device, in fp64, with dropout on. A fault names its module.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain

import torch
from torch import Tensor, nn

from gnnpar.data.dataset import Dataset
from gnnpar.data.tasks import make_task
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Rows
from gnnpar.folds.edge_data import EdgeData, EdgeKind, Schema
from gnnpar.graph import Moments, Reduction
from gnnpar.models.gnn import GNN, ModelSource
from gnnpar.models.pyg.marks import EdgeRows, Placeholder
from gnnpar.models.pyg.rows import Layout, NodeRows
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.engine import trained
from gnnpar.parallel.local import Pass
from gnnpar.partition.learned import initial_vectors
from gnnpar.partition.shard import Shard, cut

STEPS = 3
TOLERANCE = 1e-9
"""Tolerance of outputs that must be equal, relative to the largest entry."""
STEP = 1e-6
"""Step of a difference quotient, which must equal the gradient to 1e-4."""


@dataclass(frozen=True)
class Fault:
    """A fault of a model. module: its name in the model; empty: the model itself."""

    module: str
    what: str

    def __str__(self) -> str:
        return f"{self.module or 'the model'} {self.what}"


@dataclass
class _Count:
    """Aggregations and sums over all rows so far. inside: an aggregation runs, so modules act on rows of edges."""

    done: int = 0
    totals: int = 0
    inside: bool = False


@dataclass(eq=False)
class _CountedGraph(WholeGraph):
    """The whole graph on one device, with a count of aggregations. Moments and totals are fixed, so that all else must
    be row-local. totals: of the first run, in order."""

    count: _Count = field(default_factory=_Count)
    totals: list[Tensor] = field(default_factory=list[Tensor])

    def total(self, part: Tensor, how: Reduction = "sum") -> Tensor:
        self.count.totals += 1
        if self.count.totals > len(self.totals):
            self.totals.append(part)
        return self.totals[self.count.totals - 1]

    def moments(self, x: Tensor) -> Moments:
        return Moments(x.new_zeros(x.shape[1:]), x.new_ones(x.shape[1:]), self.shard.num_nodes, probe=True)

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        self.count.done += 1
        self.count.inside = True
        try:
            return super().aggregate(agg, src, dst, edge, shared)
        finally:
            self.count.inside = False


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a module: its tensors (detached copies), and its number of aggregations. wrote: into an input."""

    module: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    aggregations: int
    wrote: bool


@lru_cache(maxsize=64)
def find_fault(config: ModelSource, dataset: Dataset | None = None) -> Fault | None:
    """Return the first fault of a model, the most specific first; None if it is sound. ValueError if it cannot be
    built. dataset: a user's, as for `small_like`."""
    trial, threads = _Trial(config, small_like(config, dataset)), torch.get_num_threads()
    torch.set_num_threads(1)  # tensors of 41 rows: more threads would only wait
    try:
        with torch.random.fork_rng(devices=[]):
            return next(trial.faults(), None)
    finally:
        torch.set_num_threads(threads)


def mixing_of_rows(config: ModelSource, data: Dataset) -> Fault | None:
    """Return the first fault that makes rows depend on other nodes or on their position. data: from `small_like`."""
    trial = _Trial(config, data)
    calls = trial.record(trial.model, trial.shard)
    return next(chain(trial._not_local(calls), trial._reads_position(calls)), None)


class _Trial:
    """A model on a small graph with an isolated node 0."""

    def __init__(self, config: ModelSource, data: Dataset) -> None:
        self.task = make_task(data.task, data.num_classes)
        model = config.on(data.edge_sizes).build(data.num_features, self.task.out_dim, seed=3)
        self.model = model.double()
        self.shard = replace(_shard(data, model), num_nodes=data.num_nodes + 1)  # more than rows: totals are asked for
        rest = _shard(_without_first(data), model)
        self.rest = replace(rest, node_ids=rest.node_ids + 1, num_nodes=self.shard.num_nodes)
        self.edge_index, self.schema = data.edge_index, data.edge_sizes.schema
        x = self.shard.x
        self.features = x.shape[1] if self.schema is None else self.schema.columns[-1].stop
        self.counts = (x == x.round()).all(0)  # columns of possible category numbers: keep values in range
        self.counts[self.features :] = False
        self.record = partial(_record, schema=self.schema, totals=list[Tensor]())

    def faults(self) -> Iterator[Fault]:
        try:
            calls = self.record(self.model, self.shard)
        except ValueError:
            raise
        except Exception as error:  # a forward may raise anything on another graph
            yield cannot_run(error)
            return
        yield from self._shape(calls)
        yield from self._state()
        yield from self._not_repeated()
        yield from self._not_local(calls)
        yield from self._reads_position(calls)
        yield from self._dead_outputs(calls)
        yield from self._dead_gradients()
        yield from self._wrong_gradients()
        yield from self._constant_loss()

    def _shape(self, calls: Sequence[_Call]) -> Iterator[Fault]:
        for call in calls:
            if any(not bool(t.isfinite().all()) for t in call.outputs if t.is_floating_point()):
                yield Fault(call.module, "gives values that are not finite")
        wanted, got = [len(self.shard.x), self.task.out_dim], [list(t.shape) for t in calls[-1].outputs]
        if got != [wanted]:
            yield Fault("", f"gives {got[0] if len(got) == 1 else got} instead of one row of logits a node, {wanted}")

    def _state(self) -> Iterator[Fault]:
        """Yield faults of buffers and inputs that a forward pass changes."""
        model, x = copy.deepcopy(self.model), self.shard.x.clone()
        calls = self.record(model, replace(self.shard, x=x))
        for (name, now), (_, before) in zip(model.named_buffers(), self.model.named_buffers(), strict=True):
            module, _, leaf = name.rpartition(".")
            if not torch.equal(now, before) and not isinstance(model.get_submodule(module), nn.BatchNorm1d):
                yield Fault(
                    module, f"changes its buffer {leaf} in forward, from the rows of one rank and as often as it runs"
                )
        layers = {f"layers.{i}" for i in range(model.num_layers)}
        for call in calls:
            if call.wrote and (call.module in layers or call.module.removesuffix(".conv") in layers):
                yield Fault(call.module, "writes into its input in place, which others still read; work on a copy")
        if not torch.equal(x, self.shard.x):
            yield Fault("", "writes into the features in place; work on a copy")

    def _not_repeated(self) -> Iterator[Fault]:
        model = copy.deepcopy(self.model)
        first, again = self.record(model, self.shard), self.record(model, self.shard)
        for a, b in zip(first, again, strict=False):
            if not _same(a.outputs, b.outputs, exact=True):
                yield Fault(
                    a.module,
                    "gives other values in the second of two equal runs: its noise is not keyed (use g.dropout), or "
                    "forward changes its state",
                )

    def _not_local(self, calls: Sequence[_Call]) -> Iterator[Fault]:
        """Yield modules in which a changed row of features changes rows beyond its out-neighbours, per aggregation."""
        num_nodes = len(self.shard.x)
        for node in (0, 1, num_nodes // 2, num_nodes - 1):
            for size in (1.0, 1e3):
                x = self.shard.x.clone()
                x[node] = torch.where(self.counts, x[(node + int(size) % 7) % num_nodes], x[node] + size)
                for before, after in zip(calls, self.record(self.model, replace(self.shard, x=x)), strict=False):
                    changed = _changed_rows(before.inputs, after.inputs, num_nodes, exact=True)
                    for _ in range(before.aggregations):
                        changed = self._reached(changed)
                    beyond = _changed_rows(before.outputs, after.outputs, num_nodes) & ~changed
                    if bool(beyond.any()):
                        yield Fault(
                            before.module,
                            f"mixes rows: the features of node {node} change {int(beyond.sum())} rows that it has no "
                            "edge to. A rank holds a part of the rows: only g.aggregate (in PyG, a convolution) may "
                            "read others",
                        )

    def _reads_position(self, calls: Sequence[_Call]) -> Iterator[Fault]:
        """Yield modules with other rows that change without node 0, which has no edges."""
        for before, after in zip(calls, self.record(self.model, self.rest), strict=False):
            others = [t[1:] for t in before.outputs if t.shape[:1] == self.shard.node_ids.shape]
            rows = [t for t in after.outputs if t.shape[:1] == self.rest.node_ids.shape]
            if not _same(others, rows):
                yield Fault(
                    before.module,
                    "depends on how many rows there are, or on where a row stands; a rank holds a part of the rows, "
                    "g.node_ids names them",
                )

    def _dead_outputs(self, calls: Sequence[_Call]) -> Iterator[Fault]:
        x, features = torch.where(self.counts, self.shard.x.roll(1, 0), torch.randn_like(self.shard.x)), self.features
        x[:, features:] = self.shard.x[:, features:]  # the node's type
        other = self.record(self.model, replace(self.shard, x=x))
        for before, after in zip(calls, other, strict=False):
            if not before.inputs or not before.outputs:
                continue
            if all(not t.any() for t in before.outputs) and any(bool(t.any()) for t in before.inputs):
                yield Fault(before.module, "gives nothing but zeros")
            if not _same(before.inputs, after.inputs) and _same(before.outputs, after.outputs):
                yield Fault(before.module, "gives the same output for another input: modules before it cannot learn")

    def _dead_gradients(self) -> Iterator[Fault]:
        _, gradients = self._differentiate(self.model)
        for name, gradient in gradients.items():
            if self._may_be_unread(name, gradient):
                continue
            if gradient is None or not bool(gradient.any()):
                yield Fault(name, "has no gradient: the loss does not depend on it")
            elif not bool(gradient.isfinite().all()):
                yield Fault(name, "has a gradient that is not finite")

    def _may_be_unread(self, name: str, gradient: Tensor | None) -> bool:
        """Return True if a gradient may be missing since no layer reads rows of a type, as in the last layer of a model
        of dictionaries. `_wrong_gradients` finds detached tensors."""
        if self.schema is None:
            return False
        own = any(name.endswith("." + "__".join(key)) for key in self.schema.edges)  # HGTConv's prior of an edge type
        return gradient is None or (own and not bool(gradient.any()))

    def _wrong_gradients(self) -> Iterator[Fault]:
        """Yield gradients that differ from difference quotients of the loss, along a random direction and away from
        kinks."""
        model, draw = copy.deepcopy(self.model), torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
        _, gradients = self._differentiate(model)
        for name, parameter in trained(model.named_parameters()).items():
            direction = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
            gradient = gradients[name]
            predicted = 0.0 if gradient is None else float((gradient * direction).sum())
            quotients = [self._quotient(model, parameter, direction, step) for step in (STEP, STEP / 8)]
            if all(abs(q - predicted) > 1e-4 * abs(q) + 1e-7 for q in quotients):
                yield Fault(
                    name,
                    f"has a gradient that its loss does not have, {predicted:.4g} for {quotients[0]:.4g} along a "
                    "direction: something between them is detached",
                )

    @torch.no_grad()
    def _quotient(self, model: GNN, parameter: nn.Parameter, direction: Tensor, step: float) -> float:
        losses, start = [], parameter.clone()
        for sign in (1, -1):
            parameter.copy_(start + sign * step * direction)
            losses.append(float(self._loss(model)))
        parameter.copy_(start)
        return (losses[0] - losses[1]) / (2 * step)

    def _constant_loss(self) -> Iterator[Fault]:
        model, losses = copy.deepcopy(self.model), []
        for _ in range(STEPS + 1):
            loss, gradients = self._differentiate(model)
            losses.append(loss)
            with torch.no_grad():
                for name, parameter in trained(model.named_parameters()).items():
                    parameter -= 0.1 * (0 if (gradient := gradients[name]) is None else gradient)
        if len(set(losses)) == 1:
            yield Fault("", f"does not learn: the loss stays {losses[0]:.6g} over {STEPS} steps")

    def _reached(self, nodes: Tensor) -> Tensor:
        src, dst = self.edge_index
        out = nodes.clone()
        out[dst[nodes[src]]] = True
        return out

    def _loss(self, model: GNN) -> Tensor:
        train = self.shard.train_mask
        logits = model(_view(self.shard, []), self.shard.x)
        return self.task.loss_sum(logits[train], self.shard.y[train]) / self.shard.num_train

    def _differentiate(self, model: GNN) -> tuple[float, dict[str, Tensor | None]]:
        loss, parameters = self._loss(model), trained(model.named_parameters())
        if not loss.requires_grad:
            return float(loss.detach()), dict.fromkeys(parameters)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return float(loss.detach()), dict(zip(parameters, gradients, strict=True))


def cannot_run(error: Exception) -> Fault:
    lines = str(error).splitlines() or [""]
    return Fault("", f"cannot run on a graph of another size ({type(error).__name__}: {lines[0][:200]})")


def small_like(config: ModelSource, dataset: Dataset | None = None, *, isolated: bool = True) -> Dataset:
    """Return a small graph that the model reads, with 6 features and 3 classes. With a `dataset`: its widths, its
    number of logits, rows of its features, and its kinds of edge data. isolated: node 0 has no edge."""
    like, classes = (
        (None, 3) if dataset is None else (dataset.edges, make_task(dataset.task, dataset.num_classes).out_dim)
    )
    if config.wraps:
        from gnnpar.verify.pyg_reference import typed_dataset  # imports PyG

        model = config if dataset is None else config.on(dataset.edge_sizes)
        if (typed := typed_dataset(model, classes, like)) is not None:
            return typed
    kinds = config.edge_data if config.wraps else config.edge_data - {"weight"}
    rows = None if dataset is None else dataset.x
    if dataset is not None and dataset.learned is not None:
        first = torch.arange(min(41, dataset.num_nodes))
        rows = torch.cat([dataset.x[: len(first)], initial_vectors(first, *dataset.learned).to(dataset.x.dtype)], 1)
    graph = _graph(classes=classes, rows=rows, first=int(isolated))
    return with_edge_data(graph, kinds if dataset is None else kinds & dataset.edges.kinds, dataset)


def _graph(*, classes: int, rows: Tensor | None, first: int, num_nodes: int = 41, num_edges: int = 160) -> Dataset:
    """Return a directed graph with self loops on all nodes from `first` on. Node 0 has no other edge."""
    draw = torch.Generator().manual_seed(1)
    ends = torch.randint(1, num_nodes, (2, num_edges), generator=draw)
    edges = torch.cat([ends, torch.arange(first, num_nodes).expand(2, -1)], 1).unique(dim=1)
    edges = edges[:, torch.argsort(edges[1] * num_nodes + edges[0])]
    x = torch.randn(num_nodes, 6 if rows is None else rows.shape[1], generator=draw)
    if rows is not None and len(rows):
        x = rows[torch.arange(num_nodes) % len(rows)]
    y = torch.randint(0, max(2, classes), (num_nodes,), generator=draw)
    train = torch.arange(num_nodes) % 2 == 0
    masks = (train, ~train, torch.zeros_like(train))
    task = "single_label" if classes > 1 else "binary"
    return Dataset.of("small", x=x, y=y, edge_index=edges, masks=masks, num_classes=classes, task=task)


def _without_first(data: Dataset) -> Dataset:
    masks = (data.train_mask[1:], data.val_mask[1:], data.test_mask[1:])
    return Dataset.of(
        data.name,
        x=data.x[1:],
        y=data.y[1:],
        edge_index=data.edge_index - 1,
        edges=data.edges,
        masks=masks,
        num_classes=data.num_classes,
        task=data.task,
        num_edge_types=data.edge_sizes.types or None,
        schema=data.edge_sizes.schema,
    )


def _shard(data: Dataset, model: GNN) -> Shard:
    everybody = torch.zeros(data.num_nodes, dtype=torch.int64)
    shard = cut(data, everybody, 1, edge_ids=model.needs_edge_ids)[0]
    return shard.to(torch.device("cpu"), torch.float64)


def _view(shard: Shard, totals: list[Tensor]) -> _CountedGraph:
    return _CountedGraph(shard, Pass(seed=3, training=True), totals=totals)


def _record(model: GNN, shard: Shard, schema: Schema | None, totals: list[Tensor]) -> list[_Call]:
    """Record every call of a module in one training pass, in the order in which they end. schema: to place rows of one
    type among all rows."""
    calls: list[_Call] = []
    view, running = _view(shard, totals), []
    layout = None if schema is None else Layout.of(schema, shard.x)

    def noted(t: Tensor) -> Tensor:
        if layout is not None and isinstance(t, EdgeRows):
            return t.detach().as_subclass(Tensor)[None].clone()  # edges may be as many as nodes
        kind = layout.kind_of(t) if layout is not None and isinstance(t, NodeRows) else None
        if layout is None or kind is None:
            return t.detach().as_subclass(Tensor).clone()
        return layout.place(kind, t.detach()).clone()

    def before(module: nn.Module, inputs: tuple) -> None:
        if view.count.inside:
            return
        tensors = _tensors(inputs)
        running.append(([noted(t) for t in tensors], [t._version for t in tensors], view.count.done))

    def after(name: str, inputs: tuple, output: object) -> None:
        if view.count.inside:
            return
        copies, versions, done = running.pop()
        wrote = any(t._version != v for t, v in zip(_tensors(inputs), versions, strict=True))
        outputs = tuple(noted(t) for t in _tensors((output,)))
        calls.append(_Call(name, tuple(copies), outputs, view.count.done - done, wrote))

    hooks = []
    inside = model.on_edges
    for name, module in model.named_modules():
        if inside and name.startswith(inside):  # also on rows of edges
            continue
        hooks.append(module.register_forward_pre_hook(before))
        hooks.append(module.register_forward_hook(lambda _, inputs, output, name=name: after(name, inputs, output)))
    try:
        with torch.no_grad():
            model(view, shard.x)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _tensors(values: object) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [] if isinstance(values, Placeholder) else [values]
    if isinstance(values, dict):
        values = tuple(values.values())
    return [t for value in values for t in _tensors(value)] if isinstance(values, tuple | list) else []


def _changed_rows(before: Sequence[Tensor], after: Sequence[Tensor], num_nodes: int, *, exact: bool = False) -> Tensor:
    """Return the changed rows, [N], of tensors with a row per node. exact: any bit, since modules may amplify it."""
    changed = torch.zeros(num_nodes, dtype=torch.bool)
    for a, b in zip(before, after, strict=True):
        if a.shape == b.shape and a.shape[:1] == changed.shape:
            differs = a != b if exact or not a.is_floating_point() else (a - b).abs() > _allowed(a)
            changed |= differs.reshape(num_nodes, -1).any(1)
    return changed


def _same(first: Sequence[Tensor], second: Sequence[Tensor], *, exact: bool = False) -> bool:
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if a.shape != b.shape:
            return False
        if not (
            torch.equal(a, b) if exact or not a.is_floating_point() else bool(((a - b).abs() <= _allowed(a)).all())
        ):
            return False
    return True


def _allowed(expected: Tensor) -> float:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return TOLERANCE * max(scale, TOLERANCE)


TYPES, WIDTH, _SEED = 3, 3, 3


def drawn(num_edges: int, kinds: Collection[EdgeKind], like: EdgeData | None = None) -> EdgeData:
    """Draw weights between 0.5 and 1.5, types, and normal rows of attributes, for the given kinds. like: a user's edge
    data, used instead."""
    if like is not None:
        there = {kind: t for kind, t in like.tensors.items() if kind in kinds and len(t)}
        return EdgeData(**{kind: t[torch.arange(num_edges) % len(t)] for kind, t in there.items()})
    draw = torch.Generator().manual_seed(_SEED)
    weight = torch.rand(num_edges, generator=draw) + 0.5
    return EdgeData(
        weight=weight if "weight" in kinds else None,
        type=torch.randint(0, TYPES, (num_edges,), generator=draw) if "type" in kinds else None,
        attr=torch.randn(num_edges, WIDTH, generator=draw) if "attr" in kinds else None,
    )


def with_edge_data(dataset: Dataset, kinds: Collection[EdgeKind], like: Dataset | None = None) -> Dataset:
    """Return the graph with drawn edge data and nothing else; unchanged without any. like: as for `drawn`."""
    if not kinds:
        return dataset
    return Dataset.of(
        dataset.name,
        x=dataset.x,
        y=dataset.y,
        edge_index=dataset.edge_index,
        edges=drawn(dataset.num_edges, kinds, like and like.edges),
        num_edge_types=(like and like.edge_sizes.types) or None,
        masks=(dataset.train_mask, dataset.val_mask, dataset.test_mask),
        num_classes=dataset.num_classes,
        task=dataset.task,
    )
