"""The cost of each kind of work on a device: affine, measured (`calibrate`) or derived from two speeds.

Seconds of a call = const + flops f + elements b for products; const + edges (e + width w) + rows width r for folds.
Data beyond a core's own cache costs `far` more: for streams per element beyond it, for folds per element of an edge and
doubling of the source table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gnnpar.pricing.ir import Fold, Group

NEAR = float(1 << 18)  # elements that fit a core's own cache


def numbers_beyond(numbers: float) -> float:
    """Return the elements of a stream beyond the cache."""
    return max(0.0, numbers - NEAR)


def doublings_beyond(numbers: float) -> float:
    """Return log2(table / cache), at least 0, for a table of this many elements."""
    return max(0.0, math.log2(max(numbers, 1.0) / NEAR))


@dataclass(frozen=True)
class DenseCost:
    """Cost of products and of elementwise kernels."""

    const: float
    flop: float
    number: float
    far: float = 0.0

    def seconds(self, flops: float, numbers: float, *, calls: float = 1.0) -> float:
        far = calls * numbers_beyond(numbers / calls) * self.far if self.far and calls else 0.0
        return calls * self.const + flops * self.flop + numbers * self.number + far


@dataclass(frozen=True)
class FoldCost:
    """Cost of one direction of a fold."""

    const: float
    edge: float
    edge_number: float
    row_number: float
    far: float = 0.0

    def seconds(self, edges: float, rows: float, width: float, *, table: float = 0.0) -> float:
        """Return the seconds of a fold. `table`: number of rows of the source table."""
        number = self.edge_number + (self.far and self.far * doublings_beyond(table * width))
        return self.const + edges * (self.edge + width * number) + rows * width * self.row_number


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds of each kind of work of a rank.

    `folds`: kind -> (forward, backward); missing kinds cost as much as Softmax. `dropout`: per element masked in
    forward; `undrop`: in backward, where the mask is kept. `gather`: per element packed, received or added back.
    `coded`: bits -> per element encoded or decoded. `message`: to post and receive one message.
    `interference`: share of the shorter of compute and communication that is lost when they overlap (0 on a GPU with
    copy engines, up to 1 on a CPU with cores that move the bytes), measured at `beside` bytes/s; slower links lose
    proportionally less. `reduce`: (const, per byte) of an all_reduce in addition to the wire. `epoch`: constant of an
    epoch. `step`: of the optimizer, per parameter. `order`: of an epoch's chunk order, per edge.
    `visits`: engine -> (overhead per layer, direction and chunk; overhead per epoch; slowdown of memory-bound kernels
    compared with a loop over one kernel), measured on small graphs (`planner.overhead`). `cold`: that slowdown for the
    priced engine. `scale`: factor on all compute. `busy`: other load during the measurement; empty: none.
    """

    gemm: DenseCost
    elementwise: DenseCost
    folds: Mapping[str, tuple[FoldCost, FoldCost]]
    dropout: float
    gather: float
    coded: Mapping[int, float]
    message: float
    interference: float
    reduce: tuple[float, float]
    epoch: float
    step: float
    undrop: float | None = None
    beside: float = 0.0
    order: float = 0.0
    visits: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    cold: float = 1.0
    scale: float = 1.0
    source: str = "nominal"
    busy: str = ""
    residuals: Mapping[str, float] = field(default_factory=dict)

    @property
    def described(self) -> str:
        """Return 'measured rates', for display."""
        return f"{self.source} rates" + (f" of a busy machine ({self.busy})" if self.busy else "")

    @property
    def doubt(self) -> str:
        """Return the error of the fit, for the end of a sentence; '' if nothing was fitted."""
        worst = max(self.residuals.values(), default=None)
        return "" if worst is None else f"; the fit of kernels is off by {worst:.0%} at worst (median of a kind)"

    @property
    def kernel(self) -> float:
        """Return the factor on the seconds of memory-bound kernels: streams, sums, gathers."""
        return self.scale * self.cold

    def at(self, speed: float) -> Rates:
        """Return the rates of a device at this share of the speed."""
        if speed == 1.0:
            return self
        const, byte = self.reduce
        slower = {"scale": self.scale / speed, "message": self.message / speed, "epoch": self.epoch / speed}
        return replace(self, **slower, reduce=(const / speed, byte / speed))

    def of_engine(self, engine: str) -> Rates:
        """Return the rates with this engine's slowdown of kernels."""
        return replace(self, cold=self.visits[engine][2]) if engine in self.visits else self

    def dense_seconds(self, group: Group, rows: float, *, backward: bool = False) -> float:
        """Return seconds of a group without its folds."""
        gemms = 0.0
        for op in group.gemms:
            times = (1.0 + op.learned) if backward else 1.0
            gemms += self.scale * times * self.gemm.seconds(op.flops(rows), op.numbers(rows))
        kernels, numbers = group.elementwise
        elementwise = self.kernel * self.elementwise.seconds(0.0, numbers * rows, calls=kernels)
        mask = self.undrop if backward and self.undrop is not None else self.dropout
        return gemms + elementwise + self.scale * mask * group.dropout * rows

    def lost(self, rate: float) -> float:
        """Return the lost share of the shorter of compute and communication, for bytes arriving at `rate` bytes/s."""
        return self.interference * (min(1.0, rate / self.beside) if self.beside else 1.0)

    def overhead_seconds(self, engine: str) -> tuple[float, float]:
        """Return overhead seconds (per layer and direction, per epoch)."""
        layer, epoch, _ = self.visits.get(engine, (0.0, 0.0, 1.0))
        return self.scale * layer, self.scale * epoch

    def fold_seconds(self, op: Fold, edges: float, rows: float, *, table: float = 0.0, backward: bool = False) -> float:
        if edges == 0:
            return 0.0
        if backward and op.linear and not op.learned:
            return 0.0
        costs = self.folds.get(op.kind) or self.folds["Softmax"]
        factor = self.kernel if op.kind in ("Sum", "Max") else self.scale
        if op.linear:  # a sum by edge type has one result row per type
            rows *= max(1.0, op.out / op.width)
        return factor * op.times[backward] * costs[backward].seconds(edges, rows, op.width, table=table)

    def gather_seconds(self, numbers: float) -> float:
        return self.kernel * self.gather * numbers

    def code_seconds(self, bits: int, numbers: float) -> float:
        """Return the seconds of one side; 32 bits are copied uncoded."""
        return self.scale * (self.coded.get(bits, self.gather)) * numbers


def derived(speed: float, memory_rate: float, *, launch: float = 8e-6) -> Rates:
    """Return rates from a device's flop/s and bytes/s: 60 % of the speed in products, 70 % of the rate in streams, 35 %
    in gathers, which dense and sparse kernels commonly reach. `source` marks them as derived, not measured."""
    number = 4 / (0.7 * memory_rate)
    gathered = 4 / (0.35 * memory_rate)
    plain = FoldCost(launch, gathered, gathered, number)
    attention = FoldCost(2 * launch, 6 * gathered, 1.5 * gathered, 3 * number)
    back = FoldCost(3 * launch, 12 * gathered, 3 * gathered, 4 * number)
    return Rates(
        gemm=DenseCost(launch, 1 / (0.6 * speed), number),
        elementwise=DenseCost(launch, 0.0, number),
        folds={"Sum": (plain, plain), "Max": (plain, plain), "Softmax": (attention, back)},
        dropout=4 * number,
        gather=number + gathered,
        coded=dict.fromkeys((2, 4, 8), 2 * number),
        message=2 * launch,
        interference=0.1,
        reduce=(4 * launch, 0.0),
        epoch=20 * launch,
        step=8 * number,
        source="derived",
    )


NOMINAL = derived(20e9, 8e9, launch=10e-6)
"""Rates of one core of a server processor, for tests and for plans without calibration."""
