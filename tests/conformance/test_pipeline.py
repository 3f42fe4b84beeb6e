"""GNNPipe and hybrid: the invariants of their specification (8.4), in fp64, ranks as threads."""

import itertools
import math
from typing import Any

import pytest
import torch

from chunked import Chain
from composing import ALIKE, configured, names, rest_slow
from engines import Rank, on_ranks
from gnnpar.models.gcnii import GCNII
from gnnpar.models.resgcn import ResGCN
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipeline.chunk import Weights
from gnnpar.parallel.pipeline.chunks import draw_order
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.pipeline.strategy import GNNPipe
from gnnpar.parallel.single.strategy import Single
from gnnpar.partition.partition import Range
from gnnpar.partition.shard import Shard
from gnnpar.verify.conformance import make_job, merge_ranks, relative_error, small_graph, train_in_threads
from graphs import both, dataset_of
from outcomes import assert_close, assert_equals_autograd, assert_same_bits
from worlds import run_world

MODELS = names("model")
EXACT_RULES: dict[str, Any] = {"gradient": "fresh", "order": "fixed", "refresh": 1}


def model_of(name: str, *overrides: str):
    return configured("model", name, "model.hidden=8", "model.num_layers=4", *overrides)


@pytest.mark.quick(2)
@pytest.mark.parametrize("model", rest_slow(MODELS, *ALIKE))
@pytest.mark.parametrize(("stages", "parts", "chunks"), [(2, 1, 4), (2, 2, 6), (1, 3, 12)])
def test_equals_autograd_with_stale_constants(model, stages, parts, chunks):
    """Invariant 3: with the paper's techniques on (shuffled, R = 2, fresh gradients twice), and with all off."""
    config, data = model_of(model), small_graph()
    cases: list[tuple[dict[str, Any], float]] = [({"refresh": 2}, 2.0)]
    if stages > parts:
        cases.append((EXACT_RULES, 1.0))
    for rules, fresh in cases:
        strategy = Hybrid(stages=stages, parts=parts, chunks=chunks, **rules)
        job = make_job(strategy, config, data, world=stages * parts, epochs=3)
        assert_equals_autograd(job, refresh=strategy.refresh, fresh=fresh, shuffled=strategy.order == "shuffled")


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_ways_that_read_nothing_of_some_chunks(model):
    """Their spans of halo rows are empty, and begin where the next chunk's do."""
    rings = [(8 * part + i, 8 * part + (i + 1) % 8) for part in range(2) for i in range(8)]
    data = dataset_of(*both([*rings, (3, 12), (3, 14), (6, 9)]), num_nodes=16)
    strategy = Hybrid(stages=1, parts=2, chunks=8, chunking="range", refresh=2)
    job = make_job(strategy, model_of(model), data, world=2, epochs=4, partition=Range())
    assert_equals_autograd(job, refresh=2, fresh=2.0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", ["gcn", "gcnii", "resgcn"])
@pytest.mark.parametrize(("stages", "parts"), [(2, 1), (2, 2)])
def test_mixing_adds_last_epochs_gradients(model, stages, parts):
    strategy = Hybrid(stages=stages, parts=parts, chunks=8, gradient="mix", mixing=0.3, refresh=2)
    job = make_job(strategy, model_of(model), small_graph(), world=stages * parts, epochs=4)
    assert_equals_autograd(job, refresh=2, fresh=1.7, stale=0.3)


@pytest.mark.slow
def test_eight_stages_of_64_layers_have_the_bits_of_one(monkeypatch):
    """Invariants 4 and 10: every rank asks for the order of an epoch once, and all get the same."""
    from gnnpar.parallel.pipeline import engine as pipeline

    asked: list[tuple[int, tuple[int, ...]]] = []

    def recorded(num, *, seed, epoch, shuffled):
        asked.append((epoch, draw_order(num, seed=seed, epoch=epoch, shuffled=shuffled)))
        return asked[-1][1]

    monkeypatch.setattr(pipeline, "draw_order", recorded)
    config = model_of("resgcn", "model.num_layers=64", "model.hidden=4", "model.dropout=0.2")
    one, eight = (train_in_threads(GNNPipe(chunks=8, refresh=1), config, small_graph(), world=w) for w in (1, 8))
    assert_same_bits(one, eight)
    assert all(len(gradients) > 128 for gradients in one.gradients)
    assert sorted(epoch for epoch, _ in asked) == [0] * 9 + [1] * 9
    assert len(set(asked)) == 2


@pytest.mark.quick(2)
@pytest.mark.parametrize("rules", [{}, {"gradient": "fresh", "refresh": 1}, {"gradient": "mix", "mixing": 1.0}])
@pytest.mark.parametrize("model", ["gcn", "gcnii", "resgcn"])
def test_chunks_without_edges_between_them_are_exact(model, rules):
    """Invariant 2: a block-diagonal graph, whatever the techniques."""
    pairs = [(8 * b + i, 8 * b + j) for b in range(4) for i, j in [(0, 1), (1, 2), (2, 5), (3, 4), (4, 7), (0, 6)]]
    data = dataset_of(*both(pairs), num_nodes=32)
    config = model_of(model)
    reference = train_in_threads(Single(), config, data, world=1, epochs=3)
    strategy = GNNPipe(chunks=4, chunking="range", **rules)
    assert_close(train_in_threads(strategy, config, data, world=2, epochs=3), reference.losses, reference.gradients)


def test_one_hop_is_unbiased_over_all_orders():
    """Invariant 5: with factor 2, the mean over all K! orders is A^T G."""
    data = small_graph(num_nodes=24, num_edges=90)
    chunk_of = torch.arange(24) % 4
    gen = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(24, 3, generator=gen, dtype=torch.float64) for _ in range(2))
    src, dst = data.edge_index
    exact = torch.zeros_like(grad).index_add_(0, src, grad[dst])
    found = {}
    for fresh in (1.0, 2.0):
        chain = Chain(data, chunk_of, 1, Weights(fresh, 0.0))
        total = torch.zeros_like(x)
        for order in itertools.permutations(range(4)):
            total += chain.run(x, grad, order)[1]
        found[fresh] = relative_error(total / 24, exact)
    assert found[2.0] < 1e-12
    assert found[1.0] > 0.1


@pytest.mark.quick(1)
@pytest.mark.parametrize("hops", [1, 2, 3])
def test_many_hops_lose_their_gradient(hops):
    """Specification 3.3: over m chunk-crossing hops the expected weight is 2^m / (m + 1)!; mixing restores it."""
    data = dataset_of(list(range(hops)), list(range(1, hops + 1)), num_nodes=hops + 1)
    chunk_of, x = torch.arange(hops + 1), torch.ones(hops + 1, 1, dtype=torch.float64)
    grad = torch.zeros_like(x)
    grad[-1] = 1
    orders = list(itertools.permutations(range(hops + 1)))
    doubled = Chain(data, chunk_of, hops, Weights(2.0, 0.0))
    weight = sum(float(doubled.run(x, grad, order)[1][0]) for order in orders) / len(orders)
    assert weight == pytest.approx(2**hops / math.factorial(hops + 1), rel=1e-12)
    mixed = Chain(data, chunk_of, hops, Weights(1.0, 1.0))
    weights = [float(mixed.run(x, grad, order)[1][0]) for order in orders[-1:] * (hops + 1) + orders]
    assert weights[hops + 1 :] == pytest.approx([1.0] * len(orders), rel=1e-12)
    half = 0.0  # one order, repeated until last epoch's gradients have arrived: 1.5 a fresh hop, 0.5 a stale one
    for order in orders:
        chain = Chain(data, chunk_of, hops, Weights(1.5, 0.5))
        found = [float(chain.run(x, grad, order)[1][0]) for _ in range(hops + 1)][-1]
        assert found == pytest.approx(
            math.prod(1.5 if order.index(i) < order.index(i + 1) else 0.5 for i in range(hops))
        )
        half += found / len(orders)
    assert half == pytest.approx(1.0) if hops == 1 else half > 1.3 * weight


def test_history_is_zero_then_frozen():
    """Invariant 8: epochs 0 to R - 1 read zeros, R to 2R - 1 the rows of epoch R - 1, which are 1 to R epochs old."""
    data = dataset_of([0, 1], [1, 0], num_nodes=2)
    chain = Chain(data, torch.tensor([0, 1]), 1, Weights(), refresh=3)
    read, ages = [], []
    for epoch in range(9):
        taken = chain.history.taken_after
        ages.append(None if taken is None else epoch - taken)
        x = torch.full((2, 1), 10.0 + epoch, dtype=torch.float64)
        out, _ = chain.run(x, torch.zeros_like(x), (0, 1))
        read.append(float(out[0]))  # the first chunk reads the history of the second
        assert float(out[1]) == 10.0 + epoch
    assert read == [0, 0, 0, 12, 12, 12, 15, 15, 15]
    assert ages == [None, None, None, 1, 2, 3, 1, 2, 3]


def test_orders_are_one_for_all_ranks_and_new_every_epoch():
    """Invariant 10: an order is a function of seed and epoch, not of what a rank has drawn before."""
    orders = [draw_order(16, seed=1, epoch=e, shuffled=True) for e in range(8)]
    assert len(set(orders)) == 8
    assert all(sorted(order) == list(range(16)) for order in orders)
    assert orders[2] == draw_order(16, seed=1, epoch=2, shuffled=True) != draw_order(16, seed=2, epoch=2, shuffled=True)
    assert draw_order(4, seed=1, epoch=7, shuffled=False) == (0, 1, 2, 3)


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", ["gcn", "gcnii", "gat", "sage_max"])
def test_hybrid_of_one_stage_and_one_chunk_is_graph_parallelism(model):
    """Invariant 7, bytes included."""
    config, data = model_of(model), small_graph()
    strategy = Hybrid(stages=1, parts=3, chunks="one")
    ours = train_in_threads(strategy, config, data, world=3)
    theirs = train_in_threads(GraphParallel(), config, data, world=3)
    assert_close(ours, theirs.losses, theirs.gradients)
    for mine, other in zip(ours.traffic, theirs.traffic, strict=True):
        assert mine["forward"] == other["forward"]
        assert mine.get("backward") == other.get("backward")


@pytest.mark.quick(1)
@pytest.mark.parametrize("config", [ResGCN, GCNII])
@pytest.mark.parametrize(("stages", "parts"), [(1, 4), (2, 2), (4, 1)])
def test_bytes_are_the_formula(config, stages, parts):
    """Invariant 6, specification 1.3: V_hybrid = 2 b N H (S - 1)(1 + delta) + 2 b N H L alpha(W) + V_w(W)."""
    data, hidden, layers, b = small_graph(num_nodes=80), 8, 4, 8
    model = config(hidden=hidden, num_layers=layers, encoder="linear", decoder="linear")
    strategy = Hybrid(stages=stages, parts=parts, chunks=stages * parts * 2)
    job = make_job(strategy, model, data, world=stages * parts, partition=Range())
    got = merge_ranks(job, run_world("threads", stages * parts, job))
    alpha = job.plan.statistics["alpha"]
    for sent in got.traffic:
        delta = 1 if config is GCNII else 0
        assert sent.get("stage", 0) == 2 * b * data.num_nodes * hidden * (stages - 1) * (1 + delta)
        halo = sent.get("forward", 0) + sent.get("backward", 0)
        assert halo == pytest.approx(2 * b * data.num_nodes * hidden * layers * alpha, abs=0.5)
        weights = 2 * b * sum(p.numel() for p in job.model.parameters()) * (parts - 1)
        assert sent.get("reduce", 0) == weights + 2 * b * 2 * (stages * parts - 1), "and two numbers: loss, norm"


def held(rank: Rank) -> tuple[Shard, int]:
    """Return the shard of a rank, and the bytes of tables that it holds after an epoch."""
    rank.train(1)
    return rank.shard, rank.engine.live_bytes()["history"]


def test_a_rank_holds_rows_of_its_ways_only():
    """Tables of owned rows and mirrors, two halves a layer, and gradients of owned rows; in-edges of owned rows."""
    data, hidden, b = small_graph(num_edges=40), 8, 8
    config = model_of("gcn", "model.encoder=linear", "model.decoder=linear")
    strategy = Hybrid(stages=2, parts=2, chunks=8, chunking="range")
    job = make_job(strategy, config, data, world=4, partition=Range())
    for rank, (shard, history) in enumerate(on_ranks(job, held)):
        stage, part = divmod(rank, 2)
        mine, mirrors = job.plan.part_of == part, len(shard.halo_ids)
        assert shard.num_inner + mirrors < data.num_nodes
        edges = shard.inner.num_edges + sum(block.num_edges for block in shard.halo.values())
        assert edges == int(mine[data.edge_index[1]].sum())
        assert history == 2 * b * hidden * (2 * (shard.num_inner + mirrors) + shard.num_inner), "two layers a stage"
        assert (shard.x.numel() > 0, len(shard.y) > 0) == (stage == 0, stage == 1)


def test_the_probe_is_the_exact_gradient():
    config, data = model_of("gcnii", "model.dropout=0.4"), small_graph()
    exact = train_in_threads(Single(), config, data, world=1, epochs=1).gradients[0]
    for stages, parts in ((2, 1), (2, 2), (4, 1)):
        job = make_job(Hybrid(stages=stages, parts=parts, chunks=8), config, data, world=stages * parts)
        found = {}
        for gradient in on_ranks(job, lambda rank: rank.engine.exact_gradient(0)):
            found |= gradient
        assert max(relative_error(found[k], g) for k, g in exact.items()) < 1e-9
