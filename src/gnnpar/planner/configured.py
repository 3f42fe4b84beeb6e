"""A configured strategy as the planner knows it: the candidate that stands for it, and the bytes it sends.

What a candidate cannot say is told in a note, or there is no price at all. A strategy of the user's own has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import BFloat16, Drop, Identity
from gnnpar.codecs.uniform import Bits, Random, Uniform, code_of
from gnnpar.parallel.halo.adaqp import AdaQP
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.pipeline.schedule.stages import balanced, even
from gnnpar.parallel.pipeline.strategy import GNNPipe
from gnnpar.parallel.sampling.strategy import Minibatch
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.planner.candidate import Candidate
from gnnpar.planner.closed import DIRECTIONS
from gnnpar.planner.machines import threads_of
from gnnpar.planner.planned import Inputs, what_is_held
from gnnpar.planner.sample_statistics import draw
from gnnpar.planner.sampled import SampledEpoch, sampled_epoch
from gnnpar.planner.strategy import TAG, strategy_of
from gnnpar.planner.traffic import (
    RowCodec,
    Traffic,
    halo_traffic,
    pipeline_traffic,
    pushed_rows,
    reduced,
    sequential_traffic,
)
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.quantity import seconds_text
from gnnpar.pricing.work import Held, Work
from gnnpar.settings import Settings
from gnnpar_kernels.wire import FP8


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`work`: cut into the candidate's parts. `sampled`: in a candidate's place, for samples. `unpriced`: why nothing
    stands for it; `notes`: where what stands for it differs from what runs."""

    traffic: Traffic | None = None
    candidate: Candidate | None = None
    work: Work | None = None
    sampled: SampledEpoch | None = None
    unpriced: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Job:
    """What shapes are made from. `work_of`: parts -> the work, nothing held."""

    settings: Settings
    inputs: Inputs
    ranks: int
    number: int  # bytes of a number
    work_of: Callable[[int], Work]
    setting_of: Callable[[], Machine]  # where the ranks run

    @property
    def params(self) -> int:
        return sum(p.numel() for p in self.inputs.model.parameters())

    def rows(self, codec: object) -> RowCodec:
        return RowCodec(codec, self.number)

    def held(self) -> Held:
        """What layer 0 keeps over epochs."""
        if self.settings.first_layer == "live":
            return "no"
        return what_is_held(self.settings, self.inputs.ir)


def shape_of(job: Job) -> Shape:
    """ValueError where the run would be refused, too."""
    return _shape_of(job.settings.strategy, job)


def _shape_of(strategy: Any, job: Job) -> Shape:
    makers: dict[type, Callable[[Any, Job], Shape]] = {
        Single: _flat,
        GraphParallel: _flat,
        AdaQP: _flat,
        SAR: _sequential,
        GNNPipe: _pipeline,
        Hybrid: _pipeline,
        Minibatch: _sampled,
        TAG: _planned,
    }
    maker = makers.get(type(strategy))
    if maker is None:
        return Shape(unpriced=f"the planner's model has no {type(strategy).__name__}")
    return maker(strategy, job)


def _flat(strategy: Any, job: Job) -> Shape:
    work = replace(job.work_of(job.ranks), held=job.held())
    kept = work.held != "no"
    if isinstance(strategy, Single):
        return Shape(traffic=Traffic(), candidate=Candidate(family="single", held=kept), work=work)
    rows = job.rows(strategy.codec)
    if not rows.known:
        return Shape(unpriced=_unknown(strategy.codec))
    traffic = halo_traffic(work, rows, params=job.params)
    bits, notes = _bits(strategy.codec)
    if bits is None:
        return Shape(traffic=traffic, unpriced="the planner prices no codec that sends nothing")
    if strategy.overlap == "central_marginal":
        notes += ("overlap=central_marginal is priced as edges, which hides at least as much",)
    if job.ranks == 1:  # nothing travels: what runs is graph parallelism's engine
        bits = 32
    candidate = Candidate(
        family="adaqp" if bits < 16 else "graph_parallel",
        parts=job.ranks,
        bits=bits,
        held=kept,
        overlap="none" if strategy.overlap == "none" else "edges",
    )
    return Shape(traffic=traffic, candidate=candidate, work=work, notes=notes)


def _sequential(strategy: SAR, job: Job) -> Shape:
    if strategy.logical_parts is not None:
        return Shape(traffic=Traffic(), unpriced="the planner has no model of what goes out of core (logical_parts)")
    held = job.held()
    work = replace(job.work_of(job.ranks), held=held if held == "result" else "no")  # features of halos never stay
    rows = job.rows(strategy.codec)
    if not rows.known:
        return Shape(unpriced=_unknown(strategy.codec))
    data, pushed = job.inputs.workload, None
    if strategy.backward == "push":
        pushed = pushed_rows(data.dataset.edge_index, data.part_of(job.ranks), job.ranks)
    traffic = sequential_traffic(work, rows, params=job.params, pushed=pushed, remat=strategy.remat)
    bits, notes = _bits(strategy.codec)
    if bits is None:
        return Shape(traffic=traffic, unpriced="the planner prices no codec that sends nothing")
    if bits != 32:
        notes = ("time is that of rows as they are: the planner prices no codec of sar",)
    if strategy.rounds != "part":
        notes += (f"rounds={strategy.rounds} is priced as rounds=part",)
    candidate = Candidate(
        family="sar",
        parts=job.ranks,
        prefetch=strategy.prefetch,
        backward=strategy.backward,
        remat=strategy.remat,
        held=work.held != "no",
    )
    return Shape(traffic=traffic, candidate=candidate, work=work, notes=notes)


def _pipeline(strategy: GNNPipe, job: Job) -> Shape:
    if job.settings.first_layer == "cached":
        raise ValueError("first_layer=cached is for strategies without chunks: set first_layer=live")
    grid = strategy.mesh(job.ranks).ranks
    stages, parts, chunks = len(grid), len(grid[0]), strategy.chunks_per_part(job.ranks)
    work, model = job.work_of(parts), job.inputs.model
    boundary, rows = job.rows(strategy.boundary), job.rows(strategy.codec)
    if not (boundary.known and rows.known):
        return Shape(unpriced=_unknown(strategy.codec if boundary.known else strategy.boundary))
    groups = _cut(strategy, work, stages * strategy.virtual)
    crossed = [model.carry_widths(g.start) for g in groups[1:]] if stages > 1 else []
    traffic = pipeline_traffic(work, boundary, rows, crossed=crossed, params=job.params, ranks=job.ranks)
    bits, notes = _bits(strategy.boundary)
    if bits is None:
        return Shape(traffic=traffic, unpriced="the planner prices no codec that sends nothing")
    if strategy.virtual > 1:
        groups = _cut(strategy, work, stages)
        notes += (f"virtual={strategy.virtual} is priced as 1: bytes are right, the bubble is smaller",)
    if strategy.cut == "balanced":
        notes += ("cut=balanced is made by predicted layer times here, by measured ones in a run",)
    if strategy.remat != "none":
        notes += (f"remat={strategy.remat} is priced as none: it needs less memory and more time",)
    if parts > 1 and not isinstance(strategy.codec, Identity):
        notes += ("time is that of halo rows as they are: the planner prices no codec between parts of a stage",)
    if strategy.refresh_exact and chunks > 1:
        notes += (f"an exact pass every {strategy.refresh} epochs (refresh_exact) is in neither time nor bytes",)
    if stages == chunks == 1:
        notes += ("one stage and one chunk are priced as graph_parallel",)
    candidate = Candidate(
        family="gnnpipe" if parts == 1 else "hybrid",
        parts=parts,
        stages=stages,
        chunks=chunks,
        bits=bits,
        cuts=tuple(g.start for g in groups),
    )
    return Shape(traffic=traffic, candidate=candidate, work=work, notes=notes)


def _cut(strategy: GNNPipe, work: Work, stages: int) -> tuple[range, ...]:
    """Layers of each stage, or of each virtual one."""
    layers = work.ir.num_layers
    if strategy.cut == "even":
        return even(layers, stages)
    return balanced([sum(work.piece(i, 0, d).compute for d in DIRECTIONS) for i in range(layers)], stages)


def _sampled(strategy: Minibatch, job: Job) -> Shape:
    """A sum of gradients a step, and nothing else."""
    if job.settings.first_layer == "cached":
        raise ValueError("first_layer=cached keeps sums over all neighbours, not samples: set first_layer=live")
    settings, ranks = job.settings, job.ranks
    if not bool(job.inputs.workload.dataset.train_mask.any()):
        return Shape(traffic=Traffic(), unpriced="there are no training nodes, so there is nothing to draw")
    drawn = draw(strategy, job.inputs, seed=settings.seed, ranks=ranks, threads=threads_of(settings, ranks))
    notes = (f"nodes and edges are those of {drawn.num} batches of rank 0, drawn here by sampler={drawn.by}",)
    work, steps = job.work_of(ranks), drawn.steps
    took = f"drawing, measured here ({seconds_text(drawn.seconds)} a batch),"
    if any(rates.source != "measured" for rates in work.rates):
        steps = tuple(replace(s, draw_seconds=0.0, sort_seconds=0.0) for s in steps)
        notes += (f"{took} is not in the time: the topology's devices have speeds of their own",)
    else:
        notes += (f"{took} and sorting the edges drawn are in the time",)
        if strategy.num_workers:
            notes += (f"drawing is counted in full: num_workers={strategy.num_workers} draws ahead, on other cores",)
    epoch = sampled_epoch(steps, work, job.setting_of(), drawn.whole)
    traffic = Traffic(reduce=epoch.steps * reduced(ranks, job.params + 1, job.number))
    return Shape(traffic=traffic, sampled=epoch, notes=notes)


def _planned(strategy: TAG, job: Job) -> Shape:
    """Of the run that it chooses, as a run chooses it."""
    asked = replace(
        job.inputs.workload, model=job.inputs.model, setting=job.setting_of, first_layer=job.settings.first_layer
    )
    best = strategy.choose(asked, job.ranks)[0].candidate
    found = _shape_of(strategy_of(best), job)  # its cuts are even: bytes are the same wherever a cut is
    notes = (f"chooses {best.label}",)
    if strategy.replan:
        notes += ("replan=true may go over to another plan after the warm-up: all figures are those of the first",)
    return replace(found, candidate=best, notes=notes + found.notes)


def _bits(codec: object) -> tuple[int | None, tuple[str, ...]]:
    """The bits that time is priced with, and where they are not the codec's; None: nothing is sent."""
    if isinstance(codec, Drop):
        return None, ()
    if isinstance(codec, Identity):
        return 32, ()
    if isinstance(codec, BFloat16):
        return 16, ()
    if isinstance(codec, Uniform):
        given: list[Bits] = [codec.bits, codec.gradient_bits or codec.bits]
        known = [{FP8: 8, 1: 2}.get(code, code) for code in map(code_of, given)]
        notes = ("time is that of 2 bits, the fewest that are measured",) if 1 in given else ()
        if known[0] != known[1]:
            notes += (f"time is that of {max(known)} bits in both directions",)
        return max(known), notes
    assert isinstance(codec, (Random, Adaptive))
    bits = max([*codec.menu, codec.first_bits] if isinstance(codec, Adaptive) else codec.menu)
    if isinstance(codec, Random):
        return bits, (f"bytes are the mean of the menu {list(codec.menu)}, time is that of {bits} bits",)
    return max(bits, 2), (
        f"bits are chosen from {list(codec.menu)} while it trains: bytes and time are those of {bits} bits, without "
        "what choosing takes",
    )


def _unknown(codec: object) -> str:
    return f"the planner's model has no codec {type(codec).__name__}"
