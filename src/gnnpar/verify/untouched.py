"""Does a PyG model on gnnpar's folds equal itself, untouched, as PyG runs it? One device, fp64, dropout on."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gnnpar.data.dataset import Dataset
from gnnpar.data.preprocess import canonical_edges
from gnnpar.data.tasks import make_task
from gnnpar.folds.edge_data import ALL_KINDS, EdgeKind
from gnnpar.models.gnn import ModelSource
from gnnpar.models.pyg.dropout import keyed_dropout
from gnnpar.models.pyg.layout import Layout
from gnnpar.models.pyg.model import PyG, PyGNet, edge_arguments
from gnnpar.parallel.local import Pass
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import cut
from gnnpar.verify.differences import relative_error, rounding
from gnnpar.verify.edges import drawn
from gnnpar.verify.typed import CLASSES, dictionaries, typed_graph

SEED = 3
Outputs = list[tuple[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Difference:
    """Largest differences, each relative to the largest entry that PyG has. `module`: the first that differs."""

    loss: float
    logits: float
    gradients: dict[str, float]
    module: str


def prepared(dataset: Dataset, model: ModelSource, *, carried: frozenset[EdgeKind] = ALL_KINDS) -> Dataset:
    """The dataset as the model says that its datasets are: one self loop a node, none, or one at every second node
    where they are kept; no edge twice, and of what edges carry all that the model reads and that is `carried`. For a
    model of dictionaries, a graph of the types that it reads, unless the dataset is one."""
    assert isinstance(model, PyG)
    if (typed := typed_dataset(model)) is not None:
        return typed if dataset.edge_sizes.schema is None else dataset
    edges = canonical_edges(
        dataset.edge_index, num_nodes=dataset.num_nodes, symmetrize=False, self_loops=model.self_loops is not False
    )
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


def typed_dataset(model: ModelSource) -> Dataset | None:
    """A small typed graph that a model of dictionaries runs on, with labels for the types that it gives logits for;
    None: it reads none."""
    assert isinstance(model, PyG)
    if (schema := model.sample_schema) is None:
        return None
    kinds, loops = model.edge_data, model.self_loops == "keep"
    built = model.on(typed_graph(schema, kinds).edge_sizes).build(schema.width, CLASSES, seed=SEED)
    assert isinstance(built, PyGNet)
    answers = built.answers
    return typed_graph(replace(schema, target=answers[0]), kinds, labelled=answers, loops=loops)


def difference(config: ModelSource, dataset: Dataset, tolerance: float) -> Difference:
    """Of outputs and gradients. Attention dropout is off: PyG draws it in the order of its own list of edges."""
    assert isinstance(config, PyG)
    task = make_task(dataset.task, dataset.num_classes)
    ours = config.on(dataset.edge_sizes).build(dataset.num_features, task.out_dim, seed=SEED).double()
    for conv in ours.convs.values():
        if "dropout" in vars(conv):
            vars(conv)["dropout"] = 0.0
    theirs = copy.deepcopy(ours)
    nobody, needed = torch.zeros(dataset.num_nodes, dtype=torch.int64), ours.needs_edge_ids
    shard = cut(dataset, nobody, 1, edge_ids=needed)[0].to(torch.device("cpu"), torch.float64)
    view = WholeGraph(shard, Pass(SEED, training=True))
    train, y = shard.train_mask, shard.y[shard.train_mask]

    layout = None if ours.schema is None else Layout.of(ours.schema, shard.x)
    x, edges, carried = shard.x, dataset.edge_index, dataset.edges.to(shard.x.device, torch.float64).tensors
    if layout is not None:
        x, edges, carried = dictionaries(dataset, shard.x)
    asked = inspect.signature(theirs.net.forward).parameters
    given = {
        name: carried.get(kind)
        for kind, name in edge_arguments(theirs.net).items()
        if kind in carried or asked[name].default is inspect.Parameter.empty
    }

    def untouched() -> Tensor:
        theirs.net.train()
        with keyed_dropout(view, len(shard.x), layout, edge_ids=torch.arange(dataset.num_edges)):
            out = theirs.net(x, edges, **given)
        return out if layout is None else layout.logits(layout.marked(out), task.out_dim)

    def passes(model: PyGNet, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor], Outputs]:
        with _recorded(model) as outputs:
            logits = run()
        loss = task.loss_sum(logits[train], y) / shard.num_train
        names = [name for name, _ in model.named_parameters()]
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        found = {n: torch.zeros(1) if g is None else g for n, g in zip(names, gradients, strict=True)}
        return loss, logits, found, outputs

    mine = passes(ours, lambda: ours(view, shard.x))
    pyg = passes(theirs, untouched)
    first = next((name for (name, a), (_, b) in zip(mine[3], pyg[3], strict=False) if _error(a, b) > tolerance), "")
    least = rounding(pyg[2].values(), dataset.num_nodes)
    gradients = {
        name: relative_error(mine[2][name].detach(), expected.detach(), least=least)
        for name, expected in pyg[2].items()
    }
    return Difference(_error(mine[0], pyg[0]), _error(mine[1], pyg[1]), gradients, first)


@contextmanager
def _recorded(model: PyGNet) -> Iterator[Outputs]:
    """Outputs of the convolutions and of all modules outside of them, in the order in which they end."""
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
