"""What an epoch of neighbour sampling takes, in closed form: steps of the flat engine, each on a sample of the graph.

Layer i of a step reads the rows within h hops of its seeds and folds the edges drawn for those within h - 1, which are
the rows of the next layer and all that it computes after its fold (view.py): it is priced as `single` prices graphs of
these sizes. Besides: rows of features gathered, weights of edges that make up for what was left out, and a sum over
ranks a step. Drawing and sorting samples have no rates: who draws them measures it. Units: seconds, bytes; a number is
4 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gnnpar.parallel.needs import check_first_layer
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.sampling.statistics import Ring, Step, Whole, draw
from gnnpar.pricing.ir import Group, ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Price, Traffic, ring_bytes
from gnnpar.pricing.quantity import seconds_text
from gnnpar.pricing.rates import Rates
from gnnpar.pricing.work import Work

if TYPE_CHECKING:
    from gnnpar.parallel.sampling.strategy import Minibatch

_ENGINE, _NUMBER = "single", 4.0


def cost(strategy: Minibatch, problem: Problem, machine: Machine) -> Price:
    """Time and memory of steps drawn as a run draws them; a sum of gradients a step is all that is sent."""
    check_first_layer(strategy, problem.first_layer)
    if not bool(problem.workload.dataset.train_mask.any()):
        return Price(traffic=Traffic(), unpriced="there are no training nodes, so there is nothing to draw")
    drawn = draw(strategy, problem)
    notes = (f"nodes and edges are those of {drawn.num} batches of rank 0, drawn here by sampler={drawn.by}",)
    work, steps = problem.work_of(problem.ranks), drawn.steps
    what = f"drawing, measured here ({seconds_text(drawn.seconds)} a batch),"
    if any(rates.source != "measured" for rates in work.rates):
        steps = tuple(replace(s, draw_seconds=0.0, sort_seconds=0.0) for s in steps)
        notes += (f"{what} is not in the time: the topology's devices have speeds of their own",)
    else:
        notes += (f"{what} and sorting the edges drawn are in the time, though another core may do it meanwhile",)
    epoch = sampled_epoch(steps, work, machine, drawn.whole)
    sent = num_steps(steps) * ring_bytes(problem.ranks, problem.params + 1, problem.summed)
    return replace(epoch, traffic=Traffic(reduce=sent), notes=notes)


def sampled_epoch(steps: Sequence[Step], work: Work, machine: Machine, whole: Whole) -> Price:
    """`work`: the graph in a part a rank, which only the evaluation walks. The phase `sample`: drawing."""
    ranks, scale = work.parts.parts, max(r.scale for r in work.rates)
    count = num_steps(steps)
    phases = {
        "sample": scale * sum(s.times * s.draw_seconds for s in steps),
        "compute": sum(s.times * (_slowest(s, work) + scale * s.sort_seconds) for s in steps),
        "reduce": count * machine.reduce(range(ranks), _NUMBER * (work.ir.params + 1)),
    }
    return Price(label=f"minibatch, {count} steps", phases=phases, memory=_memory(steps, work, whole))


def num_steps(steps: Sequence[Step]) -> int:
    """Of an epoch."""
    return round(sum(s.times for s in steps))


def _slowest(step: Step, work: Work) -> float:
    return max(step_seconds(step, work.ir, rates) for rates in work.rates)


def step_seconds(step: Step, ir: ModelIR, rates: Rates) -> float:
    """Forward, loss, backward and the optimizer, of a rank."""
    rates = rates.of_engine(_ENGINE)
    visit, epoch = rates.visit_seconds(_ENGINE)
    total = rates.gather_seconds(step.rings[0].rows * ir.in_dim)
    for i in range(len(step.rings)):
        total += sum(visit + _layer_seconds(step, ir, i, rates, backward=back) for back in (False, True))
    loss = rates.scale * rates.elementwise.seconds(0.0, 8.0 * ir.final * step.seeds, calls=8)
    return total + loss + rates.scale * rates.step * ir.params + rates.epoch + epoch


def _layer_seconds(step: Step, ir: ModelIR, layer: int, rates: Rates, *, backward: bool) -> float:
    ring, total = step.rings[layer], 0.0
    for group in ir.layer(layer):
        total += rates.dense_seconds(group, _rows_of(group, step, layer), backward=backward)
    after = step.after(layer)
    for fold in ir.folds(layer):
        total += rates.fold_seconds(fold, ring.edges, after, table=ring.rows, backward=backward)
        if step.weighted and fold.linear:
            total += rates.kernel * rates.elementwise.seconds(0.0, ring.edges, calls=0)  # each weight is read once
    return total


def _rows_of(group: Group, step: Step, layer: int) -> int:
    """Return the rows of a phase: those that the fold reads before it, those that it gives after it."""
    return step.rings[layer].rows if group.phase in ("begin", "transform") else step.after(layer)


def _memory(steps: Sequence[Step], work: Work, whole: Whole) -> tuple[Memory, ...]:
    """Of the moment with most in any step, by rank."""
    ir = work.ir
    _, kept, passing, step = max((a + b, a, b, i) for i, s in enumerate(steps) for a, b in _moments(s, ir))
    sample = sum(_sample_bytes(ring, weighted=steps[step].weighted) for ring in steps[step].rings)
    per_rank: list[Memory] = []
    for p, n in enumerate(work.parts.nodes):
        halo, sent = sum(work.parts.halo[p]), work.parts.sent(p)
        blocks = 4.0 * work.parts.edges(p) + 12.0 * n + 8.0 * (halo + sent)  # by destination alone, for no gradient
        per_rank.append(
            Memory(
                parameters=5 * _NUMBER * ir.params,
                structure=whole.structure + blocks + sample,
                features=whole.features + n * ir.in_dim * _NUMBER + n * 20.0,
                saved=kept,
                halo=0.0,
                history=0.0,
                transient=passing,
            )
        )
    return tuple(per_rank)


def _sample_bytes(ring: Ring, *, weighted: bool) -> float:
    """Block of a layer: by destination and by source of 32 bits, ends of edges and ids of columns of 64, and weights of
    edges in both orders."""
    return (24.0 if weighted else 16.0) * ring.edges + 16.0 * ring.rows


def _moments(step: Step, ir: ModelIR) -> Iterator[tuple[float, float]]:
    """(kept for gradients, passing) in every layer, while it folds and while its products are made. Forward and
    backward alike: what the layers before it keep is there, what those after it keep is not. Sums read their sources,
    which are the rows that came in where a layer folds first.
    """
    kept = _NUMBER * step.rings[0].rows * ir.in_dim
    for i, ring in enumerate(step.rings):
        folds, groups, rows = ir.folds(i), ir.layer(i), _NUMBER * ring.rows
        first = sum(rows * g.saved for g in groups if g.phase in ("begin", "transform"))
        sources = any(g.phase == "transform" for g in groups)
        after = _NUMBER * step.after(i)
        folding = max([rows * sources * f.width + after * f.out for f in folds], default=0.0)
        yield kept + first, folding
        kept += first
        for group in groups:
            if group.phase not in ("begin", "transform"):
                kept += _NUMBER * group.saved * _rows_of(group, step, i)
        made = [op.width_out for g in groups for op in g.gemms]
        widest = max([*made, *(f.width for f in folds), *(g.dropout for g in groups)], default=0)
        gathered = max([f.width + f.out for f in folds if f.needs_src], default=0)
        yield kept, rows * (2 * widest + gathered) + _NUMBER * 3 * step.seeds * ir.final
