"""precision=bf16: rows of 16 bits, sums, statistics and parameters in fp32, under every strategy and of every model.

A gradient is a chain of about 8 roundings a layer (message, product, activation, and what they are made of, in both
directions), each off by at most the unit roundoff u = 2^-8 of its row: 8 L u bounds the relative error of L layers to
first order, where terms do not cancel.
"""

import pytest
import torch

from composing import configured, names
from gnnpar.parallel.single.strategy import Single
from gnnpar.verify.conformance import Outcome, small_graph, train_in_threads

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
