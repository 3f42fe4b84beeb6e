"""Every candidate is a strategy that runs: exact ones equal the single device, lossy ones train."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

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
from gnnpar.placement import Plan, Topology
from gnnpar.planner.extract import record
from gnnpar.planner.overhead import candidates as calibrated
from gnnpar.planner.overhead import trials
from gnnpar.planner.registry import shipped
from gnnpar.planner.strategy import TAG
from gnnpar.pricing.candidate import Candidate, Scope
from gnnpar.verify.conformance import Job, make_job, merge_ranks, relative_error, small_graph, train_in_threads
from worlds import Several, run_world

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


def of_every_family(world: int) -> list[Candidate]:
    """The exact candidates of each family, and its first lossy one."""
    ir = record(MODEL.build(6, 3, seed=3), 6)
    found: dict[tuple[str, bool], Candidate] = {}
    for candidate in shipped().candidates(Scope(ir=ir, nodes=60), world):
        found.setdefault((candidate.family, candidate.quality == {"exact"}), candidate)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_plans_of_every_family_run_over_gloo(world: int, tmp_path: Path) -> None:
    """Written to plan.json, and read again."""
    data, chosen = small_graph(), of_every_family(world)
    jobs: list[Job] = []
    for i, candidate in enumerate(chosen):
        job = make_job(shipped().strategy_of(candidate), MODEL, data, world=world, epochs=3)
        plan = Plan.load(job.plan.save(tmp_path / str(i)))
        plan.verify(num_layers=4, num_nodes=data.num_nodes, graph=data.graph_hash)
        model = jobs[0].model if jobs else job.model  # equal ones: each would take file descriptors of its own
        jobs.append(replace(job, plan=plan, model=model))
    ranks = run_world("gloo", world, Several(tuple(jobs)))
    exact = train_in_threads(Single(), MODEL, data, world=1, epochs=3)
    for i, (candidate, job) in enumerate(zip(chosen, jobs, strict=True)):
        outcome = merge_ranks(job, [of_rank[i] for of_rank in ranks])
        assert all(map(math.isfinite, outcome.losses)), candidate.label
        if candidate.quality == {"exact"}:
            assert outcome.losses == pytest.approx(exact.losses, rel=1e-9), candidate.label
            assert relative_error(outcome.logits, exact.logits) < 1e-9, candidate.label
    families = {candidate.family for candidate in chosen}
    assert families >= {"graph_parallel", "adaqp", "sar", "gnnpipe"} and ("hybrid" in families) == (world == 4)


def test_all_candidates_name_fields_that_their_strategies_have() -> None:
    ir = record(MODEL.build(24, 5, seed=0), 24)
    scope = Scope(ir=ir, nodes=3000)
    found = shipped().candidates(scope, 4)
    whole_graph = {"graph_parallel", "adaqp", "sar", "pipegcn", "feature", "digest", "cagnet", "sancus"}
    assert {c.family for c in found} == whole_graph | {"gnnpipe", "hybrid"}
    assert len({c.label for c in found}) == len(found)
    for candidate in found:
        shipped().strategy_of(candidate)
    assert {c.family for c in shipped().candidates(replace(scope, cached=True), 4)} == whole_graph
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
