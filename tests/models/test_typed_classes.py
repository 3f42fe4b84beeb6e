"""Classes that know the types of their dataset, and types that no edge ends at."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportCallIssue=false

from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import HeteroConv, SAGEConv

from gnnpar.folds.edge_data import EdgeSizes, Schema
from gnnpar.models.hgt import HGT
from gnnpar.models.pyg.model import PyG
from gnnpar.models.rgcn import RGCN

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
