"""The strategy of experiments/sufficient_factors is lossless, by both bodies of a dense layer, and sends less."""

import pytest
import torch

from composing import settings_of
from conftest import ROOT
from gnnpar.cli.main import run
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.verify.conformance import small_graph, train_in_threads

FOLDER = ROOT / "experiments" / "sufficient_factors"


def test_factors_equal_the_single_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64."""
    monkeypatch.chdir(FOLDER)
    for which in ("true", "false"):
        words = ["strategy=factors", f"strategy.cheaper={which}", "model=gcn,resgcn", "--worlds", "1,3"]
        assert run("check", words) == 0


@pytest.mark.parametrize("cheaper", [True, False])
def test_factors_equal_the_sum_over_ranks(monkeypatch: pytest.MonkeyPatch, cheaper: bool) -> None:
    """In fp32, whose products have a body of their own. Where all weights are wide, and most rows have no gradient,
    their factors are fewer bytes."""
    monkeypatch.chdir(FOLDER)
    words = ("model=gcn", "model.hidden=256", "model.num_layers=3", f"strategy.cheaper={str(cheaper).lower()}")
    settings = settings_of("strategy=factors", *words)
    mine, theirs = (
        train_in_threads(strategy, settings.model, small_graph(), world=2, dtype=torch.float32)
        for strategy in (settings.strategy, GraphParallel())
    )
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-5)
    for ours, sums in zip(mine.gradients, theirs.gradients, strict=True):
        assert all(torch.allclose(ours[name], sums[name], rtol=1e-4, atol=1e-6) for name in sums)
    assert mine.traffic[0]["reduce"] < theirs.traffic[0]["reduce"] / 2
    assert mine.traffic[0]["forward"] == theirs.traffic[0]["forward"]
