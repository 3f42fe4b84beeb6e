"""Price of an epoch of sampled training: steps of the flat engine, each on a sample of the graph.

Batches are drawn as in a run, and measured. Layer i of a step reads the rows within h hops of its seeds and folds the
sampled edges of the rows within h - 1 hops; after its fold it computes only these, the rows of the next layer
(view.py). It is priced as `single` prices graphs of these sizes. Added: gathering rows of features, weights for edges
left out, and one sum over ranks per step. Units: seconds, bytes; a number is 4 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from gnnpar.comm.clock import perf_counter
from gnnpar.parallel.declared import Problem
from gnnpar.parallel.local import Pass
from gnnpar.parallel.needs import check_first_layer
from gnnpar.parallel.sampling.batches import Batches
from gnnpar.parallel.sampling.neighbours import Replica
from gnnpar.parallel.sampling.view import SampledGraph
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Price, Traffic, ring_bytes
from gnnpar.pricing.quantity import seconds_text
from gnnpar.pricing.rates import Rates
from gnnpar.pricing.work import Work, held_to_evaluate

if TYPE_CHECKING:
    from gnnpar.parallel.sampling.strategy import Minibatch

_ENGINE, _NUMBER = "single", 4.0
MOST = 8  # number of batches drawn of an epoch
_BEFORE = ("begin", "transform")  # phases of a layer on the rows that it reads; others are on those that it returns
_REPEATS = 2  # the quicker one counts: the first one fills the caches


@dataclass(frozen=True, kw_only=True)
class Step:
    """A rank's share of a step, which stands for `times` steps of an epoch.

    `rows`: those that each layer reads, and the seeds; `edges`: sampled edges and loops of each layer. `weighted`: sums
    are weighted for edges left out. `draw_seconds`, `sort_seconds`: time to draw it, and to sort its edges by source
    for gradients; 0 if unknown.
    """

    rows: tuple[int, ...]
    edges: tuple[int, ...]
    times: float = 1.0
    weighted: bool = False
    draw_seconds: float = 0.0
    sort_seconds: float = 0.0


class Drawn(NamedTuple):
    """Steps of an epoch. `whole`: features and structure of the whole graph, which every rank holds in addition to its
    part. `by`: the package that draws."""

    steps: tuple[Step, ...]
    whole: Memory
    by: str


def draw(strategy: Minibatch, problem: Problem) -> Drawn:
    """Draw the batches of rank 0, which has the most seeds: the first ones of epoch 0 and its last, which may be
    smaller."""
    ir, ranks, data = problem.ir, problem.ranks, problem.workload.dataset
    graph = Replica.of(
        data.x,
        data.y,
        data.edge_index,
        data.in_degree.to(data.x.dtype),
        data.train_mask,
        strategy.cluster_of(problem.workload),
        edge_ids=problem.model.needs_edge_ids,
        shared=ranks == 1,
    )
    hops = [len(ir.folds(i)) for i in range(ir.num_layers)]
    batches = strategy.batches(graph, hops, seed=problem.seed, rank=0, ranks=ranks)
    count = len(batches)
    chosen = range(count) if count <= MOST else (*range(MOST - 1), count - 1)
    before = torch.get_num_threads()
    torch.set_num_threads(problem.threads)
    try:
        tries = [[_drawn(batches, step, hops, ir) for _ in range(_REPEATS)] for step in chosen]
    finally:
        torch.set_num_threads(before)
    more = (count - 1) / (len(tries) - 1) if len(tries) > 1 else 1.0
    steps = tuple(
        replace(
            each[0],
            times=more if i + 1 < len(tries) else 1.0,
            draw_seconds=min(one.draw_seconds for one in each),
            sort_seconds=min(one.sort_seconds for one in each),
        )
        for i, each in enumerate(tries)
    )
    held = Memory(features=graph.features_nbytes, structure=graph.structure_nbytes + batches.nbytes)
    return Drawn(steps, held, batches.drawn_by)


def _drawn(batches: Batches, step: int, hops: Sequence[int], ir: ModelIR) -> Step:
    """Draw a batch, and sort the edges of each layer by source if gradients need it."""
    began = perf_counter()
    sub = batches[0, step]
    drawn = perf_counter()
    graph, rows, edges = SampledGraph(sub, Pass(0), sum(hops)), list[int](), list[int]()
    for i, count in enumerate(hops):
        folds = ir.folds(i)
        block = graph.counted if folds and sub.weights is not None else graph.block
        if any(f.learned or not f.linear for f in folds):
            _ = block.reverse
        rows.append(graph.num_rows)
        edges.append(block.num_edges if folds else 0)
        graph = graph.at(i).inner_view(count)
    return Step(
        rows=(*rows, sub.ends[0]),
        edges=tuple(edges),
        weighted=sub.weights is not None,
        draw_seconds=drawn - began,
        sort_seconds=perf_counter() - drawn,
    )


def price_of(strategy: Minibatch, problem: Problem, machine: Machine) -> Price:
    """Return the price of steps drawn as in a run; only one sum of gradients per step is sent."""
    check_first_layer(strategy, problem.first_layer)
    if not bool(problem.workload.dataset.train_mask.any()):
        return Price(traffic=Traffic(), unpriced="there are no training nodes, so there is nothing to draw")
    drawn = draw(strategy, problem)
    work, steps = problem.work_of(problem.ranks), drawn.steps
    notes = (f"nodes and edges are those of {len(steps)} batches of rank 0, drawn here by sampler={drawn.by}",)
    mean = sum(s.times * s.draw_seconds for s in steps) / num_steps(steps)
    what = f"drawing, measured here ({seconds_text(mean)} a batch),"
    if any(rates.source != "measured" for rates in work.rates):
        steps = tuple(replace(s, draw_seconds=0.0, sort_seconds=0.0) for s in steps)
        notes += (f"{what} is not in the time: the topology's devices have speeds of their own",)
    else:
        notes += (f"{what} and sorting the edges drawn are in the time, though another core may do it meanwhile",)
    epoch = sampled_epoch(steps, work, machine, drawn.whole)
    sent = num_steps(steps) * ring_bytes(problem.ranks, problem.params + 1, problem.summed)
    return replace(epoch, traffic=Traffic(reduce=sent), notes=notes)


def sampled_epoch(steps: Sequence[Step], work: Work, machine: Machine, whole: Memory) -> Price:
    """Price an epoch of steps. `work`: the graph in one part per rank, only for evaluation. Phase `sample`: drawing."""
    ranks, scale = work.parts.parts, max(r.scale for r in work.rates)
    count = num_steps(steps)
    phases = {
        "sample": scale * sum(s.times * s.draw_seconds for s in steps),
        "compute": sum(
            s.times * (max(step_seconds(s, work.ir, rates) for rates in work.rates) + scale * s.sort_seconds)
            for s in steps
        ),
        "reduce": count * machine.reduce(range(ranks), _NUMBER * (work.ir.params + 1)),
    }
    return Price(label=f"minibatch, {count} steps", phases=phases, memory=_memory(steps, work, whole))


def num_steps(steps: Sequence[Step]) -> int:
    """Return the number of steps of an epoch."""
    return round(sum(s.times for s in steps))


def step_seconds(step: Step, ir: ModelIR, rates: Rates) -> float:
    """Return the seconds of forward, loss, backward and the optimizer on a rank."""
    rates = rates.of_engine(_ENGINE)
    overhead, epoch = rates.overhead_seconds(_ENGINE)
    total = rates.gather_seconds(step.rows[0] * ir.in_dim)
    for i in range(len(step.edges)):
        total += sum(overhead + _layer_seconds(step, ir, i, rates, backward=back) for back in (False, True))
    loss = rates.scale * rates.elementwise.seconds(0.0, 8.0 * ir.final * step.rows[-1], calls=8)
    return total + loss + rates.scale * rates.step * ir.params + rates.epoch + epoch


def _layer_seconds(step: Step, ir: ModelIR, layer: int, rates: Rates, *, backward: bool) -> float:
    edges, (before, after), total = step.edges[layer], step.rows[layer : layer + 2], 0.0
    for group in ir.layer(layer):
        total += rates.dense_seconds(group, before if group.phase in _BEFORE else after, backward=backward)
    for fold in ir.folds(layer):
        total += rates.fold_seconds(fold, edges, after, table=before, backward=backward)
        if step.weighted and fold.linear:
            total += rates.kernel * rates.elementwise.seconds(0.0, edges, calls=0)  # each weight is read once
    return total


def _memory(steps: Sequence[Step], work: Work, whole: Memory) -> tuple[Memory, ...]:
    """Return the peak memory of each rank over all steps."""
    ir = work.ir
    _, kept, passing, step = max((a + b, a, b, i) for i, s in enumerate(steps) for a, b in _moments(s, ir))
    ids, weighted = any(f.ids for f in ir.every_fold), steps[step].weighted
    # blocks: 32-bit indices by destination and by source, 64-bit ends of edges and ids of columns, weights of edges in
    # both orders, and ids of edges if a fold reads them
    rows, edges = sum(steps[step].rows[:-1]), sum(steps[step].edges)
    sample = (16.0 + 8.0 * weighted + 8.0 * ids) * edges + 16.0 * rows
    held = whole + Memory(parameters=5 * _NUMBER * ir.params, structure=sample, saved=kept, transient=passing)
    return tuple(held + held_to_evaluate(work, p) for p in range(work.parts.parts))


def _moments(step: Step, ir: ModelIR) -> Iterator[tuple[float, float]]:
    """Yield the bytes (kept for gradients, transient) of every layer, during its fold and during its products.

    In both directions, layers before this one hold their saved rows, and later layers hold none. Sums read their
    sources: the input rows, if a layer folds first.
    """
    kept = _NUMBER * step.rows[0] * ir.in_dim
    for i, (rows, after) in enumerate(pairwise(_NUMBER * rows for rows in step.rows)):
        folds, groups = ir.folds(i), ir.layer(i)
        first = sum(rows * g.saved for g in groups if g.phase in _BEFORE)
        sources = any(g.phase == "transform" for g in groups)
        folding = max([rows * sources * f.width + after * f.out for f in folds], default=0.0)
        yield kept + first, folding
        kept += first + sum(after * g.saved for g in groups if g.phase not in _BEFORE)
        made = [op.width_out for g in groups for op in g.gemms]
        widest = max([*made, *(f.width for f in folds), *(g.dropout for g in groups)], default=0)
        gathered = max([f.width + f.out for f in folds if f.needs_src], default=0)
        yield kept, rows * (2 * widest + gathered) + _NUMBER * 3 * step.rows[-1] * ir.final
