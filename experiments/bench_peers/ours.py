"""Worker: gnnpar. kind is a strategy, with settings behind it: `single`, `single row_order=metis`, `graph_parallel`,
`sar`, `minibatch`."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from serve import Epoch, Job, serve
from study import MODELS, dataset_of

from gnnpar.comm import Communicator, ThreadWorld, allocator
from gnnpar.comm.process import connect
from gnnpar.data.tasks import make_task
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sampling.strategy import Minibatch
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Strategy, Workload
from gnnpar.partition.partition import Metis
from gnnpar.partition.row_order import in_order
from gnnpar.partition.shard import Shard
from gnnpar.placement import Topology
from gnnpar.training.optim import Adam

STRATEGIES: dict[str, Strategy] = {
    "single": Single(),
    "graph_parallel": GraphParallel(),
    "sar": SAR(),
    "minibatch": Minibatch(fanout=(15, 10, 5), batch_size=1024, normalize="subgraph", sampler="own"),
}
job = Job.of_command_line()


def world() -> Communicator:
    if job.ranks == 1:
        return ThreadWorld(1).communicators()[0]
    os.environ |= {"RANK": str(job.rank), "WORLD_SIZE": str(job.ranks)}
    meet = f"file://{job.folder}/meet_{Path(job.address).name}"
    key = os.environ["BENCH_KEY"].encode()
    return connect("gloo", device=torch.device("cpu"), key=key, timeout_seconds=300, init_method=meet)


def make() -> Epoch:
    allocator.keep_freed()  # as every rank of gnnpar does
    comm, dataset, config = world(), dataset_of(job.graph), MODELS[job.model]
    name, *settings = job.kind.split()
    chosen = dict(each.split("=") for each in settings)
    strategy, task = STRATEGIES[name], make_task(dataset.task, dataset.num_classes)
    model = config.build(dataset.num_features, task.out_dim, seed=0)
    workload = Workload(dataset, Metis(), model.num_layers, cache=Path(job.folder))
    plan = strategy.plan(workload, Topology(comm.size))
    shard = Shard.open(dataset if comm.rank == 0 else None, plan.part_of, comm)
    shard, _ = in_order(shard, chosen.pop("row_order", "none"))
    assert not chosen, chosen
    engine = strategy.build(BuildContext(plan=plan, shard=shard, model=model, task=task, comm=comm, seed=0))
    optimizer = Adam(lr=0.01).build(list(engine.named_parameters()), epochs=1, layer_of=model.layer_of)
    count = {"epoch": 0}

    def epoch() -> float:
        count["epoch"] += 1
        loss = engine.train_epoch(count["epoch"], optimizer).loss
        comm.ledger.drain()
        return loss

    return epoch


serve(job, make)
