"""Bytes of sequential aggregation. Source: SAR (arXiv 2111.06483), its volume of communication. Backward sends
gradients; rows that a gradient reads come again (remat), or rows of destinations go the other way (push)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes
from gnnpar.parallel.torch_types import unique
from gnnpar.pricing.price import Traffic
from gnnpar.pricing.work import Work

if TYPE_CHECKING:
    from gnnpar.parallel.sequential.strategy import SAR


def sent(strategy: SAR, traffic: Traffic, work: Work, rows: RowBytes, problem: Problem) -> Traffic:
    """Return the bytes of all rounds."""
    pushes, run = strategy.backward == "push", problem.workload
    pushed = pushed_rows(run.dataset.edge_index, run.part_of(problem.ranks), problem.ranks) if pushes else 0
    copies, remat_bytes, push_bytes, back = work.parts.copies, 0.0, 0.0, 0.0
    for fold in work.exchanged_folds:
        if pushes and fold.pushed:
            statistics = rows.summed if rows.sends else 0
            push_bytes += pushed * (rows.row(fold.src[:1], gradient=True) + statistics * (fold.pushed - fold.src[0]))
            continue
        back += copies * rows.row(fold.src, gradient=True) * fold.learned
        if fold.needs_src and not fold.linear and strategy.remat:
            remat_bytes += copies * rows.row(fold.src)
    return replace(traffic, backward=back, remat=remat_bytes, push=push_bytes)


def pushed_rows(edge_index: Tensor, part_of: Tensor, parts: int) -> int:
    """Pairs of a destination and another part with an edge to it: what SAR's push mode sends.

    Shapes: edge_index [2, E], part_of [N].
    """
    src, dst = edge_index
    crossing = part_of[src] != part_of[dst]
    return len(unique(dst[crossing] * parts + part_of[src[crossing]])[0])
