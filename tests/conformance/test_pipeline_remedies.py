"""Switches of GNNPipe and hybrid: exact histories, codecs, stages of measured layers, memory of remat."""

import dataclasses
from typing import Any

import pytest
import torch

from composing import configured
from conformance.methods import DEEP, EVERY, EXACT_HISTORY
from engines import on_ranks
from gnnpar.codecs.codec import BFloat16, Drop
from gnnpar.codecs.uniform import Uniform
from gnnpar.config.compose import compose
from gnnpar.models.gat import GAT
from gnnpar.models.gcn import GCN
from gnnpar.models.gcnii import GCNII
from gnnpar.models.resgcn import ResGCN
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.pipeline.stage import Remat
from gnnpar.parallel.pipeline.strategy import GNNPipe
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Workload
from gnnpar.partition.partition import Random
from gnnpar.placement import Topology
from gnnpar.training.checks import check_strategy
from gnnpar.training.meter import measure_epoch
from gnnpar.training.optim import SGD
from gnnpar.training.plans import layer_seconds
from gnnpar.verify.conformance import make_job, relative_error, small_graph, train_in_threads
from outcomes import assert_close
from worlds import run_world

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


LOSSY = (Uniform(bits=8), Uniform(bits=4, gradient_bits=8), Uniform(bits=2), EVERY, BFloat16(), Drop())


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("codec", "config"),
    [*((codec, GCNII(**DEEP, dropout=0.4)) for codec in LOSSY), (LOSSY[1], GAT(hidden=16, num_layers=3, heads=2))],
    ids=lambda each: f"{type(each).__name__}{getattr(each, 'bits', '')}",
)
def test_one_stage_and_one_chunk_is_graph_parallelism(codec, config):
    """Rows and gradients are rounded to the same numbers, by node and not by where a message has them."""
    data = small_graph()
    ours = train_in_threads(Hybrid(stages=1, parts=3, chunks="one", codec=codec), config, data, world=3)
    theirs = train_in_threads(GraphParallel(codec=codec), config, data, world=3)
    assert_close(ours, theirs.losses, theirs.gradients)
    for mine, others in zip(ours.traffic, theirs.traffic, strict=True):
        assert mine.get("forward", 0) == others.get("forward", 0)
        assert mine.get("backward", 0) == others.get("backward", 0)


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
