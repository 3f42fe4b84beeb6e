"""Every candidate is a strategy that runs: exact ones equal the single device, lossy ones train."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from composing import configured
from gnnpar.parallel.declared import DeclaredCandidate
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipeline.cost import PipelineCandidate
from gnnpar.parallel.pipeline.placing import even_cuts
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Workload
from gnnpar.partition.partition import Random
from gnnpar.placement import Topology
from gnnpar.planner.extract import record
from gnnpar.planner.overhead import candidates as calibrated
from gnnpar.planner.overhead import trials
from gnnpar.planner.registry import shipped
from gnnpar.planner.strategy import TAG
from gnnpar.pricing.candidate import Candidate, Scope
from gnnpar.verify.conformance import small_graph, train_in_threads

MODEL = configured("model", "resgcn", "model.num_layers=4", "model.hidden=8")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "candidate",
    [
        DeclaredCandidate(strategy=GraphParallel(overlap="none"), parts=2),
        DeclaredCandidate(strategy=GraphParallel(), parts=2, bits=16),
        DeclaredCandidate(strategy=GraphParallel(), parts=2, bits=8),
        DeclaredCandidate(strategy=SAR(prefetch=2), parts=3),
        PipelineCandidate(stages=2, cuts=even_cuts(4, 2)),
        PipelineCandidate(stages=2, chunks=4, cuts=even_cuts(4, 2)),
        PipelineCandidate(stages=2, parts=2, cuts=even_cuts(4, 2)),
    ],
    ids=lambda c: c.label,
)
def test_a_candidate_runs(candidate: Candidate) -> None:
    strategy = shipped().strategy_of(candidate)
    assert candidate.quality - {"exact"} == strategy.exactness - {"exact"}
    data = small_graph()
    losses = train_in_threads(strategy, MODEL, data, world=candidate.ranks, epochs=4).losses
    assert all(map(math.isfinite, losses))
    if candidate.quality == {"exact"}:
        exact = train_in_threads(Single(), MODEL, data, world=1, epochs=4).losses
        assert losses == pytest.approx(exact, rel=1e-9)


def test_all_candidates_name_fields_that_their_strategies_have() -> None:
    ir = record(MODEL.build(24, 5, seed=0), 24)
    scope = Scope(ir=ir, nodes=3000)
    found = shipped().candidates(scope, 4)
    assert {c.family for c in found} == {
        "graph_parallel",
        "adaqp",
        "sar",
        "gnnpipe",
        "hybrid",
        "pipegcn",
        "feature",
        "digest",
        "cagnet",
        "sancus",
    }
    assert len({c.label for c in found}) == len(found)
    for candidate in found:
        shipped().strategy_of(candidate)
    kept = shipped().candidates(replace(scope, cached=True), 4)
    assert {c.family for c in kept} == {
        "graph_parallel",
        "adaqp",
        "sar",
        "pipegcn",
        "feature",
        "digest",
        "cagnet",
        "sancus",
    }
    assert [c.label for c in shipped().candidates(scope, 1)] == ["single"]


def test_tag_is_exact_in_its_limit() -> None:
    assert TAG(quality=("exact", "stale")).exact_limit().quality == ("exact",)
    without_a_model = Workload(small_graph(), Random(), 4)
    with pytest.raises(ValueError, match="strategy=tag reads the model"):
        TAG().plan(without_a_model, Topology(2))


def test_calibration_measures_one_candidate_of_every_engine() -> None:
    found = {c.engine: c.label for c in calibrated(trials(4)[0], 4)}
    assert found == {
        "single": "single",
        "cagnet": "cagnet",
        "feature": "feature",
        "graph_parallel": "graph_parallel",
        "rounded": "graph_parallel, 16 bit",
        "adaqp": "adaqp, 8 bit",
        "sar": "sar, prefetch 1, push",
        "stages": "gnnpipe 4 stages, 1 chunk",
        "chunks": "gnnpipe 4 stages, 16 chunks",
    }
    assert [c.label for c in calibrated(trials(1)[0], 1)] == ["single"]
