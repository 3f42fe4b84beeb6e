"""`gnnpar estimate`: bytes are those that a run sends, memory and time the planner's; nothing is run. Samples that are
priced are those of a run."""

# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from composing import configured
from conftest import Run
from gnnpar.cli.estimate import rows
from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import BFloat16, Drop
from gnnpar.codecs.uniform import Random as RandomBits
from gnnpar.codecs.uniform import Uniform
from gnnpar.config.compose import compose
from gnnpar.data.dataset import Dataset
from gnnpar.parallel.declared import Declaration, DeclaredCandidate, Declares, Priced, Problem
from gnnpar.parallel.digest.strategy import Digest
from gnnpar.parallel.halo.adaqp import AdaQP
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipeline.cost import PipelineCandidate
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.pipeline.strategy import GNNPipe
from gnnpar.parallel.sampling.cost import MOST, Drawn, Step, draw, num_steps, sampled_epoch, step_seconds
from gnnpar.parallel.sampling.strategy import Minibatch
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import CodedStrategy, Workload
from gnnpar.partition.partition import Random
from gnnpar.planner import strategy as tag
from gnnpar.planner.estimate import Estimator, row_of
from gnnpar.planner.extract import record
from gnnpar.planner.planned import workload_of
from gnnpar.planner.planner import Evaluated, Planned, recorded
from gnnpar.planner.recompute import how_held
from gnnpar.planner.registry import Registry, shipped
from gnnpar.planner.strategy import TAG
from gnnpar.pricing.candidate import Candidate
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.price import Memory, Price, Traffic
from gnnpar.pricing.rates import NOMINAL, Rates
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.steps import Step as DeclaredStep
from gnnpar.pricing.work import Work
from gnnpar.verify.conformance import small_graph, train_in_threads
from planner.conftest import Told, machine

PHASES = ("forward", "backward", "remat", "push", "stage", "reduce")
KEYS = (*PHASES, "total")


@cache
def model_of(name: str) -> Any:
    heads = ["model.heads=2"] if name.startswith("gat") else []
    return configured("model", name, "model.num_layers=3", "model.hidden=40", *heads)


def price(
    strategy: Any,
    name: str,
    world: int,
    *,
    first_layer: Any = "live",
    number: int = 4,
    rates: Rates = NOMINAL,
    data: Dataset | None = None,
) -> Price:
    """Of a run on the small graph, or on another, in random parts."""
    data, config = data or small_graph(), model_of(name)
    cached = first_layer == "cached"
    model = config.build(data.num_features, 3, seed=3, cached_first_layer=cached)
    ir = record(model, data.num_features, learned=data.learned.width if data.learned else 0)

    def work_of(parts: int) -> Work:
        part_of = Random().part_of(data, parts)
        return Work(ir, GraphStats.of(data), PartStats.of(data.edge_index, part_of, parts), (rates,) * parts)

    problem = Problem(
        workload=Workload(data, Random(), ir.num_layers),
        model=model,
        ir=ir,
        ranks=world,
        work_of=work_of,
        number=number,
        first_layer=first_layer,
        kept=how_held(model, ir) if cached else "no",
        seed=3,
    )
    assert isinstance(strategy, Priced)
    return strategy.cost(problem, machine(world))


def by_phase(found: Traffic | None) -> dict[str, float]:
    assert found is not None
    return {phase: getattr(found, phase) for phase in PHASES if getattr(found, phase)}


def sent(
    strategy: Any, name: str, world: int, dtype: torch.dtype, data: Dataset | None = None, **options: Any
) -> dict[str, int]:
    """Of the second epoch."""
    got = train_in_threads(strategy, model_of(name), data or small_graph(), world=world, dtype=dtype, **options)
    return {phase: nbytes for phase, nbytes in got.traffic[1].items() if nbytes}


RUNS = [
    (GraphParallel(overlap="none"), "gat", 3),
    (GraphParallel(codec=Drop()), "gin", 2),
    (GraphParallel(), "gcnii", 1),
    (AdaQP(codec=Uniform(bits=4, gradient_bits=8)), "gat", 3),
    (AdaQP(codec=Uniform(bits="fp8", gradient_bits=1)), "sage_max", 2),
    (SAR(), "gat", 4),
    (SAR(), "gat", 2),
    (SAR(backward="pull"), "gat", 3),
    (SAR(rounds="one", codec=BFloat16()), "gat", 3),
    (GNNPipe(boundary=Uniform(bits=2, gradient_bits=4)), "gcnii", 3),
    (Hybrid(stages=2, parts=2, chunks=8), "gcn", 4),
    (Hybrid(stages=1, parts=3, chunks="one", codec=Uniform(bits=8)), "sage", 3),
    (Minibatch(batch_size=16), "sage", 3),
    (TAG(rates="nominal", quality=("stale", "quantized")), "gat", 4),
]
MORE = [
    (GraphParallel(), "gcn", 3),
    (GraphParallel(codec=BFloat16()), "sage", 3),
    (AdaQP(codec=Uniform(bits="bf16")), "gat", 2),
    (SAR(), "gcn", 3),
    (SAR(backward="pull", remat=False), "gat", 2),
    (SAR(), "gatv2", 3),
    (SAR(codec=Drop()), "gat", 2),
    (GNNPipe(stages=3, chunks=6), "gcn", 3),
    (GNNPipe(chunks="one", boundary=BFloat16()), "gcnii", 2),
    (GNNPipe(virtual=3, chunks=2, stages=1), "gcn", 1),
    (Hybrid(stages=2, parts=2), "gat", 4),
]
RUNS += [pytest.param(*each, marks=pytest.mark.slow) for each in MORE]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("strategy", "name", "world"), RUNS, ids=lambda v: v if isinstance(v, str) else None)
def test_bytes_are_those_of_a_run(strategy: Any, name: str, world: int) -> None:
    dtype = {2: torch.bfloat16, 4: torch.float64}.get(world, torch.float32)
    found = price(strategy, name, world, number=dtype.itemsize).traffic
    assert found is not None
    assert by_phase(found) == sent(strategy, name, world, dtype)
    assert found.bound == "exact"


LEARNED = {"graph_parallel": "gcn", "sar": "gat", "cagnet": "gcn", "feature": "gcn", "bns": "gcn", "pipegcn": "sage"}
LEARNED |= dict.fromkeys(("digest", "sancus", "gnnpipe", "hybrid"), "gcn")


@pytest.mark.quick(2)
@pytest.mark.parametrize(("case", "how"), product([*LEARNED.items(), ("graph_parallel", "gat")], ["learned", "both"]))
def test_bytes_of_learned_features_are_those_of_a_run(case: tuple[str, str], how: Any) -> None:
    name, model = case
    world, data = 4 if name == "hybrid" else 3, small_graph().with_features(how, 5, 3)
    strategy = configured("strategy", name).exact_limit()
    found = price(strategy, model, world, data=data).traffic
    assert by_phase(found) == sent(strategy, model, world, torch.float32, data)
    if name == "graph_parallel" and model == "gcn":  # layer 0 sends gradients of its F + d columns, too
        assert found is not None and found.backward == found.forward > price(strategy, model, world).traffic.backward


@pytest.mark.parametrize(
    "chosen",
    [
        PipelineCandidate(stages=2, chunks=4, bits=8, cuts=(0, 2)),
        PipelineCandidate(stages=2, parts=2, bits=16, cuts=(0, 1)),
        DeclaredCandidate(strategy=GraphParallel(), parts=3, bits=4),
    ],
    ids=lambda c: c.label,
)
def test_tag_is_the_strategy_that_it_chooses(chosen: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven cuts among them, which only a plan makes."""
    best = (Evaluated(chosen, Price(), 0.0),)
    monkeypatch.setattr(tag, "run", lambda request: Planned(request, best, "", 0, 0.0))
    found = price(TAG(rates="nominal", replan=True), "sage", chosen.ranks)
    assert by_phase(found.traffic) == sent(TAG(rates="nominal"), "sage", chosen.ranks, torch.float32)
    assert found.label == chosen.label
    assert found.notes[0] == f"chooses {chosen.label}"
    assert "replan=true" in found.notes[1]
    assert not any("priced as graph_parallel" in note for note in found.notes)


@dataclass(frozen=True, kw_only=True)
class Few(CodedStrategy, Declares):
    """DIGEST by another name."""

    def declared(self) -> Declaration:
        return Declaration(family="few", step=DeclaredStep("halo", sends=(1 / 3, 0.0), kept=(1.0, 0.0)))


def test_a_declared_step_is_a_price() -> None:
    few, digest = price(Few(), "gat", 3), price(Digest(period=3), "gat", 3)
    assert few == replace(digest, label="few")
    assert digest.label == "digest, every 3 epochs"


@pytest.mark.parametrize(("strategy", "name"), [(GraphParallel(), "gcn"), (GraphParallel(), "gat"), (SAR(), "gat")])
def test_a_first_layer_that_is_held_sends_nothing(strategy: Any, name: str) -> None:
    found = price(strategy, name, 3, first_layer="cached")
    assert by_phase(found.traffic) == sent(strategy, name, 3, torch.float32, first_layer="cached")
    assert ("first layer held" in found.label) == (not isinstance(strategy, SAR))  # which never keeps features of halos


def test_bits_that_are_chosen_later_are_a_bound() -> None:
    for codec, bound in ((Adaptive(menu=(2, 4), first_bits=2, period=1), "most"), (RandomBits(menu=(2, 8)), "mean")):
        found = price(AdaQP(codec=codec), "gcn", 3)
        assert found.traffic is not None
        assert found.traffic.bound == bound
        assert found.notes
        got = sent(AdaQP(codec=codec), "gcn", 3, torch.float32)
        if bound == "most":
            assert found.traffic.forward >= got["forward"] > 0.5 * found.traffic.forward
        else:
            assert got["forward"] == pytest.approx(found.traffic.forward, rel=0.05)


def test_drawing_counts_where_rates_are_measured() -> None:
    strategy = Minibatch(batch_size=16, num_workers=2)
    there, here = (price(strategy, "gcn", 2, rates=replace(NOMINAL, source=s)) for s in ("derived", "measured"))
    assert here.phases["sample"] > 0 == there.phases["sample"]
    assert here.phases["compute"] > there.phases["compute"]  # edges are sorted
    assert here.phases["reduce"] == there.phases["reduce"]
    assert any("are in the time, though another core may do it meanwhile" in note for note in here.notes)
    assert not any("another core" in note for note in there.notes)


def test_what_the_model_does_not_know_is_said() -> None:
    assert "out of core" in price(SAR(logical_parts=4), "gcn", 1).unpriced
    assert "codec that sends nothing" in price(GraphParallel(codec=Drop()), "gcn", 2).unpriced
    with pytest.raises(ValueError, match="first_layer=cached is for strategies without chunks"):
        price(GNNPipe(), "gcn", 2, first_layer="cached")
    notes = " ".join(price(GNNPipe(virtual=3, stages=1, remat="chunk", cut="balanced"), "gcn", 1).notes)
    assert all(word in notes for word in ("virtual=3", "remat=chunk", "cut=balanced"))


SMALL = ("model=gcn", "model.num_layers=4", "model.hidden=16", "dataset.num_nodes=600")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "chosen",
    [
        ("strategy=graph_parallel", "codec=identity"),
        pytest.param(("strategy=sar", "strategy.prefetch=0"), marks=pytest.mark.slow),
        pytest.param(("strategy=gnnpipe", "strategy.chunks=8"), marks=pytest.mark.slow),
        pytest.param(("strategy=hybrid", "strategy.stages=2"), marks=pytest.mark.slow),
        ("strategy=tag", "strategy.quality=[rounded,stale]"),
        ("strategy=cagnet", "strategy.replication=2"),
        ("strategy=minibatch", "strategy.batch_size=64"),
        pytest.param(("strategy=bns", "strategy.rate=0"), marks=pytest.mark.slow),
        ("strategy=pipegcn", "codec=uniform"),
        pytest.param(("strategy=feature", "codec=bf16"), marks=pytest.mark.slow),
        pytest.param(("strategy=digest", "strategy.gradients=true", "codec=bf16"), marks=pytest.mark.slow),
        pytest.param(("strategy=cagnet", "codec=uniform"), marks=pytest.mark.slow),
        pytest.param(("strategy=sancus", "codec=identity"), marks=pytest.mark.slow),
        pytest.param(("strategy=cofree", "partition=hdrf"), marks=pytest.mark.slow),
        ("strategy=single", "dataset.num_nodes=3000", "model.hidden=64"),
    ],
    ids=lambda chosen: chosen[0].removeprefix("strategy="),
)
def test_estimated_then_trained(
    chosen: tuple[str, ...], four: str, told: Told, run_cli: Run, run_here: Run, tmp_path: Path
) -> None:
    """The bytes of result.json; its epoch is not looked at, for threads of one process say nothing of time."""
    alone = chosen[0] == "strategy=single"  # its memory is looked at, and a peak counts all that a process holds
    asked = [*SMALL, f"world_size={1 if alone else 4}", *chosen]
    (estimate,) = told("estimate", *asked)["estimates"]
    quick = (f"epochs={6 if alone else 2}", "comm=threads", "threads_per_rank=1", "tracker=jsonl", "checkpoint.keep=0")
    there = [four] if chosen[0] == "strategy=tag" else []  # what it plans for
    run = run_cli if alone else run_here
    assert run("train", *asked, *there, *quick, "hydra.run.dir=run").returncode == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert {k: estimate["bytes_per_epoch"][k] for k in KEYS} == {k: result["bytes_per_epoch"][k] for k in KEYS}
    assert estimate["exactness"] == result["exactness"]
    assert estimate["fits"] is True
    assert estimate["predicted"]["epoch_seconds"] > 0
    if chosen[0] == "strategy=tag":
        assert estimate["notes"][0] == f"chooses {result['predicted']['label']}"
    if "strategy.replication=2" in chosen:
        assert estimate["predicted"]["label"] == "cagnet, replication 2"
    if alone:
        assert 0.8 < result["memory_bytes"]["peak"][0] / estimate["predicted"]["peak_bytes"][0] < 1.2


@pytest.mark.slow
def test_the_table(four: str, run_here: Run) -> None:
    told = run_here("estimate", *SMALL, "world_size=4", four).stdout
    lines = [line.split() for line in told.splitlines()]
    names = ("single", "graph_parallel", "adaqp", "sar", "gnnpipe", "hybrid", "tag", "minibatch")
    by_name = {name: next(line for line in lines if line and line[0] == name) for name in names}
    assert by_name["single"][1:3] == ["1", "exact"]
    assert by_name["single"][5:7] == ["0", "B"]
    assert all(by_name[name][-1] == "yes" for name in names)
    assert "tag: chooses " in told
    assert "is not in the time: the topology's devices have speeds of their own" in told
    assert "<= " in told  # adaqp's bits
    assert "codec=bf16" in told


def test_a_codec_that_is_asked_for_is_a_row_more() -> None:
    strategies = {name: GraphParallel() for name in ("graph_parallel", "mine", "sar")}
    registry = Registry(strategies, with_codec=frozenset({"graph_parallel", "sar"}))
    found = dict(rows(["model=sage", "codec=uniform", "codec.bits=4"], registry))
    four_bits = "codec=uniform codec.bits=4"
    assert list(found) == ["graph_parallel", f"graph_parallel {four_bits}", "mine", "sar", f"sar {four_bits}"]
    assert found["graph_parallel"] == ["model=sage", "strategy=graph_parallel", "codec=identity"]
    assert found["sar codec=uniform codec.bits=4"] == ["model=sage", "strategy=sar", "codec=uniform", "codec.bits=4"]
    assert "sar codec=bf16" in dict(rows([], registry))
    coded = "bns cagnet digest feature gnnpipe graph_parallel hybrid pipegcn sancus sar"
    assert shipped().with_codec == set(coded.split())
    assert shipped().broken == {}


def test_too_little_memory_does_not_fit(four: str, run_here: Run) -> None:
    small = (*SMALL, four, "topology.devices.cpu.memory=200 KiB")
    told = " ".join(run_here("estimate", *small, "strategy.overlap=none").stdout.split())
    assert "of 200 KiB" in told
    assert "priced as graph_parallel, no overlap" in told
    assert "bytes an epoch: forward" in told
    few = run_here("estimate", *small, "strategy=minibatch", "world_size=1")
    assert "of 200 KiB" in " ".join(few.stdout.split())


def test_fp64_needs_more_and_nothing_that_does_not_run_ends_the_table(four: str) -> None:
    settings = compose([*SMALL, four, "strategy=gnnpipe"])
    wide = replace(settings, precision="fp64")
    thin, thick = (Estimator(s).estimate(s, "gnnpipe") for s in (settings, wide))
    assert thin.known
    assert thick.known
    assert 1.3 < thick.price.peak_bytes / thin.price.peak_bytes < 2.0  # indices stay
    assert thick.price.notes == ("time is that of fp32",)
    assert isinstance(settings.strategy, GNNPipe)
    many = replace(settings, strategy=replace(settings.strategy, stages=3))
    assert "stages=3" in (found := Estimator(settings).estimate(many, "gnnpipe")).refused
    assert row_of(found)[-1] == "does not run"


NOTHING = Memory(features=0.0, structure=0.0)


def inputs_of(name: str = "gcn", **graph: int) -> Problem:
    data, config = small_graph(**graph), configured("model", name, "model.num_layers=3", "model.hidden=16")
    model = config.build(data.num_features, 3, seed=3)
    return problem_of(Workload(data, Random(), model.num_layers, model=model))


def problem_of(workload: Workload) -> Problem:
    assert workload.model is not None
    ir = recorded(workload.model, workload.dataset)
    return Problem(workload=workload, model=workload.model, ir=ir, ranks=1, work_of=lambda parts: work_of(ir, parts))


def drawn(strategy: Minibatch, inputs: Problem, *, ranks: int = 1, seed: int = 3) -> Drawn:
    return draw(strategy, replace(inputs, ranks=ranks, seed=seed))


def work_of(ir: ModelIR, ranks: int = 1, nodes: int = 5000, edges: int = 60_000) -> Work:
    parts = PartStats.even(nodes, edges, ranks, alpha=0.3, cut_share=0.2)
    return Work(ir, GraphStats(nodes, edges, ir.in_dim, ir.final, 2000), parts, (NOMINAL,) * ranks)


def whole_step(ir: ModelIR, work: Work, seeds: int = 0, **changed: Any) -> Step:
    """All nodes and edges in every layer."""
    rows, edges = (each * ir.num_layers for each in ((work.graph.nodes,), (work.graph.edges,)))
    return Step(rows=(*rows, seeds or work.graph.train), edges=edges, **changed)


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_a_sample_of_all_is_the_single_device(name: str) -> None:
    """But for the features that are gathered: the last layer gives, and the loss reads, all nodes here."""
    ir = inputs_of(name).ir
    work = work_of(ir)
    nodes, seeds = work.graph.nodes, work.graph.train
    step = whole_step(ir, work, seeds=nodes)
    loss = NOMINAL.elementwise.seconds(0, 8 * ir.final * (nodes - seeds), calls=0) * NOMINAL.scale
    besides = NOMINAL.gather_seconds(nodes * ir.in_dim) + loss
    single = DeclaredCandidate(strategy=Single()).price(work, machine(1)).seconds
    assert step_seconds(step, ir, NOMINAL) - besides == pytest.approx(single)


def test_smaller_samples_take_less_and_sums_that_are_made_up_more() -> None:
    ir = record(configured("model", "gcn", "model.hidden=32").build(32, 3, seed=3), 32)
    work = work_of(ir)
    full = whole_step(ir, work)
    rows, edges = (tuple(most // 4**i for i in range(ir.num_layers)) for most in (4000, 20_000))
    few = replace(full, rows=(*rows, 60), edges=edges)
    weighted = replace(few, weighted=True)
    seconds = [step_seconds(s, ir, NOMINAL) for s in (few, weighted, full)]
    assert seconds == sorted(set(seconds))
    peaks = [sampled_epoch([s], work, machine(1), NOTHING).peak_bytes for s in (few, weighted, full)]
    assert peaks[0] < peaks[1] < peaks[2]


def test_the_decoder_sees_the_seeds_alone() -> None:
    ir = inputs_of("gcnii").ir
    step = whole_step(ir, work_of(ir))
    (end,) = [g for g in ir.groups if g.phase == "end"]
    many, few = (step_seconds(replace(step, rows=(*step.rows[:-1], seeds)), ir, NOMINAL) for seeds in (3000, 10))
    less = [NOMINAL.dense_seconds(end, n, backward=back) for n in (3000, 10) for back in (False, True)]
    assert many - few > less[0] + less[1] - less[2] - less[3] > 0


def test_an_epoch_is_its_steps() -> None:
    """A sum over ranks each; two kinds of steps count as often as they come; every rank holds the whole graph."""
    ir = inputs_of().ir
    work, at = work_of(ir, 2), machine(2)
    long = whole_step(ir, work, times=5.0, draw_seconds=0.01, sort_seconds=0.02)
    few = {"rows": (*(500 for _ in long.edges), long.rows[-1]), "edges": tuple(4000 for _ in long.edges)}
    short = replace(long, **few, times=1.0)
    found = sampled_epoch([long, short], work, at, Memory(features=3e6, structure=2e6))
    assert num_steps([long, short]) == 6
    assert found.phases["sample"] == pytest.approx(0.06)
    assert found.phases["reduce"] == pytest.approx(6 * at.reduce(range(2), 4.0 * (ir.params + 1)))
    steps = 5 * step_seconds(long, ir, NOMINAL) + step_seconds(short, ir, NOMINAL)
    assert found.phases["compute"] == pytest.approx(steps + 6 * 0.02)
    alone = sampled_epoch([long], work, at, NOTHING)
    assert [a.total - b.total for a, b in zip(found.memory, alone.memory, strict=True)] == pytest.approx([5.4e6] * 2)


def test_the_batches_that_are_drawn_stand_for_all() -> None:
    inputs = inputs_of(num_nodes=200, num_edges=900)
    train = int(inputs.workload.dataset.train_mask.sum())
    found = drawn(Minibatch(batch_size=7, sampler="own"), inputs)
    count = -(-train // 7)
    assert count > MOST == len(found.steps)
    assert sum(s.times for s in found.steps) == pytest.approx(count)
    assert sum(s.times * s.rows[-1] for s in found.steps) == pytest.approx(train)  # the last one is smaller
    assert found.steps[-1].rows[-1] < 7
    assert all(s.draw_seconds > 0 for s in found.steps)
    everything = drawn(Minibatch(batch_size=None, fanout=(-1,), sampler="own"), inputs, ranks=2)
    assert len(everything.steps) == 1
    assert everything.steps[0].rows[-1] == -(-train // 2)
    assert not everything.steps[0].weighted
    assert found.steps[0].weighted
    assert everything.whole.features > found.whole.features  # rows of other ranks' nodes


def test_batches_of_clusters_and_drawn_subgraphs_are_priced_as_they_are_drawn() -> None:
    inputs = inputs_of(num_nodes=200, num_edges=900)
    data = inputs.workload.dataset
    clusters = drawn(Minibatch(sampler="cluster", clusters=10, clusters_per_batch=4), inputs, ranks=2)
    assert (len(clusters.steps), clusters.by) == (3, "cluster")
    assert sum(s.times for s in clusters.steps) == 3
    rows = [s.rows[0] for s in clusters.steps]
    assert rows[-1] < rows[0] < data.num_nodes
    uniform = drawn(Minibatch(sampler="uniform", clusters=10, clusters_per_batch=4), inputs, ranks=2)
    assert (len(uniform.steps), uniform.by) == (3, "uniform")
    assert [s.rows[0] for s in uniform.steps] == [40, 40, 20]  # parts of 20 nodes, two a rank
    assert sum(s.edges[0] for s in uniform.steps) < sum(s.edges[0] for s in clusters.steps)
    saint = drawn(Minibatch(sampler="saint", batch_size=40), inputs, ranks=2)
    assert (len(saint.steps), saint.by) == (5, "saint, walk")
    assert all(s.weighted and s.rows[0] <= 20 for s in saint.steps)
    work = work_of(inputs.ir, 2)
    plain = [replace(s, weighted=False) for s in saint.steps]
    weighted, lighter = (sampled_epoch(steps, work, machine(2), saint.whole) for steps in (saint.steps, plain))
    assert weighted.seconds > lighter.seconds
    assert weighted.peak_bytes > lighter.peak_bytes
    assert clusters.whole.structure < saint.whole.structure  # counts of nodes and edges


@pytest.mark.slow
def test_the_samples_and_the_memory_are_those_of_a_run(run_cli: Run, tmp_path: Path) -> None:
    """In a process of its own: a peak counts whatever else its process holds."""
    chosen = ("model=sage", "model.hidden=64", "dataset.num_nodes=3000", "strategy=minibatch", "strategy.fanout=[6,4]")
    quick = ("world_size=1", "epochs=6", "eval_every=6", "threads_per_rank=1", "tracker=jsonl", "checkpoint.keep=0")
    run = tmp_path / "run"
    assert run_cli("train", *chosen, *quick, f"hydra.run.dir={run}").returncode == 0
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    settings = compose([*chosen, *quick])
    inputs = problem_of(workload_of(settings))
    strategy: Any = settings.strategy
    found = drawn(strategy, inputs, seed=settings.seed)
    assert len(found.steps) == first["sample/steps"]
    assert sum(s.rows[0] for s in found.steps) == first["sample/nodes"]
    assert sum(s.edges[0] for s in found.steps) == first["sample/edges"]
    assert found.by == first["sample/sampler"]
    data = inputs.workload.dataset
    parts = PartStats.of(data.edge_index, Random().part_of(data, 1), 1)
    work = Work(inputs.ir, GraphStats.of(data), parts, (NOMINAL,))
    epoch = sampled_epoch(found.steps, work, machine(1), found.whole)
    result = json.loads((run / "result.json").read_text())
    assert 0.75 < result["memory_bytes"]["peak"][0] / epoch.peak_bytes < 1.1
