"""Worker: gnnpar. kind is a strategy, with settings behind it: `single`, `single row_order=metis`, `graph_parallel`,
`sar`, `minibatch`."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from bench_peers.inputs import GRAPHS
from bench_peers.serve import Epoch, Job, serve
from epochs import alone, gnnpar_epoch, models

from gnnpar.comm import Communicator, allocator
from gnnpar.comm.process import connect
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sampling.strategy import Minibatch
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Strategy

STRATEGIES: dict[str, Strategy] = {
    "single": Single(),
    "graph_parallel": GraphParallel(),
    "sar": SAR(),
    "minibatch": Minibatch(fanout=(15, 10, 5), batch_size=1024, normalize="subgraph", sampler="own"),
}
job = Job.of_command_line()


def world() -> Communicator:
    if job.ranks == 1:
        return alone()
    os.environ |= {"RANK": str(job.rank), "WORLD_SIZE": str(job.ranks)}
    meet = f"file://{job.folder}/meet_{job.kind}"
    key = os.environ["BENCH_KEY"].encode()
    return connect("gloo", device=torch.device("cpu"), key=key, timeout_seconds=300, init_method=meet)


def make() -> Epoch:
    allocator.keep_freed()  # as every rank of gnnpar does
    name, *settings = job.kind.split()
    chosen = dict(each.split("=") for each in settings if not each.startswith("threads"))
    config, dataset = models(job.dropout)[job.model], GRAPHS[job.graph]()
    return gnnpar_epoch(dataset, STRATEGIES[name], config, world(), cache=Path(job.folder), **chosen)


serve(job, make)
