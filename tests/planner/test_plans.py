"""Plans: a round trip of plan.json, one line for a plan that cannot run, edits by hand, every candidate as a run, and a
plan that is replaced where another one is better."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composing import configured
from conftest import Run
from gnnpar.cli.train import run_training
from gnnpar.comm import ThreadWorld
from gnnpar.config.compose import compose
from gnnpar.parallel.declared import DeclaredCandidate
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipeline.cost import PipelineCandidate
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.pipeline.placing import even_cuts
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Strategy, Workload
from gnnpar.partition.partition import Random
from gnnpar.placement import Placement, Plan, Topology
from gnnpar.planner import replan
from gnnpar.planner.extract import record
from gnnpar.planner.overhead import candidates as calibrated
from gnnpar.planner.overhead import trials
from gnnpar.planner.registry import shipped
from gnnpar.planner.replan import Replanner
from gnnpar.planner.strategy import TAG
from gnnpar.pricing.candidate import Candidate, Scope
from gnnpar.pricing.rates import NOMINAL
from gnnpar.settings import ConfigError, Settings, instantiate
from gnnpar.track.jsonl import read_rows
from gnnpar.track.keys import PHASES
from gnnpar.training import loop
from gnnpar.training.loop import since_of
from gnnpar.training.plans import given_plan
from gnnpar.training.result.result import WARMUP_EPOCHS
from gnnpar.verify.conformance import Job, make_job, merge_ranks, relative_error, small_graph, train_in_threads
from outcomes import refused
from planner.conftest import machine
from worlds import Several, run_world


def pipeline() -> Plan:
    """Two stages of two parts, four layers, three chunks, 12 nodes."""
    part_of = torch.tensor([0, 1] * 6)
    chunk_of = torch.arange(12) % 3
    return Plan(
        Placement(((0, 1), (2, 3)), part_of, chunk_of, (range(2), range(2, 4))),
        strategy={"name": "hybrid", "stages": 2},
        hashes={"graph": "a" * 64, "split": "b" * 64},
        statistics={"alpha": 0.5},
        predicted={"epoch_seconds": 0.25, "peak_bytes": [2**30, 2**29, 2**30, 2**29]},
        quality=("quantized", "stale"),
        devices=("h0/0", "h0/1", "h1/0", "h1/1"),
        setup={"names": {"model": "gcn"}, "model": {"hidden": 8}},
    )


def test_round_trip(tmp_path: Path) -> None:
    plan = pipeline()
    again = Plan.load(plan.save(tmp_path))
    assert again.placement.mesh == plan.placement.mesh
    assert torch.equal(again.part_of, plan.part_of)
    assert again.placement.chunk_of is not None
    assert torch.equal(again.placement.chunk_of, torch.arange(12) % 3)
    names = ("strategy", "hashes", "statistics", "predicted", "quality", "devices", "setup", "num_ranks")
    assert [getattr(again, n) for n in names] == [getattr(plan, n) for n in names]
    assert again.placement.layers_of == plan.placement.layers_of
    again.verify(num_layers=4, num_nodes=12, graph="a" * 64, split="b" * 64)
    assert again.save(tmp_path / "b").read_text() == (tmp_path / "plan.json").read_text()


def test_a_vertex_cut_is_part_of_the_plan(tmp_path: Path) -> None:
    edges = torch.tensor([0, 1, 1, 0, 1])
    plan = placed(edge_part_of=edges)(pipeline())
    again = Plan.load(plan.save(tmp_path))
    assert again.placement.edge_part_of is not None
    assert torch.equal(again.placement.edge_part_of, edges)
    assert again.without_nodes().placement.edge_part_of is None
    again.verify(num_nodes=12, num_edges=5)
    with pytest.raises(ValueError, match="the plan places 5 edges, the graph has 6: plan again"):
        again.verify(num_edges=6)


def placed(**changes: object) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, placement=replace(plan.placement, **changes))


MUTATIONS: dict[str, Callable[[Plan], Plan]] = {
    "a stage of mesh=[[0, 1], []] has no rank": placed(mesh=((0, 1), ())),
    "mesh has the ranks [0, 1, 1, 2], not 0 to 3": placed(mesh=((0, 1), (1, 2))),
    "mesh has the ranks [0, 1, 2, 4], not 0 to 3": placed(mesh=((0, 1), (2, 4))),
    "stages have [1, 2] parts": placed(mesh=((0, 1), (2,))),
    "layers_of has 1 stages, mesh 2": placed(layers_of=(range(4),)),
    "stage 0 has no layer": placed(layers_of=(range(0), range(4))),
    "stage 1 begins with layer 3, not with 2": placed(layers_of=(range(2), range(3, 4))),
    "part_of goes from 0 to 2, but there are 2 parts": placed(part_of=torch.tensor([0, 1, 2] * 4)),
    "part 1 has no node": placed(part_of=torch.zeros(12, dtype=torch.long)),
    "chunk_of has 11 nodes, part_of 12": placed(chunk_of=torch.zeros(11, dtype=torch.long)),
    "chunk_of goes from -1 to 10, but there are 12 chunks": placed(chunk_of=torch.arange(12) - 1),
    "chunk 1 has no node": placed(chunk_of=torch.tensor([0, 2] * 6)),
    "edge_part_of goes from 0 to 2, but there are 2 parts": placed(edge_part_of=torch.tensor([0, 2, 1])),
    "devices names 3 places for 4 ranks": lambda plan: replace(plan, devices=("a", "b", "c")),
    "devices puts two ranks on one device": lambda plan: replace(plan, devices=("a", "b", "c", "c")),
    "strategy.name=3 is no name": lambda plan: replace(plan, strategy={"name": 3}),
}


@pytest.mark.parametrize("said", MUTATIONS)
def test_mutated_plans_are_rejected(said: str, tmp_path: Path) -> None:
    """From the file, as `gnnpar train plan=` reads it."""
    with refused("the plan cannot run: .*" + re.escape(said)):
        Plan.load(MUTATIONS[said](pipeline()).save(tmp_path)).verify(num_nodes=12)


def test_a_plan_of_more_ranks_than_anybody_has_is_refused_in_a_short_line(tmp_path: Path) -> None:
    """In time that grows with their number, not with its square."""
    mesh = (tuple(range(1, 100_001)), tuple(range(100_001, 200_001)))
    with pytest.raises(ValueError, match=r"mesh has the ranks \[1, 2, .*, not 0 to 199999") as caught:
        Plan.load(placed(mesh=mesh)(pipeline()).save(tmp_path)).verify(num_nodes=12)
    assert len(str(caught.value)) < 200


def test_a_plan_for_something_else() -> None:
    plan = pipeline()
    for given, said in (
        ({"graph": "c" * 64}, "the plan was made for another graph (aaaaaaaaaaaa, here cccccccccccc)"),
        ({"num_layers": 3}, "the plan has 4 layers, the model 3: set model.num_layers=4"),
        ({"num_nodes": 13}, "the plan places 12 nodes, the graph has 13"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            plan.verify(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d | {"stage": 1}, "stage=1: Extra inputs are not permitted"),
        (lambda d: {k: v for k, v in d.items() if k != "hashes"}, "hashes is missing"),
        (lambda d: d | {"schema": 2}, "schema=2: Input should be 1"),
        (lambda d: d | {"arrays": d["arrays"] | {"order": "a.npy"}}, "arrays.order.[key]=order: Input should be"),
        (lambda d: d | {"layers_of": []}, "layers_of=[]: List should have at least 1 item"),
        (lambda d: d | {"setup": ""}, "setup=: Input should be an object"),
        (lambda d: d | {"devices": ["a", [[]]]}, "devices.1=[[]]: Input should be a valid string"),
        (lambda d: d | {"devices": "abcd"}, "devices=abcd: Input should be a valid array"),
        (lambda d: d | {"quality": [1]}, "quality.0=1: Input should be a valid string"),
        (lambda d: d | {"arrays": {"part_of": "missing.npy"}}, "cannot be read (FileNotFoundError)"),
    ],
)
def test_malformed_files(change: Callable[[dict], dict], said: str, tmp_path: Path) -> None:
    file = pipeline().save(tmp_path)
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(ValueError, match=re.escape(said)):
        Plan.load(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hashes": {"graph": "0", "split": "0", "partition": "../../elsewhere"}}, "hashes.partition=../../elsewhere"),
        ({"layers_of": [[0, 1 << 40]]}, r"layers_of.0.1=1099511627776: Input should be less than or equal to 10000"),
        ({"predicted": 3}, "predicted=3: Input should be an object"),
    ],
)
def test_what_a_checkpoint_has_of_a_plan_is_checked_as_a_file_is(change: dict, said: str) -> None:
    """Its partition's hash is the name of a file that is written."""
    plan = pipeline()
    data = json.loads(json.dumps(plan.as_data(dict.fromkeys(plan.arrays, "rank-0.pt"))))
    assert Plan.of_data(data, plan.arrays).placement.layers_of == plan.placement.layers_of
    with pytest.raises(ValueError, match=said):
        Plan.of_data(data | change, plan.arrays)


def test_a_changed_array_is_noticed(tmp_path: Path) -> None:
    file = pipeline().save(tmp_path)
    name = json.loads(file.read_text())["arrays"]["part_of"]
    import numpy as np

    np.save(tmp_path / name, np.zeros(12, dtype=np.int32))
    with pytest.raises(ValueError, match="was changed: its contents differ from the hash in its name"):
        Plan.load(file)


def test_plans_without_the_new_fields_still_load(tmp_path: Path) -> None:
    file = pipeline().save(tmp_path)
    data = json.loads(file.read_text())
    del data["quality"], data["devices"]
    file.write_text(json.dumps(data))
    assert (Plan.load(file).quality, Plan.load(file).devices) == (None, ())


SMALL = ("model=gcn", "model.num_layers=2", "world_size=2", "comm=threads")
BF16 = {"_target_": "gnnpar.codecs.codec.BFloat16"}
Change = Callable[[dict[str, Any]], Any]


def written(folder: Path, strategy: str, *overrides: str, world: int = 2) -> Path:
    """plan.json of a strategy for the small graph."""
    settings = compose([f"strategy={strategy}", *SMALL, *overrides])
    plan = make_job(settings.strategy, settings.model, small_graph(), world=world).plan
    file = plan.save(folder)
    data = json.loads(file.read_text())
    data["strategy"] = {"name": strategy, **settings.resolved["strategy"]}
    file.write_text(json.dumps(data))
    return file


def edited(file: Path, change: Change) -> Settings:
    """The settings of a run with this plan, after a change of it."""
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    chosen = {key: value for key, value in data["strategy"].items() if key != "name"}
    if chosen["_target_"].endswith("Single"):
        del chosen["halo"], chosen["reduce"]
    return replace(compose(SMALL), plan=file, strategy=instantiate(chosen, "strategy"))


def refusal(settings: Settings) -> str:
    assert settings.plan is not None
    with pytest.raises(ValueError, match=r".*") as caught:
        given_plan(settings.plan, settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda data: data["setup"].update(colour=3), "nothing reads setup.colour"),
        (lambda data: data.update(layers_of=[[0, 1], [1, 2]]), "has one stage, but layers_of has 2"),
        (
            lambda data: (
                data["strategy"].update({"_target_": "gnnpar.parallel.single.strategy.Single"})
                or [data["strategy"].pop(key) for key in ("codec", "overlap")]
            ),
            "runs on 1 rank, but mesh has 2",
        ),
        (
            lambda data: data.update(quality=["quantized"]) or data["strategy"].update(codec=BF16),
            "strategy=graph_parallel is rounded, which quality=['quantized'] does not allow",
        ),
    ],
)
def test_what_is_without_effect_or_contradicts_is_refused(change: Change, line: str, tmp_path: Path) -> None:
    assert line in refusal(edited(written(tmp_path, "graph_parallel"), change))


def test_a_strategy_without_stages_or_chunks_takes_no_pipeline(tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["strategy"] = {"name": "sar", "_target_": f"{SAR.__module__}.SAR"}

    assert "strategy=sar has one stage, but mesh has 2" in refusal(edited(written(tmp_path, "gnnpipe"), change))
    one = written(tmp_path / "one", "gnnpipe", "strategy.stages=1", "strategy.parts=2")
    assert "strategy=sar has no chunks, but arrays has chunk_of" in refusal(edited(one, change))


def test_the_codec_of_the_strategy_is_what_runs(tmp_path: Path) -> None:
    """bf16 in plan.json halves the bytes of halo rows."""
    file = written(tmp_path, "graph_parallel")
    exact = bytes_of(edited(file, lambda data: None))
    assert bytes_of(edited(file, lambda data: data["strategy"].update(codec=BF16))) == exact / 2


def bytes_of(settings: Settings) -> float:
    """Of halo rows of one epoch, in fp32."""
    assert settings.plan is not None
    job = make_job(settings.strategy, settings.model, small_graph(), world=2, epochs=1, dtype=torch.float32)
    given = replace(job, plan=given_plan(settings.plan, settings))
    return merge_ranks(given, ThreadWorld(2).run(given)).traffic[0]["forward"]


def test_tag_describes_what_it_chose() -> None:
    strategy: Strategy = TAG(rates="nominal")
    model = configured("model", "gcn", "model.hidden=8")
    plan: Plan = make_job(strategy, model, small_graph(), world=2).plan
    assert plan.predicted is not None
    assert {layer.mode for layer in strategy.describe(plan)} <= {"whole", "halo", "sar", "chunk"}
    assert TAG(rates="nominal").chosen(plan).describe(plan) == strategy.describe(plan)
    nothing = replace(plan, strategy={"name": "tag", "_target_": f"{TAG.__module__}.TAG"})
    with pytest.raises(ValueError, match="strategy=tag has to say what it chose; plan again"):
        strategy.describe(nothing)


def test_a_stage_of_parts_names_both_codecs() -> None:
    facts = Hybrid(stages=2, parts=2).describe(
        make_job(Hybrid(stages=2, parts=2), configured("model", "gcn", "model.hidden=8"), small_graph(), world=4).plan
    )
    assert {layer.how for layer in facts} == {"chunks, boundary identity, halo identity"}


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


def test_candidates_are_strategies_of_their_exactness() -> None:
    ir = record(MODEL.build(24, 5, seed=0), 24)
    scope = Scope(ir=ir, nodes=3000)
    found = shipped().candidates(scope, 4)
    whole_graph = {"graph_parallel", "adaqp", "sar", "pipegcn", "feature", "digest", "cagnet", "sancus"}
    assert {c.family for c in found} == whole_graph | {"gnnpipe", "hybrid"}
    assert len({c.label for c in found}) == len(found)
    for candidate in found:
        assert candidate.quality - {"exact"} == shipped().strategy_of(candidate).exactness - {"exact"}, candidate.label
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


SAID: dict[str, Any] = {
    "label": "graph_parallel",
    "epoch_seconds": 0.1,
    "candidate": {"family": "graph_parallel"},
    "phases": {"compute": 0.08, "encode": 0.0, "wire": 0.02, "bubble": 0.0, "reduce": 0.0},
}


def rows(seconds: float, *, first: int = 0, count: int = 20, **phases: float) -> list[dict[str, Any]]:
    named = {f"time/{name}_seconds": phases.get(name, 0.0) for name in PHASES}
    return [{"epoch": first + i, "time/timed": 1, "time/epoch_seconds": seconds, **named} for i in range(count)]


def replanner(seconds: float, **phases: Any) -> Replanner:
    found = Replanner(0)
    for row in rows(seconds, **phases):
        found.add(row)
    return found


def test_only_timed_epochs_after_the_warm_up_count() -> None:
    found = Replanner(10)
    for row in rows(1.0, first=8, count=9):
        found.add(row)
    found.add({**rows(9.0, first=17, count=1)[0], "time/timed": 0})
    assert [row["epoch"] for row in found.rows] == [15, 16]
    assert found.due == 10 + WARMUP_EPOCHS + replan.EPOCHS


def test_a_prediction_that_holds_is_left_alone() -> None:
    assert replan.compared(SAID, replanner(0.119, compute=0.09, exposed_wire=0.029))[0] == ""
    why, by = replan.compared(SAID, replanner(0.3, compute=0.07, other=0.01, exposed_wire=0.22))
    assert why == "measured 300 ms an epoch, predicted 100 ms (+200%; wire x8.00)"  # eleven, but at most eight
    assert by == {"compute": 1.0, "encode": 1.0, "wire": 8.0, "reduce": 1.0}


def test_rates_and_links_are_told_what_they_take() -> None:
    before = machine(2)
    setting = replan.corrected(before, {"compute": 2.0, "encode": 4.0, "wire": 3.0, "reduce": 0.5})
    rates = setting.rates[0]
    assert rates.scale == 2.0
    assert rates.code_seconds(8, 1e6) == pytest.approx(4.0 * NOMINAL.code_seconds(8, 1e6))
    assert setting.fabric.rate(0, 1) == pytest.approx(1e9 / 3)
    assert setting.fabric.latency(0, 1) == pytest.approx(3 * before.fabric.latency(0, 1))
    assert rates.reduce[0] == pytest.approx(NOMINAL.reduce[0] / 2)


def test_another_plan_must_be_another_one_and_faster() -> None:
    import torch

    placement = Placement(((0, 1),), torch.tensor([0, 1]), None, (range(1),))
    found = replanner(0.2)
    other = {**SAID, "label": "sar", "candidate": {"family": "sar"}, "epoch_seconds": 0.15}
    assert replan.better(Plan(placement, predicted={**SAID}), SAID, found, 14, "why") is None
    assert replan.better(Plan(placement, predicted={**other, "epoch_seconds": 0.195}), SAID, found, 14, "") is None
    plan = replan.better(Plan(placement, predicted=other), SAID, found, 14, "slow")
    assert plan is not None
    assert plan.predicted is not None
    assert plan.predicted["replanned"] == {
        "epoch": 14,
        "before": "graph_parallel",
        "predicted_seconds": 0.1,
        "measured_seconds": 0.2,
        "why": "slow",
    }
    assert since_of(plan.predicted) == 14
    assert since_of(SAID) == since_of(None) == 0


def test_ranks_that_share_cores_are_not_compared() -> None:
    world: Any = SimpleNamespace(how="processes", oversubscribed=True, local_size=4, cores=2, jobs_at_once=1)
    assert replan.not_compared(world) == "4 ranks share 2 cores"
    world.oversubscribed = False
    assert replan.not_compared(world) == ""
    world.how = "threads"
    assert replan.not_compared(world) == "ranks are threads of one process"


def test_it_needs_a_checkpoint_to_go_on_from() -> None:
    from gnnpar.planner.strategy import TAG
    from gnnpar.training.checkpoint.resume import check

    settings: Any = SimpleNamespace(strategy=replace(TAG(), replan=True), checkpoint=SimpleNamespace(keep=0))
    with pytest.raises(ConfigError, match=r"set checkpoint\.keep=1"):
        check(settings)


def test_a_run_says_why_times_are_not_compared(run_here: Run, tmp_path: Path) -> None:
    quick = ("strategy=tag", "strategy.rates=nominal", "strategy.replan=true", "comm=threads", "world_size=2")
    done = run_here("train", *quick, "epochs=15", "dataset.num_nodes=400", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    assert "tag: ranks are threads of one process: times are not compared" in done.stdout


COMMON = (
    "dataset.num_nodes=300",
    "model.num_layers=4",
    "model.dropout=0",
    "partition=random",
    "precision=fp64",
    "world_size=2",
    "comm=threads",
    "tracker=jsonl",
    "strategy=tag",
    "strategy.rates=nominal",
)
AGAIN = WARMUP_EPOCHS + replan.EPOCHS + 1


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def losses_of(folder: Path) -> list[float]:
    return [row["loss/train"] for row in read_rows(folder)]


@pytest.fixture
def slow_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the warm-up the machine proves to have links so slow that a pipeline is better."""
    slow = machine(2, rate=1e5, latency=1e-5)
    monkeypatch.setattr(replan, "not_compared", lambda _: "")
    monkeypatch.setattr(replan, "setting_of", lambda *_: (slow, 2))
    monkeypatch.setattr(replan, "corrected", lambda setting, _: setting)
    monkeypatch.setattr(replan, "_GAIN", float("inf"))


def test_a_run_goes_on_with_another_plan(tmp_path: Path, slow_links: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told that links are slow, a plan without stages becomes a pipeline of one chunk: the same losses, to the end;
    also where the run is killed after that, from the checkpoint of the change and from a later one."""
    again = compose(["strategy.replan=true", "epochs=21", "checkpoint.every=16", "resume=auto", *COMMON])
    for name in ("changed", "kept", "killed", "killed_early"):
        (tmp_path / name).mkdir()
    outcome = run_training(again, tmp_path / "changed")
    assert outcome.status == "completed", outcome
    assert run_training(compose([*COMMON, "epochs=21"]), tmp_path / "kept").status == "completed"
    changed, kept = (result_of(tmp_path / name) for name in ("changed", "kept"))
    told = changed["predicted"]
    assert kept["predicted"]["label"] == told["replanned"]["before"] != told["label"]
    assert told["label"] == "gnnpipe 2 stages, 1 chunk"
    assert told["replanned"]["epoch"] == AGAIN
    assert "measured" in told["replanned"]["why"]
    assert changed["epoch_seconds"]["num_epochs"] == 21 - AGAIN - WARMUP_EPOCHS
    assert kept["predicted"]["replanned"] is None
    losses = losses_of(tmp_path / "changed")
    assert losses == pytest.approx(losses_of(tmp_path / "kept"), rel=1e-9)
    assert len(losses) == 21

    real = loop.train_epoch
    monkeypatch.setattr(loop, "train_epoch", lambda run, epoch, *rest: killed_at(17, epoch) or real(run, epoch, *rest))
    assert "killed" in (run_training(again, tmp_path / "killed").error or "")
    monkeypatch.setattr(loop, "train_epoch", real)
    why = result_of(tmp_path / "killed")["predicted"]["replanned"]["why"]
    shutil.copytree(tmp_path / "killed", tmp_path / "killed_early", dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "killed_early" / "checkpoint" / "epoch-000016")
    monkeypatch.setattr(replan, "plan_again", None)  # nothing is planned a second time
    for name in ("killed", "killed_early"):
        assert run_training(again, tmp_path / name).status == "completed"
        found = result_of(tmp_path / name)
        assert found["predicted"]["label"] == told["label"]
        assert found["predicted"]["replanned"]["epoch"] == AGAIN
        assert found["predicted"]["replanned"]["why"] == why
        assert found["epoch_seconds"]["num_epochs"] == changed["epoch_seconds"]["num_epochs"]
        assert found["bytes_per_epoch"] == changed["bytes_per_epoch"]
        assert losses_of(tmp_path / name) == losses


def killed_at(last: int, epoch: int) -> None:
    if epoch == last:
        raise RuntimeError("killed")
