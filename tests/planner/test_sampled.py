"""Epochs of neighbour sampling, priced: samples are those of a run, a sample of all is the single device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composing import configured
from conftest import Run
from gnnpar.config.compose import compose
from gnnpar.parallel.declared import DeclaredCandidate, Problem
from gnnpar.parallel.sampling.cost import (
    MOST,
    Drawn,
    Step,
    draw,
    num_steps,
    sampled_epoch,
    step_seconds,
)
from gnnpar.parallel.sampling.strategy import Minibatch
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Workload
from gnnpar.partition.partition import Random
from gnnpar.planner.extract import record
from gnnpar.planner.planned import workload_of
from gnnpar.planner.planner import recorded
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.price import Memory
from gnnpar.pricing.rates import NOMINAL
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.work import Work
from gnnpar.verify.conformance import small_graph
from planner.machines import machine

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
