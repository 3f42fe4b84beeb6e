"""A HeteroData is one typed graph: rows, edges and labels of each type where they belong, mistakes in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData

import gnnpar
from data.samples import hetero
from gnnpar.data.dataset import TaskName
from gnnpar.data.preprocess import prepare
from gnnpar.data.saved import PT, raw_graph
from gnnpar.folds.edge_data import Schema
from gnnpar.models.rgcn import RGCN
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.verify.conformance import check


def test_nodes_and_edges_of_all_types_are_one_graph() -> None:
    given = hetero()
    raw = raw_graph("given", given)
    assert isinstance(raw.edge_index, torch.Tensor)
    assert raw.x.shape == (21, 3 + 2 + 3)
    assert torch.equal(raw.x[:12, :3], given["paper"].x)
    assert torch.equal(raw.x[12:17, 3:5], given["author"].x)
    assert torch.equal(raw.x[:, 5:].argmax(1), torch.tensor([0] * 12 + [1] * 5 + [2] * 4))
    assert float(raw.x[17:, :5].abs().sum()) == 0
    assert raw.y.tolist() == [*given["paper"].y.tolist(), *[-1] * 9]
    assert raw.masks is not None
    assert int(raw.masks[0].sum()) == 6
    assert raw.edges.type is not None
    assert torch.bincount(raw.edges.type).tolist() == [20] * 5
    written = raw.edge_index[:, raw.edges.type == 0]
    assert torch.equal(written - torch.tensor([[12], [0]]), given["author", "writes", "paper"].edge_index)
    venues = raw.edge_index[1, raw.edges.type == 2]
    assert 17 <= int(venues.min()) <= int(venues.max()) <= 20


def test_it_trains_from_a_file_as_on_one_device(tmp_path) -> None:
    torch.save(hetero(), tmp_path / "hetero.pt")
    dataset = PT(path=str(tmp_path / "hetero.pt"), self_loops=False).load(None, 0)
    assert dataset.edge_sizes.types == 5
    config = RGCN(hidden=8, encoder="linear", num_bases=2)
    (case,) = check(GraphParallel(), {"rgcn": config}, worlds=(2,), dataset=dataset)
    assert case.passed, case


def test_an_encoder_is_one_for_each_type() -> None:
    """x W of a row of a type reads the rows of W that stand for its columns, and a bias of its own."""
    x = raw_graph("given", hetero()).x
    touched = [
        set((x[rows] != 0).any(0).nonzero().flatten().tolist()) for rows in (slice(12), slice(12, 17), slice(17, 21))
    ]
    assert touched == [{0, 1, 2, 5}, {3, 4, 6}, {7}]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("task", ["single_label", "multi_label", "regression"])
def test_nodes_of_other_types_have_no_label(task: TaskName, dtype: torch.dtype) -> None:
    data, numbers = hetero(), torch.arange(12)
    classes = (numbers[:, None] + torch.arange(3)) % 2
    data["paper"].y = (classes if task == "multi_label" else classes[:, 0]).to(dtype)
    found = prepare(raw_graph("given", data, task), PT(split="random", self_loops=False), seed=0)
    chosen = found.train_mask | found.val_mask | found.test_mask
    assert chosen.tolist() == [True] * 12 + [False] * 9
    assert torch.equal(found.y[chosen].flatten(), data["paper"].y.flatten().to(found.y.dtype))


WRITES, CITES, EVERY = ("author", "writes", "paper"), ("paper", "cites", "paper"), ("every",)


@pytest.mark.parametrize(
    ("place", "key", "value", "line"),
    [
        ("venue", "num_nodes", [4], "nothing says how many nodes of type venue there are"),
        ("venue", "num_nodes", -4, "nothing says how many nodes of type venue there are"),
        ("author", "x", torch.zeros(5, 2, dtype=torch.complex64), "x of type author is torch.complex64"),
        ("author", "x", torch.full((5, 2), 1e300, dtype=torch.float64), "0 NaN and 10 infinite values"),
        ("author", "x", torch.full((5, 2), torch.nan), "10 NaN and 0 infinite values"),
        ("author", "y", torch.zeros(5).long(), "2 types of nodes have y: paper, author; give labels to one type"),
        ("paper", "x", torch.ones(11, 3), r"of type paper"),
        (CITES, "edge_index", torch.full((2, 5), 0.5), r"edge_index of \(paper, cites, paper\) is torch.float32; node"),
        (CITES, "edge_label", torch.ones(20), "holds edge_label, which models do not read"),
        (WRITES, "edge_weight", torch.ones(20), r"edge_weight must be of every type of edges and of one width \(auth"),
        (
            WRITES,
            "edge_index",
            5 * torch.eye(2, 20).long(),
            r"1 of 20 edges \(author, writes, paper\) name a node of t",
        ),
        (EVERY, "edge_weight", torch.full((20,), torch.inf), "edge_weight of edge 0 is inf"),
        (EVERY, "edge_attr", torch.zeros(19, 2), r"edge_attr must be \[100, width\], one row an edge, got \[95, 2\]"),
        (EVERY, "edge_attr", torch.zeros(20, 2, 2), r"edge_attr must be \[100, width\], one row an edge, got \[100, 2"),
    ],
)
def test_a_mistake_is_one_clear_line(place: Any, key: str, value: object, line: str) -> None:
    data = hetero()
    for each in data.edge_types if place == EVERY else [place]:
        setattr(data[each], key, value)
    with pytest.raises(ValueError, match=line) as caught:
        _ = gnnpar.homogeneous(data), raw_graph("given", data)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("dataset given")


# what PyG's to_hetero writes between quotation marks into the code of a forward
EVIL = 'x",[getattr(__import__("os"),"system")("touch PWNED")]and"y'


def test_a_name_that_could_be_code_is_refused_by_every_reader(tmp_path: Path) -> None:
    data = hetero()
    data["paper", EVIL, "paper"].edge_index = torch.zeros(2, 1, dtype=torch.long)
    torch.save(data, tmp_path / "evil.pt")
    readers: list[Callable[[], object]] = [
        lambda: raw_graph("given", data),
        lambda: gnnpar.homogeneous(data),
        lambda: PT(path=str(tmp_path / "evil.pt"), self_loops="keep").load(None, 0),
        lambda: Schema.of('[[["a", 1]], [["a", "x\\"", "a"]], null]'),
    ]
    for read in readers:
        with pytest.raises(ValueError, match=r"the type 'x\".* has more in it than letters, digits, spaces and _ - \."):
            read()


@pytest.mark.parametrize("given", [None, Data()])
def test_what_is_no_typed_graph_is_named(given: HeteroData) -> None:
    with pytest.raises(ValueError, match=f"there is a {type(given).__name__}, not a torch_geometric.data.HeteroData"):
        gnnpar.homogeneous(given)
