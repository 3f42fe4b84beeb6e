"""Vertex cuts: every edge in one part, copies where edges are, and partitioners that save copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnpar.cli.partition import run as gnnpar_partition
from gnnpar.data.dataset import Dataset
from gnnpar.partition.partition import Metis, Random, partition, partition_edges
from gnnpar.partition.shard import cut_nodes
from gnnpar.partition.vertex_cut import DBH, HDRF, NE, RandomEdges, copies_of, pairs_of, vertex_cut_statistics
from gnnpar.verify.conformance import small_graph

PARTS = 4
CUTS = [RandomEdges(), DBH(), HDRF(), NE()]


def graph_of(pairs: Tensor, num_nodes: int) -> Dataset:
    """Both directions of pairs [2, M], without features."""
    ends = torch.cat([pairs, pairs.flip(0)], dim=1)
    ends = ends[:, torch.argsort(ends[1] * num_nodes + ends[0])]
    none = torch.zeros(num_nodes, dtype=torch.bool)
    x, y = torch.zeros(num_nodes, 1), torch.zeros(num_nodes, dtype=torch.int64)
    return Dataset.of("g", x=x, y=y, edge_index=ends, masks=(none, none, none), num_classes=2, task="single_label")


def power_law(num_nodes: int = 400, num_pairs: int = 2400) -> Dataset:
    gen = torch.Generator().manual_seed(0)
    ends = (torch.rand(2, num_pairs, generator=gen) ** 3 * num_nodes).long()
    ends = ends[:, ends[0] != ends[1]]
    keys = torch.unique(ends.min(0).values * num_nodes + ends.max(0).values)
    return graph_of(torch.stack([keys // num_nodes, keys % num_nodes]), num_nodes)


def factor(data: Dataset, by: Any) -> float:
    part_of = by.part_of(data, PARTS)
    edges = partition_edges(data, PARTS, part_of, by=by)
    return vertex_cut_statistics(data.edge_index, part_of, edges, PARTS)["replication_factor"]


@pytest.mark.parametrize("by", [*CUTS, Random(), Metis()], ids=lambda by: type(by).__name__)
def test_every_edge_is_in_one_part_with_its_ends_and_its_other_direction(by: Any) -> None:
    data = small_graph()
    part_of = partition(data, PARTS, by=by)
    edges = partition_edges(data, PARTS, part_of, by=by)
    src, dst = data.edge_index
    assert edges.shape == src.shape
    assert 0 <= int(edges.min()) <= int(edges.max()) < PARTS
    of_pair: dict[frozenset[int], set[int]] = {}
    for s, d, p in zip(src.tolist(), dst.tolist(), edges.tolist(), strict=True):
        if s != d:
            of_pair.setdefault(frozenset((s, d)), set()).add(p)
    assert all(len(parts) == 1 for parts in of_pair.values())
    held = copies_of(data.edge_index, part_of, edges, PARTS)
    assert torch.cat(held).unique().equal(torch.arange(data.num_nodes))
    for p, copies in enumerate(cut_nodes(data, part_of, edges, PARTS)):
        block, ids = copies.shard.inner, copies.shard.node_ids
        assert torch.equal(ids, held[p])
        mine = (src != dst) & (edges == p)
        loops = (src == dst) & torch.isin(src, ids)
        assert block.num_edges == int(mine.sum() + loops.sum())
        found = torch.stack([ids[block.indices.long()], ids[block.edge_dst]])
        assert torch.equal(found, data.edge_index[:, mine | loops])


def test_ne_copies_less_than_hdrf_than_dbh_than_chance() -> None:
    data = power_law()
    by_chance, hashed, high_first, grown = (factor(data, by) for by in CUTS)
    assert 1 < grown < high_first < hashed < by_chance <= PARTS
    assert 1 < factor(data, Metis()) < by_chance


def test_ne_grows_by_the_node_with_fewest_edges_left() -> None:
    """Two cliques of 6 and a path between them: parts are the cliques, cut on the path alone."""
    clique = torch.combinations(torch.arange(6)).T
    path = torch.tensor([[5, 12], [12, 6]])
    graph = graph_of(torch.cat([clique, clique + 6, path], dim=1), 13)
    for seed in range(5):
        by = NE(seed=seed)
        edges = partition_edges(graph, 2, by.part_of(graph, 2), by=by)
        found = vertex_cut_statistics(graph.edge_index, by.part_of(graph, 2), edges, 2)
        assert sum(found["copies"]) == 14, "one node has two copies"
        assert found["copied_edges"] == [32, 32]


def test_dbh_cuts_the_hub_alone() -> None:
    """A star of 40 leaves: each edge goes with its leaf."""
    star = graph_of(torch.stack([torch.zeros(40, dtype=torch.int64), torch.arange(1, 41)]), 41)
    part_of = DBH().part_of(star, PARTS)
    edges = partition_edges(star, PARTS, part_of, by=DBH())
    found = vertex_cut_statistics(star.edge_index, part_of, edges, PARTS)
    assert sum(found["copies"]) == 40 + PARTS
    assert sum(found["copied_edges"]) == 80


def test_random_edges_ne_and_hdrf_give_equal_parts() -> None:
    for by, most in ((RandomEdges(), 2), (NE(), 8), (HDRF(), 60)):
        counts = torch.bincount(by.edge_part_of(power_law(), PARTS))
        assert int(counts.max() - counts.min()) <= most  # a pair is two edges
    apart = graph_of(torch.arange(40).view(2, 20), 40)  # every edge is a component of its own
    assert torch.bincount(NE().edge_part_of(apart, PARTS)).tolist() == [10] * 4


def test_hdrf_places_by_its_formula() -> None:
    """Against the paper's score, computed for every part of every edge."""
    data, balance = power_law(30, 80), 1.1
    pairs = pairs_of(data.edge_index, data.num_nodes)
    placed = HDRF(seed=5, balance=balance)._placed(pairs, 3)
    import numpy as np

    order = np.random.Generator(np.random.Philox(key=5)).permutation(len(pairs.low)).tolist()
    load, held = [0, 0, 0], [set(), set(), set()]
    for i in order:
        u, v = int(pairs.low[i]), int(pairs.high[i])
        d_u, d_v = int(pairs.degree[u]), int(pairs.degree[v])
        scores = [
            (1 + 1 - d_u / (d_u + d_v)) * (u in held[p])
            + (1 + 1 - d_v / (d_u + d_v)) * (v in held[p])
            + balance * (max(load) - load[p]) / (1 + max(load) - min(load))
            for p in range(3)
        ]
        chosen = int(placed[i])
        assert scores[chosen] == pytest.approx(max(scores), abs=1e-12)
        load[chosen] += 1
        held[chosen] |= {u, v}


@pytest.mark.parametrize("by", ["dbh", "metis"])
def test_gnnpar_partition_shows_the_replication_factor_beside_the_edge_cut(
    by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"out={tmp_path / 'shards'}"
    assert gnnpar_partition(["dataset=sbm", "dataset.num_nodes=200", "world_size=2", f"partition={by}", out]) == 0
    said = capsys.readouterr()
    text = said.out + said.err
    assert "of the edges are cut" in text
    assert "as a vertex cut: replication factor 1." in text
