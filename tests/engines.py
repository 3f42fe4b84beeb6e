"""One rank of a job, opened for tests that look inside it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from gnnpar.comm import Communicator, ThreadWorld
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.engine import EpochReport
from gnnpar.partition.shard import Shard
from gnnpar.verify.conformance import Job, on_device
from gnnpar_kernels.csr import accumulate_dtype

T = TypeVar("T")


class Rank(NamedTuple):
    """What a rank trains with. `engine`, `model`: untyped, as tests read fields of one kind of engine."""

    engine: Any
    optimizer: Any
    model: Any
    shard: Shard

    def train(self, epochs: int) -> list[EpochReport]:
        """Train epochs 0 to `epochs` - 1, and return what each reports, its gradient too."""
        return [self.engine.train_epoch(epoch, self.optimizer, keep_gradient=True) for epoch in range(epochs)]


def open_rank(
    job: Job,
    comm: Communicator,
    model: nn.Module | None = None,
    place: Callable[[Any, torch.device], Any] = on_device,
) -> Rank:
    """Build what `job` trains on the rank of `comm`.

    `model`: in the place of the job's; one copy a rank. `place`: moves it to the device.
    """
    mine: Any = place(copy.deepcopy(model or job.model).to(accumulate_dtype(job.dtype)), comm.device)
    given = job.dataset if comm.rank == 0 else None
    shard = Shard.open(
        given, job.plan.part_of, comm, edge_ids=job.model.needs_edge_ids, placement=job.plan.placement
    ).to(comm.device, job.dtype)
    task = job.task.of(job.dataset.task, job.dataset.num_classes)
    context = BuildContext(
        plan=job.plan, shard=shard, model=mine, task=task, comm=comm, seed=job.seed, first_layer=job.first_layer
    )
    engine = job.strategy.build(context)
    layer_of = job.model.layer_of if model is None else (lambda name: 0)
    optimizer = job.optim.build(engine.named_parameters(), epochs=job.epochs, layer_of=layer_of)
    return Rank(engine, optimizer, mine, shard)


def on_ranks(job: Job, look: Callable[[Rank], T], model: nn.Module | None = None) -> list[T]:
    """Return look(rank) of every rank of a world of threads."""
    return ThreadWorld(job.plan.num_ranks).run(lambda comm: look(open_rank(job, comm, model)))
