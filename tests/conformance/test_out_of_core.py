"""Parts in time equal the single device, with every tensor that is worth it paged out between turns."""

import pytest

from composing import configured
from conformance.test_sar import assert_equal
from gnnpar.codecs.codec import BFloat16
from gnnpar.engines import paging
from gnnpar.runner.conformance import make_job, small_graph, train_in_threads
from gnnpar.strategies.sar import SAR
from gnnpar.strategies.single import Single

MODELS = ("gcn", "gat", "gatv2", "sage_max", "gcnii", "resgcn")


@pytest.fixture(autouse=True)
def every_tensor_is_a_page(monkeypatch, tmp_path):
    monkeypatch.setattr(paging, "SMALLEST", 1)


def model_of(name):
    return configured("model", name, "model.hidden=8", "model.num_layers=3")


@pytest.mark.parametrize("backward", ["push", "pull"])
@pytest.mark.parametrize("model", MODELS)
def test_equals_the_single_device(model, backward):
    reference = train_in_threads(Single(), model_of(model), small_graph(), world=1, epochs=2)
    strategy = SAR(logical_parts=4, backward=backward)
    assert_equal(train_in_threads(strategy, model_of(model), small_graph(), world=1, epochs=2), reference)
