"""float64 from file to loss under precision=fp64; under fp32, ids and times that it would merge are refused."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GraphConv

import gnnpar
from gnnpar.cli.partition import run as partition
from gnnpar.config.compose import compose
from gnnpar.data import RawGraph
from gnnpar.data.folder import Folder
from gnnpar.data.npz import NPZ
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.saved import PT, write_given
from gnnpar.data.stored import Stored
from gnnpar.folds.edge_data import EdgeData
from gnnpar.launch.launch import world_of
from gnnpar.partition.manifest import read_manifest
from gnnpar.partition.on_disk import open_part, write_shards
from gnnpar.training.shards import check

NODES, EDGES = 40, 160


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def raw(**changes: Any) -> RawGraph:
    """A regression with float64 features, weights, attributes and targets on distinct edges."""
    key = torch.randperm(NODES**2, generator=torch.Generator().manual_seed(1))[:EDGES]
    train = torch.arange(NODES) < 30
    fields: dict[str, Any] = {
        "name": "wide",
        "x": numbers(NODES, 3),
        "y": numbers(NODES, 1, seed=2),
        "edge_index": torch.stack([key % NODES, key // NODES]),
        "edges": EdgeData(weight=numbers(EDGES, seed=3).abs(), attr=numbers(EDGES, 2, seed=4)),
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
    torch.save(data(given), tmp_path / "g.pt")
    np.savez(tmp_path / "g.npz", **arrays(given))
    (tmp_path / "g").mkdir()
    src, dst = given.edge_index.numpy()
    for key, array in ({**arrays(given), "src": src, "dst": dst}).items():
        if key != "edge_index":
            np.save(tmp_path / "g" / f"{key}.npy", array)
    how: dict[str, Any] = {"self_loops": "keep", "drop_duplicates": False, "task": "regression"}
    folder = Folder(path=str(tmp_path / "g"), **how)
    sources = [
        PT(path=str(tmp_path / "g.pt"), **how),
        PT(path=str(write_given(arrays(given))), **how),
        NPZ(path=str(tmp_path / "g.npz"), **how),
        folder,
    ]
    for config in sources:
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
        ({"edges": EdgeData(attr=torch.arange(EDGES)[:, None] + 2**24)}, "edge_attr has numbers up to"),
    ],
)
def test_numbers_that_float32_merges_are_refused_and_kept_by_fp64(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^dataset wide: {line}") as caught:
        prepare(raw(**changes), KEEP, seed=0)
    assert "\n" not in str(caught.value)
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
