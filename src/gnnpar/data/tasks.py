"""Tasks: loss and metric of a dataset, computed from the rows of each rank.

A rank calls `loss_sum` on its training rows, and the engine divides by the *global* number of training nodes. For a
metric it calls `statistics` on its rows; `reduction="sum"` adds the matrices over ranks, `"concat"` stacks their rows;
`value` returns the metric of the result. Examples are nodes; in link prediction (links.py) they are pairs of nodes.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar, Literal, Protocol, Self, cast

import torch
import torch.nn.functional as F
from annotated_types import Ge, Lt
from torch import Tensor

from gnnpar.data.dataset import MATRICES, Dataset, TaskName
from gnnpar.data.metrics import LOSSES, METRICS, Rows, confusion, explained, moments, nll, roc_auc
from gnnpar.paths import locate

Metric = Callable[[Tensor, Tensor], float | Tensor]


class Task(Protocol):
    """Loss and metric of one kind of examples. A metric over no rows is nan."""

    name: ClassVar[TaskName]
    reduction: ClassVar[Literal["sum", "concat"]]

    @property
    def out_dim(self) -> int: ...
    @property
    def metric_name(self) -> str: ...
    def loss_sum(self, logits: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the sum of the losses of all rows, weighted by `weight` [N]."""
        ...

    @abstractmethod
    def statistics(self, logits: Tensor, y: Tensor) -> Tensor: ...
    @abstractmethod
    def value(self, statistics: Tensor) -> float: ...
    def values(self, statistics: Tensor) -> Mapping[str, float]:
        """Return all metrics by name; empty for a task with one metric."""
        return {}


@dataclass(frozen=True, eq=False)
class Labelled(Task):
    """A task with nodes as examples. Entries of nan in a matrix y are unknown, and ignored in losses and metrics.

    loss: (outputs, y) -> losses [N] or [N, C], or their mean; None: the task's own. class_weight [C]: weight of rows by
    class. scale: factor that makes `loss_sum` / training rows the mean over weights, or over known entries, of the
    whole graph. metrics: name -> function of (outputs, y) of a split, rows in the order of nodes. main: the metric for
    model selection; None: the task's own.
    """

    num_classes: int
    loss: Rows | None = None
    class_weight: Tensor | Literal["balanced"] | None = None
    label_smoothing: float = 0.0
    scale: float = 1.0
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    main: str | None = None
    name: ClassVar[TaskName] = "single_label"
    own_metric: ClassVar[str] = "accuracy"
    reduction: ClassVar[Literal["sum", "concat"]] = "sum"

    @property
    def out_dim(self) -> int:
        return self.num_classes

    @property
    def metric_name(self) -> str:
        return self.main or self.own_metric

    @property
    def used_loss(self) -> Rows:
        return self.loss or next(iter(LOSSES[self.name].values()))

    @property
    def reads_logits(self) -> bool:
        return self.name != "regression" and self.loss in (None, *LOSSES[self.name].values()) and self.loss != nll

    def inputs(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (outputs, targets) in the shapes and dtypes that losses take."""
        return logits, y.to(logits.dtype) if self.name in MATRICES else y

    def loss_sum(self, logits: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        outputs, targets = self.inputs(logits, y)
        unknown = targets.isnan() if self.name in MATRICES else None
        targets = targets if unknown is None else targets.masked_fill(unknown, 0)
        loss = self.used_loss(outputs, targets)
        if loss.ndim == 0:
            if weight is not None:
                raise ValueError("task.loss returns one number, and this strategy weights rows: return one value a row")
            return (loss * len(y) if len(y) else logits.sum()) * self.scale
        loss = loss if unknown is None or loss.ndim == 1 else loss.masked_fill(unknown, 0)
        loss = loss.mean(1) if loss.ndim == 2 and self.name == "regression" else loss
        if self.class_weight is not None:
            loss = loss * self._weights(logits)[y]
        if weight is not None:
            loss = loss * (weight if loss.ndim == 1 else weight[:, None])
        return loss.sum() / (loss.shape[1] if loss.ndim == 2 else 1) * self.scale

    def _weights(self, like: Tensor) -> Tensor:
        assert isinstance(self.class_weight, Tensor), "`with_training_counts` comes first"
        return self.class_weight.to(like)

    def counts(self, y: Tensor) -> Tensor | None:
        """Return counts for `with_training_counts`, to be summed over ranks: training rows by class [C], or known
        entries [1]; None: no counts."""
        if self.name in MATRICES:
            return (~y.isnan()).sum().double()[None]
        return None if self.class_weight is None else y.bincount(minlength=self.num_classes).double()

    def with_training_counts(self, counts: Tensor, rows: int) -> Self:
        """Return the task with class weights and `scale` of all training `rows`. `counts`: summed over ranks."""
        if self.name in MATRICES:
            return replace(self, scale=rows * self.num_classes / float(counts))
        weights = self.class_weight
        if not isinstance(weights, Tensor):  # balanced; 0 for a class without rows
            weights = torch.where(counts > 0, rows / (len(counts) * counts.clamp(min=1)), 0.0)
        if len(weights) != len(counts):
            raise ValueError(
                f"task.class_weight has {len(weights)} numbers, and y {len(counts)} classes; give one each"
            )
        weights = weights.to(counts)
        if not (total := float((weights * counts).sum())) > 0:
            raise ValueError("task.class_weight is 0 for all classes of the training split; give one a positive weight")
        return replace(self, class_weight=weights, scale=rows / total)

    def check_loss(self, like: Tensor, *, in_parts: bool) -> None:
        """Try a user's loss on 64 rows in the dtype of `like`. Raises ValueError if its shape is wrong, and, if rows
        are computed `in_parts`, if the loss of all rows is not the mean over parts."""
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(64, self.out_dim, generator=generator, dtype=torch.float64)
        y = torch.rand(64, self.num_classes, generator=generator)
        y = y if self.name == "regression" else (y < 0.5).float() if self.name == "multi_label" else y.argmax(1)
        outputs, targets = self.inputs(logits.to(like), y.to(like.device))
        with torch.no_grad():
            whole, first, rest = (self.used_loss(outputs[at], targets[at]) for at in _PROBED)
        again = "return one value a row (reduction='none')"
        if whole.ndim > 2 or (whole.ndim and len(whole) != 64):
            raise ValueError(f"task.loss returns {list(whole.shape)} of 64 rows: {again}, an entry, or their mean")
        if self.scale != 1.0 and whole.ndim < (2 if self.name in MATRICES else 1):
            raise ValueError(f"task.loss returns one number, and rows have weights or entries lack: {again} or entry")
        parts = (24 * first + 40 * rest) / 64 if whole.ndim == 0 else torch.cat([first, rest])
        if in_parts and not torch.allclose(whole, parts, rtol=1e-9 if like.dtype == torch.float64 else 1e-4):
            raise ValueError(
                "task.loss of all rows is no mean of the losses of its parts, which ranks compute: "
                f"{again}; weights of classes are task.class_weight"
            )


_PROBED = (slice(0, 64), slice(0, 24), slice(24, 64))


@dataclass(frozen=True, eq=False)
class SingleLabel(Labelled):
    """One of C classes: cross entropy and accuracy.

    Shapes: logits [N, C], y [N] int64; statistics [1, 2] = correct, rows.
    """

    def loss_sum(self, logits: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        if self.loss is not None:
            return super().loss_sum(logits, y, weight)
        of_classes = None if self.class_weight is None else self._weights(logits)
        how = "sum" if weight is None else "none"
        loss = F.cross_entropy(logits, y, of_classes, reduction=how, label_smoothing=self.label_smoothing)
        return (loss if weight is None else (loss * weight).sum()) * self.scale

    def statistics(self, logits: Tensor, y: Tensor) -> Tensor:
        correct = (logits.argmax(1) == y).sum()
        return torch.stack([correct, torch.full_like(correct, len(y))]).double()[None]

    def value(self, statistics: Tensor) -> float:
        correct, rows = statistics[0].tolist()
        return correct / rows if rows else float("nan")


@dataclass(frozen=True, eq=False)
class Binary(Labelled):
    """Two classes, one logit: binary cross entropy and the area under the ROC curve. Shapes: logits [N, 1], y [N] int64
    of 0/1; losses take [N] and [N]; statistics [N, 2] = score, label. The area is nan if a class is absent."""

    name: ClassVar[TaskName] = "binary"
    own_metric: ClassVar[str] = "roc_auc"
    reduction: ClassVar[Literal["sum", "concat"]] = "concat"

    @property
    def out_dim(self) -> int:
        return 1

    def inputs(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return logits[:, 0], y.to(logits.dtype)

    def statistics(self, logits: Tensor, y: Tensor) -> Tensor:
        return torch.stack([logits[:, 0].double(), y.double()], 1)

    def value(self, statistics: Tensor) -> float:
        return roc_auc(statistics[:, 0], statistics[:, 1])


@dataclass(frozen=True, eq=False)
class MultiLabel(Labelled):
    """Any subset of C classes: binary cross entropy averaged over classes, micro-F1 at logit > 0 from summed counts.

    Shapes: logits [N, C], y [N, C] of 0/1, nan: unknown; statistics [1, 4] = true positives, false positives, false
    negatives, rows.
    """

    name: ClassVar[TaskName] = "multi_label"
    own_metric: ClassVar[str] = "micro_f1"

    def statistics(self, logits: Tensor, y: Tensor) -> Tensor:
        hits, false_positives, false_negatives = confusion(logits, y).sum(1)
        return torch.stack([hits, false_positives, false_negatives, torch.full_like(hits, len(y))])[None]

    def value(self, statistics: Tensor) -> float:
        hits, false_positives, false_negatives, rows = statistics[0].tolist()
        total = 2 * hits + false_positives + false_negatives
        if not rows:
            return float("nan")
        return 2 * hits / total if total else 0.0


@dataclass(frozen=True, eq=False)
class Regression(Labelled):
    """T numbers: squared error and R^2, both averaged over targets. Shapes: output [N, T], y [N, T], nan: unknown;
    statistics [1, 4 T], `moments` in one row. R^2 is nan for a constant target."""

    name: ClassVar[TaskName] = "regression"
    own_metric: ClassVar[str] = "r2"
    reduction: ClassVar[Literal["sum", "concat"]] = "concat"

    def statistics(self, logits: Tensor, y: Tensor) -> Tensor:
        return moments(logits, y).flatten(1)

    def value(self, statistics: Tensor) -> float:
        return explained(statistics.view(len(statistics), 4, self.num_classes))


class TaskConfig(Protocol):
    """A frozen dataclass with the keys of conf/task/*.yaml. decoder: how to score pairs of nodes, if pairs are the
    examples; None: nodes are the examples."""

    @property
    def decoder(self) -> Literal["dot", "mlp"] | None: ...
    def prepare(self, dataset: Dataset, seed: int) -> Dataset:
        """Return the dataset with the examples of the task. `seed`: the run's seed."""
        ...

    def of(self, name: TaskName, num_classes: int) -> Task:
        """Return the task of a prepared dataset: `of(dataset.task, dataset.num_classes)`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The task of the dataset's labels, one example per node.

    loss: a name of LOSSES, or a function by module.name. class_weight, label_smoothing: as in torch's CrossEntropyLoss;
    balanced: in inverse proportion to training rows. metric: for model selection, by default the task's own. metrics:
    further ones; names of METRICS, or functions by module.name. given: the caller's functions, under "loss" and
    "metrics.NAME".
    """

    loss: str | None = None
    class_weight: Literal["balanced"] | tuple[Annotated[float, Ge(0)], ...] | None = None
    label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    metric: str | None = None
    metrics: tuple[str, ...] | dict[str, str] = ()
    given: Mapping[str, Rows] = field(default_factory=dict, init=False, repr=False)

    @property
    def decoder(self) -> Literal["dot", "mlp"] | None:
        return None

    def prepare(self, dataset: Dataset, seed: int) -> Dataset:
        if dataset.task == "link":
            raise ValueError("dataset.task=link leaves labels out, and they are the task: set task=link")
        return dataset

    def with_functions(self, given: Mapping[str, Rows]) -> Self:
        made = replace(self)
        object.__setattr__(made, "given", {**self.given, **given})
        return made

    def functions(self) -> dict[str, Rows]:
        """Return the user's functions by key, "loss" and "metrics.NAME". Raises ValueError if an import fails."""
        names = {f"metrics.{name}": each for name, each in self._named_metrics().items()} | {"loss": self.loss or ""}
        return {key: self.given.get(key) or imported(key, name) for key, name in names.items() if _OWN.search(name)}

    def _named_metrics(self) -> dict[str, str]:
        """Return name -> metric. A user's metric has the name of its function."""
        named = self.metrics if isinstance(self.metrics, dict) else {_OWN.split(m)[-1]: m for m in self.metrics}
        return {**named, **({} if self.metric is None or self.metric in named else {self.metric: self.metric})}

    def of(self, name: TaskName, num_classes: int) -> Task:
        task, own, losses = make_task(name, num_classes), self.functions(), LOSSES[name]
        if self.loss is not None and "loss" not in own and self.loss not in losses:
            raise ValueError(
                f"task.loss={self.loss} is no loss of {name} labels ({', '.join(losses)}); choose one, or your own "
                "function, module.name"
            )
        plain = self.loss is None or self.loss == next(iter(losses))
        if self.class_weight is not None and name in MATRICES:
            raise ValueError(f"task.class_weight is for one class a node, and these labels are {name}; leave it out")
        if self.label_smoothing and not (plain and name == "single_label"):
            raise ValueError("task.label_smoothing is of task.loss=cross_entropy of classes; leave it out")
        metrics: dict[str, Metric] = {}
        for title, metric in self._named_metrics().items():
            found, tasks = METRICS.get(metric, (own.get(f"metrics.{title}"), (name,)))
            if found is None or name not in tasks:
                known = ", ".join(each for each, (_, tasks) in METRICS.items() if name in tasks)
                key = "task.metric" if metric == self.metric else "task.metrics"
                raise ValueError(f"{key}={metric} is no metric of {name} labels ({known}); choose one")
            if (title, metric) != (task.own_metric,) * 2:
                metrics[title] = partial(found, name) if metric in METRICS else found
        weights = self.class_weight
        return replace(
            task,
            loss=None if plain else own.get("loss") or losses[str(self.loss)],
            class_weight=torch.tensor(weights, dtype=torch.float64) if isinstance(weights, tuple) else weights,
            label_smoothing=self.label_smoothing,
            metrics=metrics,
            main=self.metric,
        )


_OWN = re.compile("[.:]")  # only names of functions contain these


def imported(key: str, name: str) -> Rows:
    """Import a function, or make an object of a class, by module.name or module:name. Raises ValueError."""
    try:
        found = locate(name.replace(":", "."))
        found = found() if isinstance(found, type) else found
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"task.{key}={name} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"task.{key}={name} is a {type(found).__name__}; give a function of (outputs, y)")
    return cast("Rows", found)


def make_task(name: TaskName, num_classes: int) -> Labelled:
    """Return the task of a dataset: `make_task(dataset.task, dataset.num_classes)`."""
    return _TASKS.get(name, Binary)(num_classes)


_TASKS: dict[TaskName, type[SingleLabel | Binary | MultiLabel | Regression]] = {
    "regression": Regression,
    "single_label": SingleLabel,
    "multi_label": MultiLabel,
}
