"""Bytes that an epoch sends, all ranks together and by phase, as result.json counts them; nothing is run.

Formulas of the model's folds, the partition's counts and the codec's rows (specs/sar.md 2.1, specs/gnnpipe.md 2.4):
exact wherever every epoch sends the same. A codec that chooses its bits in training is priced by its menu's bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import BFloat16, Drop, Identity
from gnnpar.codecs.quantized import is_wide
from gnnpar.codecs.uniform import Random, Uniform, code_of
from gnnpar.pricing.ir import Fold
from gnnpar.pricing.work import Work
from gnnpar_kernels.wire import FP32, has_metadata, row_nbytes

Bound = Literal["exact", "mean", "most"]
Widths = Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of an epoch after the first, payload and metadata. `bound`: what the figures are."""

    forward: float = 0.0
    backward: float = 0.0
    remat: float = 0.0
    push: float = 0.0
    stage: float = 0.0
    reduce: float = 0.0
    bound: Bound = "exact"

    @property
    def total(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "bound")

    def as_json(self) -> dict[str, object]:
        figures = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "bound"}
        return {"total": round(self.total), **{name: round(value) for name, value in figures.items()}, "is": self.bound}


@dataclass(frozen=True)
class RowCodec:
    """What a row takes on the wire. `number`: bytes of a number that travels as it is."""

    codec: object
    number: int = 4

    @property
    def known(self) -> bool:
        return isinstance(self.codec, (Identity, BFloat16, Drop, Uniform, Random, Adaptive))

    @property
    def bound(self) -> Bound:
        return "most" if isinstance(self.codec, Adaptive) else "mean" if isinstance(self.codec, Random) else "exact"

    def row(self, widths: Widths, *, gradient: bool = False) -> float:
        """Bytes of one row of all operands; those after the first are scores."""
        codec = self.codec
        if isinstance(codec, Drop) or not widths:
            return 0.0
        if isinstance(codec, Identity):
            return self.number * sum(widths)
        if isinstance(codec, BFloat16):
            return 2 * sum(widths)
        assert isinstance(codec, (Uniform, Random, Adaptive))
        if isinstance(codec, Uniform):
            firsts = [code_of((codec.gradient_bits or codec.bits) if gradient else codec.bits)]
            scores = FP32 if codec.bits == 32 else code_of(codec.score_bits)
        else:
            firsts = [max(*codec.menu, codec.first_bits)] if isinstance(codec, Adaptive) else list(codec.menu)
            scores = code_of(codec.score_bits)
        rest = sum(self._operand(width, scores) for width in widths[1:])
        return fmean(self._operand(widths[0], code) for code in firsts) + rest

    def _operand(self, width: int, code: int) -> int:
        """A row too narrow for metadata travels as it is."""
        if code == FP32 or (has_metadata(code) and not is_wide(width)):
            return self.number * width
        return row_nbytes(width, code)


def pushed_rows(edge_index: Tensor, part_of: Tensor, parts: int) -> int:
    """Pairs of a destination and another part with an edge to it: what SAR's push mode sends.

    Shapes: edge_index [2, E], part_of [N].
    """
    src, dst = edge_index
    crossing = part_of[src] != part_of[dst]
    return len(torch.unique(dst[crossing] * parts + part_of[src[crossing]]))


def reduced(ranks: int, numbers: int, number: int) -> int:
    """Of a ring sum of so many numbers, all ranks."""
    return 2 * (ranks - 1) * numbers * number


def halo_traffic(work: Work, rows: RowCodec, *, params: int) -> Traffic:
    """Graph parallelism: halo rows forward, gradients of those that have one back, and the sum with the loss in it."""
    forward, backward = _exchanges(work, rows)
    total = reduced(work.parts.parts, params + 1, rows.number)
    return Traffic(forward=forward, backward=backward, reduce=total, bound=rows.bound)


def sequential_traffic(work: Work, rows: RowCodec, *, params: int, pushed: int | None, remat: bool) -> Traffic:
    """SAR: rows that a gradient reads come again (remat), or go the other way. `pushed`: pairs that `pushed_rows`
    counts, None where nothing is pushed."""
    found = halo_traffic(work, rows, params=params)
    copies, remat_bytes, push_bytes, back = _copies(work), 0.0, 0.0, 0.0
    for fold in _live(work):
        if pushed is not None and fold.pushed:
            statistics = 0 if isinstance(rows.codec, Drop) else rows.number
            push_bytes += pushed * (rows.row(fold.src[:1], gradient=True) + statistics * (fold.pushed - fold.src[0]))
            continue
        back += copies * rows.row(fold.src, gradient=True) * fold.learned
        if fold.needs_src and not fold.linear and remat:
            remat_bytes += copies * rows.row(fold.src)
    return replace(found, backward=back, remat=remat_bytes, push=push_bytes)


def pipeline_traffic(
    work: Work, boundary: RowCodec, rows: RowCodec, *, crossed: Sequence[Widths], params: int, ranks: int
) -> Traffic:
    """GNNPipe and hybrids. `crossed`: widths of the carry at each boundary between two ranks; `rows`: codec between the
    parts of a stage, which `work` is cut into. Two numbers of every rank are summed besides: loss and norm."""
    nodes, parts = sum(work.parts.nodes), work.parts.parts
    forward, backward = _exchanges(work, rows)
    stage = sum(nodes * (boundary.row(w) + boundary.row(w, gradient=True)) for w in crossed)
    total = reduced(parts, params, rows.number) + reduced(ranks, 2, rows.number)
    bounds = [boundary.bound, *([rows.bound] if parts > 1 else [])]
    bound: Bound = "most" if "most" in bounds else "mean" if "mean" in bounds else "exact"
    return Traffic(forward=forward, backward=backward, stage=stage, reduce=total, bound=bound)


def _exchanges(work: Work, rows: RowCodec) -> tuple[float, float]:
    """(forward, backward) of one halo exchange a fold and direction."""
    copies, folds = _copies(work), _live(work)
    return (
        copies * sum(rows.row(f.src) for f in folds),
        copies * sum(rows.row(f.src, gradient=True) for f in folds if f.learned),
    )


def _copies(work: Work) -> float:
    """Halo rows of all parts."""
    return sum(map(sum, work.parts.halo))


def _live(work: Work) -> list[Fold]:
    """Folds whose rows are exchanged: not those of a layer 0 that is held."""
    first = 0 if work.held == "no" else 1
    return [f for i in range(first, work.ir.num_layers) for f in work.ir.folds(i)]
