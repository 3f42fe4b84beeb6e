"""The loss and the metrics of a task, of the output rows that a rank owns: examples are nodes, or pairs of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from gnnpar.comm import Communicator
from gnnpar.data.links import Link
from gnnpar.data.tasks import Task
from gnnpar.durable import JsonDict
from gnnpar.parallel.local import Pass
from gnnpar.parallel.pairs import PairExamples
from gnnpar.partition.shard import Shard

SPLITS = ("train", "val", "test")


class Objective(Protocol):
    """Of one rank. Collective where examples are pairs."""

    def loss(self, rows: Tensor, run: Pass) -> Tensor:
        """This rank's share of the mean loss over all training examples. Shapes: rows [N, outputs] of its nodes."""
        ...

    def metrics(self, rows: Tensor) -> JsonDict:
        """metric/train, metric/val, metric/test over all ranks, None for an empty split; the same on every rank. Of a
        task with several metrics also metric/more: name -> split -> value."""
        ...


def objective_of(task: Task, shard: Shard, model: nn.Module, comm: Communicator, seed: int) -> Objective:
    """Collective where examples are pairs."""
    if isinstance(task, Link):
        return PairObjective(task, comm, PairExamples(task, shard, model, comm, seed))
    return NodeObjective(task, shard, comm)


class NodeObjective:
    """Examples are nodes."""

    def __init__(self, task: Task, shard: Shard, comm: Communicator) -> None:
        self._task, self._shard, self._comm = task, shard, comm
        self._train = shard.rows_of_split["train"]

    @cached_property
    def _labels(self) -> Tensor:
        return self._shard.y[self._train]

    def loss(self, rows: Tensor, run: Pass) -> Tensor:
        return self._task.loss_sum(rows[self._train], self._labels) / self._shard.num_train

    def metrics(self, rows: Tensor) -> JsonDict:
        task, comm = self._task, self._comm
        owned = (self._shard.rows_of_split[split] for split in SPLITS)
        statistics = [task.statistics(rows[of_split], self._shard.y[of_split]) for of_split in owned]
        if task.reduction == "sum":
            totals = comm.all_reduce(torch.stack(statistics)).cpu()  # the host waits once
            values = [_value(task, total) for total in totals]
        else:
            gathered = [comm.gather(each.cpu()) for each in statistics]
            values = comm.broadcast([None if every is None else _value(task, torch.cat(every)) for every in gathered])
        return {f"metric/{split}": value for split, value in zip(SPLITS, values, strict=True)}


@dataclass(frozen=True)
class PairObjective:
    """Examples are pairs of nodes. Training pairs are not evaluated."""

    task: Link
    comm: Communicator
    examples: PairExamples

    def loss(self, rows: Tensor, run: Pass) -> Tensor:
        return self.examples.loss(rows, run)

    def metrics(self, rows: Tensor) -> JsonDict:
        found: JsonDict = {"metric/train": None}
        more: JsonDict = {}
        for split in SPLITS[1:]:
            every = self.comm.gather(self.examples.statistics(rows, split))
            values = None if every is None else self.task.values(torch.cat(every))
            for name, value in self.comm.broadcast(values).items():
                more.setdefault(name, {})[split] = None if math.isnan(value) else value
            found[f"metric/{split}"] = more[self.task.metric_name][split]
        return found | {"metric/more": more}


def _value(task: Task, statistics: Tensor) -> float | None:
    """A metric from the statistics of all ranks; None where there are no rows, or of one class only."""
    value = float(task.value(statistics)) if statistics.numel() else math.nan
    return None if math.isnan(value) else value
