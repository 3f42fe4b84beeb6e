"""Losses of every strategy in fp64: a refactor may not change them.

After a change that must: `python tests/golden/make.py` writes them anew; the changelog says why (Numerics). What is
compared, and how closely, stands in tests/golden_runs.py.
"""

import pytest

from golden_runs import STRATEGIES, losses, recorded, runs, tolerance

OWN = ("single", "graph_parallel", "gnnpipe", "hybrid", "minibatch")


def cases():
    """Conformance holds other strategies to single or to an oracle: 10 epochs of them are slow."""
    for strategy, case in [(s, case) for s, cases in recorded().items() for case in cases]:
        slow = not case.isdigit() and strategy not in OWN
        yield pytest.param(strategy, case, marks=pytest.mark.slow if slow else (), id=f"{strategy}-{case}")


@pytest.mark.quick(60)
@pytest.mark.parametrize(("strategy", "case"), cases())
def test_losses_are_as_recorded(strategy, case):
    found = losses(strategy, case)
    assert found == pytest.approx(recorded()[strategy][case], rel=tolerance(strategy))
    assert case != "2" or found == losses(strategy, case), "a second run has the same bits"


def test_every_recorded_run_is_one_that_is_there():
    assert list(recorded()) == STRATEGIES
    assert [(s, case) for s, cases in recorded().items() for case in cases] == runs()
