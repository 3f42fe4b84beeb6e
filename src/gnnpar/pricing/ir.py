"""The planner's model: groups of operations of each layer, their costs by rows and edges, and live tensors.

A group is (layer, begin | transform | aggregate | post | end). The groups form a chain; `cuts` has the tensors between
two layers (GCNII: two). Widths are in numbers, not bytes; a number is 4 bytes in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

Times = tuple[float, float]
"""Of a fold without a kernel, forward and backward: its seconds over those of softmax attention."""
Passing = tuple[float, int]
"""Of a fold without a kernel: numbers an edge that its gradient holds at once, and the most edges at once."""
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
        """Return the numbers of both factors and of the result."""
        return self.width_in * self.width_out + (self.width_in + self.width_out) * n


@dataclass(frozen=True, order=True)
class Fold:
    """One aggregation. Widths are numbers a row: `src` of what travels, `dst` of what stays, `edge` of an edge's rows.

    `linear`: backward needs no source row. `learned`: do the sources have a gradient, which travels back? `pushed`:
    numbers of the row that a destination would push instead of pulling sources twice (attention), 0 where it cannot.
    `split`: (types, numbers beside the values forward, backward, 1 where anything is differentiated) of partial rows,
    which are of destinations (0) or of pairs with one of so many types; () where a fold is not split over its edges.
    `ids`: it reads ids of edges. `out`: numbers of a row of the result; for a fold that returns rows of edges, of all
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
    split: tuple[int, ...] = field(default=(), repr=False)  # hashes of models stay what they were
    times: Times = field(default=(1.0, 1.0), repr=False)
    passing: Passing = field(default=(0.0, 0), repr=False)
    ids: bool = field(default=False, repr=False)

    @property
    def width(self) -> int:
        """Return the numbers of a source row, all operands together."""
        return sum(self.src)

    def passing_numbers(self, edges: float) -> float:
        """Return the numbers that the gradient of a fold without a kernel holds for edges: of a slice, and gradients of
        all."""
        numbers, most = self.passing
        return numbers * min(edges, most) + sum(self.edge) * edges * (most > 0)


@dataclass(frozen=True)
class Group:
    """Operations that are planned together. `elementwise`: (kernels, numbers a row read and written); `dropout`:
    numbers a row with a mask; `saved`: numbers a row kept for backward; `params`: numbers; `moments`: columns with mean
    and variance over all rows; `totals`: numbers of each sum over all rows."""

    layer: int
    phase: Phase
    gemms: tuple[Gemm, ...] = ()
    folds: tuple[Fold, ...] = ()
    elementwise: tuple[int, int] = (0, 0)
    dropout: int = 0
    saved: int = 0
    params: int = 0
    moments: int = field(default=0, repr=False)  # hashes of models without stay what they were
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
    learned: int = field(default=0, repr=False)  # hashes of models without stay what they were

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
        """Return layer -> the first layer with the same groups: deep models have few different ones."""
        first: dict[tuple[Group, ...], int] = {}
        return tuple(
            first.setdefault(tuple(replace(g, layer=0) for g in self.layer(i)), i) for i in range(self.num_layers)
        )

    def alike(self, layers: Iterable[int], *, apart: int = -1) -> list[tuple[int, int]]:
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

    @property
    def splits(self) -> bool:
        """Return True if the in-edges of every fold can be folded at their sources, all under one cover."""
        folds = self.every_fold
        return len({f.split[:1] for f in folds} - {()}) == 1 and all(f.split for f in folds)

    @cached_property
    def params(self) -> int:
        return sum(g.params for g in self.groups)

    @cached_property
    def moments(self) -> tuple[int, ...]:
        """Return the columns of each group that takes moments."""
        return tuple(g.moments for g in self.groups if g.moments)

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Return the numbers of each sum over all rows."""
        return tuple(n for g in self.groups for n in g.totals)

    @property
    def summed_moments(self) -> int:
        """Return the numbers that an epoch sums over ranks: for moments (sums and squares forward, two gradients
        backward), for totals (once in each direction), and the squared norm of the gradient of learned vectors."""
        return 4 * sum(self.moments) + 2 * sum(self.totals) + bool(self.learned)

    @cached_property
    def params_of(self) -> tuple[int, ...]:
        return tuple(sum(g.params for g in self.layer(i)) for i in range(self.num_layers))

    @cached_property
    def saved_of(self) -> tuple[int, ...]:
        return tuple(sum(g.saved for g in self.layer(i)) for i in range(self.num_layers))

    @property
    def widest(self) -> int:
        """Return the numbers of the widest computed row, features excluded."""
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
