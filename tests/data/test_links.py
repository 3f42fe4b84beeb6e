"""Link prediction: the split of edges, negatives, metrics against their definitions, and what is refused."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gnnpar.data.dataset import Dataset
from gnnpar.data.links import ExcludedNodes, Link
from gnnpar.data.preprocess import Preprocess, canonical_edges
from gnnpar.data.raw import EdgeList
from gnnpar.verify.conformance import small_graph

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
    ranks = []
    for row in scores.tolist():
        best = 1 + sum(each > row[0] for each in row[1:])
        worst = 1 + sum(each >= row[0] for each in row[1:])
        ranks.append((best + worst) / 2)
    negatives = sorted((each for row in scores.tolist() for each in row[1:]), reverse=True)
    if len(negatives) < k:
        hits = 1.0
    else:
        hits = sum(row[0] > negatives[k - 1] for row in scores.tolist()) / len(ranks)
    return sum(1 / rank for rank in ranks) / len(ranks), hits


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
    with pytest.raises(ValueError, match=line) as error:
        task.prepare(undirected(torch.tensor(ends), num_nodes), 0)
    assert "\n" not in str(error.value)
