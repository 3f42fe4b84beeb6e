"""rmat is the graph that Graph500's generator describes, pair by pair, however it is read."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gnnpar.data import rmat
from gnnpar.data.rmat import RMAT, _Graph

SMALL = RMAT(scale=10, num_features=4)


def pairs_of(config: RMAT, limit: int = 1 << 17) -> tuple[np.ndarray, np.ndarray]:
    chunks = [(src, dst) for src, dst, _ in _Graph.of(config, 0).pairs(limit)]
    return tuple(np.concatenate(each) for each in zip(*chunks, strict=True))  # type: ignore[return-value]


def test_the_graph_depends_on_its_own_seed_only():
    first = SMALL.load(None, 0)
    assert first.graph_hash == SMALL.load(None, 9).graph_hash
    assert first.graph_hash != replace(SMALL, graph_seed=1).load(None, 0).graph_hash
    assert (
        replace(SMALL, graph_seed=None).load(None, 1).graph_hash
        == replace(SMALL, graph_seed=1).load(None, 0).graph_hash
    )
    assert first.split_hash != replace(SMALL, split_seed=None).load(None, 9).split_hash


@pytest.mark.parametrize("limit", [1, 777, 1 << 14])
def test_pairs_do_not_depend_on_chunks(limit):
    config = replace(SMALL, scale=6)
    whole, chunked = pairs_of(config), pairs_of(config, limit)
    assert all(np.array_equal(a, b) for a, b in zip(whole, chunked, strict=True))
    assert len(whole[0]) == 16 << 6


def test_quadrants_and_degrees_are_those_of_the_parameters():
    """A pair falls into quadrant (0, 0) with a at each level, and the expected degree of an id with k bits set is
    pairs * (a + b)^(scale - k) * (c + d)^k."""
    config = RMAT(scale=9, edge_factor=1024)
    src, dst = _Graph.of(config, 0).unscrambled(0, config.num_pairs)
    count = config.num_pairs
    for level in range(config.scale):
        quadrant = 2 * (src >> level & 1) + (dst >> level & 1)
        shares = torch.bincount(quadrant, minlength=4) / count
        for share, wanted in zip(shares.tolist(), (0.57, 0.19, 0.19, 0.05), strict=True):
            assert share == pytest.approx(wanted, abs=5 * math.sqrt(wanted * (1 - wanted) / count))
    degree = torch.bincount(src, minlength=1 << config.scale)
    ones = torch.tensor([bin(i).count("1") for i in range(1 << config.scale)])
    for k in range(config.scale + 1):
        ids, wanted = ones == k, count * 0.76 ** (config.scale - k) * 0.24**k
        spread = math.sqrt(wanted * int(ids.sum()))
        assert abs(float(degree[ids].sum()) - wanted * int(ids.sum())) < 5 * spread
    assert int(degree[0]) == pytest.approx(count * 0.76**9, rel=0.02)


def test_levels_are_independent():
    src, dst = _Graph.of(SMALL, 0).unscrambled(0, SMALL.num_pairs)
    bits = torch.stack([ids >> level & 1 for ids in (src, dst) for level in range(SMALL.scale)]).double()
    correlation = torch.corrcoef(bits)
    inside = torch.tensor([[abs(i - j) in (0, SMALL.scale) for j in range(20)] for i in range(20)])
    assert correlation[~inside].abs().max() < 5 / math.sqrt(SMALL.num_pairs)


@pytest.mark.parametrize("scale", [4, 7, 12])
def test_scrambling_is_a_bijection(scale):
    graph = _Graph.of(RMAT(scale=scale, graph_seed=3), 0)
    ids = torch.arange(1 << scale)
    scrambled = graph.scrambled(ids)
    assert torch.equal(scrambled.sort().values, ids)
    assert not torch.equal(scrambled, ids)
    assert not torch.equal(scrambled, _Graph.of(RMAT(scale=scale, graph_seed=4), 0).scrambled(ids))


def test_the_tail_is_heavy_and_many_nodes_are_alone():
    degree = RMAT(scale=14, num_features=1).load(None, 0).in_degree - 1
    assert degree.max() > 50 * degree.double().mean()
    assert 0.15 < (degree == 0).double().mean() < 0.45
    tail = degree.double().sort().values[-160:]
    flat = np.random.default_rng(0).poisson(degree.double().mean().item(), size=len(degree))
    assert tail[0] > 4 * np.sort(flat)[-160]  # of as many edges without structure


def test_edges_go_both_ways_without_repeats():
    data = SMALL.load(None, 0)
    src, dst = data.edge_index
    keys = src * data.num_nodes + dst
    assert torch.equal(keys.unique(), (dst * data.num_nodes + src).unique())
    assert len(keys.unique()) == len(keys)
    assert int((src == dst).sum()) == data.num_nodes


@pytest.mark.parametrize("normalize", ["none", "row"])
def test_in_chunks_it_is_the_same_graph(tmp_path, normalize):
    config = replace(SMALL, scale=14, normalize=normalize)
    assert config.num_pairs > rmat.CHUNK_PAIRS
    whole, stored = config.load(None, 0), config.stored(None, 0, tmp_path)
    assert (stored.graph_hash, stored.split_hash) == (whole.graph_hash, whole.split_hash)
    assert np.array_equal(stored.x[100:117], whole.x[100:117].numpy())
    assert stored.num_edges == whole.num_edges


def test_features_show_the_class():
    config = replace(SMALL, feature_noise=0.0)
    data = config.load(None, 0)
    code = torch.stack([data.x[data.y == c][0] for c in range(8)])
    assert torch.equal(data.x, code[data.y])
    noise = (
        replace(SMALL, num_features=64, feature_noise=0.5).load(None, 0).x
        - replace(SMALL, num_features=64, feature_noise=0.0).load(None, 0).x
    )
    assert float(noise.std()) == pytest.approx(0.5, rel=0.02)
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.01)
    counts = torch.bincount(data.y)
    assert counts.min() > 0.6 * counts.double().mean()


def test_what_does_not_fit_is_refused_in_one_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"rmat of 2\^30 nodes needs .* GiB at least, .*: lower dataset.scale, or cut"):
        RMAT(scale=30).load(None, 0)
    with pytest.raises(ValueError, match=r"dataset.a \+ dataset.b \+ dataset.c = 1 leave nothing"):
        RMAT(a=0.6, b=0.2, c=0.2).load(None, 0)
    with pytest.raises(ValueError, match="normalize=standard needs all features"):
        RMAT(normalize="standard").stored(None, 0, tmp_path)
    monkeypatch.setattr(rmat, "require_memory", lambda *_: None)
    with pytest.raises(ValueError, match=r"sorted, needs 6,144.0 GiB of disk at least, .* free: name another place"):
        RMAT(scale=28, edge_factor=1024).stored(None, 0, tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr("gnnpar.files.memory_bytes", lambda: 1 << 30)
    with pytest.raises(ValueError, match=r"2\^30 nodes, even in chunks, needs 48 GiB at least, this machine has 1"):
        RMAT(scale=30).stored(None, 0, Path(tmp_path))
