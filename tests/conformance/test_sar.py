"""SAR equals the single device whatever its rounds, and with parts in time, each tensor paged out between turns."""

from itertools import product

import pytest

from composing import configured
from conformance.methods import QUICK, TINY
from engines import on_ranks
from gnnpar.codecs.codec import BFloat16, Drop, Identity
from gnnpar.codecs.uniform import Uniform
from gnnpar.comm import CodedExchange
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sequential import paging
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.verify.conformance import (
    check,
    make_job,
    relative_error,
    small_graph,
    train_in_threads,
)
from outcomes import assert_equal, assert_passed, assert_same_bits

SMALL = ("model.hidden=8", "model.num_layers=2")
MODELS = {
    "gcn": ("gcn",),
    "gat": ("gat", "model.heads=2", "model.attention_dropout=0.4"),
    "gatv2": ("gatv2", "model.heads=2", "model.attention_dropout=0.4"),
    "sage_max": ("sage_max",),
}
WAYS = [("push", "gat"), *(("pull", model) for model in MODELS)]  # only attention has something to push


def model_of(name, *overrides):
    return configured("model", MODELS[name][0], *SMALL, *MODELS[name][1:], *overrides)


@pytest.fixture(scope="module")
def references():
    """The single device, once per model."""
    return {name: train_in_threads(Single(), model_of(name), small_graph(), world=1, epochs=1) for name in MODELS}


@pytest.mark.quick(4)
@pytest.mark.parametrize(("way", "rounds", "prefetch"), product(WAYS, ["peer", "one", "part", TINY], range(4)))
def test_every_schedule_equals_the_single_device(way, rounds, prefetch, references):
    backward, model = way
    strategy = SAR(rounds=rounds, prefetch=prefetch, backward=backward)
    assert_equal(train_in_threads(strategy, model_of(model), small_graph(), world=4, epochs=1), references[model])


def test_the_tiny_budget_cuts_peers(monkeypatch):
    """What the test above means by it: blocks are cut, forward and pushed."""
    seen = set()
    true = CodedExchange.take

    def watching(self, posted, peer):
        seen.add((posted.tag.phase, posted.incoming[peer].first > 0))
        return true(self, posted, peer)

    monkeypatch.setattr(CodedExchange, "take", watching)
    train_in_threads(SAR(rounds=TINY), model_of("gat"), small_graph(), world=4, epochs=1)
    assert {("forward", True), ("push", True)} <= seen


@pytest.mark.quick(1)
@pytest.mark.parametrize("codec", [BFloat16(), Drop()], ids=["bf16", "drop"])
@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_pushed_gradients_are_rounded_by_as_much_and_drop_sends_nothing(model, codec):
    config, data = model_of(model), small_graph()
    expected = train_in_threads(GraphParallel(codec=codec), config, data, world=4)
    pushed = train_in_threads(SAR(codec=codec), config, data, world=4)
    assert pushed.losses[0] == expected.losses[0]
    if isinstance(codec, Drop):
        assert pushed.traffic[1].keys() == {"reduce"}
        assert_equal(pushed, expected)
    exact = train_in_threads(Single(), config, data, world=1)
    name = "layers.0.conv.weight"
    error, theirs = (relative_error(each.gradients[0][name], exact.gradients[0][name]) for each in (pushed, expected))
    assert theirs / 3 < error < 3 * theirs


@pytest.mark.quick(1)
@pytest.mark.parametrize("codec", [Uniform(bits=8), QUICK], ids=["uniform", "adaptive"])
def test_quantized_pushes_are_near_the_gradient(codec):
    """Cut lists and pushed rows: sources are read as their readers had them."""
    exact = train_in_threads(Single(), model_of("gat"), small_graph(), world=1, epochs=1)
    got = train_in_threads(SAR(codec=codec, rounds=2 * TINY), model_of("gat"), small_graph(), world=3, epochs=3)
    for name, gradient in exact.gradients[0].items():
        assert relative_error(got.gradients[0][name], gradient) < 0.2, name


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_a_cached_first_layer_is_exact_and_sends_no_constant_rows_again(model):
    config = model_of(model, *(["model.order=aggregate_first"] if model == "gcn" else []))
    assert_passed(check(SAR(), {model: config}, worlds=(1, 3), first_layer="cached"))
    got = train_in_threads(SAR(), config, small_graph(), world=3, epochs=2, first_layer="cached")
    live = train_in_threads(SAR(), config, small_graph(), world=3, epochs=2)
    assert got.traffic[0] == live.traffic[0]
    sent, sent_live = got.traffic[1]["forward"], live.traffic[1]["forward"]
    dropout = model == "gat" or config.input_dropout > 0
    assert sent == sent_live if dropout else sent < sent_live


@pytest.fixture
def every_tensor_is_a_page(monkeypatch):
    monkeypatch.setattr(paging, "SMALLEST", 1)


@pytest.mark.quick(1)
@pytest.mark.usefixtures("every_tensor_is_a_page")
@pytest.mark.parametrize(("backward", "model"), [*WAYS, ("pull", "gcnii")])
def test_parts_out_of_core_equal_the_single_device(model, backward):
    config = configured("model", model, *SMALL, "model.num_layers=3")
    reference = train_in_threads(Single(), config, small_graph(), world=1, epochs=2)
    strategy = SAR(logical_parts=4, backward=backward)
    assert_equal(train_in_threads(strategy, config, small_graph(), world=1, epochs=2), reference)


@pytest.mark.slow
@pytest.mark.usefixtures("every_tensor_is_a_page")
def test_parts_in_time_are_parts_in_space():
    """The same bits as four ranks, also with a lossy codec: random numbers are keyed by rows, not by devices."""
    for codec in (Identity(), BFloat16()):
        in_space = train_in_threads(SAR(codec=codec), model_of("gat"), small_graph(), world=4)
        in_time = train_in_threads(SAR(codec=codec, logical_parts=4), model_of("gat"), small_graph(), world=1)
        assert_same_bits(in_time, in_space)


@pytest.mark.usefixtures("every_tensor_is_a_page")
def test_the_probe_of_fidelity_and_the_state():
    job = make_job(SAR(logical_parts=3, codec=BFloat16()), model_of("gcn"), small_graph(), world=1)
    ((engine, *_),) = on_ranks(job, lambda rank: rank)
    exact, state = engine.exact_gradient(0), engine.state_dict()
    single = make_job(Single(), model_of("gcn"), small_graph(), world=1)
    (expected,) = on_ranks(single, lambda rank: rank.engine.exact_gradient(0))
    assert all(relative_error(exact[name], g) < 1e-9 for name, g in expected.items())
    assert [len(part["codecs"]) for part in state["parts"]] == [1, 1, 1]
    engine.load_state_dict(state)
    assert engine.live_bytes()["host"] > 0
