"""Worker: gnnpar, and what workers of other environments read: the graph, its cut and initial weights in files.

kind is a strategy, with settings behind it: `single`, `single row_order=metis`, `graph_parallel`, `sar`, `minibatch`.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from bench_peers.serve import Epoch, Job, serve
from epochs import alone, block_model, gnnpar_epoch, models

from gnnpar.comm import Communicator, allocator
from gnnpar.comm.process import connect
from gnnpar.data.dataset import Dataset
from gnnpar.data.npz import NPZ
from gnnpar.data.rmat import RMAT
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sampling.strategy import Minibatch
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Strategy
from gnnpar.partition.partition import Metis, partition

DEBIAN = NPZ(  # conf/dataset/debian.yaml
    name="debian",
    path=f"{os.environ.get('GNNPAR_DATA', 'data')}/debian/debian.npz",
    self_loops=False,
    symmetrize=False,
    split="public",
)
GRAPHS: dict[str, Callable[[], Dataset]] = {
    "sbm_tenth": lambda: block_model(5_000),
    "sbm": lambda: block_model(50_000),  # the graph of epoch_speed
    "sbm_four": lambda: block_model(200_000),
    "debian": lambda: DEBIAN.load(None, 0),
    "rmat": lambda: RMAT(scale=15, edge_factor=16, num_features=128, graph_seed=0).load(None, 0),
}
STRATEGIES: dict[str, Strategy] = {
    "single": Single(),
    "graph_parallel": GraphParallel(),
    "sar": SAR(),
    "minibatch": Minibatch(fanout=(15, 10, 5), batch_size=1024, normalize="subgraph", sampler="own"),
}


def write(graph: str, folder: Path) -> Dataset:
    """The graph, its cut into two parts, and initial weights of every model by layer and name."""
    dataset = GRAPHS[graph]()
    inputs: dict[str, Any] = {"edges": dataset.edge_index, "x": dataset.x, "y": dataset.y, "train": dataset.train_mask}
    inputs["part_of"] = partition(dataset, 2, by=Metis(), cache=folder, say=lambda _: None)
    for name, config in models(dropout=0.0).items():
        layers = config.build(dataset.num_features, dataset.num_classes, seed=0).layers
        inputs[name] = [{key.removeprefix("conv."): w for key, w in each.state_dict().items()} for each in layers]
    torch.save(inputs, folder / "inputs.pt")
    return dataset


def world(job: Job) -> Communicator:
    if job.ranks == 1:
        return alone()
    os.environ |= {"RANK": str(job.rank), "WORLD_SIZE": str(job.ranks)}
    meet = f"file://{job.folder}/meet_{job.kind}"
    key = os.environ["BENCH_KEY"].encode()
    return connect("gloo", device=torch.device("cpu"), key=key, timeout_seconds=300, init_method=meet)


def make(job: Job) -> Epoch:
    allocator.keep_freed()  # as every rank of gnnpar does
    name, *settings = job.kind.split()
    chosen = dict(each.split("=") for each in settings if not each.startswith("threads"))
    config, dataset = models(job.dropout)[job.model], GRAPHS[job.graph]()
    return gnnpar_epoch(dataset, STRATEGIES[name], config, world(job), cache=Path(job.folder), **chosen)


if __name__ == "__main__":
    serve(make)
