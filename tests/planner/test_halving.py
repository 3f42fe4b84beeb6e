"""Successive halving with made-up times: who is run, how long, and who is chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gnnpar.parallel.declared import DeclaredCandidate
from gnnpar.parallel.pipeline.cost import PipelineCandidate
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.planner.halving import EPOCHS, check, halved
from gnnpar.planner.planner import Evaluated, Planned
from gnnpar.pricing.price import Price
from gnnpar.pricing.topology import Machines
from gnnpar.settings import Measured


def planned(count: int) -> Planned:
    """Candidates predicted at 1, 2, 3, ... seconds; the last is refused."""
    evaluated = [
        Evaluated(DeclaredCandidate(strategy=SAR(prefetch=i), parts=2), Price(phases={"compute": i + 1.0}), i + 1.0)
        for i in range(count)
    ]
    refused = Evaluated(PipelineCandidate(stages=2), Price(phases={"compute": 0.5}), 0.5, "stale is not allowed")
    nothing = cast("Any", None)
    return Planned(nothing, (*evaluated, refused), "enumerate", 0, 0.0)


def test_the_better_half_runs_for_longer_and_the_fastest_is_chosen() -> None:
    found, seen = planned(6), []
    truth = {0: 5.0, 1: 4.0, 2: 3.0, 3: 9.0}

    def run(plan: Any, epochs: int) -> float:
        seen.append((plan, epochs))
        return truth[plan]

    best, seconds = halved(found, 4, lambda p: cast("Any", p.candidate.as_json()["prefetch"]), run, lambda _: None)
    assert seen == [(0, EPOCHS), (1, EPOCHS), (2, EPOCHS), (3, EPOCHS), (2, 2 * EPOCHS), (1, 2 * EPOCHS)]
    assert best.chosen.candidate.as_json()["prefetch"] == 2
    assert len(best.evaluated) == len(found.evaluated)
    assert seconds == {p.candidate.label: truth[i] for i, p in enumerate(found.evaluated[:4])}


def test_only_this_machine_with_a_core_a_rank() -> None:
    settings: Any = SimpleNamespace(topology=Measured(cores=2), names={"topology": "measured"}, threads_per_rank="auto")
    check(settings, 2, 4)
    with pytest.raises(ValueError, match=r"--measure=4: 4 ranks of 1 threads share 2 cores.*set world_size=2"):
        check(settings, 4, 4)
    settings.topology = Machines(
        devices={"cpu": {"type": "cpu", "memory": "1 GiB"}}, hosts=({"name": "h", "devices": {"cpu": 1}},)
    )
    settings.names = {"topology": "two_nodes"}
    with pytest.raises(ValueError, match=r"--measure=4 runs plans on this machine, but topology=two_nodes"):
        check(settings, 2, 4)
