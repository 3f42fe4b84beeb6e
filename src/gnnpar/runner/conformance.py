"""Does a strategy, in its exact limit, equal the single device? fp64, ranks as threads, dropout on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnpar.comm import ThreadWorld
from gnnpar.data.dataset import Dataset
from gnnpar.data.tasks import make_task
from gnnpar.models.gnn import GNN, ModelConfig
from gnnpar.plan import Topology
from gnnpar.shard.partition import Partitioner, Random
from gnnpar.shard.shard import Shard
from gnnpar.strategies.single import Single
from gnnpar.strategies.strategy import FirstLayer, Strategy, Workload

TOLERANCE = 1e-9
"""Largest difference allowed, per tensor, relative to the reference's largest entry."""


@dataclass(frozen=True)
class Case:
    """One model on one world: the worst relative differences over the epochs compared."""

    model: str
    world: int
    loss_error: float
    worst_gradient_error: float
    worst_parameter: str
    logits_error: float
    error: str | None = None

    @property
    def passed(self) -> bool:
        worst = max(self.loss_error, self.worst_gradient_error, self.logits_error)
        return self.error is None and worst <= TOLERANCE


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a run leaves to compare: loss and gradient of every epoch, logits [N, C] in global order."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    logits: Tensor


def small_graph(*, num_nodes: int = 60, num_edges: int = 400, seed: int = 0) -> Dataset:
    """Directed, with self loops on most nodes, isolated nodes and repeated edges."""
    gen = torch.Generator().manual_seed(seed)
    alone = max(0, min(2, num_nodes - 2))  # the last nodes have no edge at all
    ends = torch.randint(0, max(1, num_nodes - alone), (2, num_edges), generator=gen)
    loops = torch.arange(max(1, num_nodes - alone)).expand(2, -1)
    repeated = ends[:, : num_edges // 20]
    edges = torch.cat([ends, loops, repeated], dim=1)
    edges = edges[:, torch.argsort(edges[1] * num_nodes + edges[0], stable=True)]
    x = torch.randn(num_nodes, 6, generator=gen)
    y = torch.randint(0, 3, (num_nodes,), generator=gen)
    kind = torch.rand(num_nodes, generator=gen)
    masks = (kind < 0.6, (kind >= 0.6) & (kind < 0.8), kind >= 0.8)
    return Dataset.of("small", x=x, y=y, edge_index=edges, masks=masks, num_classes=3, task="single_label")


def train_in_threads(
    strategy: Strategy, config: ModelConfig, dataset: Dataset, *, world: int, epochs: int = 2, seed: int = 3,
    partition: Partitioner | None = None, first_layer: FirstLayer = "live", dtype: torch.dtype = torch.float64,
    watch: Callable[[int, object], None] = lambda rank, comm: None,
) -> Outcome:  # fmt: skip
    """Train with plain SGD on a world of threads. `watch(rank, communicator)` is called after every epoch."""
    task = make_task(dataset.task, dataset.num_classes)
    # threads share torch's random state: build once, copy
    model = config.build(dataset.num_features, task.out_dim, seed=seed, cached_first_layer=first_layer == "cached")
    plan = strategy.plan(Workload(dataset, partition or Random(), model.num_layers), Topology(world))

    def rank(comm) -> tuple[list[float], list[dict[str, Tensor]], Tensor, Tensor]:
        mine: GNN = copy.deepcopy(model).to(dtype)
        given = dataset if comm.rank == 0 else None
        shard = Shard.open(given, plan.part_of, comm, edge_ids=model.needs_edge_ids).to(comm.device, dtype)
        engine = strategy.build(plan, shard, mine, task, comm, seed=seed, first_layer=first_layer)
        optimizer = torch.optim.SGD([p for _, p in engine.named_parameters()], lr=0.1)
        losses, gradients = [], []
        for epoch in range(epochs):
            report = engine.train_epoch(epoch, optimizer, keep_gradient=True)
            assert report.gradient is not None
            losses.append(report.loss)
            gradients.append(report.gradient)
            watch(comm.rank, comm)
        engine.drain()
        return losses, gradients, engine.node_ids, engine.predict()

    results = ThreadWorld(world).run(rank)
    logits = torch.full((dataset.num_nodes, task.out_dim), torch.nan, dtype=dtype)
    merged: list[dict[str, Tensor]] = [{} for _ in range(epochs)]
    for _, gradients, ids, rows in results:
        logits[ids] = rows
        for into, found in zip(merged, gradients, strict=True):
            into.update(found)
    return Outcome(results[0][0], merged, logits)


def check(
    strategy: Strategy, models: Mapping[str, ModelConfig], *, worlds: Sequence[int] = (1, 2, 3, 4),
    dataset: Dataset | None = None, first_layer: FirstLayer = "live",
) -> list[Case]:  # fmt: skip
    """Every model on every world the strategy can use, against the single device."""
    dataset = dataset or small_graph()
    limit = strategy.exact_limit()
    most = limit.max_ranks or max(worlds)
    cases = []
    for name, config in models.items():
        reference = train_in_threads(Single(), config, dataset, world=1)
        for world in (w for w in worlds if w <= most):
            cases.append(_case(limit, name, config, dataset, world, reference, first_layer))
    return cases


def _case(
    limit: Strategy,
    name: str,
    config: ModelConfig,
    dataset: Dataset,
    world: int,
    reference: Outcome,
    first_layer: FirstLayer,
) -> Case:  # fmt: skip
    try:
        got = train_in_threads(limit, config, dataset, world=world, first_layer=first_layer)
    except Exception as error:  # a strategy of the user's own may fail in any way: a row of the table
        inf = float("inf")
        return Case(name, world, inf, inf, "", inf, f"{type(error).__name__}: {error}")
    worst, parameter = 0.0, ""
    for mine, theirs in zip(got.gradients, reference.gradients, strict=True):
        for key, expected in theirs.items():
            error = relative_error(mine.get(key), expected)
            if error >= worst:
                worst, parameter = error, key
    losses = zip(got.losses, reference.losses, strict=True)
    loss_error = max(abs(a - b) / max(abs(b), 1e-300) for a, b in losses)
    return Case(name, world, loss_error, worst, parameter, relative_error(got.logits, reference.logits))


def relative_error(got: Tensor | None, expected: Tensor) -> float:
    """Largest difference over the largest entry expected; infinite where something is missing or not a number."""
    if got is None or got.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    error = float((got - expected).abs().max() / scale)
    return error if error == error else float("inf")
