"""The planner's model: groups of operations of each layer, their costs by rows and edges, and live tensors.

A group is (layer, begin | transform | aggregate | post | end). The groups form a chain; `cuts` has the tensors between
two layers (GCNII: two). Widths count elements, not bytes; an element has 4 bytes in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from gnnpar.folds.aggregator import Aggregator, Pushable
from gnnpar.folds.block import Operands
from gnnpar.folds.mergeable import merging_of

Times = tuple[float, float]
"""Seconds of a fold without a kernel relative to softmax attention: (forward, backward)."""
Passing = tuple[float, int]
"""Memory of the gradient of a fold without a kernel: (elements per edge held at once, edges at once)."""
Phase = Literal["begin", "transform", "aggregate", "post", "end"]


@dataclass(frozen=True, order=True)
class Gemm:
    """A product [n, width_in] x [width_in, width_out]. `learned`: the input has a gradient, so backward computes dX."""

    width_in: int
    width_out: int
    learned: bool

    def flops(self, n: float) -> float:
        return 2.0 * self.width_in * self.width_out * n

    def numbers(self, n: float) -> float:
        """Return the elements of both factors and of the result."""
        return self.width_in * self.width_out + (self.width_in + self.width_out) * n


@dataclass(frozen=True, order=True)
class Fold:
    """One aggregation. Widths are elements per row: `src` of source rows, which are sent, `dst` of destination rows,
    which are local, `edge` of edge rows.

    `linear`: backward needs no source row. `learned`: the sources have a gradient, which is sent back. `pushed`:
    elements of the row that a destination would push instead of pulling sources twice (attention); 0: not supported.
    `split`: (types, exact elements beyond values in forward, in backward, 1 if anything is differentiated) of partial
    rows. types: 0, one row per destination; else one per pair of destination and type. (): not split over its edges.
    `ids`: it reads ids of edges. `out`: elements of a result row; for a fold that returns rows of edges, of all
    in-edges of a destination.
    """

    kind: str
    src: tuple[int, ...]
    dst: tuple[int, ...]
    edge: tuple[int, ...]
    out: int
    linear: bool
    needs_src: bool
    learned: bool
    pushed: int = 0
    split: tuple[int, ...] = field(default=(), repr=False)  # not in repr, so that hashes of models are stable
    times: Times = field(default=(1.0, 1.0), repr=False)
    passing: Passing = field(default=(0.0, 0), repr=False)
    ids: bool = field(default=False, repr=False)

    @staticmethod
    def of(
        agg: Aggregator, x: Operands, tail: Sequence[int], times: Times = (1.0, 1.0), passing: Passing = (0.0, 0)
    ) -> Fold:
        """Return the Fold of an aggregation, without gradient flags. tail: shape of a result row."""
        src, dst, edge, _ = (tuple(t.shape[1:].numel() for t in rows) for rows in x)
        split: tuple[int, ...] = ()
        if (merging := merging_of(agg, x.edge)) is not None:
            split = merging.types, *merging.exact_numbers(tail[1:] if merging.types else tail)
        return Fold(
            kind=type(agg).__name__,
            src=src,
            dst=dst,
            edge=edge,
            out=math.prod(tail),
            linear=agg.linear,
            needs_src=agg.needs_src,
            learned=False,
            pushed=sum(src) + 2 * sum(dst) if isinstance(agg, Pushable) else 0,
            split=split,
            times=times,
            passing=passing,
            ids=agg.needs_edge_ids,
        )

    @property
    def width(self) -> int:
        """Return the elements of a source row, all operands together."""
        return sum(self.src)

    def passing_numbers(self, edges: float) -> float:
        """Return the elements that the gradient of a fold without a kernel holds: for a slice of edges, and the
        gradients of all edge rows."""
        numbers, most = self.passing
        return numbers * min(edges, most) + sum(self.edge) * edges * (most > 0)


@dataclass(frozen=True)
class Group:
    """Operations that are planned together. `elementwise`: (kernels, elements per row read and written); `dropout`:
    elements per row with a mask; `saved`: elements per row kept for backward; `params`: number of parameters;
    `moments`: columns with mean and variance over all rows; `totals`: elements of each sum over all rows."""

    layer: int
    phase: Phase
    gemms: tuple[Gemm, ...] = ()
    folds: tuple[Fold, ...] = ()
    elementwise: tuple[int, int] = (0, 0)
    dropout: int = 0
    saved: int = 0
    params: int = 0
    moments: int = field(default=0, repr=False)  # not in repr, so that hashes of models are stable
    totals: tuple[int, ...] = field(default=(), repr=False)

    @property
    def kernels(self) -> int:
        return len(self.gemms) + len(self.folds) + self.elementwise[0]


@dataclass(frozen=True)
class ModelIR:
    """A model. `cuts[i]`: widths of the row tensors alive between layer i and i + 1. `final`: width of the logits.
    `learned`: number of trained features."""

    num_layers: int
    in_dim: int
    final: int
    groups: tuple[Group, ...]
    cuts: tuple[tuple[int, ...], ...]
    learned: int = field(default=0, repr=False)  # not in repr, so that hashes of models are stable

    def layer(self, index: int) -> tuple[Group, ...]:
        return self._layers[index]

    @cached_property
    def _layers(self) -> tuple[tuple[Group, ...], ...]:
        return tuple(tuple(g for g in self.groups if g.layer == i) for i in range(self.num_layers))

    @cached_property
    def _folds(self) -> tuple[tuple[Fold, ...], ...]:
        return tuple(tuple(f for g in groups for f in g.folds) for groups in self._layers)

    @cached_property
    def twins(self) -> tuple[int, ...]:
        """Return layer -> the first layer with the same groups. Deep models have few different layers."""
        first: dict[tuple[Group, ...], int] = {}
        return tuple(
            first.setdefault(tuple(replace(g, layer=0) for g in self.layer(i)), i) for i in range(self.num_layers)
        )

    def layer_kinds(self, layers: Iterable[int], *, apart: int = -1) -> list[tuple[int, int]]:
        """Return (a layer, the number of equal layers), to price each kind once; layer `apart` is its own kind."""
        kinds: dict[int, list[int]] = {}
        for layer in layers:
            kinds.setdefault(-1 if layer == apart else self.twins[layer], []).append(layer)
        return [(same[0], len(same)) for same in kinds.values()]

    def folds(self, index: int) -> tuple[Fold, ...]:
        return self._folds[index]

    @property
    def every_fold(self) -> list[Fold]:
        return [f for folds in self._folds for f in folds]

    @cached_property
    def params(self) -> int:
        return sum(g.params for g in self.groups)

    @cached_property
    def moments(self) -> tuple[int, ...]:
        """Return the columns of each group that takes moments."""
        return tuple(g.moments for g in self.groups if g.moments)

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Return the elements of each sum over all rows."""
        return tuple(n for g in self.groups for n in g.totals)

    @property
    def summed_moments(self) -> int:
        """Return the elements that an epoch sums over ranks: for moments (sums and squares forward, two gradients
        backward), for totals (once in each direction), and for the squared norm of the gradient of learned vectors."""
        return 4 * sum(self.moments) + 2 * sum(self.totals) + bool(self.learned)

    @cached_property
    def params_of(self) -> tuple[int, ...]:
        return tuple(sum(g.params for g in self.layer(i)) for i in range(self.num_layers))

    @cached_property
    def saved_of(self) -> tuple[int, ...]:
        return tuple(sum(g.saved for g in self.layer(i)) for i in range(self.num_layers))

    @property
    def widest(self) -> int:
        """Return the elements of the widest computed row, features excluded."""
        products = [op.width_out for g in self.groups for op in g.gemms]
        return max(
            [
                self.final,
                *products,
                *(max(f.width, f.out) for g in self.groups for f in g.folds),
                *(g.dropout for g in self.groups),
            ]
        )

    def describe(self) -> str:
        cut = max((sum(c) for c in self.cuts), default=0)
        kinds = sorted({f.kind for g in self.groups for f in g.folds})
        return (
            f"{self.num_layers} layers, {self.params} parameters, folds {', '.join(kinds)}, at most {cut} live at a cut"
        )
