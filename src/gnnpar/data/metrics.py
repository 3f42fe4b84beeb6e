"""Losses and metrics by name. Losses of task.loss: (outputs, y) -> one value per row [N], or per entry [N, C]. Metrics
of task.metric and task.metrics: functions of the outputs and labels of a whole split. Entries of nan in a matrix of
labels are unknown; metrics ignore them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnpar.data.dataset import TaskName

Rows = Callable[[Tensor, Tensor], Tensor]

cross_entropy: Rows = partial(F.cross_entropy, reduction="none")
nll: Rows = partial(F.nll_loss, reduction="none")  # outputs are log-probabilities
bce: Rows = partial(F.binary_cross_entropy_with_logits, reduction="none")
mse: Rows = partial(F.mse_loss, reduction="none")
l1: Rows = partial(F.l1_loss, reduction="none")
huber: Rows = partial(F.huber_loss, reduction="none")


def focal(logits: Tensor, y: Tensor) -> Tensor:
    """Return (1 - p)^2 times the cross entropy, p of the true label (Lin et al. 2017, arXiv:1708.02002, gamma 2)."""
    loss = bce(logits, y) if y.is_floating_point() else cross_entropy(logits, y)
    return (1 - torch.exp(-loss)).square() * loss


LOSSES: dict[TaskName, dict[str, Rows]] = {  # the first is the task's own
    "single_label": {"cross_entropy": cross_entropy, "nll": nll, "focal": focal},
    "binary": {"bce": bce, "focal": focal},
    "multi_label": {"bce": bce, "focal": focal},
    "regression": {"mse": mse, "l1": l1, "huber": huber},
}


def confusion(logits: Tensor, y: Tensor) -> Tensor:
    """Return true positives, false positives and false negatives of every class, [3, C] float64, of known entries.

    Shapes: logits [N, C], y [N] class ids or [N, C]; or logits [N, 1], y [N] of two classes.
    """
    if y.ndim == 1:
        classes = max(2, logits.shape[1])
        chosen = logits.argmax(1) if logits.shape[1] > 1 else (logits[:, 0] > 0).long()
        predicted, actual = F.one_hot(chosen, classes).bool(), F.one_hot(y, classes).bool()
    else:
        predicted, actual = (logits > 0) & ~y.isnan(), y > 0.5
    hits = (predicted & actual).sum(0)
    return torch.stack([hits, predicted.sum(0) - hits, actual.sum(0) - hits]).double()


def f1(task: TaskName, logits: Tensor, y: Tensor, *, macro: bool) -> float:
    """Return F1 as in scikit-learn: skip a class that is neither predicted nor present; such a label counts 0."""
    counts = confusion(logits, y)
    counts = counts if macro else counts.sum(1, keepdim=True)
    hits, wrong = counts[0], counts[1:].sum(0)
    scores = 2 * hits / (2 * hits + wrong).clamp(min=1)
    return float((scores if task == "multi_label" else scores[hits + wrong > 0]).mean())


def accuracy(task: TaskName, logits: Tensor, y: Tensor) -> float:
    """Return the share of correct rows, or of correct known entries of a matrix."""
    if y.ndim == 1:
        return f1(task, logits, y, macro=False)
    return float(((logits > 0) == (y > 0.5))[~y.isnan()].double().mean())


def area(task: TaskName, logits: Tensor, y: Tensor) -> float:
    """Return the area under the ROC curve; for a matrix the mean over columns with both labels, as OGB's evaluator."""
    columns = y[:, None] if y.ndim == 1 else y
    known = [(s[~c.isnan()], c[~c.isnan()]) for s, c in zip(logits.double().T, columns.double().T, strict=True)]
    return float(torch.tensor([roc_auc(*each) for each in known], dtype=torch.float64).nanmean())


def mae(task: TaskName, output: Tensor, y: Tensor) -> float:
    return float((output.double() - y).abs().nanmean())


def rmse(task: TaskName, output: Tensor, y: Tensor) -> float:
    """Return the root mean squared error, averaged over targets as in scikit-learn."""
    return float((output.double() - y).square().nanmean(0).sqrt().mean())


def r2(task: TaskName, output: Tensor, y: Tensor) -> float:
    return explained(moments(output, y))


def moments(output: Tensor, y: Tensor) -> Tensor:
    """Return for every target the number of known values, their mean, the sum of squares around it, and the sum of
    squared errors. Shapes: [N, T], [N, T] -> [1, 4, T]."""
    known, target = ~y.isnan(), y.double()
    count = known.sum(0).double()
    mean = target.nan_to_num(0.0).sum(0) / count.clamp(min=1)
    spread, errors = (torch.where(known, d, 0.0).square().sum(0) for d in (target - mean, output.double() - target))
    return torch.stack([count, mean, spread, errors])[None]


def explained(moments: Tensor) -> float:
    """Return R^2 from moments of several parts, [P, 4, T], the mean over targets; nan for a constant target. Means are
    merged (Chan et al. 1982), so that an offset of the targets costs no precision."""
    count, mean, spread, errors = moments.unbind(1)
    total = count.sum(0)
    center = (count * mean).sum(0) / total.clamp(min=1)
    spread = spread.sum(0) + (count * (mean - center).square()).sum(0)
    constant = spread <= total * (1e-13 * center).square()
    return float("nan") if bool(constant.any()) else float((1 - errors.sum(0) / spread).mean())


def roc_auc(score: Tensor, label: Tensor) -> float:
    """Return the probability that a random positive outscores a random negative; ties count one half.

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


_CLASSES: tuple[TaskName, ...] = ("single_label", "binary", "multi_label")
METRICS: dict[str, tuple[Callable[..., float], tuple[TaskName, ...]]] = {
    "accuracy": (accuracy, _CLASSES),
    "micro_f1": (partial(f1, macro=False), _CLASSES),
    "macro_f1": (partial(f1, macro=True), _CLASSES),
    "roc_auc": (area, ("binary", "multi_label")),
    "mae": (mae, ("regression",)),
    "rmse": (rmse, ("regression",)),
    "r2": (r2, ("regression",)),
}
"""Name -> the metric, and the tasks that have it."""
