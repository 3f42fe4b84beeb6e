"""Losses equal torch's, metrics their definitions, rank by rank too; regression and link prediction."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportArgumentType=false

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import rankdata
from torch import Tensor

import gnnpar
from gnnpar.data import make_task
from gnnpar.data.dataset import Dataset
from gnnpar.data.links import ExcludedNodes, Link
from gnnpar.data.metrics import METRICS
from gnnpar.data.npz import NPZ
from gnnpar.data.preprocess import Preprocess, canonical_edges
from gnnpar.data.raw import EdgeList, RawGraph, checked, task_of
from gnnpar.data.tasks import roc_auc
from gnnpar.models.sage import SAGE
from gnnpar.training.result.result import fault
from gnnpar.verify.conformance import small_graph
from outcomes import refused


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


TARGET_NODES, TARGETS = 60, 2


def graph() -> Dataset:
    """Targets that neighbours explain; every seventh node has none, and is in no split."""
    plain = small_graph(num_nodes=TARGET_NODES)
    gen = torch.Generator().manual_seed(1)
    y = plain.x @ torch.randn(plain.num_features, TARGETS, generator=gen) + 5
    y[::7] = torch.nan
    train, val, test = (m & ~torch.isnan(y[:, 0]) for m in (plain.train_mask, plain.val_mask, plain.test_mask))
    given = {"x": plain.x, "edge_index": plain.edge_index, "masks": (train, val, test)}
    return Dataset.of("small", y=y, num_classes=TARGETS, task="regression", **given)


def test_nodes_without_a_target_are_in_no_split(tmp_path: Path) -> None:
    data = graph()
    file = tmp_path / "g.npz"
    np.savez(file, x=data.x.numpy(), y=data.y.numpy()[:, 0], edge_index=data.edge_index.numpy())
    read = NPZ(path=str(file), task="regression", split="random").load(None, 0)
    assert (read.task, read.num_classes, read.y.shape) == ("regression", 1, (TARGET_NODES, 1))
    chosen = read.train_mask | read.val_mask | read.test_mask
    assert torch.equal(chosen, ~torch.isnan(read.y[:, 0]))
    with pytest.raises(ValueError, match=r"is regression: dataset.split=per_class needs one class a node"):
        NPZ(path=str(file), task="regression", split="per_class").load(None, 0)


@pytest.mark.parametrize(
    ("y", "line"),
    [
        (np.full(TARGET_NODES, np.nan), "no node has a target"),
        (np.where(np.arange(TARGET_NODES) == 3, np.inf, 0.5), "1 targets are infinite or beyond float32; scale y"),
        (np.ones((TARGET_NODES, 2, 2)), r"\[60\] or \[60, targets\], got torch.float64 \[60, 2, 2\]"),
    ],
)
def test_what_is_no_target_is_one_line(y: np.ndarray, line: str, tmp_path: Path) -> None:
    data = graph()
    np.savez(tmp_path / "g.npz", x=data.x.numpy(), y=y, edge_index=data.edge_index.numpy())
    with pytest.raises(ValueError, match=line):
        NPZ(path=str(tmp_path / "g.npz"), task="regression", split="random").load(None, 0)


def test_a_run_explains_the_targets(tmp_path: Path) -> None:
    data = graph()
    masks = {"train_mask": data.train_mask, "val_mask": data.val_mask, "test_mask": data.test_mask}
    given = {"x": data.x, "y": data.y, "edge_index": data.edge_index, **masks}
    how: Any = {"strategy": "graph_parallel", "world_size": 2, "comm": "threads", "epochs": 60, "threads_per_rank": 1}
    how |= {"dataset.task": "regression", "optim.lr": 0.05, "folder": tmp_path / "run"}
    run = gnnpar.train(SAGE(num_layers=2, hidden=16, dropout=0.0), given, **how)
    metric = run.result["metric"]
    assert metric["name"] == "r2"
    assert not fault(run.result)
    assert metric["train"] > 0.5


NODES = 60


def undirected(ends: Tensor, num_nodes: int = NODES) -> Dataset:
    """With both directions of every edge, and self loops. Shapes: ends [2, n]."""
    edges = canonical_edges(EdgeList(ends), Preprocess(symmetrize=True), num_nodes=num_nodes).edge_index
    mask = torch.ones(num_nodes, dtype=torch.bool)
    x, y, masks = torch.randn(num_nodes, 4), torch.zeros(num_nodes, dtype=torch.int64), (mask, ~mask, ~mask)
    return Dataset.of("drawn", x=x, y=y, edge_index=edges, masks=masks, num_classes=2, task="single_label")


def adjacency(edge_index: Tensor, num_nodes: int = NODES) -> Tensor:
    """[N, N] bool, in both directions, without self loops."""
    table = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
    table[edge_index[0], edge_index[1]] = True
    return (table | table.T).fill_diagonal_(False)


def graphs() -> list[Dataset]:
    """Undirected; directed with repeated edges, edges in both directions and in one, and self loops."""
    return [undirected(torch.randint(0, NODES, (2, 300), generator=torch.Generator().manual_seed(1))), small_graph()]


@pytest.mark.parametrize("whole", graphs(), ids=["undirected", "directed"])
def test_no_edge_of_validation_or_test_reaches_training_in_either_direction(whole: Dataset) -> None:
    data = Link(val_fraction=0.1, test_fraction=0.2, eval_negatives=7).prepare(whole, seed=0)
    assert data.pairs is not None
    trained, known = adjacency(data.edge_index), adjacency(whole.edge_index)
    tables = {"train": data.pairs.train.T, "val": data.pairs.val, "test": data.pairs.test}
    of_split = {name: adjacency(table[:, :2].T) for name, table in tables.items()}
    assert torch.equal(trained, of_split["train"]), "aggregations read training edges, all of them"
    assert not (trained & (of_split["val"] | of_split["test"])).any()
    assert not (of_split["val"] & of_split["test"]).any()
    assert torch.equal(of_split["train"] | of_split["val"] | of_split["test"], known)
    sizes = [len(table) for table in tables.values()]
    assert sum(sizes) == int(known.sum()) // 2, "each pair once"
    assert sizes[1:] == [round(0.1 * sum(sizes)), round(0.2 * sum(sizes))]
    loops = [int((g.edge_index[0] == g.edge_index[1]).sum()) for g in (whole, data)]
    assert loops[0] == loops[1] > 0
    assert torch.equal(data.in_degree, torch.bincount(data.edge_index[1], minlength=NODES))
    one_way = ~known | (torch.zeros_like(known).index_put((*whole.edge_index,), torch.tensor(True)))
    source, destination = data.pairs.val[:, :2].T
    assert one_way[source, destination].all(), "of an edge in one direction the source is the source"


def test_the_split_and_its_negatives_follow_from_graph_and_seed() -> None:
    task, whole = Link(split_seed=None), small_graph()
    first, again, other = (task.prepare(whole, seed) for seed in (0, 0, 1))
    assert (first.graph_hash, first.split_hash) == (again.graph_hash, again.split_hash)
    assert first.split_hash != other.split_hash
    assert Link().prepare(whole, 0).split_hash == Link().prepare(whole, 1).split_hash


@pytest.mark.parametrize("whole", graphs(), ids=["undirected", "directed"])
def test_negatives_are_pairs_without_an_edge_uniformly(whole: Dataset) -> None:
    data = Link(val_fraction=0.1, test_fraction=0.2, eval_negatives=200).prepare(whole, seed=0)
    assert data.pairs is not None
    known = adjacency(whole.edge_index) | torch.eye(NODES, dtype=torch.bool)
    for table in (data.pairs.val, data.pairs.test):
        assert not known[table[:, :1], table[:, 2:]].any()
    reached = torch.zeros_like(known).index_put((data.pairs.test[0, 0], data.pairs.test[0, 2:]), torch.tensor(True))
    left = ~known[data.pairs.test[0, 0]]
    assert reached[data.pairs.test[0, 0]].sum() > 0.9 * left.sum(), "200 draws reach nearly all that are left"
    trained = adjacency(data.edge_index) | torch.eye(NODES, dtype=torch.bool)
    own = data.pairs.share(torch.arange(0, NODES, 2), torch.arange(NODES) // 2)
    sources = 2 * own.source
    drawn = own.candidates(slice(None), 50, seed=3, epoch=4)
    assert torch.equal(drawn[:, 0], own.destination)
    assert not trained[sources[:, None], drawn[:, 1:]].any()
    assert (adjacency(whole.edge_index)[sources[:, None], drawn[:, 1:]]).any(), "training does not know the held out"
    assert torch.equal(drawn, own.candidates(slice(None), 50, seed=3, epoch=4))
    assert not torch.equal(drawn, own.candidates(slice(None), 50, seed=3, epoch=5))


def test_training_negatives_do_not_depend_on_the_parts() -> None:
    data = Link().prepare(small_graph(), 0)
    assert data.pairs is not None
    nodes = torch.arange(NODES)
    whole = data.pairs.share(nodes, nodes)
    table = torch.full((whole.total, 4), -1)
    for part in range(3):
        ids = nodes[nodes % 3 == part]
        own = data.pairs.share(ids, nodes // 3)
        assert torch.equal(ids[own.source], data.pairs.train[0, own.number])
        table[own.number] = own.candidates(slice(None), 3, seed=1, epoch=2)
    assert torch.equal(table, whole.candidates(slice(None), 3, seed=1, epoch=2))


def test_every_node_that_is_left_is_drawn_as_often() -> None:
    pairs = torch.tensor([[0, 0, 2], [1, 4, 5]])
    table = ExcludedNodes.of(pairs, 8)
    counts = torch.bincount(table.draw(torch.tensor([0]), torch.tensor([9]), 5000, key=1)[0], minlength=8)
    assert counts[[0, 1, 4]].sum() == 0
    assert counts[[2, 3, 5, 6, 7]].min() > 850, "of 1000 each"


def plain_metrics(scores: Tensor, k: int) -> tuple[float, float]:
    """MRR with ties half way between best and worst rank, and the share of positives above the k-th best negative,
    from their definitions. Shapes: scores [n, 1 + m], positives first."""
    ranks, negatives = rankdata(-scores, axis=1)[:, 0], scores[:, 1:].flatten().sort(descending=True).values
    hits = 1.0 if len(negatives) < k else float((scores[:, 0] > negatives[k - 1]).double().mean())
    return (1 / ranks).mean(), hits


@pytest.mark.parametrize("k", [1, 5, 20, 81])
def test_metrics_are_those_of_their_definitions_whatever_the_ranks(k: int) -> None:
    scores = torch.randint(-3, 6, (16, 6), generator=torch.Generator().manual_seed(k)).double()  # with ties
    task = Link(hits=k)
    parts = [scores[:5], scores[5:5], scores[5:]]
    statistics = torch.cat([task.statistics(part, torch.zeros_like(part)) for part in parts])
    mrr, hits = plain_metrics(scores, k)
    assert task.values(statistics) == pytest.approx({"mrr": mrr, f"hits@{k}": hits}, rel=1e-12)
    assert task.value(statistics) == pytest.approx(mrr)
    assert replace(task, metric="hits").value(statistics) == pytest.approx(hits)
    assert math.isnan(task.value(task.statistics(scores[:0], scores[:0])))


@pytest.mark.parametrize(
    ("task", "ends", "line"),
    [
        (Link(), [[0, 1, 2], [1, 2, 3]], r"3 pairs of nodes with an edge, too few for task.val_fraction=0.05"),
        (Link(val_fraction=0.5, test_fraction=0.4), [[0, 1], [1, 2]], r"1 for validation and 1 for test leave none"),
        (Link(val_fraction=0, test_fraction=0), [[0, 0, 1], [1, 2, 2]], "has an edge with all other 2 nodes"),
    ],
    ids=["few", "none left", "no negatives"],
)
def test_a_graph_without_enough_pairs_is_one_line(task: Link, ends: list[list[int]], line: str) -> None:
    num_nodes = max(map(max, ends)) + 1
    with refused(line):
        task.prepare(undirected(torch.tensor(ends), num_nodes), 0)
