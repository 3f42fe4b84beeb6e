"""Epoch time and peak memory of `single` and `graph_parallel` beside PyG's layers, ratios inside one run.

Variants take turns epoch by epoch, so that a slow minute of the machine hits all of them.

    python experiments/epoch_speed/run.py            # writes results.csv, prints the tables
    python experiments/epoch_speed/run.py --quick    # a tenth of the graph, a minute
"""

import argparse
import csv
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

from pyg_models import PyGModel, adjacency

from gnnpar.comm import Communicator, ThreadWorld
from gnnpar.data.dataset import Dataset
from gnnpar.data.synthetic import SBM
from gnnpar.data.tasks import make_task
from gnnpar.models.gat import GAT
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import ModelConfig
from gnnpar.models.sage import SAGE
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Strategy, Workload
from gnnpar.partition.partition import Metis
from gnnpar.partition.shard import Shard
from gnnpar.placement import Topology
from gnnpar.training.memory import measure_epoch
from worlds import run_world

SHAPE = {"num_layers": 3, "hidden": 128, "dropout": 0.5}
MODELS: dict[str, ModelConfig] = {"gcn": GCN(**SHAPE), "sage": SAGE(**SHAPE), "gat": GAT(**SHAPE, heads=4)}
Epoch = Callable[[], float]


def load(quick: bool) -> Dataset:
    """sbm with 50 k nodes, 1 M edges, power-law degrees, homophily 0.8, 128 features."""
    nodes = 5_000 if quick else 50_000
    return SBM(
        num_nodes=nodes,
        avg_degree=20,
        homophily=0.8,
        num_features=128,
        graph_seed=0,
        bridge_share=0.05,
        lateral_share=0.05,
    ).load(None, 0)


def gnnpar_epoch(dataset: Dataset, strategy: Strategy, config: ModelConfig, comm: Communicator, plan=None) -> Epoch:
    task = make_task(dataset.task, dataset.num_classes)
    model = config.build(dataset.num_features, task.out_dim, seed=0)
    if plan is None:
        plan = strategy.plan(Workload(dataset, Metis(), model.num_layers), Topology(comm.size))
    shard = Shard.open(dataset if comm.rank == 0 else None, plan.part_of, comm)
    engine = strategy.build(BuildContext(plan=plan, shard=shard, model=model, task=task, comm=comm, seed=0))
    optimizer = torch.optim.Adam([p for _, p in engine.named_parameters()], lr=0.01)
    state = {"epoch": 0}

    def epoch() -> float:
        state["epoch"] += 1
        loss = engine.train_epoch(state["epoch"], optimizer).loss
        comm.ledger.drain()
        return loss

    return epoch


def pyg_epoch(dataset: Dataset, kind: str) -> Epoch:
    config = MODELS[kind]
    widths = [dataset.num_features, *[config.hidden] * (config.num_layers - 1), dataset.num_classes]
    model = PyGModel(kind, widths, heads=4, dropout=config.dropout).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # GATConv's attention runs over edge lists; on torch CSR it took longer (README)
    edges = dataset.edge_index if kind == "gat" else adjacency(dataset.edge_index, dataset.num_nodes)
    train = dataset.train_mask.nonzero().flatten()

    def epoch() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(dataset.x, edges)[train], dataset.y[train])
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch


def peak_bytes(epoch: Epoch) -> int:
    """The allocator's peak in one epoch above what was alive before it."""
    from gnnpar.training.memory import live_storages

    with measure_epoch(torch.device("cpu")) as report:
        before = sum(live_storages().values())
        epoch()
    assert report.peak is not None
    return report.peak - before


def take_turns(variants: dict[str, Epoch], *, epochs: int, warmup: int = 2) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(warmup + epochs):
        for name, epoch in variants.items():
            began = time.perf_counter()
            epoch()
            if i >= warmup:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def against_pyg(dataset: Dataset, *, epochs: int, rows: list[dict]) -> None:
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        for kind, config in MODELS.items():
            (comm,) = ThreadWorld(1).communicators()
            variants = {"single": gnnpar_epoch(dataset, Single(), config, comm), "pyg": pyg_epoch(dataset, kind)}
            seconds = take_turns(variants, epochs=epochs)
            peaks = {name: peak_bytes(epoch) for name, epoch in variants.items()}
            pairs = [p / s for p, s in zip(seconds["pyg"], seconds["single"], strict=True)]
            rows.append(
                {
                    "table": "pyg",
                    "model": kind,
                    "threads": threads,
                    "single_seconds": statistics.median(seconds["single"]),
                    "other_seconds": statistics.median(seconds["pyg"]),
                    "speedup": statistics.median(pairs),
                    "low": min(pairs),
                    "high": max(pairs),
                    "single_mib": peaks["single"] / 2**20,
                    "other_mib": peaks["pyg"] / 2**20,
                }
            )
            show(rows[-1])


class TwoRanks:
    """In one world of two processes: single on rank 0 (1 thread, then all), graph_parallel on both, in turns."""

    def __init__(self, dataset: Dataset, kind: str, epochs: int) -> None:
        self.dataset, self.kind, self.epochs = dataset, kind, epochs
        config = MODELS[kind]
        self.plan = GraphParallel().plan(Workload(dataset, Metis(), config.num_layers), Topology(2))

    def __call__(self, comm: Communicator) -> dict[str, list[float]]:
        torch.set_num_threads(1)
        config = MODELS[self.kind]
        both = gnnpar_epoch(self.dataset, GraphParallel(), config, comm, self.plan)
        alone = None
        if comm.rank == 0:
            (own,) = ThreadWorld(1).communicators()
            alone = gnnpar_epoch(self.dataset, Single(), config, own)
        seconds: dict[str, list[float]] = {"single_1": [], "single_2": [], "ranks_2": []}
        for i in range(self.epochs + 2):
            for name, times in seconds.items():
                comm.barrier()
                torch.set_num_threads(2 if name == "single_2" else 1)
                began = time.perf_counter()
                if name == "ranks_2":
                    both()
                elif alone is not None:
                    alone()
                if i >= 2:
                    times.append(time.perf_counter() - began)
                comm.barrier()
        return seconds


def two_ranks(dataset: Dataset, *, epochs: int, rows: list[dict]) -> None:
    if (os.cpu_count() or 1) < 2:
        print("graph_parallel on 2 ranks needs 2 cores: not measured")
        return
    for kind in MODELS:
        seconds = run_world("gloo", 2, TwoRanks(dataset, kind, epochs))[0]
        for base in ("single_1", "single_2"):
            pairs = [s / r for s, r in zip(seconds[base], seconds["ranks_2"], strict=True)]
            rows.append(
                {
                    "table": "ranks",
                    "model": kind,
                    "threads": int(base[-1]),
                    "single_seconds": statistics.median(seconds[base]),
                    "other_seconds": statistics.median(seconds["ranks_2"]),
                    "speedup": statistics.median(pairs),
                    "low": min(pairs),
                    "high": max(pairs),
                    "single_mib": "",
                    "other_mib": "",
                }
            )
            show(rows[-1])


def show(row: dict) -> None:
    memory = ""
    if row["single_mib"]:
        memory = f", peak above live {row['single_mib']:.0f} against {row['other_mib']:.0f} MiB"
    if row["table"] == "pyg":
        text = f"single {row['single_seconds']:.3f} s, PyG {row['other_seconds']:.3f} s: {row['speedup']:.2f}x faster"
        what = f"{row['threads']} threads"
    else:
        text = f"{row['other_seconds']:.3f} s, single {row['single_seconds']:.3f} s: {row['speedup']:.2f}x faster"
        what = f"2 ranks x 1 thread against single with {row['threads']} threads"
    print(f"{row['model']:5} {what}: {text} ({row['low']:.2f} to {row['high']:.2f}){memory}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the graph")
    parser.add_argument("--epochs", type=int, default=7)
    options = parser.parse_args()
    dataset, rows = load(options.quick), []
    print(f"sbm: {dataset.num_nodes} nodes, {dataset.num_edges} edges, {dataset.num_features} features")
    against_pyg(dataset, epochs=options.epochs, rows=rows)
    two_ranks(dataset, epochs=options.epochs, rows=rows)
    if not options.quick:
        stamp = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "cores": os.cpu_count()}
        with (HERE / "results.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *stamp])
            writer.writeheader()
            writer.writerows([{**row, **stamp} for row in rows])


if __name__ == "__main__":
    main()
