"""Hashes name contents: equal contents, equal hashes; any change of edges, features, labels or split shows."""

import re

import pytest
import torch

from data.samples import raw_graph
from gnnpar.data import Preprocess, prepare


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


def test_properties_count_what_is_there():
    data = prepare(raw_graph(), Preprocess(), seed=0)
    assert (data.num_nodes, data.num_edges, data.num_features, data.num_classes) == (6, 9, 2, 3)
    assert re.fullmatch("[0-9a-f]{64}", data.graph_hash)
