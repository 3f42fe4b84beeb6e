"""Tasks: the loss and the metric of a dataset, in the form ranks can share.

A rank calls `loss_sum` on the training rows it owns and the engine divides by the *global* number of training nodes.
For a metric it calls `statistics` on the rows it owns: `reduction="sum"` means add the matrices over ranks,
`"concat"` means stack their rows on one rank; `value` then turns the result into the number reported.
Examples of a task are nodes, but for link prediction (links.py), whose examples are pairs of nodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnpar.data.dataset import Dataset, TaskName


class Task(Protocol):
    """Loss and metric of one kind of labels. A metric over no rows is nan."""

    @property
    def name(self) -> TaskName: ...
    @property
    def out_dim(self) -> int: ...
    @property
    def metric_name(self) -> str: ...
    @property
    def reduction(self) -> Literal["sum", "concat"]: ...
    def loss_sum(self, logits: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Of all rows; with weights [N], each row's loss as often as its weight says."""
        ...

    def statistics(self, logits: Tensor, y: Tensor) -> Tensor: ...
    def value(self, statistics: Tensor) -> float: ...
    def values(self, statistics: Tensor) -> Mapping[str, float]:
        """All metrics of a task that has several, by name; none of one that has `value` alone."""
        ...


class OneMetric:
    """A task that has `value` alone."""

    def values(self, statistics: Tensor) -> Mapping[str, float]:
        return {}


@dataclass(frozen=True)
class SingleLabel(OneMetric):
    """One of C classes: cross entropy and accuracy.

    Shapes: logits [N, C], y [N] int64; statistics [1, 2] = correct, rows.
    """

    num_classes: int
    name: TaskName = "single_label"
    metric_name: str = "accuracy"
    reduction: Literal["sum", "concat"] = "sum"

    @property
    def out_dim(self) -> int:
        return self.num_classes

    def loss_sum(self, logits: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        if weight is not None:
            return (F.cross_entropy(logits, y, reduction="none") * weight).sum()
        return F.cross_entropy(logits, y, reduction="sum")

    def statistics(self, logits: Tensor, y: Tensor) -> Tensor:
        correct = (logits.argmax(1) == y).sum()
        return torch.stack([correct, torch.full_like(correct, len(y))]).double()[None]

    def value(self, statistics: Tensor) -> float:
        correct, rows = statistics[0].tolist()
        return correct / rows if rows else float("nan")


@dataclass(frozen=True)
class Binary(OneMetric):
    """Two classes, one logit: binary cross entropy and the area under the ROC curve.

    Shapes: logits [N, 1], y [N] int64 of 0/1; statistics [N, 2] = score, label.
    The area is nan where a class is absent.
    """

    name: TaskName = "binary"
    metric_name: str = "roc_auc"
    reduction: Literal["sum", "concat"] = "concat"

    @property
    def out_dim(self) -> int:
        return 1

    def loss_sum(self, logits: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits[:, 0], y.to(logits.dtype), weight=weight, reduction="sum")

    def statistics(self, logits: Tensor, y: Tensor) -> Tensor:
        return torch.stack([logits[:, 0].double(), y.double()], 1)

    def value(self, statistics: Tensor) -> float:
        return roc_auc(statistics[:, 0], statistics[:, 1])


@dataclass(frozen=True)
class MultiLabel(OneMetric):
    """Any subset of C classes: binary cross entropy averaged over classes, micro-F1 at logit > 0 from summed counts.

    Shapes: logits [N, C], y [N, C] of 0/1; statistics [1, 4] = true positives, false positives, false negatives, rows.
    """

    num_classes: int
    name: TaskName = "multi_label"
    metric_name: str = "micro_f1"
    reduction: Literal["sum", "concat"] = "sum"

    @property
    def out_dim(self) -> int:
        return self.num_classes

    def loss_sum(self, logits: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        weight = None if weight is None else weight[:, None]
        loss = F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), weight=weight, reduction="sum")
        return loss / self.num_classes

    def statistics(self, logits: Tensor, y: Tensor) -> Tensor:
        predicted, actual = logits > 0, y > 0.5
        hits = (predicted & actual).sum()
        return torch.stack([hits, predicted.sum() - hits, actual.sum() - hits, torch.full_like(hits, len(y))]).double()[
            None
        ]

    def value(self, statistics: Tensor) -> float:
        hits, false_positives, false_negatives, rows = statistics[0].tolist()
        total = 2 * hits + false_positives + false_negatives
        if not rows:
            return float("nan")
        return 2 * hits / total if total else 0.0


@dataclass(frozen=True)
class Regression(OneMetric):
    """T numbers: squared error averaged over targets, and R^2, the share of a target's variance that is explained,
    averaged over targets.

    Shapes: output [N, T], y [N, T]; statistics [1, 1 + 3 T] = rows, then of every target the sum of y, of y^2 and of
    squared errors. R^2 is nan where a target is constant.
    """

    num_targets: int
    name: TaskName = "regression"
    metric_name: str = "r2"
    reduction: Literal["sum", "concat"] = "sum"

    @property
    def out_dim(self) -> int:
        return self.num_targets

    def loss_sum(self, logits: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        squares = (logits - y.to(logits.dtype)).square().mean(1)
        return squares.sum() if weight is None else (squares * weight).sum()

    def statistics(self, logits: Tensor, y: Tensor) -> Tensor:
        target = y.double()
        sums = (target.sum(0), target.square().sum(0), (logits.double() - target).square().sum(0))
        return torch.cat([target.new_tensor([len(y)]), *sums])[None]

    def value(self, statistics: Tensor) -> float:
        rows = float(statistics[0, 0])
        total, squares, errors = statistics[0, 1:].view(3, self.num_targets)
        spread = squares - total.square() / rows if rows else torch.zeros_like(squares)
        constant = spread <= 1e-12 * squares
        return float("nan") if bool(constant.any()) else float((1 - errors / spread).mean())


class TaskConfig(Protocol):
    """A frozen dataclass whose fields are the keys of conf/task/*.yaml.

    `decoder`: how pairs of nodes are scored, where they are the examples, so that a rank reads output rows of others.
    """

    @property
    def decoder(self) -> Literal["dot", "mlp"] | None: ...
    def prepare(self, dataset: Dataset, seed: int) -> Dataset:
        """The dataset with the examples of the task; `seed` is the run's seed."""
        ...

    def of(self, name: TaskName, num_classes: int) -> Task:
        """The task of a prepared dataset: `of(dataset.task, dataset.num_classes)`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The task of the dataset's labels, one example a node."""

    @property
    def decoder(self) -> Literal["dot", "mlp"] | None:
        return None

    def prepare(self, dataset: Dataset, seed: int) -> Dataset:
        if dataset.task == "link":
            raise ValueError("dataset.task=link leaves labels out, and they are the task: set task=link")
        return dataset

    def of(self, name: TaskName, num_classes: int) -> Task:
        return make_task(name, num_classes)


def make_task(name: TaskName, num_classes: int) -> Task:
    """The task of a dataset: `make_task(dataset.task, dataset.num_classes)`."""
    if name == "regression":
        return Regression(num_classes)
    if name == "single_label":
        return SingleLabel(num_classes)
    if name == "multi_label":
        return MultiLabel(num_classes)
    return Binary()


def roc_auc(score: Tensor, label: Tensor) -> float:
    """Probability that a random positive outscores a random negative, ties counting one half.

    Shapes: score [N], label [N] of 0/1.
    """
    positive = label > 0.5
    num_positive = int(positive.sum())
    num_negative = len(label) - num_positive
    if not num_positive or not num_negative:
        return float("nan")
    _, inverse, counts = torch.unique(score, return_inverse=True, return_counts=True)
    mean_rank = counts.cumsum(0).double() - (counts.double() - 1) / 2  # ranks from 1, averaged over ties
    rank_sum = float(mean_rank[inverse][positive].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)
