"""GNNPipe and hybrid: invariants of their specification (8.4), in fp64, ranks as threads; and their switches."""

import dataclasses
from typing import Any

import pytest
import torch

from composing import ALIKE, configured, names, rest_slow
from conformance.methods import DEEP, EVERY, EXACT_HISTORY
from engines import Rank, on_ranks
from gnnpar.codecs.codec import BFloat16, Drop, Identity
from gnnpar.codecs.uniform import Uniform
from gnnpar.config.compose import compose
from gnnpar.models.gat import GAT
from gnnpar.models.gcn import GCN
from gnnpar.models.gcnii import GCNII
from gnnpar.models.resgcn import ResGCN
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipeline.chunks import draw_order
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.pipeline.stage import Remat
from gnnpar.parallel.pipeline.strategy import GNNPipe
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Workload
from gnnpar.partition.partition import Random, Range
from gnnpar.partition.shard import Shard
from gnnpar.placement import Topology
from gnnpar.training.checks import check_strategy
from gnnpar.training.meter import measure_epoch
from gnnpar.training.optim import SGD
from gnnpar.training.plans import layer_seconds
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
    """Invariants 3, 5, 8: with the paper's techniques on (shuffled, R = 2, fresh gradients twice), and with all off."""
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
    job = make_job(strategy, model_of(model), small_graph(), world=stages * parts, epochs=5)  # two snapshots are read
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


def test_orders_are_one_for_all_ranks_and_new_every_epoch():
    """Invariant 10: an order is a function of seed and epoch, not of what a rank has drawn before."""
    orders = [draw_order(16, seed=1, epoch=e, shuffled=True) for e in range(8)]
    assert len(set(orders)) == 8
    assert all(sorted(order) == list(range(16)) for order in orders)
    assert orders[2] == draw_order(16, seed=1, epoch=2, shuffled=True) != draw_order(16, seed=2, epoch=2, shuffled=True)
    assert draw_order(4, seed=1, epoch=7, shuffled=False) == (0, 1, 2, 3)


LOSSY = (Uniform(bits=8), Uniform(bits=4, gradient_bits=8), Uniform(bits=2), EVERY, BFloat16(), Drop())


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("codec", "config"),
    [
        *((Identity(), model_of(model)) for model in ("gcn", "gcnii", "gat", "sage_max")),
        *((codec, GCNII(**DEEP, dropout=0.4)) for codec in LOSSY),
        (LOSSY[1], GAT(hidden=16, num_layers=3, heads=2)),
    ],
    ids=lambda each: f"{type(each).__name__}{getattr(each, 'bits', '')}",
)
def test_one_stage_and_one_chunk_is_graph_parallelism(codec, config):
    """Invariant 7, bytes included. Rows and gradients are rounded to the same numbers, by node and not by where a
    message has them."""
    ours, theirs = (
        train_in_threads(strategy, config, small_graph(), world=3)
        for strategy in (Hybrid(stages=1, parts=3, chunks="one", codec=codec), GraphParallel(codec=codec))
    )
    assert_close(ours, theirs.losses, theirs.gradients)
    for mine, others in zip(ours.traffic, theirs.traffic, strict=True):
        for phase in ("forward", "backward"):
            assert mine.get(phase, 0) == others.get(phase, 0)


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


CLIPPED = SGD(lr=0.3, clip=0.05)


@pytest.mark.parametrize(("stages", "parts"), [(2, 1), (2, 2)])
def test_exact_histories_every_epoch_make_the_forward_exact(stages, parts):
    """With R = 1 every stale row is this epoch's: the loss is that of the single device, dropped gradients aside."""
    data, config = small_graph(), GCNII(**DEEP, dropout=0.4)
    reference = train_in_threads(Single(), config, data, world=1, epochs=1)
    rules: dict[str, Any] = {"history_init": "exact", "refresh_exact": True, "refresh": 1}
    strategy = Hybrid(stages=stages, parts=parts, chunks=8, **rules)
    got = train_in_threads(strategy, config, data, world=stages * parts, epochs=1)
    assert got.losses == pytest.approx(reference.losses, rel=1e-12)
    zeros = train_in_threads(dataclasses.replace(strategy, history_init="zeros"), config, data, world=stages * parts)
    assert abs(zeros.losses[0] / reference.losses[0] - 1) > 1e-3
    gaps = [relative_error(got.gradients[0][k], g) for k, g in reference.gradients[0].items()]
    assert max(gaps) > 1e-2, "gradients of stale edges are still dropped"


def test_an_exact_pass_sends_every_row_once():
    """Forward halos and boundaries once more than training does, and no gradient."""
    data, config = small_graph(), GCNII(**DEEP, dropout=0.4)
    plain = Hybrid(stages=2, parts=2, chunks=8, refresh=9)
    exact = dataclasses.replace(plain, history_init="exact")
    without, once = (train_in_threads(s, config, data, world=4, epochs=2).traffic for s in (plain, exact))
    assert once[0]["forward"] == 2 * without[0]["forward"]
    assert once[0]["stage"] == 1.5 * without[0]["stage"]
    assert once[0]["backward"] == without[0]["backward"]
    assert once[1] == without[1]


def test_an_exact_refresh_changes_the_epochs_after_it():
    data, config = small_graph(), ResGCN(**DEEP, dropout=0.4, norm="layer")
    exact = GNNPipe(**EXACT_HISTORY)
    thawed, frozen = (
        train_in_threads(dataclasses.replace(exact, refresh_exact=refresh), config, data, world=2, epochs=3).losses
        for refresh in (True, False)
    )
    assert frozen[:2] == thawed[:2]
    assert frozen[2] != thawed[2]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("codec", "low", "high"), [(BFloat16(), 1e-6, 3e-2), (Uniform(bits=8), 1e-6, 3e-2)])
@pytest.mark.parametrize("virtual", [1, 2])
def test_a_boundary_has_a_codec(codec, low, high, virtual):
    """Few bits, small errors, exact evaluation; the same bits whatever runs them."""
    data, config = small_graph(), GCNII(**DEEP)
    plain = GNNPipe(chunks=8, virtual=virtual)
    coded = dataclasses.replace(plain, boundary=codec)
    exact, got = (train_in_threads(s, config, data, world=2, dtype=torch.float32) for s in (plain, coded))
    assert low < abs(got.losses[0] / exact.losses[0] - 1) < high
    assert got.traffic[0]["stage"] < 0.6 * exact.traffic[0]["stage"]
    again = train_in_threads(coded, config, data, world=2, dtype=torch.float32)
    assert again.losses == got.losses
    assert coded.exactness == {"stale", *codec.exactness}


@pytest.mark.parametrize("epoch", [0, 3])
def test_a_run_that_goes_on_without_its_history_starts_an_exact_one(epoch):
    """As after a resume on other ranks, which drops the engine's state: no row of the first epoch is a zero."""
    data, config = small_graph(), GCNII(**DEEP, dropout=0.0)
    reference = train_in_threads(Single(), config, data, world=1, epochs=1)
    job = make_job(GNNPipe(chunks=8, history_init="exact"), config, data, world=2)
    first = on_ranks(job, lambda rank: rank.engine.train_epoch(epoch, rank.optimizer).loss)
    assert first == pytest.approx(reference.losses * 2, rel=1e-12)


@pytest.mark.slow
def test_the_clipped_norm_is_that_of_all_stages():
    """CLIPPED is far below the gradient: stages that clipped their own share would step further."""
    curves = []
    for world in (1, 2, 4):
        got = train_in_threads(GNNPipe(chunks=16), GCNII(**DEEP), small_graph(), world=world, epochs=4, optim=CLIPPED)
        curves.append(got.losses)
    assert curves[1] == pytest.approx(curves[0], rel=1e-12)
    assert curves[2] == pytest.approx(curves[0], rel=1e-12)


def test_the_preset_is_the_papers_setting():
    strategy = configured("strategy", "gnnpipe")
    assert strategy == GNNPipe()
    assert (strategy.order, strategy.refresh, strategy.history_init) == ("shuffled", 23, "zeros")
    assert (strategy.weights.fresh, strategy.weights.stale, strategy.chunking) == (2.0, 0.0, "balanced")
    assert strategy.chunks_per_part(8) == 32
    hybrid = configured("strategy", "hybrid", "strategy.parts=2")
    assert len(hybrid.mesh(8).ranks) == 4
    assert hybrid.chunks_per_part(8) == 16
    assert strategy.exactness == {"stale"}
    assert strategy.exact_limit().exactness == {"exact"}


def test_stages_are_cut_where_measured_seconds_balance():
    """The first layer costs as much as the other three together: it gets a stage of its own, and no number changes."""
    data, config = small_graph(), ResGCN(**DEEP)
    model = config.build(6, 3, seed=3)
    workload = Workload(data, Random(), model.num_layers, layer_seconds=lambda: [3.0, 1.0, 1.0, 1.0])
    even, balanced = (GNNPipe(chunks=8, cut=cut).plan(workload, Topology(2)) for cut in ("even", "balanced"))
    assert even.placement.layers_of == (range(2), range(2, 4))
    assert balanced.placement.layers_of == (range(1), range(1, 4))
    job = make_job(GNNPipe(chunks=8), config, data, world=2)
    cut_otherwise = dataclasses.replace(job, plan=balanced)
    first, second = (run_world("threads", 2, each)[0][0] for each in (job, cut_otherwise))
    assert first == second


def test_layers_are_measured_with_their_encoder_and_decoder():
    data = small_graph(num_nodes=400, num_edges=4000)
    wide = dataclasses.replace(data, x=torch.ones(400, 50_000))
    model = ResGCN(**DEEP).build(50_000, 3, seed=0)
    seconds = layer_seconds(model, wide, device=torch.device("cpu"))
    assert len(seconds) == 4
    assert seconds[0] > 2 * min(seconds[1:3]), "50,000 features wide: the encoder takes tens of layers"
    assert all(p.grad is None for p in model.parameters()), "measuring leaves the model alone"


def test_what_it_says_and_refuses():
    hybrid = configured("strategy", "hybrid", "strategy.parts=2", "codec=uniform", "codec.bits=4")
    assert hybrid.codec == Uniform(bits=4)
    assert hybrid.exactness == {"stale", "quantized"}
    assert hybrid.exact_limit().exactness == {"exact"}
    check_strategy(compose(["strategy=gnnpipe", "codec=identity"]), 2)
    assert configured("strategy", "gnnpipe", "strategy.parts=2", "codec=bf16").codec == BFloat16()
    config, data = GCNII(**DEEP), small_graph()
    hybrid = Hybrid(stages=2, parts=2, codec=BFloat16(), boundary=Uniform(bits=8))
    layers = hybrid.describe(make_job(hybrid, config, data, world=4).plan)
    assert len(layers) == config.num_layers
    assert {layer.how for layer in layers} == {"chunks, boundary uniform, halo bfloat16"}
    pipeline = GNNPipe(boundary=BFloat16())
    alone = pipeline.describe(make_job(pipeline, config, data, world=2).plan)
    assert {layer.how for layer in alone} == {"chunks, boundary bfloat16"}


def measured(remat: Remat, *, layers: int, chunks: int, hidden: int, nodes: int) -> tuple[int, int]:
    """Bytes in the second epoch of one rank in fp32: the allocator's peak, and those kept for the backward."""
    data = small_graph(num_nodes=nodes, num_edges=2 * nodes)
    config = GCN(num_layers=layers, hidden=hidden, encoder="linear", decoder="linear", dropout=0.0)
    job = make_job(GNNPipe(chunks=chunks, chunking="range", remat=remat), config, data, world=1, dtype=torch.float32)
    (rank,) = on_ranks(job, lambda rank: rank)
    rank.train(1)
    rank.optimizer.zero_grad()
    with measure_epoch(torch.device("cpu")) as report:
        rank.engine.train_epoch(1, rank.optimizer)
    assert report.peak is not None
    return report.peak, report.activations + rank.engine.live_bytes()["activations"]


def test_bytes_fall_as_planned() -> None:
    """GCN keeps 2 N H numbers a layer (the matrix's input, the activation's output), and the encoder's output; `chunk`
    those of one of 8."""
    layers, nodes, hidden, chunks = 8, 1600, 32, 8
    rows = 4 * nodes * hidden
    sizes = {"layers": layers, "chunks": chunks, "hidden": hidden, "nodes": nodes}
    found = {remat: measured(remat, **sizes) for remat in ("none", "chunk", "layer")}
    kept = {r: nbytes for r, (_, nbytes) in found.items()}
    assert kept["none"] == pytest.approx((2 * layers + 1) * rows, rel=0.1)
    assert kept["chunk"] == pytest.approx((2 * layers + 1) * rows / chunks, rel=0.1)
    assert kept["layer"] == pytest.approx((layers - 1) * rows + 3 * rows / chunks, rel=0.1)
    for remat in ("chunk", "layer"):
        saved = found["none"][0] - found[remat][0]
        assert saved == pytest.approx(kept["none"] - kept[remat], rel=0.1), "the allocator saw it, too"
