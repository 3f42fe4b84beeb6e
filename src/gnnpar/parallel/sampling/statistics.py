"""Batches of an epoch, drawn as a run draws them, and how large they are: what neighbour sampling is priced by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from gnnpar.comm.clock import perf_counter
from gnnpar.parallel.local import Pass
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.sampling.batches import Batches
from gnnpar.parallel.sampling.replica import replica_of_dataset
from gnnpar.parallel.sampling.view import SampledGraph, Subgraph
from gnnpar.pricing.ir import ModelIR

if TYPE_CHECKING:
    from gnnpar.parallel.sampling.strategy import Minibatch

MOST = 8  # batches of an epoch that are drawn
_REPEATS = 2  # the quicker one counts: the first one fills the caches


@dataclass(frozen=True, kw_only=True)
class Ring:
    """What one layer of a step works on. `rows`: that it reads; `edges`: drawn, loops with them."""

    rows: int
    edges: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """A rank's share of one, which stands for `times` steps of an epoch. `rings`: of each layer. `weighted`: do sums
    make up for edges left out? `draw_seconds`, `sort_seconds`: of drawing it, and of its edges sorted by source for
    gradients; 0 if unknown."""

    rings: tuple[Ring, ...]
    seeds: int
    times: float
    weighted: bool = False
    draw_seconds: float = 0.0
    sort_seconds: float = 0.0

    def after(self, layer: int) -> int:
        """Rows that a layer hands on."""
        return self.rings[layer + 1].rows if layer + 1 < len(self.rings) else self.seeds


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Bytes of the whole graph, which every rank holds beside its part."""

    features: float
    structure: float


@dataclass(frozen=True, kw_only=True)
class SampleStatistics:
    """`num`: batches; `seconds`: of drawing one here, in the mean; `by`: who draws."""

    steps: tuple[Step, ...]
    whole: Whole
    num: int
    seconds: float
    by: str


def draw(strategy: Minibatch, problem: Problem) -> SampleStatistics:
    """Rank 0's batches, of the most seeds: the first ones of epoch 0 and its last, which may be smaller."""
    ir, ranks = problem.ir, problem.ranks
    graph = replica_of_dataset(
        problem.workload.dataset,
        edge_ids=problem.model.needs_edge_ids,
        cluster_of=strategy.cluster_of(problem.workload),
    )
    hops = [len(ir.folds(i)) for i in range(ir.num_layers)]
    batches, by = strategy.batches(graph, hops, seed=problem.seed, rank=0, ranks=ranks)
    count = len(batches)
    chosen = range(count) if count <= MOST else (*range(MOST - 1), count - 1)
    before = torch.get_num_threads()
    torch.set_num_threads(problem.threads)
    try:
        ones = [_step(batches, step, hops, ir) for step in chosen]
    finally:
        torch.set_num_threads(before)
    more = (count - 1) / (len(ones) - 1) if len(ones) > 1 else 1.0
    steps = tuple(replace(one, times=more if i + 1 < len(ones) else 1.0) for i, one in enumerate(ones))
    whole = replace(graph, shared=ranks == 1)
    seconds = sum(s.times * s.draw_seconds for s in steps) / count
    held = Whole(features=whole.features_nbytes, structure=whole.structure_nbytes + batches.nbytes)
    return SampleStatistics(steps=steps, whole=held, num=len(ones), seconds=seconds, by=by)


def _step(batches: Batches, step: int, hops: list[int], ir: ModelIR) -> Step:
    tries = [_once(batches, step, hops, ir) for _ in range(_REPEATS)]
    draw, sort = min(one.draw_seconds for one in tries), min(one.sort_seconds for one in tries)
    return replace(tries[0], draw_seconds=draw, sort_seconds=sort)


def _once(batches: Batches, step: int, hops: list[int], ir: ModelIR) -> Step:
    began = perf_counter()
    sub = batches[0, step]
    drawn = perf_counter()
    rings = _rings(sub, hops, ir)
    return Step(
        rings=rings,
        seeds=sub.ends[0],
        times=1.0,
        weighted=sub.weights is not None,
        draw_seconds=drawn - began,
        sort_seconds=perf_counter() - drawn,
    )


def _rings(sub: Subgraph, hops: list[int], ir: ModelIR) -> tuple[Ring, ...]:
    """Of each layer, its edges sorted by source where gradients go that way."""
    graph = SampledGraph(sub, Pass(0), sum(hops))
    rings: list[Ring] = []
    for i, count in enumerate(hops):
        folds, block = ir.folds(i), graph.block
        if folds and sub.weights is not None:
            block = graph.counted
        if any(f.learned or not f.linear for f in folds):
            _ = block.reverse
        rings.append(Ring(rows=graph.num_rows, edges=block.num_edges if folds else 0))
        graph = graph.at(i).inwards(count)
    return tuple(rings)
