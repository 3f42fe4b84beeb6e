"""The variance that a codec gives the gradient of a model at fixed weights."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnpar.comm import Communicator, ThreadWorld
from gnnpar.data.tasks import make_task
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.halo.adaqp import AdaQP
from gnnpar.parallel.strategy import Workload
from gnnpar.partition.partition import Random
from gnnpar.partition.shard import Shard
from gnnpar.placement import Topology


@dataclass(frozen=True)
class Spread:
    """`variance`: of the gradient, all entries; `halo_bytes`: of one epoch, all ranks; `mean_bits` of a choice."""

    variance: float
    halo_bytes: int
    mean_bits: float | None


class Study:
    """A dataset, a model and a partition; every codec meets the same weights. Dropout would be noise of its own."""

    def __init__(self, dataset: Any, config: Any, *, world: int = 2) -> None:
        task = make_task(dataset.task, dataset.num_classes)
        self.dataset, self.task = dataset, task
        self.model = config.build(dataset.num_features, task.out_dim, seed=1)
        self.world = world
        self.plan = AdaQP().plan(Workload(dataset, Random(), self.model.num_layers), Topology(world))

    def spread(self, codec: Any, *, draws: int = 30, first: int = 3) -> Spread:
        """Epochs `first` on, after a choice in epoch 2."""

        def body(comm: Communicator) -> tuple[list[Tensor], int, dict]:
            model = copy.deepcopy(self.model)
            shard = Shard.open(self.dataset if comm.rank == 0 else None, self.plan.part_of, comm)
            engine: Any = AdaQP(codec=codec).build(
                BuildContext(plan=self.plan, shard=shard, model=model, task=self.task, comm=comm, seed=5)
            )
            for epoch in range(1, first):
                engine.reduced_gradient(epoch)
            facts = {}
            for runtime in engine._codecs:
                facts |= getattr(runtime, "facts", dict)()
            comm.ledger.drain()
            gradients = [engine.reduced_gradient(epoch) for epoch in range(first, first + draws)]
            sent = comm.ledger.drain().bytes
            return gradients, (sent["forward"] + sent["backward"]) // draws, facts

        results = ThreadWorld(self.world).run(body)
        gradients = torch.stack(results[0][0]).double()
        variance = float((gradients - gradients.mean(0)).square().sum(1).mean()) * draws / (draws - 1)
        return Spread(variance, sum(r[1] for r in results), results[0][2].get("assign/mean_bits"))
