"""first_layer=cached: the same numbers, and nothing of the features travels after the first epoch."""

from itertools import product

import pytest

from composing import configured
from gnnpar.codecs.codec import Drop
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.single.strategy import Single
from gnnpar.verify.conformance import relative_error, small_graph, train_in_threads
from outcomes import assert_equal

F, HIDDEN = 6, 8
LIVE = ["gcn", "sage", "sage_max", "gin", "gat", "gatv2"]  # models without an encoder by default


def config_of(model, p):
    order = ["model.order=aggregate_first"] if model in ("gcn", "sage") else []
    return configured("model", model, f"model.hidden={HIDDEN}", f"model.input_dropout={p}", *order)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("model", "p"), product(LIVE, [0.0, 0.4]))
def test_cached_equals_live_and_sends_less(model, p):
    config, data = config_of(model, p), small_graph()
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
    config, data = config_of("gcn", 0.0), small_graph()
    dropped = train_in_threads(GraphParallel(codec=Drop()), config, data, world=3, epochs=1, first_layer="cached")
    assert dropped.traffic[0].get("forward", 0) == 0
    live = train_in_threads(GraphParallel(codec=Drop()), config, data, world=3, epochs=1)
    assert dropped.losses == pytest.approx(live.losses, rel=1e-12)
    assert relative_error(dropped.logits, live.logits) < 1e-12
