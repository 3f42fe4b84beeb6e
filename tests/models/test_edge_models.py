"""Models that read types or attributes of edges: prices, programs, refusals, classes made by types."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch_geometric.nn import HeteroConv, SAGEConv

from composing import configured
from conformance.test_edge_data import ACROSS, HETERO, HGT_2, TYPED, WITHIN
from gnnpar.folds.edge_data import EdgeSizes, Schema
from gnnpar.models.hgt import HGT
from gnnpar.models.pyg.model import PyG
from gnnpar.models.rgat import RGAT
from gnnpar.models.rgcn import RGCN
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.local import Pass
from gnnpar.partition.shard import cut
from gnnpar.planner.extract import record
from gnnpar.training.result.export import Plain, traced
from gnnpar.verify.conformance import small_graph, train_in_threads
from outcomes import refused

TYPES, KINDS, RELATIONS, WIDTH = 3, 3, 5, 3


@pytest.mark.parametrize("model", ["gine", "transformer"])
def test_the_planner_sees_what_edges_carry(model: str) -> None:
    plain, wide = (configured("model", model, f"model.edge_dim={dim}").build(6, 3, seed=0) for dim in (0, WIDTH))
    for net, edge in ((wide, (WIDTH,)), (plain, ())):
        ir = record(net, 6)
        assert [fold.edge for i in range(2) for fold in ir.folds(i)] == [edge] * 2


@pytest.mark.parametrize(
    ("config", "sizes", "fold"),
    [
        (replace(ACROSS, num_relations=TYPES), 6, ("Generic", (6,), 8)),
        (replace(WITHIN, num_relations=TYPES), 6, ("Generic", (6,), 8 * TYPES)),
        (replace(HGT_2, num_relations=RELATIONS), 9, ("Generic", (8, 8), 8)),
    ],
)
def test_the_planner_sees_the_rows(config: Any, sizes: int, fold: Any) -> None:
    """Of rgat the results, of hgt keys and values."""
    model = config.build(sizes, 3, seed=0)
    (found,) = record(model, sizes).folds(0)
    assert (found.kind, found.src, found.out) == fold
    assert config.__class__ is not HGT_2.__class__ or model.activation_widths(1) == (8, KINDS)


def test_programs_hold_one_relation() -> None:
    one = ACROSS.on(EdgeSizes()).build(6, 3, seed=0)
    x = torch.randn(TYPED.num_nodes, 6)
    assert torch.allclose(traced(one).module()(x, TYPED.edge_index), Plain(one)(x, TYPED.edge_index), atol=1e-6)


def without_attributes(model: str) -> None:
    data = small_graph()
    shard = cut(data, torch.zeros(data.num_nodes).long(), 1, edge_ids=True)[0]
    configured("model", model, f"model.edge_dim={WIDTH}").build(6, 3, seed=0)(WholeGraph(shard, Pass(0)), shard.x)


TYPES_LINE = "num_relations=2, but the edges of the dataset have {} types"
CANNOT: list[tuple[Callable[[], object], str]] = [
    (lambda: RGCN(num_relations=2).on(TYPED.edge_sizes), TYPES_LINE.format(3)),
    (lambda: RGAT(num_relations=2).on(TYPED.edge_sizes), TYPES_LINE.format(3)),
    (lambda: replace(HGT_2, num_relations=2).on(HETERO.edge_sizes), TYPES_LINE.format(5)),
    (lambda: RGCN(num_bases=2, num_blocks=2), "exclude each other"),
    (lambda: RGAT(num_bases=2, num_blocks=2), "exclude each other"),
    (
        lambda: RGCN(num_blocks=4, hidden=8).on(TYPED.edge_sizes).build(6, 3, seed=0),
        "num_blocks=4 does not divide the widths of a layer, 6 and 8",
    ),
    (
        lambda: train_in_threads(configured("strategy", "feature"), ACROSS, TYPED, world=2),
        "Generic of layer 0 separates by neither",
    ),
    (
        lambda: HGT_2.build(3, 3, seed=0),
        "num_node_types=3 reads so many columns at the end of .* which there are 3",
    ),
    (
        lambda: replace(HGT_2, hidden=9).build(9, 3, seed=0),
        "hidden=9 does not divide into model.heads=2 heads: use hidden=10",
    ),
    *(
        (lambda given=given: traced(given[0].on(given[1]).build(given[2], 3, seed=0)), "has no form in plain torch")
        for given in ((HGT_2, EdgeSizes(types=2), 9), (ACROSS, TYPED.edge_sizes, 6))
    ),
    *(
        (
            lambda model=model: configured("model", model, f"model.edge_dim={WIDTH}").on(small_graph().edge_sizes),
            r"model\.edge_dim=3, but edge_attr of the dataset has width 0",
        )
        for model in ("gine", "transformer")
    ),
    *(
        (lambda model=model: without_attributes(model), "reads 3 attributes of each edge, and the graph has none")
        for model in ("gine", "transformer")
    ),
]


@pytest.mark.parametrize(("run", "line"), CANNOT)
def test_what_cannot_run_is_refused_in_one_line(run: Callable[[], object], line: str) -> None:
    with refused(line):
        run()


WIDTHS = {"paper": 4, "author": 3}
BOTH = Schema(tuple(WIDTHS.items()), (("author", "writes", "paper"), ("paper", "by", "author")), "paper")
ONE = Schema(tuple(WIDTHS.items()), (("author", "writes", "paper"),), "paper")


class ByName(torch.nn.Module):
    """Looks widths up by the names of its own types."""

    def __init__(self, metadata, num_classes):
        super().__init__()
        self.pre = torch.nn.ModuleDict({name: torch.nn.Linear(WIDTHS[name], 8) for name in metadata[0]})
        self.conv = HeteroConv({key: SAGEConv((8, 8), num_classes) for key in metadata[1]})

    def forward(self, x_dict, edge_index_dict):
        return self.conv({name: self.pre[name](x) for name, x in x_dict.items()}, edge_index_dict)["paper"]


class TwoLayers(torch.nn.Module):
    def __init__(self, metadata, num_classes):
        super().__init__()
        widths = (8, num_classes)
        self.convs = torch.nn.ModuleList(
            HeteroConv({key: SAGEConv((-1, -1), width) for key in metadata[1]}) for width in widths
        )

    def forward(self, x_dict, edge_index_dict):
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
        return x_dict["paper"]


def test_a_class_that_looks_types_up_is_made_with_those_of_the_dataset() -> None:
    config = PyG(target=f"{__name__}.ByName", self_loops="keep")
    assert config.edge_data == {"type"}
    assert "dictionaries by type" in config.in_one_piece
    typed = config.on(EdgeSizes(types=2, schema=BOTH))
    assert isinstance(typed, PyG) and typed.types is not None
    built = typed.build(BOTH.width, 3, seed=0)
    assert set(built.get_submodule("net.pre")._modules) == set(WIDTHS)


def test_a_type_that_no_edge_ends_at_is_named() -> None:
    typed = PyG(target=f"{__name__}.TwoLayers", self_loops="keep").on(EdgeSizes(types=1, schema=ONE))
    with pytest.raises(ValueError, match=r"no edge ends at author, .*; add reverse edges .*ToUndirected"):
        typed.build(ONE.width, 3, seed=0)
    both = typed.__class__(target=typed.target, self_loops="keep", types=BOTH, edge_types=2)
    assert both.build(BOTH.width, 3, seed=0).num_layers == 4


def test_matrices_of_relations_beyond_memory_are_refused() -> None:
    for config, types in ((RGCN(hidden=64), 1 << 32), (HGT(hidden=1 << 18, num_layers=2), 4)):
        with pytest.raises(ValueError, match=r"a model with model\.hidden=\d+, .* needs .* GiB at least"):
            config.on(EdgeSizes(types=types)).build(100, 3, seed=0)
