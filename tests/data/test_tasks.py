"""Losses equal torch's, metrics equal scikit-learn's definitions, and both can be computed rank by rank."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportArgumentType=false

import math

import pytest
import torch
import torch.nn.functional as F

from gnnpar.data import make_task
from gnnpar.data.metrics import METRICS
from gnnpar.data.raw import RawGraph, checked, task_of
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


def test_r2_of_targets_with_a_large_offset_keeps_its_digits():
    task, output, y = case("regression")
    output, y = output.double(), y.double()
    offset = 1.7e9
    parts = [task.statistics(output[r] + offset, y[r] + offset) for r in (slice(0, 7), slice(7, 40))]
    assert task.value(torch.cat(parts)) == pytest.approx(task.value(task.statistics(output, y)), rel=1e-6)
    moved = task.statistics(output + offset, torch.full_like(y, offset))
    assert math.isnan(task.value(moved))


@pytest.mark.parametrize("name", ["single_label", "multi_label"])
def test_f1_by_name_equals_its_definition(name):
    _, logits, y = case(name)
    logits[:, 4] = -9  # class 4 is neither there nor predicted
    y[y == 4] = 3
    if name == "multi_label":
        y[:, 4] = 0
    predicted = F.one_hot(logits.argmax(1), 5).bool() if name == "single_label" else logits > 0
    actual = F.one_hot(y, 5).bool() if name == "single_label" else y > 0
    hits, total = (predicted & actual).sum(0), predicted.sum(0) + actual.sum(0)
    scores = [2 * int(h) / int(n) if n else 0.0 for h, n in zip(hits, total, strict=True)]
    macro = sum(scores) / (4 if name == "single_label" else 5)  # as scikit-learn: no class, but a label of score 0
    assert METRICS["macro_f1"][0](name, logits, y) == pytest.approx(macro, rel=1e-12)
    assert METRICS["micro_f1"][0](name, logits, y) == pytest.approx(2 * int(hits.sum()) / int(total.sum()), rel=1e-12)


def test_errors_by_name_equal_their_definitions():
    _, output, y = case("regression")
    y[3, 1] = torch.nan
    known = ~y.isnan()
    errors = (output - y).double()
    assert METRICS["mae"][0]("regression", output, y) == pytest.approx(errors[known].abs().mean().item())
    columns = [errors[known[:, t], t].square().mean().sqrt().item() for t in range(5)]
    assert METRICS["rmse"][0]("regression", output, y) == pytest.approx(sum(columns) / 5)


def labelled(y, task="auto"):
    edges = torch.zeros(2, 0, dtype=torch.int64)
    return checked(RawGraph(name="g", x=torch.zeros(len(y), 1), y=y, edge_index=edges, task=task_of(y, task)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_one_hot_labels_are_one_class_a_node(dtype, capsys):
    classes = torch.tensor([0, 2, 1, 0])
    y = F.one_hot(classes, 4).to(dtype)
    made = labelled(y)
    assert (made.task, made.num_classes, made.y.tolist()) == ("single_label", 4, classes.tolist())
    assert "dataset g: y is one-hot, [4, 4]" in capsys.readouterr().out
    assert labelled(y, "multi_label").task == "multi_label"
    if dtype == torch.float32:
        y[1] = torch.nan
        assert labelled(y).y.tolist() == [0, -1, 1, 0]


def test_unknown_entries_are_nan_and_minus_one():
    y = torch.tensor([[1.0, -1.0, 1.0], [torch.nan, 0.0, 1.0]])
    made = labelled(y)
    assert made.task == "multi_label"
    assert made.y.isnan().tolist() == [[False, True, False], [True, False, False]]
    with pytest.raises(ValueError, match="multi-label entries are -1 and never 0, and -1 means unknown"):
        labelled(torch.tensor([[1, -1, 1], [-1, -1, 1]]))
