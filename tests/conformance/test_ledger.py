"""Bytes sent equal the closed formula: sum over layers of b x halo rows x (width forward + width backward).

A first layer that is kept sends nothing of its features again; rows of 16 bits are half the bytes, off by roundings."""

from itertools import product

import pytest
import torch

from composing import configured, names
from conformance.methods import NODES, WORLD, three
from gnnpar.codecs.codec import BFloat16, Drop, Identity
from gnnpar.comm import ThreadWorld
from gnnpar.parallel.cagnet.strategy import Cagnet
from gnnpar.parallel.feature.strategy import FeatureParallel
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.partition.partition import Random
from gnnpar.verify.conformance import Outcome, make_job, merge_ranks, relative_error, small_graph, train_in_threads
from graphs import ODD
from outcomes import assert_equal

F, HIDDEN, CLASSES, HEADS = 6, 8, 3, 2

# model -> [(width forward, width backward) of every layer]; backward is 0 where the input needs no gradient
WIDTHS = {
    ("gcn", "aggregate_first"): [(F, 0), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN)],
    ("gcn", "transform_first"): [(HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (CLASSES, CLASSES)],
    ("gcn", "auto"): [(F, 0), (HIDDEN, HIDDEN), (CLASSES, CLASSES)],
    ("sage", "auto"): [(F, 0), (HIDDEN, HIDDEN), (CLASSES, CLASSES)],
    ("sage_max", "auto"): [(F, 0), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN)],
    ("rgcn", "auto"): [(F, 0), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN)],
    ("gin", "auto"): [(F, 0), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN)],
    ("gat", "auto"): [(HIDDEN + HEADS, HIDDEN + HEADS)] * 2 + [(CLASSES + 1, CLASSES + 1)],
    ("gatv2", "auto"): [(HIDDEN, HIDDEN)] * 2 + [(CLASSES, CLASSES)],
    ("gcnii", "auto"): [(HIDDEN, HIDDEN)] * 3,  # an encoder: rows of layer 0 need a gradient
    ("resgcn", "auto"): [(HIDDEN, HIDDEN)] * 3,
}


def config_of(model, order):
    heads = [f"model.heads={HEADS}"] if model in ("gat", "gatv2") else []
    return configured("model", model, f"model.hidden={HIDDEN}", "model.num_layers=3", f"model.order={order}", *heads)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("key", "codec", "dtype"),
    product(WIDTHS, [Identity(), BFloat16(), Drop()], [torch.float32, torch.float64]),
)
def test_halo_bytes_equal_the_formula(key, codec, dtype):
    job = make_job(GraphParallel(codec=codec), config_of(*key), small_graph(), world=3, dtype=dtype)
    rows = sum(job.plan.statistics["halo_rows"])
    b = {Identity: dtype.itemsize, BFloat16: 2, Drop: 0}[type(codec)]
    for traffic in merge_ranks(job, ThreadWorld(3).run(job)).traffic:
        assert traffic.get("forward", 0) == b * rows * sum(f for f, _ in WIDTHS[key])
        assert traffic.get("backward", 0) == b * rows * sum(w for _, w in WIDTHS[key])


def test_reduce_bytes_are_the_parameters_and_the_loss():
    job = make_job(GraphParallel(), config_of("gcn", "auto"), small_graph(), world=3)
    numbers = sum(p.numel() for p in job.model.parameters()) + 1
    got = train_in_threads(GraphParallel(), config_of("gcn", "auto"), small_graph(), world=3)
    assert got.traffic[0]["reduce"] == 2 * (3 - 1) * numbers * 8


def test_a_partition_without_cut_edges_sends_nothing():
    got = train_in_threads(GraphParallel(), config_of("gcn", "auto"), ODD["no_edges"](), world=3, partition=Random())
    assert got.traffic[0].keys() == {"reduce"}


LIVE = ["gcn", "sage", "sage_max", "gin", "gat", "gatv2"]  # models without an encoder by default


def first_aggregated(model, p):
    order = ["model.order=aggregate_first"] if model in ("gcn", "sage") else []
    return configured("model", model, f"model.hidden={HIDDEN}", f"model.input_dropout={p}", *order)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("model", "p"), product(LIVE, [0.0, 0.4]))
def test_cached_equals_live_and_sends_less(model, p):
    config, data = first_aggregated(model, p), small_graph()
    (live, alone), (uncached, cached) = (
        [train_in_threads(strategy, config, data, world=world, epochs=3, first_layer=how) for how in ("live", "cached")]
        for strategy, world in ((Single(), 1), (GraphParallel(), 3))
    )
    for kept in (alone, cached):
        assert_equal(kept, live, losses=1e-10)
    first, second = cached.traffic[0]["forward"], cached.traffic[1]["forward"]
    halo_features = first - second
    assert second < uncached.traffic[1]["forward"]
    assert halo_features > 0, "fetched once, in the first epoch"
    assert cached.traffic[2]["forward"] == second


@pytest.mark.parametrize(
    ("strategy", "config", "saved"),
    [
        (Cagnet(), three("sage"), lambda plan: (WORLD - 1) * NODES * F),
        (FeatureParallel(), three("gcn"), lambda plan: 2 * (WORLD - 1) * NODES * F // WORLD),  # columns, and sums
        (SAR(), three("gcn", "model.order=aggregate_first"), lambda plan: sum(plan.statistics["halo_rows"]) * F),
        (SAR(), three("gat"), lambda plan: 0),  # its rows are multiplied first
    ],
    ids=["cagnet", "feature", "sar gcn", "sar gat"],
)
def test_layer_0_is_sent_once_where_it_is_kept(strategy, config, saved):
    data = small_graph()
    live, cached = (
        train_in_threads(strategy, config, data, world=WORLD, first_layer=how).traffic for how in ("live", "cached")
    )
    assert cached[0] == live[0]
    assert live[1]["forward"] - cached[1]["forward"] == 8 * saved(make_job(strategy, config, data, world=WORLD).plan)


def test_auto_aggregates_layer_0_first_when_cached():
    config = configured("model", "gcn", "model.hidden=2")  # narrower than the features: live would transform first
    assert not config.build(F, 3, seed=0).layers[0].conv.aggregate_first
    assert config.build(F, 3, seed=0, cached_first_layer=True).layers[0].conv.aggregate_first


def test_an_encoder_makes_caching_impossible():
    config = configured("model", "gcnii")
    with pytest.raises(ValueError, match=r"first_layer=cached needs raw features .* set model\.encoder=none"):
        config.build(F, 3, seed=0, cached_first_layer=True)


def test_the_negative_control_stays_one():
    """With codec=drop the one fetch is dropped too, and evaluation still sees the true rows."""
    config, data = first_aggregated("gcn", 0.0), small_graph()
    dropped = train_in_threads(GraphParallel(codec=Drop()), config, data, world=3, epochs=1, first_layer="cached")
    assert dropped.traffic[0].get("forward", 0) == 0
    live = train_in_threads(GraphParallel(codec=Drop()), config, data, world=3, epochs=1)
    assert dropped.losses == pytest.approx(live.losses, rel=1e-12)
    assert relative_error(dropped.logits, live.logits) < 1e-12


LAYERS = 3
UNIT = 2.0**-8
BOUND = 8 * LAYERS * UNIT
SMALL = ("model.hidden=8", f"model.num_layers={LAYERS}")


def trained(strategy, model: str, world: int, dtype: torch.dtype) -> Outcome:
    config = configured("model", model, *SMALL)
    return train_in_threads(strategy, config, small_graph(), world=world, dtype=dtype, epochs=2)


def gradient_error(narrow: Outcome, wide: Outcome, epoch: int) -> float:
    """|g' - g| / |g| over all parameters."""
    mine, theirs = (torch.cat([g.flatten() for g in run.gradients[epoch].values()]).double() for run in (narrow, wide))
    return float((mine - theirs).norm() / theirs.norm())


def assert_rounded(narrow: Outcome, wide: Outcome) -> None:
    """Off by its roundings, and really rounded; what is trained and reduced has 32 bits."""
    assert UNIT / 64 < gradient_error(narrow, wide, 0) < BOUND
    assert narrow.losses[0] == pytest.approx(wide.losses[0], rel=LAYERS * UNIT)
    assert narrow.losses[0] != wide.losses[0]
    assert narrow.logits.dtype == torch.float32
    assert {g.dtype for g in narrow.gradients[0].values()} == {torch.float32}


@pytest.mark.quick(3)
@pytest.mark.parametrize("strategy", names("strategy"))
def test_every_strategy_sends_half_the_bytes_and_is_off_by_its_roundings(strategy):
    config = configured("strategy", strategy)
    world = config.capabilities.max_ranks or 2
    narrow, wide = (trained(config, "gcn", world, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert_rounded(narrow, wide)
    assert narrow.losses[1] == pytest.approx(wide.losses[1], rel=LAYERS * UNIT)
    quantized = "quantized" in config.exactness
    for mine, theirs in zip(narrow.traffic, wide.traffic, strict=True):
        assert mine.keys() == theirs.keys()
        for phase, nbytes in mine.items():
            if phase in ("reduce", "assign"):
                assert nbytes == theirs[phase]
            elif not quantized:
                assert 2 * nbytes == theirs[phase], phase


@pytest.mark.quick(3)
@pytest.mark.parametrize("model", names("model"))
def test_every_model_is_off_by_its_roundings(model):
    wide = trained(Single(), model, 1, torch.float64)
    for strategy, world in ((Single(), 1), (configured("strategy", "graph_parallel"), 2)):
        assert_rounded(trained(strategy, model, world, torch.bfloat16), wide)
