"""Every candidate is a strategy that runs: exact ones equal the single device, lossy ones train."""

from __future__ import annotations

import math

import pytest

from composing import configured
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Workload
from gnnpar.partition.partition import Random
from gnnpar.placement import Topology
from gnnpar.planner.candidate import Candidate, even_cuts
from gnnpar.planner.extract import record
from gnnpar.planner.search.grid import candidates
from gnnpar.planner.strategy import TAG, families, strategy_of
from gnnpar.verify.conformance import small_graph, train_in_threads

MODEL = configured("model", "resgcn", "model.num_layers=4", "model.hidden=8")


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(family="graph_parallel", parts=2, overlap="none"),
        Candidate(family="graph_parallel", parts=2, bits=16),
        Candidate(family="adaqp", parts=2, bits=8),
        Candidate(family="sar", parts=3, prefetch=2),
        Candidate(family="gnnpipe", stages=2, cuts=even_cuts(4, 2)),
        Candidate(family="gnnpipe", stages=2, chunks=4, cuts=even_cuts(4, 2)),
        Candidate(family="hybrid", stages=2, parts=2, cuts=even_cuts(4, 2)),
    ],
    ids=lambda c: c.label,
)
def test_a_candidate_runs(candidate: Candidate) -> None:
    strategy = strategy_of(candidate)
    assert candidate.quality - {"exact"} == strategy.exactness - {"exact"}
    data = small_graph()
    losses = train_in_threads(strategy, MODEL, data, world=candidate.ranks, epochs=4).losses
    assert all(map(math.isfinite, losses))
    if candidate.quality == {"exact"}:
        exact = train_in_threads(Single(), MODEL, data, world=1, epochs=4).losses
        assert losses == pytest.approx(exact, rel=1e-9)


def test_all_candidates_name_fields_that_their_strategies_have() -> None:
    ir = record(MODEL.build(24, 5, seed=0), 24)
    found = list(candidates(ir, 4, families=families("live"), nodes=3000))
    assert {c.family for c in found} == {"graph_parallel", "adaqp", "sar", "gnnpipe", "hybrid"}
    assert len({c.label for c in found}) == len(found)
    for candidate in found:
        strategy_of(candidate)
    assert not {"gnnpipe", "hybrid"} & set(families("cached"))


def test_tag_is_exact_in_its_limit() -> None:
    assert TAG(quality=("exact", "stale")).exact_limit().quality == ("exact",)
    without_a_model = Workload(small_graph(), Random(), 4)
    with pytest.raises(ValueError, match="strategy=tag reads the model"):
        TAG().plan(without_a_model, Topology(2))
