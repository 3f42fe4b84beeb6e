"""Training epochs in this process, to be timed in turns: gnnpar's engines beside PyG's layers."""

import itertools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnpar.comm import Communicator, ThreadWorld
from gnnpar.data.dataset import Dataset
from gnnpar.data.synthetic import SBM
from gnnpar.data.tasks import make_task
from gnnpar.models.gat import GAT
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import ModelConfig, ModelSource
from gnnpar.models.sage import SAGE
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.strategy import Strategy, Workload
from gnnpar.partition.partition import Metis
from gnnpar.partition.row_order import in_order
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan, Topology
from gnnpar.training.meter import live_storages, measure_epoch
from gnnpar.training.optim import Adam

Epoch = Callable[[], float]
"""Trains one epoch and returns its loss before the step."""


def models(dropout: float) -> dict[str, ModelConfig]:
    shape = {"num_layers": 3, "hidden": 128, "dropout": dropout}
    return {"gcn": GCN(**shape), "sage": SAGE(**shape), "gat": GAT(**shape, heads=4)}


def block_model(nodes: int, *, features: int = 128, loops: bool = True) -> Dataset:
    """Power-law degrees, 20 edges a node, homophily 0.8."""
    shares = {"homophily": 0.8, "bridge_share": 0.05, "lateral_share": 0.05}
    return SBM(num_nodes=nodes, avg_degree=20, num_features=features, graph_seed=0, self_loops=loops, **shares).load(
        None, 0
    )


def alone() -> Communicator:
    return ThreadWorld(1).communicators()[0]


def gnnpar_epoch(
    dataset: Dataset,
    strategy: Strategy,
    source: ModelSource,
    comm: Communicator,
    *,
    plan: Plan | None = None,
    row_order: str = "none",
    cache: Path | None = None,
) -> Epoch:
    """As `gnnpar train` builds it."""
    task = make_task(dataset.task, dataset.num_classes)
    model = source.on(dataset.edge_sizes).build(dataset.num_features, task.out_dim, seed=0)
    workload = Workload(dataset, Metis(), model.num_layers, cache=cache)
    plan = plan or strategy.plan(workload, Topology(comm.size))
    shard = Shard.open(dataset if comm.rank == 0 else None, plan.part_of, comm, edge_ids=model.needs_edge_ids)
    shard, _ = in_order(shard, row_order)
    engine = strategy.build(BuildContext(plan=plan, shard=shard, model=model, task=task, comm=comm, seed=0))
    optimizer = Adam(lr=0.01).build(list(engine.named_parameters()), epochs=1, layer_of=model.layer_of)
    numbers = itertools.count(1)

    def epoch() -> float:
        loss = engine.train_epoch(next(numbers), optimizer).loss
        comm.ledger.drain()
        return loss

    return epoch


def pyg_epoch(model: nn.Module, dataset: Dataset, edges: Tensor) -> Epoch:
    """Whole-graph training as PyG's examples write it, on the device of the model."""
    device = edges.device
    optimizer = torch.optim.Adam(model.train().parameters(), lr=0.01, fused=device.type == "cuda")
    x, y = dataset.x.to(device), dataset.y.to(device)
    train = dataset.train_mask.nonzero().flatten().to(device)

    def epoch() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edges)[train], y[train])
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch


def peak_bytes(call: Callable[[], object]) -> int:
    """The allocator's peak in one call above what was alive before it."""
    with measure_epoch(torch.device("cpu")) as report:
        before = sum(live_storages().values())
        call()
    assert report.peak is not None
    return report.peak - before
