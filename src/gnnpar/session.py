"""One rank of the caller's training loop: the result of `gnnpar.distribute`, with or without torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from gnnpar.comm.world import Host, World, restored_torch_settings
from gnnpar.files import FolderInUse, WriteError, working_in
from gnnpar.launch import processes
from gnnpar.launch.join import join as join_ranks
from gnnpar.launch.join import refusal
from gnnpar.launch.launch import world_of
from gnnpar.launch.slurm import check_rank
from gnnpar.parallel.objective import SPLITS
from gnnpar.partition.learned import join
from gnnpar.settings import ConfigError, Settings
from gnnpar.track.console import say
from gnnpar.track.tracker import Null
from gnnpar.training.checkpoint.resume import Start
from gnnpar.training.checks import check
from gnnpar.training.loop import Job, Run, prepare
from gnnpar.training.meter import evaluate
from gnnpar.training.optim import refuse_closure
from gnnpar.training.plans import PlanSource
from gnnpar.training.result.record import RunRecord
from gnnpar.training.result.result import read_result


class Session:
    """A context manager; if one rank raises, the others end and name it. `close` ends the session without `with`.

    Every method except `parameters` is collective. epoch: epochs done. node_ids: global ids of the rows that `predict`
    returns on this rank.
    """

    def __init__(self, run: Run, monitored: ExitStack) -> None:
        self._run, self._monitored = run, monitored
        self.epoch = 0

    @property
    def rank(self) -> int:
        return self._run.comm.rank

    @property
    def world_size(self) -> int:
        return self._run.comm.size

    @property
    def node_ids(self) -> Tensor:
        return self._run.engine.node_ids

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank, all or of its stage, for a torch optimizer."""
        return (parameter for _, parameter in self._run.engine.named_parameters())

    def train_epoch(self, optimizer: torch.optim.Optimizer | None = None) -> float:
        """Train an epoch, by default with the optimizer of the settings. Return the mean loss, equal on every rank."""
        run = self._run
        if optimizer is None:
            run.optimizer.schedule(self.epoch)
        if optimizer is None and run.captured is not None:
            report = run.captured.train_epoch(self.epoch)
        else:
            report = run.engine.train_epoch(self.epoch, run.optimizer if optimizer is None else _UserStepper(optimizer))
        self.epoch += 1
        return report.loss

    def predict(self) -> Tensor:
        """Return exact logits [nodes of this rank, classes]: no codec, no stale rows, no dropout."""
        self._run.engine.drain()
        return self._run.engine.predict()

    def evaluate(self) -> dict[str, float | None]:
        """Return the task's metric on train, val and test; None for an empty split."""
        run = self._run
        metrics = evaluate(run.engine, run.objective)
        return {split: metrics[f"metric/{split}"] for split in SPLITS}

    def gather(self, rows: Tensor) -> Tensor:
        """Gather all rows: [nodes of this rank, ...], in the order of `node_ids` -> [N, ...] in the order of nodes."""
        comm = self._run.comm
        if len(rows) != len(self.node_ids):
            raise ValueError(
                f"{len(rows)} rows, but this rank has {len(self.node_ids)} nodes: one row each, as node_ids"
            )
        parts = comm.gather((self.node_ids.cpu(), rows.detach().cpu()))
        total = None
        if parts is not None:
            ids = torch.cat([ids for ids, _ in parts])
            total = torch.cat([part for _, part in parts])[ids.argsort()]
        return comm.broadcast(total).to(rows.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights of the whole model by name, on every rank; for a PyG model, the state dict of its class.
        With features=learned, also the vectors of all nodes as features.weight."""
        run = self._run
        run.engine.drain()
        weights = run.engine.named_weights()
        mine = {name: each.detach().cpu() if isinstance(each, Tensor) else each for name, each in weights}
        parts = run.comm.gather(mine)
        merged = {name: each for part in parts or () for name, each in part.items()}
        join(merged, {})
        prefix = "net." if run.settings.model.wraps else ""
        return {name.removeprefix(prefix): each for name, each in run.comm.broadcast(merged).items()}

    def close(self) -> None:
        self._run.engine.drain()
        self._run.comm.close()
        self._monitored.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._monitored.__exit__(kind, error, traceback)


class _UserStepper:
    """A caller's torch optimizer with the interface of engines, also for non-finite gradients."""

    refused = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        refuse_closure(optimizer)
        self.optimizer = optimizer

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, norm: float | None = None) -> None:
        self.optimizer.step()


def open_session(settings: Settings, plan_source: PlanSource, folder: Path) -> Session:
    """Join the other ranks, read the graph, plan, and build this rank's part. Collective. folder: for plan.json; rank
    0's is used. Raises ConfigError if the session cannot begin, Failure if a rank is missing or is lost later."""
    check_rank(os.environ)
    rank = int(os.environ.get("RANK", "0"))
    with ExitStack() as inside:
        try:
            world = joined_world(settings)
            if rank == 0:
                claim(folder, inside)
        except ValueError as error:
            raise refusal(error, settings.comm.connect_seconds) from error
        record = RunRecord(settings, world, folder)
        store = None
        if world.size > 1:
            others = join_ranks(record, settings.comm.connect_seconds)
            inside.enter_context(others.watched(settings.comm.lost_seconds))
            store = others.store
        inside.enter_context(restored_torch_settings())
        comm = processes.connected(world, settings.comm, store=store)
        run = prepare(Job(settings, world, folder, plan_source), comm, Host(), Null(), Start())
        return Session(run, inside.pop_all())


def joined_world(settings: Settings) -> World:
    """Return the world of the started ranks. Raise ConfigError if there are too few for the settings."""
    world = world_of(settings)
    if world.how not in ("joined", "alone"):
        raise ConfigError(
            f"world_size={world.size}, but gnnpar.distribute starts no ranks: start the script with torchrun "
            f"--master-port=29500 --nproc-per-node={world.size}, or use gnnpar.train, which starts its own"
        )
    if world.links is not None:
        raise ConfigError("launch=paced shapes the links of ranks that gnnpar starts; use it with gnnpar.train")
    check(settings, world)
    return world


def claim(folder: Path, inside: ExitStack) -> None:
    """Lock the folder until `inside` ends. Raise ConfigError if a run is active in it, or has completed."""
    try:
        inside.enter_context(working_in(folder, remedy="choose another folder=", say=say))
    except (FolderInUse, WriteError) as error:
        raise ConfigError(str(error)) from error
    if (read_result(folder) or {}).get("status") == "completed":
        raise ConfigError(f"{folder} holds a run that has completed, and its plan.json stays; choose another folder=")
