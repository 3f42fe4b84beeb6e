"""Training epochs in this process, to be timed in turns: gnnpar's engines beside PyG's layers."""

import datetime
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from bench_peers.serve import Epoch, training
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
from gnnpar.partition.partition import Metis, Partitioner
from gnnpar.partition.row_order import in_order
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan, Topology
from gnnpar.training.captured import CapturedEpochs
from gnnpar.training.meter import live_storages, measure_epoch
from gnnpar.training.optim import Adam
from gnnpar.training.result.result import commit, installed, processor, versions
from gnnpar_kernels.csr import accumulate_dtype


def facts() -> dict[str, Any]:
    """Return where, when and on which commit a line is measured."""
    memory = psutil.virtual_memory().total / 2**30
    return {
        "date": datetime.datetime.now().isoformat(timespec="minutes"),
        "hardware": f"{processor()}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "versions": {**versions(), "torch_geometric": installed("torch_geometric")},
        "commit": commit(),
        "load": os.getloadavg()[0],
    }


def models(dropout: float) -> dict[str, ModelConfig]:
    shape = {"num_layers": 3, "hidden": 128, "dropout": dropout}
    return {"gcn": GCN(**shape), "sage": SAGE(**shape), "gat": GAT(**shape, heads=4)}


def block_model(nodes: int, *, features: int = 128, loops: bool = True) -> Dataset:
    """Power-law degrees, 20 edges a node, homophily 0.8."""
    shares = {"homophily": 0.8, "bridge_share": 0.05, "lateral_share": 0.05}
    return SBM(num_nodes=nodes, avg_degree=20, num_features=features, graph_seed=0, self_loops=loops, **shares).load(
        None, 0
    )


def alone(device: torch.device = torch.device("cpu")) -> Communicator:
    return ThreadWorld(1, device=device).communicators()[0]


def gnnpar_epoch(
    dataset: Dataset,
    strategy: Strategy,
    source: ModelSource,
    comm: Communicator,
    *,
    plan: Plan | None = None,
    by: Partitioner = Metis(),
    row_order: str = "none",
    cache: Path | None = None,
    dtype: torch.dtype = torch.float32,
    captured: bool = False,
) -> Epoch:
    """As `gnnpar train` builds it, on the device of the communicator."""
    task = make_task(dataset.task, dataset.num_classes)
    model = source.on(dataset.edge_sizes).build(dataset.num_features, task.out_dim, seed=0)
    workload = Workload(dataset, by, model.num_layers, model=model, cache=cache)
    plan = plan or strategy.plan(workload, Topology(comm.size))
    cut = {"edge_ids": model.needs_edge_ids, "placement": plan.placement}
    shard = Shard.open(dataset if comm.rank == 0 else None, plan.part_of, comm, **cut)
    shard, _ = in_order(shard.to(comm.device, dtype), row_order)
    model = model.to(comm.device, accumulate_dtype(dtype))
    engine = strategy.build(BuildContext(plan=plan, shard=shard, model=model, task=task, comm=comm, seed=0))
    optimizer = Adam(lr=0.01).build(list(engine.named_parameters()), epochs=1000, layer_of=model.layer_of)
    replays = CapturedEpochs(engine, optimizer, comm, 0, model) if captured else None
    numbers = itertools.count(1)

    def epoch() -> float:
        number = next(numbers)
        report = replays.train_epoch(number) if replays else engine.train_epoch(number, optimizer)
        comm.ledger.drain()
        return report.loss

    return epoch


def pyg_epoch(model: nn.Module, dataset: Dataset, edges: Tensor) -> Epoch:
    """Whole-graph training on the device of the model and the edges."""
    x, y, train = (each.to(edges.device) for each in (dataset.x, dataset.y, dataset.train_mask.nonzero().flatten()))
    return training(model.train(), lambda: model(x, edges), y, train)


def peak_bytes(call: Callable[[], object]) -> int:
    """The allocator's peak in one call above what was alive before it."""
    with measure_epoch(torch.device("cpu")) as report:
        before = sum(live_storages().values())
        call()
    assert report.peak is not None
    return report.peak - before
