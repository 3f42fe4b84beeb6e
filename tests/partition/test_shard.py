"""Laws of a partition and of the shards cut along it."""

from dataclasses import dataclass

import pytest
import torch

from gnnpar.comm import ThreadWorld
from gnnpar.partition.chunking import Balanced, chunk
from gnnpar.partition.partition import Metis, Random, Range, partition, partition_edges, train_weights
from gnnpar.partition.shard import Shard, _counted, cut, partition_statistics
from gnnpar.partition.vertex_cut import HDRF
from gnnpar.verify.conformance import small_graph
from graphs import ODD

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


def test_parts_of_a_partitioner_of_ones_own_are_not_cached(tmp_path):
    """Even where it has the name and the fields of one of gnnpar."""

    @dataclass(frozen=True, kw_only=True)
    class Own(Range):
        def part_of(self, dataset, parts):
            return torch.arange(dataset.num_nodes) % parts

    Own.__qualname__ = "Range"
    dataset = small_graph()
    partition(dataset, 3, by=Range(), cache=tmp_path)
    for _ in range(2):
        assert torch.equal(partition(dataset, 3, by=Own(), cache=tmp_path), torch.arange(dataset.num_nodes) % 3)
    assert len(list(tmp_path.iterdir())) == 1


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


def test_shards_reach_their_ranks():
    dataset = small_graph()
    part_of = partition(dataset, 3, by=Random())

    def body(comm):
        return Shard.open(dataset if comm.rank == 0 else None, part_of if comm.rank == 0 else None, comm)

    for p, shard in enumerate(ThreadWorld(3).run(body)):
        assert shard.part == p
        assert torch.equal(dataset.x[part_of == p], shard.x)


def test_table_of_edge_types_beyond_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="a table of 3 nodes by 1099511627776 types of edges needs"):
        _counted(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 3, 1 << 40)
