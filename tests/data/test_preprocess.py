"""Laws of preprocessing: edges, splits, hashes, one-line mistakes; float64 from file to loss under precision=fp64."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GraphConv

import gnnpar
from data.samples import raw_graph, sources
from gnnpar.cli.partition import run as partition
from gnnpar.config.compose import compose
from gnnpar.data import Preprocess, RawGraph, prepare
from gnnpar.data.dataset import EdgeChanges
from gnnpar.data.preprocess import canonical_edges
from gnnpar.data.raw import EdgeList
from gnnpar.data.saved import PT, write_given
from gnnpar.data.stored import Stored
from gnnpar.folds.edge_data import EdgeData
from gnnpar.launch.launch import world_of
from gnnpar.partition.manifest import read_manifest
from gnnpar.partition.on_disk import open_part, write_shards
from gnnpar.training.shards import check
from outcomes import refused

EDGES = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=40)


@given(EDGES, st.booleans(), st.sampled_from([True, False, "keep"]), st.booleans())
def test_canonical_edges_are_the_sorted_list_or_set(edges, symmetrize, self_loops, distinct):
    given_edges = EdgeList(torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t())
    config = Preprocess(symmetrize=symmetrize, self_loops=self_loops, drop_duplicates=distinct)
    found = canonical_edges(given_edges, config, num_nodes=9)
    out = found.edge_index
    expected = [(i, j) for j, i in edges if i != j]
    if symmetrize:
        expected += [(j, i) for i, j in expected]
    if self_loops is True:
        expected += [(i, i) for i in range(9)]
    if self_loops == "keep":
        expected += [(i, i) for j, i in edges if i == j]
    assert [(i, j) for j, i in out.t().tolist()] == sorted(set(expected) if distinct else expected)
    again = canonical_edges(found, config, num_nodes=9)
    assert torch.equal(again.edge_index, out) or not distinct


def test_what_was_done_to_the_edges_is_counted():
    raw = raw_graph()  # 0->1 twice, a loop at 2
    loops = int((raw.edge_index[0] == raw.edge_index[1]).sum())
    repeated = raw.edge_index.shape[1] - raw.edge_index.unique(dim=1).shape[1]
    assert loops == 1
    assert repeated >= 1
    kept = prepare(raw, Preprocess(self_loops="keep", drop_duplicates=False), seed=0)
    assert kept.edge_changes == EdgeChanges()
    assert torch.equal(kept.edge_index.unique(dim=1), raw.edge_index.unique(dim=1))
    assert prepare(raw, Preprocess(), seed=0).edge_changes == EdgeChanges(5, 0, repeated)
    assert prepare(raw, Preprocess(self_loops=False), seed=0).edge_changes == EdgeChanges(0, 1, repeated)


def test_degrees_count_in_edges_with_loops_and_isolated_nodes():
    data = prepare(raw_graph(), Preprocess(), seed=0)
    assert data.in_degree.tolist() == [2, 2, 2, 1, 1, 1]
    repeated = prepare(raw_graph(), Preprocess(drop_duplicates=False), seed=0)
    assert (repeated.num_edges, repeated.in_degree.tolist()) == (10, [2, 2, 3, 1, 1, 1])
    bare = prepare(raw_graph(), Preprocess(self_loops=False), seed=0)
    assert bare.in_degree.tolist() == [1, 1, 1, 0, 0, 0]
    assert not bool((bare.edge_index[0] == bare.edge_index[1]).any())


def test_undirected_pairs_are_always_symmetrised():
    data = prepare(raw_graph(pairs=True), Preprocess(self_loops=False), seed=0)
    assert data.edge_index.t().tolist() == [[1, 0], [4, 0], [0, 1], [2, 1], [1, 2], [0, 4]]


def test_row_normalisation_sums_to_one_and_leaves_empty_rows():
    x = torch.tensor([[1.0, 3.0], [0.0, 0.0], [2.0, 2.0], [5.0, 0.0], [1.0, 1.0], [4.0, 1.0]])
    out = prepare(raw_graph(x=x), Preprocess(normalize="row"), seed=0).x
    torch.testing.assert_close(out.sum(1), torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0]))


def test_standardisation_is_fitted_on_training_nodes_only():
    x = torch.cat([torch.randn(6, 2), torch.full((6, 1), 3.0)], 1)
    out = prepare(raw_graph(x=x), Preprocess(normalize="standard"), seed=0).x
    torch.testing.assert_close(out[:3].mean(0), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(out[:3, :2].std(0, correction=0), torch.ones(2))
    moved = torch.cat([x[:3], x[3:] + 100])
    assert torch.equal(prepare(raw_graph(x=moved), Preprocess(normalize="standard"), seed=0).x[:3], out[:3])


def big(**changes):
    y = torch.arange(600) % 4
    fields = {"x": torch.ones(600, 1), "y": y, "edge_index": torch.zeros(2, 0, dtype=torch.int64), "masks": None}
    return raw_graph(**(fields | changes))


def test_per_class_split_takes_20_and_30_of_each_class():
    data = prepare(big(), Preprocess(split="per_class"), seed=0)
    for mask, count in ((data.train_mask, 20), (data.val_mask, 30), (data.test_mask, 100)):
        assert torch.bincount(data.y[mask]).tolist() == [count] * 4
    assert bool((data.train_mask.int() + data.val_mask.int() + data.test_mask.int() == 1).all())


def test_random_split_takes_fractions_of_the_labelled_nodes():
    y = torch.arange(600) % 4
    y[:100] = -1
    data = prepare(big(y=y), Preprocess(split="random", train_fraction=0.5, val_fraction=0.25), seed=0)
    assert [int(m.sum()) for m in (data.train_mask, data.val_mask, data.test_mask)] == [250, 125, 125]
    assert not bool((data.train_mask | data.val_mask | data.test_mask)[:100].any())


@pytest.mark.parametrize("split", ["per_class", "random"])
def test_split_seed_decides_the_split_and_null_means_the_run_seed(split):
    def hash_of(split_seed, seed):
        return prepare(big(), Preprocess(split=split, split_seed=split_seed), seed=seed).split_hash

    assert hash_of(0, 0) == hash_of(0, 7)
    assert hash_of(0, 0) != hash_of(1, 0)
    assert hash_of(None, 3) == hash_of(3, 0)


@pytest.mark.parametrize("rows", [True, False])
def test_numbered_splits_are_columns_or_rows(rows):
    train, val, test = np.zeros((3, 10, 6), dtype=bool)
    for k in range(10):
        train[k, k % 6], val[k, (k + 1) % 6], test[k, (k + 2) % 6] = True, True, True
    masks = tuple(torch.from_numpy(m if rows else m.T.copy()) for m in (train, val, test))
    data = prepare(raw_graph(masks=masks), Preprocess(split_index=7), seed=0)
    assert [int(m.nonzero()) for m in (data.train_mask, data.val_mask, data.test_mask)] == [1, 2, 3]
    by_seed = prepare(raw_graph(masks=masks), Preprocess(split_index=None), seed=7)
    assert by_seed.split_hash == data.split_hash
    with pytest.raises(ValueError, match="has 10 splits, numbered 0 to 9"):
        prepare(raw_graph(masks=masks), Preprocess(split_index=10), seed=0)


def weighted(edges: list[tuple[int, int, float]], **options: Any) -> dict[tuple[int, int], list[float]]:
    """Canonical edges of four nodes with their weights."""
    src, dst, weight = zip(*edges, strict=True)
    edges_of = EdgeList(torch.tensor([src, dst]), EdgeData(weight=torch.tensor(weight)))
    found = canonical_edges(edges_of, Preprocess(**options), num_nodes=4)
    kept: dict[tuple[int, int], list[float]] = {}
    assert found.data.weight is not None
    for (a, b), w in zip(found.edge_index.T.tolist(), found.data.weight.tolist(), strict=True):
        kept.setdefault((a, b), []).append(w)
    return kept


def test_a_self_loop_keeps_its_weight_and_one_that_is_added_has_1() -> None:
    edges = [(0, 1, 2.0), (1, 1, 0.5), (2, 0, 3.0), (0, 1, 2.0)]
    loops = {(0, 0): [1.0], (1, 1): [0.5], (2, 2): [1.0], (3, 3): [1.0]}
    assert weighted(edges) == {(0, 1): [2.0], (2, 0): [3.0]} | loops
    assert weighted(edges, self_loops=False, symmetrize=True) == {
        (0, 1): [2.0],
        (1, 0): [2.0],
        (2, 0): [3.0],
        (0, 2): [3.0],
    }
    assert weighted(edges, drop_duplicates=False)[0, 1] == [2.0, 2.0]


def test_two_weights_of_an_edge_are_one_line() -> None:
    with pytest.raises(ValueError, match="edge 0 -> 1 has two weights, 2 and 5; add them up"):
        weighted([(0, 1, 5.0), (0, 1, 2.0)])
    with pytest.raises(ValueError, match="edge 1 -> 0 has two weights"):
        weighted([(0, 1, 5.0), (1, 0, 2.0)], symmetrize=True)
    with pytest.raises(ValueError, match="node 3 has two self loops, of weights 2 and 1; add them up"):
        weighted([(3, 3, 1.0), (3, 3, 2.0)], drop_duplicates=False)
    assert weighted([(0, 1, 5.0), (0, 1, 2.0)], drop_duplicates=False)[0, 1] == [2.0, 5.0]


def test_hashes_are_stable_across_runs_and_machines():
    data = prepare(raw_graph(), Preprocess(), seed=0)
    assert data.graph_hash == "d0fce4861f438adf783db2b1ec1b36287234f9afa919094481c154abba8eb9b5"
    assert data.split_hash == "d61018d6bdcc70fbd239db6798117cf92ad62b229115de44658c31c234e982aa"


def test_hashes_ignore_how_edges_were_listed():
    raw = raw_graph()
    shuffled = raw_graph(edge_index=raw.edge_index[:, torch.tensor([4, 2, 0, 3, 1])].to(torch.int32))
    assert prepare(raw, Preprocess(), seed=0).graph_hash == prepare(shuffled, Preprocess(), seed=5).graph_hash


@pytest.mark.parametrize(
    ("change", "graph", "split"),
    [
        ({"x": torch.ones(6, 2)}, True, False),
        ({"y": torch.tensor([0, 1, 2, 0, 2, 1])}, True, False),
        ({"edge_index": torch.tensor([[0], [1]])}, True, False),
        ({"masks": tuple(torch.eye(6)[row] for row in (1, 2, 3))}, False, True),
    ],
)
def test_hashes_see_every_part(change, graph, split):
    old, new = prepare(raw_graph(), Preprocess(), seed=0), prepare(raw_graph(**change), Preprocess(), seed=0)
    assert (old.graph_hash != new.graph_hash) == graph
    assert (old.split_hash != new.split_hash) == split


NAN = torch.tensor([[0.0, 1.0]] * 4 + [[float("nan"), 2.0], [float("inf"), 0.0]])
ALL = torch.ones(6)
INTEGERS = torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": NAN}, "features hold 1 NaN and 1 infinite values of 12 .first at node 4, feature 0.; replace them"),
        ({"x": torch.full((6, 1), 1e300, dtype=torch.float64)}, "features hold 0 NaN and 6 infinite"),
        ({"x": torch.ones(6)}, r"features must be \[nodes, features\].*got shape \[6\]"),
        ({"x": torch.ones(0, 3)}, r"got shape \[0, 3\]"),
        ({"x": torch.ones(4, 2)}, r"labels of a single_label task must have shape \[4\], got \[6\]|outside nodes 0..3"),
        (
            {"edge_index": torch.tensor([[0, 6], [1, 2]])},
            "1 of 2 edges point outside nodes 0..5 .ids range from 0 to 6",
        ),
        ({"edge_index": torch.tensor([[0, -1], [1, 2]])}, "1 of 2 edges point outside nodes 0..5 .ids range from -1"),
        ({"edge_index": torch.ones(3, 2).long()}, r"must have shape \[2, edges\], got \[3, 2\]; transpose"),
        ({"edge_index": torch.tensor([[0.0], [1.0]])}, "edge_index is torch.float32; node ids must be integers"),
        ({"y": torch.tensor([0, 1, 2, 0, 1])}, r"must have shape \[6\], got \[5\]"),
        ({"y": torch.tensor([0, 1, 2, 0, 1, -3])}, "1 labels lie outside 0..2 .they range from -3 to 2"),
        ({"y": torch.tensor([0, 1, 2, 0, 1, 0]), "task": "binary"}, "1 labels lie outside 0..1"),
        ({"y": torch.full((6,), -1)}, "no node has a label"),
        ({"y": torch.tensor([0.5, 1, 2, 0, 1, 0])}, "1 labels are not whole numbers"),
        ({"y": INTEGERS, "task": "multi_label"}, r"must have shape \[6, classes\] of 0/1, got \[6\]"),
        ({"y": INTEGERS[:, None].repeat(1, 2), "task": "multi_label"}, "4 multi-label entries are neither 0 nor 1"),
        ({"masks": (0 * ALL, ALL, 0 * ALL)}, "the training split is empty .train/val/test = 0/6/0"),
        ({"masks": (ALL, torch.eye(6)[0], 0 * ALL)}, "1 nodes are in both the train and the val split"),
        ({"masks": (ALL[:5], ALL, ALL)}, r"train_mask must be \[6\].*got \[5\]"),
        ({"masks": (3 * ALL.long(), ALL, ALL)}, "train_mask is torch.int64 with values other"),
        ({"masks": None}, "has no split of its own; set dataset.split=random"),
        ({"y": torch.tensor([-1, 1, 2, 0, 1, 2])}, "1 nodes of the train split have no label"),
    ],
)
def test_a_bad_graph_is_one_clear_line(change, message):
    with refused(f"^dataset tiny.*(?:{message})"):
        prepare(raw_graph(**change), Preprocess(), seed=0)


@pytest.mark.parametrize("how", ["given", "both"])
def test_a_graph_without_features_is_refused_unless_they_are_learned(how):
    dataset = prepare(raw_graph(x=torch.ones(6, 0)), Preprocess(), seed=0)
    with pytest.raises(ValueError, match="dataset tiny: the graph has no features: features=learned gives each node"):
        dataset.with_features(how, 5, 0)
    assert dataset.with_features("learned", 5, 0).num_features == 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split": "per_class"}, "class 0 has 2 nodes, fewer than .* = 50; lower them or set dataset.split=random"),
        ({"split": "random", "train_fraction": 0.8, "val_fraction": 0.4}, "add up to more than 1"),
    ],
)
def test_an_impossible_split_is_one_clear_line(fields, message):
    with pytest.raises(ValueError, match=message):
        prepare(raw_graph(), Preprocess(**fields), seed=0)


def test_what_is_unusual_but_fine_enters():
    no_edges = prepare(raw_graph(edge_index=torch.zeros(2, 0, dtype=torch.int64)), Preprocess(self_loops=False), seed=0)
    assert no_edges.num_edges == 0
    assert no_edges.in_degree.tolist() == [0] * 6
    nan_label = prepare(
        raw_graph(y=torch.tensor([[0.0], [1], [2], [0], [1], [float("nan")]]), masks=None), RANDOM, seed=0
    )
    assert nan_label.y.tolist() == [0, 1, 2, 0, 1, -1]
    assert prepare(raw_graph(x=torch.ones(6, 2, dtype=torch.uint8)), Preprocess(), seed=0).x.dtype == torch.float32


RANDOM = Preprocess(split="random")


NODES, NUM_EDGES = 40, 160


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def raw(**changes: Any) -> RawGraph:
    """A regression with float64 features, weights, attributes and targets on distinct edges."""
    key = torch.randperm(NODES**2, generator=torch.Generator().manual_seed(1))[:NUM_EDGES]
    train = torch.arange(NODES) < 30
    fields: dict[str, Any] = {
        "name": "wide",
        "x": numbers(NODES, 3),
        "y": numbers(NODES, 1, seed=2),
        "edge_index": torch.stack([key % NODES, key // NODES]),
        "edges": EdgeData(weight=numbers(NUM_EDGES, seed=3).abs(), attr=numbers(NUM_EDGES, 2, seed=4)),
        "task": "regression",
        "masks": (train, ~train, torch.zeros(NODES, dtype=torch.bool)),
    }
    return RawGraph(**(fields | changes))


def data(given: RawGraph) -> Data:
    assert given.masks is not None
    train, val, _ = given.masks
    edges = {f"edge_{kind}": value for kind, value in given.edges.tensors.items()}
    return Data(x=given.x, y=given.y, edge_index=given.edge_index, train_mask=train, val_mask=val, **edges)


def arrays(given: RawGraph) -> dict[str, Any]:
    return {key: value.numpy() for key, value in data(given).to_dict().items()}


class Weighted(torch.nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.conv = GraphConv(in_channels, out_channels)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, x, edge_index, edge_weight=None):
        return self.conv(x, edge_index, edge_weight)


KEEP = Preprocess(self_loops="keep", drop_duplicates=False)


def test_fp64_keeps_all_numbers_of_every_source(tmp_path: Path) -> None:
    given = raw()
    wanted = prepare(given, KEEP.in_float64(), seed=0)
    order = torch.argsort(given.edge_index[1] * NODES + given.edge_index[0])
    assert torch.equal(wanted.x, given.x)
    assert torch.equal(wanted.y, given.y)
    assert torch.equal(wanted.edges.tensors["weight"], given.edges.tensors["weight"][order])
    assert torch.equal(wanted.edges.tensors["attr"], given.edges.tensors["attr"][order])
    how: dict[str, Any] = {"self_loops": "keep", "drop_duplicates": False, "task": "regression"}
    *_, folder = configs = sources(tmp_path, arrays(given), **how)
    for config in configs:
        assert config.in_float64().load(None, 0).graph_hash == wanted.graph_hash
        found = config.load(None, 0)
        assert found.graph_hash == prepare(given, KEEP, seed=0).graph_hash
        assert found.x.dtype == found.y.dtype == torch.float32
    assert folder.in_float64().stored(None, 0, tmp_path).graph_hash == wanted.graph_hash


@pytest.mark.parametrize("double", [True, False])
def test_shards_on_disk_hold_the_numbers_of_the_dataset(tmp_path: Path, double: bool) -> None:
    config = KEEP.in_float64() if double else KEEP
    dataset = prepare(raw(), config, seed=0)
    write_shards(Stored.of(dataset), torch.arange(NODES) % 2, 2, tmp_path / "s", edge_ids=True, setup={})
    manifest = read_manifest(tmp_path / "s")
    assert (manifest.files["part-0/x.npy"].dtype == "<f8", manifest.rounded) == (double, not double)
    assert (manifest.task, manifest.num_classes) == ("regression", 1)
    shard = open_part(tmp_path / "s", manifest, 1, edge_ids=True)
    assert torch.equal(shard.x, dataset.x[1::2])
    assert torch.equal(shard.y, dataset.y[1::2])
    attr = dataset.edges.tensors["attr"][dataset.edge_index[1] % 2 == 1]
    assert shard.edge_attr is not None
    assert torch.equal(shard.edge_attr, attr)


@pytest.mark.quick(1)
@pytest.mark.parametrize("normalize", ["none", "standard", "row"])
def test_first_loss_equals_a_torch_loop(tmp_path: Path, normalize: str) -> None:
    given = raw(x=numbers(NODES, 3) + 1.7e9 if normalize == "standard" else numbers(NODES, 3))
    assert given.masks is not None
    train, x = given.masks[0], given.x
    if normalize == "standard":
        x = (x - x[train].mean(0)) / x[train].std(0, correction=0)
    if normalize == "row":
        x = x / x.abs().sum(1, keepdim=True)
    plain, weight = data(given), given.edges.tensors["weight"]
    del plain.edge_attr
    expected = F.mse_loss(Weighted(3, 1).double()(x, given.edge_index, weight)[train], given.y[train])
    dataset = {"self_loops": "keep", "drop_duplicates": False, "task": "regression", "normalize": normalize}
    how: Any = {"strategy": "graph_parallel", "world_size": 2, "comm": "threads", "precision": "fp64", "epochs": 1}
    run = gnnpar.train(Weighted, plain, dataset=dataset, folder=tmp_path / "run", **how)
    assert float(run.history["loss/train"][0]) == pytest.approx(expected.item(), rel=1e-13)


def test_standardised_times_are_computed_in_float64_and_stored_in_float32(capsys) -> None:
    x = torch.arange(NODES, dtype=torch.float64)[:, None] * 10 + 1.7e9
    found = prepare(raw(x=x), Preprocess(self_loops="keep", normalize="standard"), seed=0).x
    rows = x[:30]
    assert found.dtype == torch.float32
    assert torch.equal(found, ((x - rows.mean(0)) / rows.std(0, correction=0)).float())
    assert "dataset wide: x has numbers up to 1700000390 in column 0" in capsys.readouterr().out


IDS = torch.arange(NODES) + 100_000_000
BESIDE_ONES = torch.stack([torch.ones(NODES).double(), IDS], 1)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"x": IDS[:, None]},
            r"x has numbers up to 100000039 in column 0.*set dataset.normalize=standard or precision",
        ),
        ({"x": BESIDE_ONES}, "x has numbers up to 100000039 in column 1, where float32 has steps of 8"),
        ({"x": 1.7e9 + 600 * torch.rand(NODES, 1).double()}, "x has numbers up to 17000"),
        ({"y": torch.arange(NODES).double() + 1.7e9}, "y has numbers up to 1700000039.*set precision=fp64"),
        ({"y": IDS[:, None]}, "y has numbers up to 100000039"),
        ({"edges": EdgeData(attr=torch.arange(NUM_EDGES)[:, None] + 2**24)}, "edge_attr has numbers up to"),
    ],
)
def test_numbers_that_float32_merges_are_refused_and_kept_by_fp64(changes: dict[str, Any], line: str) -> None:
    with refused(f"^dataset wide: {line}"):
        prepare(raw(**changes), KEEP, seed=0)
    found = prepare(raw(**changes), KEEP.in_float64(), seed=0)
    assert len(found.x.unique(dim=0)) == len(raw(**changes).x.unique(dim=0))
    assert len(found.y.unique()) == len(raw(**changes).y.unique())


@pytest.mark.parametrize(
    "x",
    [
        torch.randint(0, 2**24, (NODES, 2)),
        torch.full((NODES, 1), 2**30),
        torch.full((NODES, 1), 1.7e9, dtype=torch.float64),
        numbers(200_000, 1),
        torch.where(torch.arange(NODES) % 2 == 0, 0.0, 1e12)[:, None].double(),
    ],
    ids=["small", "one power of 2", "constant", "many", "two values"],
)
def test_numbers_that_float32_tells_apart_are_not_refused(x: torch.Tensor) -> None:
    nodes = len(x)
    train = torch.arange(nodes) < 30
    changes = {"x": x, "y": torch.zeros(nodes), "masks": (train, ~train, torch.zeros(nodes, dtype=torch.bool))}
    assert prepare(raw(**changes), KEEP, seed=0).x.dtype == torch.float32


def test_node_ids_beyond_float64_are_refused_under_fp64() -> None:
    with pytest.raises(ValueError, match=r"x has numbers up to .* where float64 has steps of"):
        prepare(raw(x=torch.arange(NODES)[:, None] + 2**60), KEEP.in_float64(), seed=0)


def test_times_of_one_type_of_nodes_are_refused() -> None:
    graph = HeteroData()
    graph["paper"].x, graph["paper"].y = torch.randn(6, 2), torch.arange(6) % 3
    graph["paper"].train_mask = torch.arange(6) < 4
    graph["author"].x = 1.7e9 + torch.arange(5).double()[:, None]
    graph["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 2], [3, 4, 5]])
    config = PT(path=str(write_given(graph)), self_loops=False)
    with pytest.raises(ValueError, match="x has numbers up to 1700000004 in column 2"):
        config.load(None, 0)
    assert torch.equal(config.in_float64().load(None, 0).x[6:, 2:3], graph["author"].x)


def test_shards_of_another_precision_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", **arrays(raw()))
    graph = [f"dataset.path={tmp_path / 'g.npz'}", "dataset=npz", "dataset.task=regression", "dataset.self_loops=keep"]
    for made, other in (("fp32", "fp64"), ("fp64", "fp32")):
        out = tmp_path / made
        assert partition([*graph, "world_size=2", f"precision={made}", f"out={out}"]) == 0
        settings = compose(["strategy=graph_parallel", f"shards={out}", f"precision={other}", "world_size=2"])
        with pytest.raises(ValueError, match=rf"^precision={other}: shards=.* partition again with precision={other}$"):
            check(settings, world_of(settings))
