"""20 epochs of every strategy and model in fp64: a refactor may not change the losses.

After a change that must: `PYTHONPATH=tests python tests/golden/test_golden.py` writes them anew; the changelog
says why (Numerics).
Compared to 1e-11 rather than bitwise, because matrix products differ in the last bits between processors.
"""

from pathlib import Path

import pytest

from composing import configured, names
from gnnpar.runner.conformance import small_graph, train_in_threads

FOLDER = Path(__file__).parent
# a rounding that falls the other way changes a quantized run for good: those repeat on one machine only (test_adaqp)
# tag has the losses of what it chooses
STRATEGIES = [s for s in names("strategy") if "quantized" not in configured("strategy", s).exactness and s != "tag"]
PAIRS = [(s, m) for s in STRATEGIES for m in names("model")]


def losses(strategy: str, model: str) -> list[float]:
    own = ("strategy.sampler=own",) if strategy == "minibatch" else ()  # another sampler draws other neighbours
    method = configured("strategy", strategy, *own)
    config = configured("model", model, "model.hidden=8")
    most = 2 if hasattr(method, "check_world") else 3  # two layers are two stages
    return train_in_threads(method, config, small_graph(), world=method.max_ranks or most, epochs=20).losses


@pytest.mark.parametrize(("strategy", "model"), PAIRS)
def test_losses_are_as_recorded(strategy, model):
    recorded = [float(line) for line in (FOLDER / f"{strategy}-{model}.txt").read_text().split()]
    assert losses(strategy, model) == pytest.approx(recorded, rel=1e-11)


if __name__ == "__main__":
    for pair in PAIRS:
        (FOLDER / f"{'-'.join(pair)}.txt").write_text("\n".join(map(repr, losses(*pair))) + "\n")
