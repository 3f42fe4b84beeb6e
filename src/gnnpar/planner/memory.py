"""Most bytes a rank holds in an epoch, as a closed form. Source: specs/tag.md 8.8; units: bytes, numbers of 4 bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from gnnpar.planner.candidate import Candidate, layers_of
from gnnpar.pricing.ir import Fold
from gnnpar.pricing.work import Work

_NUMBER = 4.0
_SAFETY = 1.08  # what allocators round up and small tensors add


@dataclass(frozen=True)
class Memory:
    """Of one rank, by what it is for."""

    parameters: float  # weights, gradients, two moments, and the vector that is summed
    structure: float
    features: float
    saved: float
    halo: float
    history: float
    transient: float

    @property
    def total(self) -> float:
        return _SAFETY * sum(asdict(self).values())


def memory(candidate: Candidate, work: Work) -> tuple[Memory, ...]:
    """By rank: stages of the grid, then parts."""
    spans = layers_of(candidate.cuts, work.ir.num_layers)
    return tuple(_rank(candidate, work, span, p) for span in spans for p in range(candidate.parts))


def _rank(candidate: Candidate, work: Work, layers: range, p: int) -> Memory:
    ir, parts = work.ir, work.parts
    n, e, halo = parts.nodes[p], parts.edges(p), sum(parts.halo[p])
    params = sum(ir.params_of[i] for i in layers)
    first, last = layers.start == 0, layers.stop == ir.num_layers
    folds = [f for i in layers for f in ir.folds(i)]
    widest = max([f.width for f in folds], default=0)
    kept = 0.0
    if work.held != "no":
        kept += halo * ir.in_dim if work.held == "rows" else n * sum(f.out for f in ir.folds(0))
    columns = n if candidate.family == "sar" and candidate.remat else _columns(candidate, n, e, halo)
    kept += sum((columns - n) * f.width for f in folds if f.needs_src)
    tables = _tables(candidate, folds, n, e, halo)
    if candidate.family == "sar":
        at_once = (1 + candidate.prefetch) * max(parts.nodes)
        moving = 2 * min(halo, at_once) * widest
    else:
        moving = (halo + parts.sent(p)) * widest / candidate.chunks
    dense = 2 * n * ir.widest / candidate.chunks
    attention = max([columns * f.width + n * f.out for f in folds if f.needs_src], default=0) / candidate.chunks
    carried = n * sum(ir.cuts[layers.start - 1]) if not first else 0.0
    carried += 2 * n * sum(ir.cuts[layers.stop - 1]) / candidate.chunks if not last else n * ir.final * 3
    return Memory(
        parameters=5 * _NUMBER * params,
        structure=_structure(n, e, halo) + tables.structure,
        features=n * ir.in_dim * _NUMBER * first + n * 20.0,
        saved=_saved(work, layers, n, e) * _NUMBER,
        halo=kept * _NUMBER,
        history=tables.numbers * _NUMBER,
        transient=(max(moving, dense) + attention + carried) * _NUMBER + tables.order,
    )


def _columns(candidate: Candidate, n: float, e: float, halo: float) -> float:
    """Source rows that folds read which keep them, all chunks: each has the rows of its own edges, gathered."""
    if candidate.stages == 1 and candidate.chunks == 1:
        return n + halo
    rows = n + halo
    return candidate.chunks * rows * (1.0 - math.exp(-e / candidate.chunks / max(1.0, rows)))


class _Tables(NamedTuple):
    """Of a stage: numbers of its tables of rows, bytes of their structure and of what cutting an order takes."""

    numbers: float
    structure: float
    order: float


def _tables(candidate: Candidate, folds: Sequence[Fold], n: float, e: float, halo: float) -> _Tables:
    """Sources (this epoch's and, of chunks, the history's) and gradients, where there are any. An edge has its ends in
    64 bits; the order of an epoch is cut out of copies of both, sorted by source for the gradients. Folds that are not
    linear have edges of their own, by chunk: 12 bytes each, and two ids a column.
    """
    if candidate.stages == 1 and candidate.chunks == 1:
        return _Tables(0.0, 0.0, 0.0)
    halves = 2 if candidate.chunks > 1 else 1
    numbers = sum((halves * (n + halo) + n * f.learned) * f.width for f in folds)
    learned = any(f.learned and f.linear for f in folds)
    structure = (24.0 if learned else 16.0) * e + 8.0 * (n + halo)
    if not all(f.linear for f in folds):
        structure += 12.0 * e + 16.0 * _columns(candidate, n, e, halo)
    return _Tables(numbers, structure, (64.0 if learned else 8.0) * e)


def _structure(n: float, e: float, halo: float) -> float:
    """CSR by destination and by source of 32 bits; destinations of edges and lists of rows of 64."""
    return 2 * 4.0 * (e + n + halo) + 8.0 * e + 2 * 8.0 * halo


def _saved(work: Work, layers: range, n: float, e: float) -> float:
    """Numbers kept between forward and backward."""
    return n * sum(work.ir.saved_of[i] for i in layers)
