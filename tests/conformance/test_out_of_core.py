"""Parts in time equal the single device, with every tensor that is worth it paged out between turns."""

import pytest

from composing import configured
from conformance.test_sar import assert_equal
from engines import on_ranks
from gnnpar.codecs.codec import BFloat16, Identity
from gnnpar.parallel.sequential import paging
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.verify.conformance import make_job, relative_error, small_graph, train_in_threads
from outcomes import assert_same_bits

WAYS = [("gat", "push"), *((model, "pull") for model in ("gcn", "gat", "gatv2", "sage_max", "gcnii"))]


@pytest.fixture(autouse=True)
def every_tensor_is_a_page(monkeypatch, tmp_path):
    monkeypatch.setattr(paging, "SMALLEST", 1)


def model_of(name):
    return configured("model", name, "model.hidden=8", "model.num_layers=3")


@pytest.mark.parametrize(("model", "backward"), WAYS)
def test_equals_the_single_device(model, backward):
    reference = train_in_threads(Single(), model_of(model), small_graph(), world=1, epochs=2)
    strategy = SAR(logical_parts=4, backward=backward)
    assert_equal(train_in_threads(strategy, model_of(model), small_graph(), world=1, epochs=2), reference)


def test_parts_in_time_are_parts_in_space():
    """The same bits as four ranks, also with a lossy codec: random numbers are keyed by rows, not by devices."""
    for codec in (Identity(), BFloat16()):
        in_space = train_in_threads(SAR(codec=codec), model_of("gat"), small_graph(), world=4)
        in_time = train_in_threads(SAR(codec=codec, logical_parts=4), model_of("gat"), small_graph(), world=1)
        assert_same_bits(in_time, in_space)


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


def test_parts_on_one_device_need_one_rank():
    with pytest.raises(ValueError, match=r"logical_parts=4 puts all parts on one device, but there are 2 ranks"):
        make_job(SAR(logical_parts=4), model_of("gcn"), small_graph(), world=2)
