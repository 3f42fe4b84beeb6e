"""Laws of a partition, of its shards, chunks and vertex cuts; streaming partitioners against their definitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composing import configured
from gnnpar.cli.partition import run as gnnpar_partition
from gnnpar.data.dataset import Dataset
from gnnpar.data.synthetic import SBM
from gnnpar.partition import chunking, streaming
from gnnpar.partition.chunking import Balanced, chunk, chunk_statistics, quotient
from gnnpar.partition.partition import Metis, Random, Range, partition, partition_edges, train_weights
from gnnpar.partition.shard import _counted, cut, cut_nodes, partition_statistics
from gnnpar.partition.streaming import LDG, Fennel
from gnnpar.partition.vertex_cut import DBH, HDRF, NE, RandomEdges, copies_of, pairs_of, vertex_cut_statistics
from gnnpar.verify.conformance import small_graph
from graphs import ODD, both, dataset_of

PARTITIONERS = [Metis(), Metis(objective="volume"), Metis(balance="edges"), Metis(balance="train"), Random(), Range()]


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_edge_exactly_once_and_lists_match(parts, seed):
    dataset = small_graph(seed=seed)
    part_of = partition(dataset, parts, by=Random(seed=seed))
    shards = cut(dataset, part_of, parts, edge_ids=True)
    seen = []
    for p, shard in enumerate(shards):
        assert torch.equal(shard.node_ids, (part_of == p).nonzero().flatten())
        assert torch.equal(shard.in_degree.long(), dataset.in_degree[shard.node_ids])
        columns = {p: shard.node_ids, **{q: b.src_ids for q, b in shard.halo.items()}}
        for q, block in {p: shard.inner, **shard.halo}.items():
            assert block.edge_ids is not None
            src, dst = dataset.edge_index[:, block.edge_ids]
            assert torch.equal(columns[q][block.indices.long()], src)
            assert torch.equal(shard.node_ids[block.edge_dst], dst)
            assert bool((part_of[src] == q).all())
            seen.append(block.edge_ids)
        for q, block in shard.halo.items():
            assert block.src_ids is not None
            assert torch.equal(shards[q].node_ids[shards[q].boundary[p]], block.src_ids), "sent = expected"
            assert block.rows is None or bool((block.indptr.diff() > 0).all()), "halo rows are compressed"
        assert shard.boundary.keys() == {q for q in range(parts) if p in shards[q].halo}
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(dataset.num_edges))


@pytest.mark.parametrize("by", PARTITIONERS, ids=repr)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_partitioners_fill_every_part(by, parts):
    dataset = small_graph(num_nodes=200, num_edges=1500)
    part_of = partition(dataset, parts, by=by)
    sizes = torch.bincount(part_of, minlength=parts)
    assert part_of.shape == (200,)
    assert int(sizes.min()) > 0
    if not (isinstance(by, Metis) and by.balance != "nodes"):
        assert int(sizes.max()) <= 1.1 * 200 / parts + 1
    assert torch.equal(part_of, partition(dataset, parts, by=by)), "equal seeds, equal parts"


@pytest.mark.parametrize("nodes", [7, 100_000, 3_000_000])
def test_weights_of_training_nodes_fit_into_32_bits(nodes):
    """METIS adds them up in those."""
    train = torch.arange(nodes) % 3 > 0
    weights = train_weights(train)
    assert weights.sum() < 2**31
    assert set(weights[train.numpy()]) == {weights.max()}
    assert weights.max() > 100 * weights.min() or nodes == 7


def test_metis_balances_what_it_is_told_to():
    dataset = ODD["power_law"]()
    edges = partition_statistics(dataset, partition(dataset, 2, by=Metis(balance="edges")), 2)["edges"]
    assert max(edges) <= 0.65 * sum(edges)
    train = partition_statistics(dataset, partition(dataset, 2, by=Metis(balance="train")), 2)["train_nodes"]
    assert max(train) <= 0.6 * sum(train)


def test_metis_cuts_less_than_random():
    dataset = ODD["path"]()
    cuts = [partition_statistics(dataset, partition(dataset, 2, by=by), 2)["cut_edges"] for by in (Metis(), Random())]
    assert cuts[0] == 2 < cuts[1]


def test_statistics_equal_the_shards():
    dataset = small_graph()
    part_of = partition(dataset, 3, by=Random())
    stats = partition_statistics(dataset, part_of, 3)
    shards = cut(dataset, part_of, 3)
    assert stats["nodes"] == [s.num_inner for s in shards]
    assert stats["halo_rows"] == [sum(s.num_halo.values()) for s in shards]
    assert stats["sent_rows"] == [sum(map(len, s.boundary.values())) for s in shards]
    assert stats["halo_from"] == [[s.num_halo.get(j, 0) for j in range(3)] for s in shards]
    assert stats["edges"] == [s.inner.num_edges + sum(b.num_edges for b in s.halo.values()) for s in shards]
    assert stats["alpha"] == pytest.approx(sum(stats["halo_rows"]) / dataset.num_nodes)


def test_cache_is_keyed_by_content(tmp_path):
    dataset, said = small_graph(), []
    first = partition(dataset, 3, by=Random(), cache=tmp_path, say=said.append)
    again = partition(dataset, 3, by=Random(), cache=tmp_path, say=said.append)
    assert torch.equal(first, again)
    assert len(said) == 1
    assert "partitioned 60 nodes into 3 parts" in said[0]
    partition(small_graph(seed=1), 3, by=Random(), cache=tmp_path)
    partition(dataset, 3, by=Random(seed=1), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_parts_and_chunks_of_a_partitioner_of_ones_own_are_not_cached(tmp_path):
    """Even where it has the name and the fields of one of gnnpar."""

    @dataclass(frozen=True, kw_only=True)
    class Own(Range):
        def part_of(self, dataset, parts):
            return torch.arange(dataset.num_nodes) % parts

        def assign(self, graph, part_of, chunks_per_part, seed):
            return self.part_of(graph, chunks_per_part)

    Own.__qualname__ = "Range"
    dataset = small_graph()
    kept = partition(dataset, 3, by=Range(), cache=tmp_path)
    chunk(dataset, kept, 3, by=chunking.Range(), cache=tmp_path)
    for _ in range(2):
        assert torch.equal(partition(dataset, 3, by=Own(), cache=tmp_path), torch.arange(dataset.num_nodes) % 3)
        assert torch.equal(chunk(dataset, kept, 3, by=Own(), cache=tmp_path), torch.arange(dataset.num_nodes) % 3)
    assert len(list(tmp_path.iterdir())) == 2


CACHED = {
    "partition": lambda data, **where: partition(data, 3, by=Random(), **where),
    "chunking": lambda data, **where: chunk(data, torch.arange(data.num_nodes) % 3, 4, by=Balanced(), **where),
    "vertex cut": lambda data, **where: partition_edges(data, 3, torch.arange(data.num_nodes) % 3, by=HDRF(), **where),
}


@pytest.mark.parametrize("damage", [lambda d: d[:-4], lambda d: d[:40] + b"\xff" + d[41:], lambda d: b""])
@pytest.mark.parametrize("title", CACHED)
def test_a_corrupt_cache_is_noticed_and_made_anew(tmp_path, title, damage):
    dataset, said = small_graph(), []
    first = CACHED[title](dataset, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert torch.equal(CACHED[title](dataset, cache=tmp_path, say=said.append), first)
    assert said[0] == f"the cached {title} {file} is corrupt: making it again"
    assert file.read_bytes() == whole


def test_more_ranks_than_nodes_is_one_clear_line():
    with pytest.raises(ValueError, match="8 nodes cannot fill 9 parts: launch at most 8 ranks"):
        partition(ODD["path"](), 9, by=Metis())


def test_more_ranks_than_metis_can_fill_is_one_clear_line():
    dataset = ODD["star"]()

    def fill_ever_more() -> None:
        for parts in range(2, 13):
            assert int(torch.bincount(partition(dataset, parts, by=Metis()), minlength=parts).min()) > 0

    with pytest.raises(ValueError, match=r"Metis left \d+ of \d+ parts without nodes .*: use fewer ranks"):
        fill_ever_more()


def test_table_of_edge_types_beyond_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="a table of 3 nodes by 1099511627776 types of edges needs"):
        _counted(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 3, 1 << 40)


Score = Callable[[int, int], Fraction | float]  # neighbours in a part, its load


def one_by_one(dataset: Dataset, parts: int, by: LDG | Fennel, score: Score, capacity: int) -> list[int]:
    """The papers' greedy: every node looks at all its in-neighbours' parts."""
    num_nodes = dataset.num_nodes
    neighbours: list[list[int]] = [[] for _ in range(num_nodes)]
    for src, dst in dataset.edge_index.T.tolist():
        neighbours[dst] += [src] if src != dst else []
    weight = [
        1 if by.balance == "nodes" else len(n) + 1 + loops for n, loops in zip(neighbours, _loops(dataset), strict=True)
    ]
    part: dict[int, int] = {}
    for _ in range(by.passes):
        for v in range(num_nodes):
            was = part.pop(v, None)
            load = [sum(weight[u] for u, q in part.items() if q == p) for p in range(parts)]
            empty = [p for p in range(parts) if p not in part.values()]
            there = [sum(part.get(u) == p for u in neighbours[v]) for p in range(parts)]
            room = [p for p in range(parts) if load[p] + weight[v] <= capacity]
            if was in empty:
                part[v] = was
            elif num_nodes - v <= len(empty):
                part[v] = empty[0]
            elif room:
                part[v] = min(room, key=lambda p: (-score(there[p], load[p]), load[p], p))
            else:
                part[v] = min(range(parts), key=lambda p: (load[p], p))
    return [part[v] for v in range(num_nodes)]


def _loops(dataset: Dataset) -> list[int]:
    src, dst = dataset.edge_index
    return torch.bincount(dst[src == dst], minlength=dataset.num_nodes).tolist()


def capacity_of(dataset: Dataset, parts: int, by: LDG | Fennel) -> int:
    total = dataset.num_nodes + (dataset.num_edges if by.balance == "edges" else 0)
    share = -(-total // parts)
    return max(share, int(share * (1 + by.slack)))


@pytest.mark.parametrize("block", [1, 7, 4096])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "by", [LDG(), LDG(passes=3), LDG(balance="edges", slack=0.2), Fennel(), Fennel(passes=2, slack=0.0)], ids=repr
)
def test_the_greedy_of_the_papers(monkeypatch: pytest.MonkeyPatch, by, parts: int, block: int) -> None:
    monkeypatch.setattr(streaming, "BLOCK_NODES", block)
    for dataset in (small_graph(), ODD["power_law"](), ODD["multi_edges"](), ODD["directed"]()):
        if parts > dataset.num_nodes:
            continue
        capacity = capacity_of(dataset, parts, by)
        src, dst = dataset.edge_index
        entries, nodes = int((src != dst).sum()), dataset.num_nodes
        total = nodes + (dataset.num_edges if by.balance == "edges" else 0)

        def fennel(count: int, load: int, entries=entries, nodes=nodes, total=total) -> float:
            alpha = sqrt(parts) * (entries / 2) / nodes**1.5
            cost = 1.5 * alpha * sqrt(load * nodes / total)
            return count - int(cost * streaming.UNIT + 1e-6) / streaming.UNIT

        def ldg(count: int, load: int, capacity=capacity) -> Fraction:
            return count * (1 - Fraction(load, capacity))

        want = one_by_one(dataset, parts, by, fennel if isinstance(by, Fennel) else ldg, capacity)
        assert by.part_of(dataset, parts).tolist() == want


@pytest.mark.parametrize("name", ["ldg", "fennel"])
def test_cuts_less_than_random_and_keeps_its_balance(name: str) -> None:
    dataset = SBM(num_nodes=800, num_communities=4).load(None, 0)
    by = configured("partition", name)
    random = partition_statistics(dataset, partition(dataset, 4, by=Random()), 4)["cut_share"]
    once = partition_statistics(dataset, partition(dataset, 4, by=by), 4)
    more = configured("partition", name, "partition.passes=3")
    again = partition_statistics(dataset, partition(dataset, 4, by=more), 4)
    assert once["cut_share"] < 0.9 * random
    assert again["cut_share"] < 0.8 * once["cut_share"]
    for statistics in (once, again):
        assert max(statistics["nodes"]) <= (1 + by.slack) * 200
    assert torch.equal(by.part_of(dataset, 4), by.part_of(dataset, 4))


@pytest.mark.parametrize("by", [LDG(), Fennel(), LDG(passes=2), Fennel(balance="edges")], ids=repr)
def test_no_part_is_empty(by) -> None:
    for make in ODD.values():
        dataset = make()
        for parts in range(1, min(dataset.num_nodes, 6) + 1):
            assert int(torch.bincount(partition(dataset, parts, by=by), minlength=parts).min()) > 0


CHUNKERS = [Balanced(), chunking.Metis(), chunking.Range()]


def cliques(count: int, size: int):
    """Cliques in a ring, one edge between neighbours; nodes dealt out so that ranges do not follow cliques."""
    pairs = [(c + count * i, c + count * j) for c in range(count) for i in range(size) for j in range(i)]
    pairs += [(c, (c + 1) % count) for c in range(count)]
    return dataset_of(*both(pairs), num_nodes=count * size)


@pytest.mark.parametrize("by", CHUNKERS)
@pytest.mark.parametrize(("parts", "chunks"), [(1, 1), (1, 4), (2, 4), (3, 2)])
def test_every_part_has_all_its_chunks_and_the_same_ones_again(by, parts, chunks):
    dataset = small_graph(seed=0)
    part_of = partition(dataset, parts, by=Random())
    chunk_of = by.assign(dataset, part_of, chunks, 3)
    for part in range(parts):
        assert torch.unique(chunk_of[part_of == part]).tolist() == list(range(chunks))
    assert torch.equal(chunk_of, by.assign(dataset, part_of, chunks, 3))


def test_a_way_is_cut_by_what_lies_inside_it():
    """Chunks of one part do not depend on the edges of another, nor on edges between parts."""
    dataset = small_graph(seed=0)
    part_of = partition(dataset, 2, by=Metis())
    src, dst = dataset.edge_index
    alone = (part_of[src] == 0) & (part_of[dst] == 0)
    ids = part_of == 0
    whole = chunking.Metis().assign(dataset, part_of, 3, 0)[ids]
    fewer = replace(dataset, edge_index=dataset.edge_index[:, alone])
    assert torch.equal(whole, chunking.Metis().assign(fewer, part_of, 3, 0)[ids])


def test_metis_finds_the_cliques_and_range_does_not():
    dataset = cliques(4, 12)
    part_of = torch.zeros(dataset.num_nodes, dtype=torch.int64)
    shares = [
        chunk_statistics(dataset.edge_index, part_of, by.assign(dataset, part_of, 4, 0))["rho"]
        for by in (chunking.Metis(), chunking.Range())
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
    assert spread(chunking.Metis()) > 1.06


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
        chunking.Metis().assign(ODD["path"](), torch.zeros(8, dtype=torch.int64), 3, 0)


@pytest.mark.parametrize("name", [n for n in ODD if not n.startswith("one_node")])
@pytest.mark.parametrize("by", [Balanced(), chunking.Range()])
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
    part_of = partition(dataset, 2, by=Metis())
    first = chunk(dataset, part_of, 4, by=Balanced(), cache=tmp_path)
    assert torch.equal(first, chunk(dataset, part_of, 4, by=Balanced(), cache=tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    chunk(dataset, part_of, 2, by=Balanced(), cache=tmp_path)
    chunk(dataset, part_of, 4, by=chunking.Metis(), cache=tmp_path)
    chunk(dataset, part_of, 4, by=Balanced(), seed=1, cache=tmp_path)
    chunk(dataset, 1 - part_of, 4, by=Balanced(), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


PARTS = 4
CUTS = [RandomEdges(), DBH(), HDRF(), NE()]


def graph_of(pairs: Tensor, num_nodes: int) -> Dataset:
    """Both directions of pairs [2, M]."""
    return dataset_of(*torch.cat([pairs, pairs.flip(0)], dim=1), num_nodes=num_nodes)


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
