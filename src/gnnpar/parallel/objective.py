"""Loss and metrics of a task from the output rows of one rank. Examples are nodes, or pairs of nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from gnnpar.comm import Communicator
from gnnpar.data.links import Link
from gnnpar.data.tasks import Labelled, Task
from gnnpar.files import JsonDict
from gnnpar.parallel.local import Pass
from gnnpar.parallel.pairs import PairExamples
from gnnpar.partition.shard import Shard
from gnnpar.track.console import say

SPLITS = ("train", "val", "test")


class NodeObjective:
    """Examples are nodes."""

    def __init__(self, task: Task, shard: Shard, comm: Communicator) -> None:
        self._task, self._shard, self._comm = task, shard, comm
        self._train = shard.rows_of_split["train"]
        self._seen = False

    @cached_property
    def _labels(self) -> Tensor:
        return self._shard.y[self._train]

    def loss(self, rows: Tensor, run: Pass) -> Tensor:
        """Return this rank's share of the mean loss over all training examples. Shapes: rows [N, outputs] of its
        nodes."""
        return self._task.loss_sum(rows[self._train], self._labels) / self._shard.num_train

    def metrics(self, rows: Tensor) -> JsonDict:
        """Return metric/train, metric/val, metric/test over all ranks, None for an empty split, equal on every rank.
        For a task with several metrics also metric/more: name -> split -> value."""
        task, comm = self._task, self._comm
        owned = (self._shard.rows_of_split[split] for split in SPLITS)
        statistics = [task.statistics(rows[of_split], self._shard.y[of_split]) for of_split in owned]
        if isinstance(task, Labelled) and task.reads_logits and not self._seen:
            self._warn_of_probabilities(rows)
        self._seen = True
        if task.reduction == "sum":
            totals = comm.all_reduce(torch.stack(statistics)).cpu()  # the host waits once
            values = [_value(task, total) for total in totals]
        else:
            gathered = [comm.gather(each.cpu()) for each in statistics]
            values = comm.broadcast([None if every is None else _value(task, torch.cat(every)) for every in gathered])
        found: JsonDict = {f"metric/{split}": value for split, value in zip(SPLITS, values, strict=True)}
        if not isinstance(task, Labelled) or not task.metrics:
            return found
        more = {task.own_metric: dict(zip(SPLITS, values, strict=True))} | comm.broadcast(self._further(rows))
        return {f"metric/{split}": more[task.metric_name][split] for split in SPLITS} | {"metric/more": more}

    def _further(self, rows: Tensor) -> JsonDict | None:
        """Return metrics of whole splits, name -> split -> value, on rank 0, which gathers their rows in node order.
        Collective."""
        assert isinstance(self._task, Labelled)
        found: JsonDict = {name: {} for name in self._task.metrics}
        for split in SPLITS:
            mine = self._shard.rows_of_split[split]
            every = self._comm.gather([t[mine].cpu() for t in (self._shard.node_ids[: len(rows)], rows, self._shard.y)])
            if every is None:
                continue
            ids, outputs, labels = (torch.cat(each) for each in zip(*every, strict=True))
            order = ids.argsort()
            for name, metric in self._task.metrics.items():
                value = float(metric(outputs[order], labels[order])) if len(ids) else math.nan
                found[name][split] = value if math.isfinite(value) else None
        return found if self._comm.rank == 0 else None

    def _warn_of_probabilities(self, rows: Tensor) -> None:
        """Warn if outputs look like probabilities. Collective."""
        low, high = (float(rows.amin()), float(rows.amax())) if rows.numel() else (math.inf, -math.inf)
        every = self._comm.gather((low, high))
        if every is not None and min(low for low, _ in every) >= 0 and 0 < max(high for _, high in every) <= 1:
            say(
                "the model's outputs look like probabilities (all lie in [0, 1]); task.loss reads logits: remove the "
                "sigmoid or softmax at the model's end"
            )


def fit_task(task: Task, shard: Shard, comm: Communicator, *, in_parts: bool) -> Task:
    """Return the task fitted to all training rows. Collective. `in_parts`: a rank computes the loss of its rows in
    pieces. Raises ValueError if a user's loss does not allow that."""
    if not isinstance(task, Labelled):
        return task
    if (counts := task.counts(shard.y[shard.rows_of_split["train"]])) is not None:
        task = task.with_training_counts(comm.all_reduce(counts), shard.num_train)
    if task.loss is not None:
        task.check_loss(shard.in_degree, in_parts=in_parts or comm.size > 1)
    return task


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


Objective = NodeObjective | PairObjective
"""The loss and metrics of one rank. Collective if examples are pairs."""


def objective_of(task: Task, shard: Shard, model: nn.Module, comm: Communicator, seed: int) -> Objective:
    """Return the objective. Collective if examples are pairs."""
    if isinstance(task, Link):
        return PairObjective(task, comm, PairExamples(task, shard, model, comm, seed))
    return NodeObjective(task, shard, comm)


def _value(task: Task, statistics: Tensor) -> float | None:
    """Return a metric from the statistics of all ranks; None without rows, or with one class."""
    value = float(task.value(statistics)) if statistics.numel() else math.nan
    return None if math.isnan(value) else value
