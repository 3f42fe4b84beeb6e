"""Losses equal torch's, metrics equal scikit-learn's definitions, and both can be computed rank by rank."""

import math

import pytest
import torch
import torch.nn.functional as F

from gnnpar.data import make_task
from gnnpar.data.tasks import roc_auc


def case(name):
    gen = torch.Generator().manual_seed(0)
    task = make_task(name, 2 if name == "binary" else 5)
    logits = torch.randn(40, task.out_dim, generator=gen)
    if name == "regression":
        return task, logits, 3 + torch.randn(40, 5, generator=gen)
    if name == "multi_label":
        return task, logits, (torch.rand(40, 5, generator=gen) < 0.3).float()
    return task, logits, torch.randint(0, max(task.out_dim, 2), (40,), generator=gen)


def test_single_label_is_cross_entropy_and_accuracy():
    task, logits, y = case("single_label")
    torch.testing.assert_close(task.loss_sum(logits, y) / 40, F.cross_entropy(logits, y))
    assert task.value(task.statistics(logits, y)) == pytest.approx((logits.argmax(1) == y).float().mean().item())


def test_multi_label_is_mean_bce_and_micro_f1():
    task, logits, y = case("multi_label")
    torch.testing.assert_close(task.loss_sum(logits, y) / 40, F.binary_cross_entropy_with_logits(logits, y))
    predicted = logits > 0
    hits = (predicted & (y > 0)).sum().item()
    precision, recall = hits / predicted.sum().item(), hits / y.sum().item()
    assert task.value(task.statistics(logits, y)) == pytest.approx(2 * precision * recall / (precision + recall))
    assert task.value(task.statistics(torch.full_like(logits, -1), torch.zeros_like(y))) == 0


def test_binary_is_bce_and_area_under_the_curve():
    task, logits, y = case("binary")
    assert task.out_dim == 1
    torch.testing.assert_close(
        task.loss_sum(logits, y) / 40, F.binary_cross_entropy_with_logits(logits[:, 0], y.float())
    )
    score = (logits[:, 0] * 2).round()  # ties
    positive, negative = score[y == 1], score[y == 0]
    pairs = (positive[:, None] > negative).double() + 0.5 * (positive[:, None] == negative).double()
    assert roc_auc(score, y) == pytest.approx(pairs.mean().item())
    assert math.isnan(roc_auc(score, torch.ones(40)))


def test_regression_is_the_mean_squared_error_and_r2():
    task, output, y = case("regression")
    torch.testing.assert_close(task.loss_sum(output, y) / 40, F.mse_loss(output, y))
    weight = torch.rand(40)
    expected = (((output - y) ** 2).mean(1) * weight).sum()
    torch.testing.assert_close(task.loss_sum(output, y, weight), expected)
    errors, spread = ((output - y) ** 2).sum(0), ((y - y.mean(0)) ** 2).sum(0)
    assert task.value(task.statistics(output, y)) == pytest.approx((1 - errors / spread).mean().item())
    assert task.value(task.statistics(y, y)) == 1
    assert math.isnan(task.value(task.statistics(output, torch.full_like(y, 7.3))))


@pytest.mark.parametrize("name", ["single_label", "binary", "multi_label", "regression"])
def test_statistics_of_ranks_add_up(name):
    task, logits, y = case(name)
    rows = [slice(0, 13), slice(13, 13), slice(13, 40)]
    parts = [task.statistics(logits[r], y[r]) for r in rows]
    assert all(p.dtype == torch.float64 and p.ndim == 2 for p in parts)
    whole = torch.stack(parts).sum(0) if task.reduction == "sum" else torch.cat(parts)
    assert task.value(whole) == pytest.approx(task.value(task.statistics(logits, y)), nan_ok=False)
    assert math.isnan(task.value(task.statistics(logits[:0], y[:0])))
