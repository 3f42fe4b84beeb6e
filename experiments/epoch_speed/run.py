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
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "tests")]

import epochs
from epochs import Epoch, alone, block_model, gnnpar_epoch, peak_bytes, pyg_epoch
from pyg_models import PyGModel, adjacency

from gnnpar.comm import Communicator
from gnnpar.data.dataset import Dataset
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Workload
from gnnpar.partition.partition import Metis
from gnnpar.placement import Topology
from worlds import run_world

MODELS = epochs.models(dropout=0.5)


def theirs(dataset: Dataset, kind: str) -> Epoch:
    config = MODELS[kind]
    widths = [dataset.num_features, *[config.hidden] * (config.num_layers - 1), dataset.num_classes]
    # GATConv's attention runs over edge lists; on torch CSR it took longer (README)
    edges = dataset.edge_index if kind == "gat" else adjacency(dataset.edge_index, dataset.num_nodes)
    return pyg_epoch(PyGModel(kind, widths, heads=4, dropout=config.dropout), dataset, edges)


def take_turns(variants: dict[str, Epoch], *, epochs: int, warmup: int = 2) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(warmup + epochs):
        for name, epoch in variants.items():
            began = time.perf_counter()
            epoch()
            if i >= warmup:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def compared(table: str, model: str, threads: int, single: list[float], other: list[float], pairs: list[float]) -> dict:
    row = {"table": table, "model": model, "threads": threads, "single_seconds": statistics.median(single)}
    row |= {"other_seconds": statistics.median(other), "speedup": statistics.median(pairs)}
    return row | {"low": min(pairs), "high": max(pairs), "single_mib": "", "other_mib": ""}


def against_pyg(dataset: Dataset, *, epochs: int, rows: list[dict]) -> None:
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        for kind, config in MODELS.items():
            variants = {"single": gnnpar_epoch(dataset, Single(), config, alone()), "pyg": theirs(dataset, kind)}
            single, pyg = take_turns(variants, epochs=epochs).values()
            peaks = {name: peak_bytes(epoch) / 2**20 for name, epoch in variants.items()}
            pairs = [p / s for p, s in zip(pyg, single, strict=True)]
            memory = {"single_mib": peaks["single"], "other_mib": peaks["pyg"]}
            rows.append(compared("pyg", kind, threads, single, pyg, pairs) | memory)
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
        both = gnnpar_epoch(self.dataset, GraphParallel(), config, comm, plan=self.plan)
        single = gnnpar_epoch(self.dataset, Single(), config, alone()) if comm.rank == 0 else None
        seconds: dict[str, list[float]] = {"single_1": [], "single_2": [], "ranks_2": []}
        for i in range(self.epochs + 2):
            for name, times in seconds.items():
                comm.barrier()
                torch.set_num_threads(2 if name == "single_2" else 1)
                began = time.perf_counter()
                if name == "ranks_2":
                    both()
                elif single is not None:
                    single()
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
            rows.append(compared("ranks", kind, int(base[-1]), seconds[base], seconds["ranks_2"], pairs))
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
    dataset, rows = block_model(5_000 if options.quick else 50_000), []
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
