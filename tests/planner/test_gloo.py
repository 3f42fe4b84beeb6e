"""Every family's plan, written to plan.json and read again, is run by processes over gloo."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from composing import configured
from gnnpar.parallel.single.strategy import Single
from gnnpar.placement import Plan
from gnnpar.planner.extract import record
from gnnpar.planner.registry import shipped
from gnnpar.pricing.candidate import Candidate, Scope
from gnnpar.verify.conformance import Job, make_job, merge_ranks, relative_error, small_graph, train_in_threads
from worlds import Several, run_world

MODEL = configured("model", "resgcn", "model.num_layers=4", "model.hidden=8")
EPOCHS = 3


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
    data, chosen = small_graph(), of_every_family(world)
    jobs: list[Job] = []
    for i, candidate in enumerate(chosen):
        strategy = shipped().strategy_of(candidate)
        job = make_job(strategy, MODEL, data, world=world, epochs=EPOCHS)
        file = job.plan.save(tmp_path / str(i))
        plan = Plan.load(file)
        plan.verify(num_layers=4, num_nodes=data.num_nodes, graph=data.graph_hash)
        model = jobs[0].model if jobs else job.model  # equal ones: each would take file descriptors of its own
        jobs.append(replace(job, plan=plan, model=model))
    ranks = run_world("gloo", world, Several(tuple(jobs)))
    exact = train_in_threads(Single(), MODEL, data, world=1, epochs=EPOCHS)
    families_run = set()
    for i, (candidate, job) in enumerate(zip(chosen, jobs, strict=True)):
        outcome = merge_ranks(job, [of_rank[i] for of_rank in ranks])
        families_run.add(candidate.family)
        assert all(map(math.isfinite, outcome.losses)), candidate.label
        if candidate.quality == {"exact"}:
            assert outcome.losses == pytest.approx(exact.losses, rel=1e-9), candidate.label
            assert relative_error(outcome.logits, exact.logits) < 1e-9, candidate.label
    assert families_run >= {"graph_parallel", "adaqp", "sar", "gnnpipe"}
    assert ("hybrid" in families_run) == (world == 4)
