"""Chunks inside parts: complete, none empty, balanced, repeatable."""

from dataclasses import replace

import pytest
import torch

from gnnpar.partition import chunking
from gnnpar.partition.chunking import Balanced, Metis, Range, chunk, chunk_statistics, quotient
from gnnpar.partition.partition import Metis as MetisParts
from gnnpar.partition.partition import Random as RandomParts
from gnnpar.partition.partition import partition
from gnnpar.verify.conformance import small_graph
from graphs import ODD, both, dataset_of

CHUNKERS = [Balanced(), Metis(), Range()]


def cliques(count: int, size: int):
    """Cliques in a ring, one edge between neighbours; nodes dealt out so that ranges do not follow cliques."""
    pairs = [(c + count * i, c + count * j) for c in range(count) for i in range(size) for j in range(i)]
    pairs += [(c, (c + 1) % count) for c in range(count)]
    return dataset_of(*both(pairs), num_nodes=count * size)


@pytest.mark.parametrize("by", CHUNKERS)
@pytest.mark.parametrize(("parts", "chunks"), [(1, 1), (1, 4), (2, 4), (3, 2)])
def test_every_part_has_all_its_chunks_and_the_same_ones_again(by, parts, chunks):
    dataset = small_graph(seed=0)
    part_of = partition(dataset, parts, by=RandomParts())
    chunk_of = by.assign(dataset, part_of, chunks, 3)
    for part in range(parts):
        assert torch.unique(chunk_of[part_of == part]).tolist() == list(range(chunks))
    assert torch.equal(chunk_of, by.assign(dataset, part_of, chunks, 3))


def test_a_way_is_cut_by_what_lies_inside_it():
    """Chunks of one part do not depend on the edges of another, nor on edges between parts."""
    dataset = small_graph(seed=0)
    part_of = partition(dataset, 2, by=MetisParts())
    src, dst = dataset.edge_index
    alone = (part_of[src] == 0) & (part_of[dst] == 0)
    ids = part_of == 0
    whole = Metis().assign(dataset, part_of, 3, 0)[ids]
    fewer = replace(dataset, edge_index=dataset.edge_index[:, alone])
    assert torch.equal(whole, Metis().assign(fewer, part_of, 3, 0)[ids])


def test_metis_finds_the_cliques_and_range_does_not():
    dataset = cliques(4, 12)
    part_of = torch.zeros(dataset.num_nodes, dtype=torch.int64)
    shares = [
        chunk_statistics(dataset.edge_index, part_of, by.assign(dataset, part_of, 4, 0))["rho"]
        for by in (Metis(), Range())
    ]
    assert shares[0] == pytest.approx(8 / dataset.num_edges)  # the ring only
    assert shares[1] > 0.5


def test_balanced_chunks_cost_the_same_where_degrees_differ():
    """A skewed graph: METIS balances nodes; GNNPipe's chunks balance 50 + degree, at the price of a larger cut."""
    gen = torch.Generator().manual_seed(1)
    draw = (torch.rand(2, 60000, generator=gen) ** 2 * 1500).long()
    dataset = dataset_of(draw[0], draw[1], num_nodes=1500)
    part_of = torch.zeros(1500, dtype=torch.int64)
    weight = (50 + dataset.in_degree).double()

    def spread(by) -> float:
        cost = torch.bincount(by.assign(dataset, part_of, 8, 0), weights=weight, minlength=8)
        return float(cost.max() / cost.mean())

    assert spread(Balanced()) < 1.06
    assert spread(Metis()) > 1.06


def test_balanced_merges_four_pieces_a_chunk(monkeypatch):
    pieces = torch.arange(64) % 16  # 16 pieces of 4 nodes
    monkeypatch.setattr(chunking, "metis", lambda *_, **__: pieces)
    dataset = cliques(4, 16)
    chunk_of = Balanced().assign(dataset, torch.zeros(64, dtype=torch.int64), 4, 0)
    assert torch.bincount(chunk_of).tolist() == [16] * 4
    for piece in range(16):
        assert len(torch.unique(chunk_of[pieces == piece])) == 1, "a piece stays together"
    other = Balanced().assign(dataset, torch.zeros(64, dtype=torch.int64), 4, 1)
    assert not torch.equal(chunk_of, other), "the seed shuffles the pieces"


@pytest.mark.parametrize("by", CHUNKERS)
def test_more_chunks_than_nodes(by):
    dataset = ODD["path"]()
    part_of = torch.arange(8) // 4
    with pytest.raises(ValueError, match="part 0 of 2 has 4 nodes and cannot fill 5 chunks: use at most 8 chunks"):
        by.assign(dataset, part_of, 5, 0)


def test_a_chunk_without_nodes(monkeypatch):
    monkeypatch.setattr(chunking, "metis", lambda *_, **__: torch.zeros(8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"2 of 3 chunks of part 0 of 1 have no nodes \(chunks \[1, 2\]; 8 nodes\)"):
        Metis().assign(ODD["path"](), torch.zeros(8, dtype=torch.int64), 3, 0)


@pytest.mark.parametrize("name", [n for n in ODD if not n.startswith("one_node")])
@pytest.mark.parametrize("by", [Balanced(), Range()])
def test_odd_graphs_have_chunks(by, name):
    dataset = ODD[name]()
    part_of = torch.zeros(dataset.num_nodes, dtype=torch.int64)
    assert int(by.assign(dataset, part_of, 2, 0).max()) == 1


def test_statistics_and_quotient():
    dataset = ODD["path"]()  # 0-1-...-7, 14 directed edges
    part_of, chunk_of = torch.arange(8) // 4, torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])
    found = chunk_statistics(dataset.edge_index, part_of, chunk_of)
    assert quotient(dataset.edge_index, chunk_of, 2).tolist() == [[4, 3], [3, 4]]
    assert (found["chunks"], found["chunk_nodes_min"], found["chunk_edges_max"]) == (4, 2, 4)
    assert found["rho"] == pytest.approx(6 / 14)


def test_the_cache_gives_the_same_and_tells_chunkings_apart(tmp_path):
    dataset = small_graph(seed=0)
    part_of = partition(dataset, 2, by=MetisParts())
    first = chunk(dataset, part_of, 4, by=Balanced(), cache=tmp_path)
    assert torch.equal(first, chunk(dataset, part_of, 4, by=Balanced(), cache=tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    chunk(dataset, part_of, 2, by=Balanced(), cache=tmp_path)
    chunk(dataset, part_of, 4, by=Metis(), cache=tmp_path)
    chunk(dataset, part_of, 4, by=Balanced(), seed=1, cache=tmp_path)
    chunk(dataset, 1 - part_of, 4, by=Balanced(), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 5
