"""SAR equals the single device whatever its rounds, and graph_parallel to the bit where no peer's block is cut."""

import pytest
import torch

from composing import configured
from gnnpar.runner.conformance import relative_error, small_graph, train_in_threads
from gnnpar.strategies.graph_parallel import GraphParallel
from gnnpar.strategies.sar import SAR
from gnnpar.strategies.single import Single

SMALL = ("model.hidden=8", "model.num_layers=2")
MODELS = {
    "gcn": ("gcn",),
    "gat": ("gat", "model.heads=2", "model.attention_dropout=0.4"),
    "gatv2": ("gatv2", "model.heads=2", "model.attention_dropout=0.4"),
    "sage_max": ("sage_max",),
}
TINY = 400 / 2**20  # rows of at most 80 bytes: pieces of 5 rows and more


def model_of(name):
    return configured("model", MODELS[name][0], *SMALL, *MODELS[name][1:])


@pytest.fixture(scope="module")
def references():
    """The single device, once per model."""
    return {name: train_in_threads(Single(), model_of(name), small_graph(), world=1, epochs=1) for name in MODELS}


def assert_equal(got, expected, tolerance=1e-9):
    assert got.losses == pytest.approx(expected.losses, rel=tolerance)
    assert relative_error(got.logits, expected.logits) < tolerance
    for mine, theirs in zip(got.gradients, expected.gradients, strict=True):
        assert max(relative_error(mine[k], g) for k, g in theirs.items()) < tolerance


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rounds", ["peer", "one", "part", TINY])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_every_schedule_equals_the_single_device(rounds, prefetch, model, references):
    strategy = SAR(rounds=rounds, prefetch=prefetch)
    assert_equal(train_in_threads(strategy, model_of(model), small_graph(), world=4, epochs=1), references[model])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rounds", ["peer", "one", "part"])
@pytest.mark.parametrize("remat", [True, False])
def test_pulling_has_the_bits_of_graph_parallel(remat, rounds, model):
    config, data = model_of(model), small_graph()
    expected = train_in_threads(GraphParallel(), config, data, world=4)
    got = train_in_threads(SAR(rounds=rounds, remat=remat), config, data, world=4)
    assert got.losses == expected.losses
    assert torch.equal(got.logits, expected.logits)
    for mine, theirs in zip(got.gradients, expected.gradients, strict=True):
        assert all(torch.equal(mine[k], g) for k, g in theirs.items())
