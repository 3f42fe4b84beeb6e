"""Names of classes that earlier versions wrote into files still resolve, and hashes do not follow a file that moves."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from gnnpar.aliases import MOVED, current, published, with_current_targets, with_published_targets
from gnnpar.config.compose import compose
from gnnpar.config.jobs import job_key
from gnnpar.settings import build_settings

OLD = {
    "strategy=adaqp": "gnnpar.strategies.adaqp.AdaQP",
    "strategy=gnnpipe": "gnnpar.strategies.gnnpipe.GNNPipe",
    "strategy=graph_parallel": "gnnpar.strategies.graph_parallel.GraphParallel",
    "strategy=hybrid": "gnnpar.strategies.hybrid.Hybrid",
    "strategy=minibatch": "gnnpar.strategies.minibatch.Minibatch",
    "strategy=sar": "gnnpar.strategies.sar.SAR",
    "strategy=single": "gnnpar.strategies.single.Single",
    "strategy=tag": "gnnpar.strategies.tag.TAG",
}


@pytest.mark.parametrize("module", MOVED.values())
def test_every_alias_names_a_module_that_is_there(module: str) -> None:
    import_module(module)


@pytest.mark.parametrize(("override", "old"), OLD.items())
def test_a_configuration_of_before_builds_the_same_settings(override: str, old: str) -> None:
    settings = compose([override])
    before = with_published_targets(settings.resolved)
    assert before["strategy"]["_target_"] == old
    assert build_settings(before, settings.names).strategy == settings.strategy
    assert with_current_targets(before) == json.loads(json.dumps(settings.resolved, default=str))
    assert job_key(before, settings.names) == job_key(settings.resolved, settings.names)


def test_the_key_of_a_job_is_that_of_version_0_1_0() -> None:
    settings = compose(["strategy=adaqp", "model=gat", "world_size=4"])
    assert job_key(settings.resolved, settings.names) == Path(__file__).with_name("job_key.txt").read_text().strip()


def test_names_of_users_stay() -> None:
    assert current("mine.Strategy") == published("mine.Strategy") == "mine.Strategy"
    assert current("gnnpar.strategies.sar.SAR") == "gnnpar.parallel.sequential.strategy.SAR"
