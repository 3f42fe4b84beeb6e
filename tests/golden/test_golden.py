"""Losses of every strategy in fp64: a refactor may not change them.

After a change that must: `python tests/golden/make.py` writes them anew; the changelog says why (Numerics). What is
compared, and how closely, stands in tests/golden_runs.py.
"""

import pytest

from golden_runs import FOLDER, STRATEGIES, losses, pairs, recorded, short_losses, tolerance, worlds_of


def long_runs():
    """Of the others, whose losses conformance holds to those of single or of an oracle, in the long suite."""
    for file in sorted(FOLDER.glob("*.txt")):
        own = file.stem.split("-")[0] in ("single", "graph_parallel", "gnnpipe", "hybrid", "minibatch")
        yield pytest.param(file, marks=() if own else pytest.mark.slow, id=file.stem)


@pytest.mark.parametrize("file", long_runs())
def test_losses_are_as_recorded(file):
    strategy, model = file.stem.split("-")
    wanted = [float(line) for line in file.read_text().split()]
    assert losses(strategy, model) == pytest.approx(wanted, rel=1e-11)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_of_every_world_are_as_recorded_and_repeat_bit_for_bit(strategy):
    wanted = recorded(strategy)
    assert list(wanted) == [str(w) for w in worlds_of(strategy)]
    for world in worlds_of(strategy):
        found = short_losses(strategy, world)
        assert found == pytest.approx(wanted[str(world)], rel=tolerance(strategy)), world
        assert world != 2 or found == short_losses(strategy, world)


def test_every_file_is_of_a_strategy_that_is_there():
    assert sorted(file.stem for file in FOLDER.glob("*.json")) == STRATEGIES
    assert {file.stem for file in FOLDER.glob("*.txt")} == {f"{strategy}-{model}" for strategy, model in pairs()}
