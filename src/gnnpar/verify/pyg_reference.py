"""Compare the training of a PyG model on gnnpar's folds with PyG's own loop. One device, fp64, dropout on."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gnnpar.comm import ThreadWorld
from gnnpar.data.dataset import Dataset
from gnnpar.data.preprocess import Preprocess, canonical_edges
from gnnpar.data.raw import EdgeList
from gnnpar.data.tasks import Task, make_task
from gnnpar.folds.edge_data import ALL_KINDS, EdgeData, EdgeKind, Schema
from gnnpar.models.gnn import ModelSource
from gnnpar.models.pyg.model import PyG, PyGNet, answer_of, edge_arguments, required
from gnnpar.models.pyg.rows import Layout
from gnnpar.models.pyg.substitutes import keyed_dropout
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.engine import trained
from gnnpar.parallel.local import Pass
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Workload
from gnnpar.parallel.torch_types import or_zeros
from gnnpar.partition.partition import Random
from gnnpar.partition.shard import Shard, cut
from gnnpar.placement import Topology
from gnnpar.training.optim import Adam
from gnnpar.verify.differences import relative_error, rounding
from gnnpar.verify.soundness import drawn

SEED, STEPS = 3, 3
CLASSES = 3
_NODES, _MORE, _EDGES = 23, 6, 5  # of a typed graph: of the first type, more of each next one, of each edge type
ADAM = Adam(lr=0.01, eps=1e-4)
"""Adam's eps, large enough to keep gradients of pure rounding, which are 0 mathematically, small."""
_ORDER = "the order of parameters"
Outputs = list[tuple[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Difference:
    """Largest differences, each relative to PyG's largest entry. state: differences of parameters and buffers after the
    steps. module: the first that differs. replaced: the first parameter that is another tensor after a forward."""

    loss: float
    logits: float
    gradients: dict[str, float]
    state: dict[str, float]
    module: str
    replaced: str


class Trained(NamedTuple):
    """Results of some steps: losses and gradients of each, logits in evaluation, outputs of modules."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    logits: Tensor
    outputs: Outputs


def prepared(dataset: Dataset, model: ModelSource, *, carried: frozenset[EdgeKind] = ALL_KINDS) -> Dataset:
    """Return the dataset as the model requires.

    Self loops: one per node, none, or one at every second node if they are kept. Repeated edges only if loops are kept.
    Edge data: all kinds that the model reads among `carried`. For a model of dictionaries, a graph of its types, unless
    the dataset is typed.
    """
    assert isinstance(model, PyG)
    if (typed := typed_dataset(model)) is not None:
        return typed if dataset.edge_sizes.schema is None else dataset
    edges = canonical_edges(
        EdgeList(dataset.edge_index),
        Preprocess(self_loops=model.self_loops is not False, drop_duplicates=model.self_loops != "keep"),
        num_nodes=dataset.num_nodes,
    ).edge_index
    if model.self_loops == "keep":
        edges = edges[:, (edges[0] != edges[1]) | (edges[0] % 2 == 0)]
    masks = (dataset.train_mask, dataset.val_mask, dataset.test_mask)
    return Dataset.of(
        dataset.name,
        x=dataset.x,
        y=dataset.y,
        edge_index=edges,
        edges=drawn(edges.shape[1], model.edge_data & carried),
        masks=masks,
        num_classes=dataset.num_classes,
        task=dataset.task,
    )


def typed_dataset(model: ModelSource, classes: int = CLASSES, like: EdgeData | None = None) -> Dataset | None:
    """Return a small typed graph for a model of dictionaries, with labels for the types with logits; None for other
    models. like: edge data of a user's graph."""
    assert isinstance(model, PyG)
    if (schema := model.sample_schema) is None:
        return None
    kinds, loops = model.edge_data, model.self_loops == "keep"
    built = model.on(typed_graph(schema, kinds, like=like).edge_sizes).build(schema.width, classes, seed=SEED)
    assert isinstance(built, PyGNet)
    answers = built.answers
    return typed_graph(
        replace(schema, target=answers[0]), kinds, labelled=answers, loops=loops, classes=classes, like=like
    )


def difference(config: ModelSource, dataset: Dataset, tolerance: float, given: Dataset | None = None) -> Difference:
    """Compare training the model on `dataset` with PyG's own loop on `given`, the unprepared graph (None: `dataset`).

    Three steps of Adam; compares all state of the module and its logits. Attention dropout is off, since PyG draws it
    in the order of its own edges.
    """
    assert isinstance(config, PyG)
    given, task = given or dataset, make_task(dataset.task, dataset.num_classes)
    ours = config.on(dataset.edge_sizes).build(dataset.num_features, task.out_dim, seed=SEED).double()
    for conv in ours.convs.values():
        if "dropout" in vars(conv):
            vars(conv)["dropout"] = 0.0
    pyg_net, held = copy.deepcopy(ours), _held(ours)
    plan = Single().plan(Workload(dataset, Random(), ours.num_layers, model=ours), Topology(1))
    shard = cut(dataset, plan.part_of, 1, edge_ids=ours.needs_edge_ids)[0].to(torch.device("cpu"), torch.float64)
    (comm,) = ThreadWorld(1).communicators()
    engine = Single().build(BuildContext(plan=plan, shard=shard, model=ours, task=task, comm=comm, seed=SEED))
    optimizer = ADAM.build(engine.named_parameters(), epochs=STEPS, layer_of=ours.layer_of)
    with _recorded(ours) as outputs:
        reports = [engine.train_epoch(epoch, optimizer, keep_gradient=True) for epoch in range(STEPS)]
    mine = Trained([r.loss for r in reports], [r.gradient or {} for r in reports], engine.predict(), outputs)
    pyg = _plain_loop(pyg_net, given, task, shard)
    pairs = ((name, a, b) for (name, a), (_, b) in zip(mine.outputs, pyg.outputs, strict=False))
    alike = ((name, a.reshape(b.shape) if a.numel() == b.numel() else a, b) for name, a, b in pairs)  # [1, N, F] too
    first = next((name for name, a, b in alike if _error(a, b) > tolerance), "")
    gradients = dict[str, float]()
    for got, expected in zip(mine.gradients, pyg.gradients, strict=True):
        least = rounding(expected.values(), dataset.num_nodes)
        for name, each in expected.items():
            gradients[name] = max(gradients.get(name, 0.0), relative_error(got.get(name), each, least=least))
    after, now = {name: each.double() for name, each in ours.state_dict().items()}, _held(ours)
    state = {n: relative_error(after.get(n), t.double(), least=ADAM.lr) for n, t in pyg_net.state_dict().items()}
    replaced = (
        "" if list(now.items()) == list(held.items()) else next((n for n in held if now.get(n) != held[n]), _ORDER)
    )
    losses = max(abs(a - b) / max(abs(b), 1e-300) for a, b in zip(mine.losses, pyg.losses, strict=True))
    return Difference(losses, _error(mine.logits, pyg.logits), gradients, state, first, replaced)


def _held(model: PyGNet) -> dict[str, int]:
    """Return the parameters of a module under all of their names, with the identity of each tensor."""
    return {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}


def reads_order_of_edges(config: ModelSource, dataset: Dataset) -> bool:
    """Return True if PyG's own forward gives other logits for the same edges in another order. Evaluation, fp64."""
    task, everybody = make_task(dataset.task, dataset.num_classes), torch.zeros(dataset.num_nodes, dtype=torch.int64)
    net = config.on(dataset.edge_sizes).build(dataset.num_features, task.out_dim, seed=SEED).double()
    assert isinstance(net, PyGNet)
    shard = cut(dataset, everybody, 1)[0].to(torch.device("cpu"), torch.float64)
    order = torch.randperm(dataset.num_edges, generator=torch.Generator().manual_seed(SEED))
    other = replace(dataset, edge_index=dataset.edge_index[:, order], edges=dataset.edges.at(order))
    first, again, turned = (_plain_loop(net, each, task, shard, steps=0).logits for each in (dataset, dataset, other))
    return torch.equal(first, again) and _error(turned, first) > 1e-6


def _plain_loop(pyg_net: PyGNet, dataset: Dataset, task: Task, shard: Shard, *, steps: int = STEPS) -> Trained:
    """Train the module as its user does, with dropout masks of `shard` only from gnnpar."""
    net, x, y = pyg_net.net, dataset.x.double(), dataset.y
    layout = None if pyg_net.schema is None else Layout.of(pyg_net.schema, shard.x)
    edges, carried = dataset.edge_index, dataset.edges.to(x.device, torch.float64).tensors
    if layout is not None:
        x, edges, carried = dictionaries(dataset, x)
    needed = required(net.forward)
    taken = edge_arguments(net).items()
    arguments = {name: carried.get(kind) for kind, name in taken if kind in carried or name in needed}
    if "batch" in needed:
        arguments["batch"] = torch.zeros(dataset.num_nodes, dtype=torch.int64)
    ones = "SGFormerAttention" in {type(each).__name__ for each in net.modules()}  # of torch's default dtype

    def logits(epoch: int, *, training: bool) -> Tensor:
        net.train(training)
        view = WholeGraph(shard, Pass(SEED, epoch, training=training))
        ids = torch.arange(dataset.num_edges)
        with ExitStack() as stack:
            if training:
                stack.enter_context(keyed_dropout(view, len(y), layout, edge_ids=ids))
            if ones:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float64)
            out = answer_of(net(x, edges, **arguments), typed=layout is not None)
        if layout is not None:
            return layout.logits(layout.answers(layout.marked(out), task.out_dim))
        assert isinstance(out, Tensor)
        return out

    optimizer, train = torch.optim.Adam(net.parameters(), lr=ADAM.lr, eps=ADAM.eps), dataset.train_mask
    losses, gradients = list[float](), list[dict[str, Tensor]]()
    y = y.double() if y.is_floating_point() else y
    with _recorded(pyg_net) as outputs:
        for epoch in range(steps):
            optimizer.zero_grad()
            loss = task.loss_sum(logits(epoch, training=True)[train], y[train]) / int(train.sum())
            loss.backward()
            named = pyg_net.named_parameters()
            gradients.append({n: or_zeros(p.grad, p).clone() for n, p in trained(named).items()})
            losses.append(loss.item())
            optimizer.step()
        with torch.no_grad():
            return Trained(losses, gradients, logits(steps, training=False), outputs)


@contextmanager
def _recorded(model: PyGNet) -> Iterator[Outputs]:
    """Record outputs of the convolutions and of all modules outside them, in the order in which they end."""
    found: Outputs = []
    inside = tuple(f"{name}." for name in model.convs)

    def note(name: str, output: object) -> None:
        if isinstance(output, Tensor):
            found.append((name, output.detach()))

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: note(name, output))
        for name, module in model.net.named_modules()
        if not name.startswith(inside)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _error(got: Tensor, expected: Tensor) -> float:
    return relative_error(got.detach(), expected.detach())


def typed_graph(
    schema: Schema,
    kinds: Collection[EdgeKind],
    *,
    labelled: Collection[str] = (),
    loops: bool = False,
    classes: int = CLASSES,
    like: EdgeData | None = None,
    seed: int = 0,
) -> Dataset:
    """Return a typed graph with 23, 29, 35, ... nodes per type and about 5 edges per destination and edge type.

    The first node has no edge. labelled: types with labels. loops: add a few self loops if both ends are of one type.
    like: as for `drawn`.
    """
    draw = torch.Generator().manual_seed(seed)
    counts = [_NODES + _MORE * i for i in range(len(schema.nodes))]
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    total, x = starts[-1], torch.zeros(starts[-1], schema.width)
    for t, (own, count) in enumerate(zip(schema.columns, counts, strict=True)):
        rows = slice(starts[t], starts[t] + count)
        x[rows, own] = torch.randn(count, own.stop - own.start, generator=draw)
        if len(counts) > 1:
            x[rows, schema.width - len(counts) + t] = 1
    found: list[Tensor] = []
    for number, (a, _, b) in enumerate(schema.edges):
        source, destination = schema.names.index(a), schema.names.index(b)
        ends = [
            torch.randint(int(t == 0), counts[t], (_EDGES * counts[destination],), generator=draw) + starts[t]
            for t in (source, destination)
        ]
        if a == b:
            kept = (ends[0] != ends[1]) | (loops & (ends[0] % 2 == 1))
            ends = [each[kept] for each in ends]
        found.append(torch.stack([*ends, torch.full_like(ends[0], number)]))
    edges = torch.cat(found, 1).unique(dim=1)
    edges = edges[:, torch.argsort(edges[1] * total + edges[0], stable=True)]
    known = torch.zeros(total, dtype=torch.bool)
    for t, name in enumerate(schema.names):
        known[starts[t] : starts[t + 1]] = name in labelled
    y = torch.where(known, torch.randint(0, max(2, classes), (total,), generator=draw), -1)
    part = torch.arange(total) % 4
    return Dataset.of(
        "small",
        x=x,
        y=y,
        edge_index=edges[:2],
        edges=replace(drawn(edges.shape[1], kinds, like), type=edges[2]),
        masks=(known & (part < 2), known & (part == 2), known & (part == 3)),
        num_classes=classes,
        task="single_label" if classes > 1 else "binary",
        num_edge_types=len(schema.edges),
        schema=schema,
    )


class Dictionaries(NamedTuple):
    """A typed graph in PyG's form: rows and edges by type, edges numbered within their types, and edge data by kind."""

    x: dict[str, Tensor]
    edge_index: dict[tuple[str, str, str], Tensor]
    carried: dict[EdgeKind, dict[tuple[str, str, str], Tensor]]


def dictionaries(dataset: Dataset, x: Tensor) -> Dictionaries:
    """Return the dictionaries. Nodes are in the order of their types. Shapes: x [N, schema.width]."""
    schema, types = dataset.edge_sizes.schema, dataset.edges.type
    assert schema is not None
    assert types is not None
    kinds = len(schema.nodes)
    counts = x[:, -kinds:].sum(0).long() if kinds > 1 else torch.tensor([len(x)])
    ends = [0, *counts.cumsum(0).tolist()]
    start = dict(zip(schema.names, ends, strict=False))
    rows = {name: x[ends[t] : ends[t + 1], schema.columns[t]] for t, (name, width) in enumerate(schema.nodes) if width}
    edges: dict[tuple[str, str, str], Tensor] = {}
    carried: dict[EdgeKind, dict[tuple[str, str, str], Tensor]] = {}
    for number, key in enumerate(schema.edges):
        of_type = types == number
        edges[key] = dataset.edge_index[:, of_type] - torch.tensor([[start[key[0]]], [start[key[2]]]])
        for kind in dataset.edges.kinds - {"type"}:
            carried.setdefault(kind, {})[key] = dataset.edges.tensors[kind][of_type].to(x.dtype)
    return Dictionaries(rows, edges, carried)
