"""Compare the training of a PyG model on gnnpar's folds with PyG's own loop. One device, fp64, dropout on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
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
from gnnpar.folds.edge_data import ALL_KINDS, EdgeData, EdgeKind
from gnnpar.models.gnn import ModelSource
from gnnpar.models.pyg.model import PyG, PyGNet, answer_of, edge_arguments, required
from gnnpar.models.pyg.rows import Layout
from gnnpar.models.pyg.substitutes import keyed_dropout
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.engine import trained
from gnnpar.parallel.local import Pass
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Workload
from gnnpar.parallel.torch_types import or_zeros
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.partition import Random
from gnnpar.partition.shard import Shard, cut
from gnnpar.placement import Topology
from gnnpar.training.optim import Adam
from gnnpar.verify.differences import relative_error, rounding
from gnnpar.verify.edges import drawn
from gnnpar.verify.typed import CLASSES, dictionaries, typed_graph

SEED, STEPS = 3, 3
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
