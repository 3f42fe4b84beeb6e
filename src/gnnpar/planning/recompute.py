"""Where recomputing would replace communication in a plan, by minimum cut: how often it fires, and what it would save.

Source: specs/tag.md 5 and 8.12. Three kinds of operations that each rank could run in full: (a) weight gradients from
sufficient factors, (b) rows of halo nodes, from static features in layer 0 or from the layer before, (c) the first
residual of deep models, by stage instead of over every boundary. Costs are those of `rates` and of the links alone;
what overlap hides anyway is counted too, so savings in bytes are exact and those in seconds an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor as Array

from gnnpar.planning.candidate import Candidate
from gnnpar.planning.closed import DIRECTIONS, Setting
from gnnpar.planning.mincut import Tensor, duplicate, sufficient_factors
from gnnpar.planning.quantity import bytes_text, seconds_text
from gnnpar.planning.work import Work


@dataclass(frozen=True)
class Beyond:
    """What lies behind the halo of each part: rows that its halo nodes read and it has not, edges into halo nodes."""

    rows: tuple[float, ...]
    edges: tuple[float, ...]

    @staticmethod
    def of(edge_index: Array, part_of: Array, parts: int) -> Beyond:
        """Shapes: edge_index [2, E], part_of [N]."""
        src, dst = edge_index
        rows, edges = [], []
        for p in range(parts):
            held = part_of == p
            into = held[dst]
            halo = torch.zeros_like(held)
            halo[src[into & ~held[src]]] = True
            second = halo[dst]
            far = torch.zeros_like(held)
            far[src[second]] = True
            rows.append(float((far & ~held & ~halo).sum()))
            edges.append(float(second.sum()))
        return Beyond(tuple(rows), tuple(edges))


@dataclass(frozen=True)
class Operation:
    """What could be recomputed. `extra`: seconds of computing; `saved`, `needed`: seconds of messages that are spared
    and that its inputs need; the same in bytes of an epoch over all ranks."""

    extra: float
    saved: float
    saved_bytes: float
    needed: float = 0.0
    needed_bytes: float = 0.0


@dataclass(frozen=True)
class Savings:
    """Of one kind: `fired` of `possible` operations, bytes and seconds of an epoch."""

    what: str
    fired: int
    possible: int
    nbytes: float
    seconds: float

    def __str__(self) -> str:
        if not self.fired:
            return f"{self.what} 0 of {self.possible}"
        saved = f"{bytes_text(self.nbytes)} and at most {seconds_text(self.seconds)} an epoch"
        return f"{self.what} {self.fired} of {self.possible}, {saved} less"


def savings(candidate: Candidate, work: Work, setting: Setting, beyond: Beyond | None = None) -> tuple[Savings, ...]:
    """By kind; those that the plan has no operation of are left out. `beyond` None: only layer 0's halos are asked."""
    kinds = {
        "weight gradients from factors": _factors(candidate, work, setting),
        "halo rows": _halos(candidate, work, setting, beyond), "first residuals": _residuals(candidate, work, setting),
    }  # fmt: skip
    return tuple(_decided(what, operations) for what, operations in kinds.items() if operations)


def _decided(what: str, operations: Sequence[Operation]) -> Savings:
    """Inputs come from operations that nobody can duplicate, whose tensors are broadcast where it fires."""
    count = len(operations)
    weights = [op.extra - op.saved for op in operations] + [0.0] * count
    tensors = [Tensor(count + i, (i,), op.needed) for i, op in enumerate(operations)]
    choice = duplicate(weights, tensors, fixed=frozenset(range(count, 2 * count)))
    fired = [operations[i] for i in sorted(choice.duplicated)]
    return Savings(what, len(fired), count, sum(op.saved_bytes - op.needed_bytes for op in fired), -choice.seconds)


def _factors(candidate: Candidate, work: Work, setting: Setting) -> list[Operation]:
    """A weight's gradient a stage of several parts: all-gather of both factors against a ring sum (5.3)."""
    parts, found = candidate.parts, []
    if parts == 1:
        return found
    rows = max(work.parts.nodes)
    rate = min(setting.fabric.rate(p, (p + 1) % parts) for p in range(parts))
    flop = max(r.scale * r.gemm.flop for r in work.rates)
    for group in work.ir.groups:
        for gemm in group.gemms:
            m, n = gemm.width_in, gemm.width_out
            _, reduced = sufficient_factors(rows, m, n, replicas=parts, rate=rate, seconds_per_flop=flop)
            factor_bytes = (parts - 1) * rows * (m + n) * 4.0
            found.append(Operation(
                extra=(parts - 1) * 2 * rows * m * n * flop, saved=reduced, saved_bytes=2 * (parts - 1) * m * n * 4.0,
                needed=factor_bytes / rate, needed_bytes=parts * factor_bytes,
            ))  # fmt: skip
    return found


def _halos(candidate: Candidate, work: Work, setting: Setting, beyond: Beyond | None) -> list[Operation]:
    """(layer, part): sources of its halo nodes made at home, where all peers' rows would have come from."""
    if candidate.parts == 1 or candidate.chunks > 1:
        return []
    last = work.ir.num_layers if beyond is not None else 1
    return [
        _halo(work, setting, layer, p, beyond)
        for layer in range(last)
        for p in range(candidate.parts)
        if work.ir.folds(layer)
    ]


def _halo(work: Work, setting: Setting, layer: int, p: int, beyond: Beyond | None) -> Operation:
    rates, rows = work.rates[p], sum(work.parts.halo[p])
    here = [g for g in work.ir.layer(layer) if g.phase in ("begin", "transform")]
    before = [g for g in work.ir.layer(layer - 1) if g.phase in ("aggregate", "post")] if layer else []
    extra = sum(rates.dense_seconds(g, rows, backward=b) for g in (*here, *before) for b in (False, True))
    spared = [f for d in DIRECTIONS for f in work.flows(layer, d) if (f[1] if d == "forward" else f[0]) == p]
    needed = needed_bytes = 0.0
    if layer and beyond is not None:
        folds = work.ir.folds(layer - 1)
        extra += sum(rates.fold_seconds(f, beyond.edges[p], rows, backward=b) for f in folds for b in (False, True))
        needed_bytes = sum(beyond.rows[p] * work.row_bytes(layer - 1, d, 32) for d in DIRECTIONS)
        peers = [q for q in range(work.parts.parts) if q != p]
        needed = setting.exchange([(q, p, needed_bytes / len(peers)) for q in peers])
    return Operation(extra, setting.exchange(spared), sum(f[2] for f in spared), needed, needed_bytes)


def _residuals(candidate: Candidate, work: Work, setting: Setting) -> list[Operation]:
    """(stage behind the first): the second tensor that is alive at its cut, made anew from the features."""
    found = []
    first = [g for g in work.ir.layer(0) if g.phase == "begin"]
    for s, layer in enumerate(candidate.cuts[1:], start=1):
        widths = work.ir.cuts[layer - 1]
        if len(widths) < 2 or not first:
            continue
        rows, params = max(work.parts.nodes), sum(g.params for g in first)
        rates = setting.rates[s * candidate.parts]
        extra = sum(rates.dense_seconds(g, rows, backward=b) for g in first for b in (False, True))
        pairs = [((s - 1) * candidate.parts + p, s * candidate.parts + p) for p in range(candidate.parts)]
        nbytes = 2 * 4.0 * widths[-1] * rows
        sums = setting.exchange([(a, b, 2 * 4.0 * params) for a, b in pairs])  # its weight is then on both stages
        saved = setting.exchange([(a, b, nbytes) for a, b in pairs])
        found.append(Operation(
            extra, saved, nbytes * candidate.parts, sums, 2 * 4.0 * params * candidate.parts
        ))  # fmt: skip
    return found
