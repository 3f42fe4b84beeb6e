"""Work of one epoch on every rank, by layer: seconds of each piece and bytes between each pair.

Pieces, as in the engines: dense work before and after a fold, the fold over inner edges and over each peer's halo,
encoding and adding back. Closed forms and the simulator combine the same pieces.

`rank_memory` has the peak bytes of a rank in an epoch, in closed form. An element has 4 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from gnnpar.pricing.ir import Fold, ModelIR
from gnnpar.pricing.price import Memory
from gnnpar.pricing.rates import Rates
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar_kernels.wire import BF16, FP32, row_nbytes

Bits = Literal[32, 16, 8, 4, 2, 1]
Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
Flow = tuple[int, int, float]
"""Sender, receiver, bytes."""
Held = Literal["no", "result", "rows"]
"""Cache of layer 0 over epochs: nothing, its sums of the features, or the features of the halo."""


@lru_cache(maxsize=4096)
def wire_bytes(widths: tuple[int, ...], bits: int) -> int:
    """Return the bytes of one row of all operands in these bits. Below 16 bits, operands after the first (scores) have
    8 bits, or fp32 if that is smaller."""
    if bits == 32:
        return 4 * sum(widths)
    if bits == 16:
        return 2 * sum(widths)
    first = row_nbytes(widths[0], min(bits, 8))
    rest = sum(min(row_nbytes(w, 8), row_nbytes(w, FP32)) for w in widths[1:])
    return min(first, row_nbytes(widths[0], BF16)) + rest


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer in one direction on one part. `halo[q]`: the fold over rows of part q."""

    before: float
    inner: float
    halo: tuple[float, ...]
    after: float
    pack: float  # to pack rows for all peers
    unpack: float  # to unpack or add back rows of all peers

    @property
    def compute(self) -> float:
        return self.before + self.inner + sum(self.halo) + self.after


@dataclass(frozen=True)
class Work:
    """A model on a graph in some parts, with the rates of each rank's device. rates[p]: of part p's rank."""

    ir: ModelIR
    graph: GraphStats
    parts: PartStats
    rates: tuple[Rates, ...]
    held: Held = "no"

    def piece(self, layer: int, p: int, direction: Direction, *, share: float = 1.0, bits: int = 32) -> LayerSeconds:
        """Return the seconds of a layer on a part. `share`: of the part's rows and edges, for a chunk."""
        rates, backward = self.rates[p], direction == "backward"
        n = self.parts.nodes[p] * share
        more = sum(self.parts.halo[p]) if layer == 0 and self.held == "rows" else 0.0  # halo messages computed here
        before, after = self.dense(layer, p, n, backward=backward, more=more)
        folds = () if layer == 0 and self.held == "result" else self.ir.folds(layer)
        inner = sum(
            rates.fold_seconds(f, self.parts.inner[p] * share, n, table=self.parts.nodes[p], backward=backward)
            for f in folds
        )
        halo = tuple(sum(self._halo_fold(f, p, q, share, backward) for f in folds) for q in range(self.parts.parts))
        width = self.exchanged_width(layer, direction)
        out, into = self.parts.sent(p) * share, sum(self.parts.halo[p]) * share
        pack, unpack = (out, into) if direction == "forward" else (into, out)
        return LayerSeconds(
            before, inner, halo, after, rates.code_seconds(bits, pack * width), rates.code_seconds(bits, unpack * width)
        )

    def dense(self, layer: int, p: int, rows: float, *, backward: bool, more: float = 0.0) -> tuple[float, float]:
        """Return the seconds of a layer's dense work on the messages and before them, and after the folds. more:
        further rows of the messages."""
        early = late = 0.0
        for group in self.ir.layer(layer):
            count = rows + more if group.phase == "transform" else rows
            seconds = self.rates[p].dense_seconds(group, count, backward=backward)
            if group.phase in ("begin", "transform"):
                early += seconds
            else:
                late += seconds
        return early, late

    def pieces(self, layer: int, direction: Direction, *, share: float = 1.0, bits: int = 32) -> list[LayerSeconds]:
        """Return the pieces of every part."""
        return [self.piece(layer, p, direction, share=share, bits=bits) for p in range(self.parts.parts)]

    def _halo_fold(self, fold: Fold, p: int, q: int, share: float, backward: bool) -> float:
        """Return the seconds of a fold over a halo block. It writes the result's rows in forward and the sources' in
        backward, at most as many as the part has."""
        edges, rows = self.parts.cut[p][q] * share, self.parts.halo[p][q] * share
        touched = min(rows if backward else edges, self.parts.nodes[p] * share)
        table = self.parts.nodes[p] if backward else self.parts.halo[p][q]
        return self.rates[p].fold_seconds(fold, edges, touched, table=table, backward=backward)

    def layer_kinds(self, layers: Iterable[int]) -> list[tuple[int, int]]:
        """Return (a layer, number of layers with the same cost), to price each kind once; a cached layer 0 is its own
        kind."""
        return self.ir.layer_kinds(layers, apart=-1 if self.held == "no" else 0)

    def exchanged_width(self, layer: int, direction: Direction) -> int:
        """Return the elements per row exchanged in this layer: of all sources in forward, of sources with a gradient in
        backward."""
        return sum(f.width for f in self.exchanged(layer, direction))

    def exchanged(self, layer: int, direction: Direction) -> list[Fold]:
        """Return the folds with exchanged rows; none for a cached layer 0."""
        if layer == 0 and self.held != "no":
            return []
        return [f for f in self.ir.folds(layer) if direction == "forward" or f.learned]

    @property
    def exchanged_folds(self) -> list[Fold]:
        """Return the exchanged folds of all layers, forward."""
        return [f for i in range(self.ir.num_layers) for f in self.exchanged(i, "forward")]

    def row_bytes(self, layer: int, direction: Direction, bits: int) -> int:
        folds = self.exchanged(layer, direction)
        return sum(wire_bytes(f.src, bits) for f in folds)

    def flows(self, layer: int, direction: Direction, bits: int = 32) -> list[Flow]:
        """Return (sender, receiver, bytes) of one exchange; backward in the other direction."""
        row = self.row_bytes(layer, direction, bits)
        flows = [(q, p, rows * row) for p, halos in enumerate(self.parts.halo) for q, rows in enumerate(halos) if rows]
        if direction == "backward":
            flows = [(b, a, nbytes) for a, b, nbytes in flows]
        return [flow for flow in flows if flow[2]]

    @cached_property
    def loss_seconds(self) -> tuple[float, ...]:
        """Return the seconds of the loss and its gradient: a few passes over the logits of the training rows."""
        share = self.graph.train / max(1, self.graph.nodes)
        return tuple(
            r.scale * r.elementwise.seconds(0, 8 * self.ir.final * n * share, calls=8)
            for r, n in zip(self.rates, self.parts.nodes, strict=True)
        )

    def step_seconds(self, p: int, params: float, engine: str = "") -> float:
        """Return the seconds of the optimizer's step and the engine's overhead per epoch."""
        rates = self.rates[p]
        return rates.scale * rates.step * params + rates.epoch + rates.overhead_seconds(engine)[1]

    def overhead_seconds(self, engine: str) -> float:
        """Return an engine's overhead for a layer in one direction, on the slowest part."""
        return max(r.overhead_seconds(engine)[0] for r in self.rates)


@dataclass(frozen=True)
class LayerPass:
    """One layer in one direction. `bits`: of rows on the wire."""

    work: Work
    layer: int
    direction: Direction
    bits: int = 32

    @property
    def forward(self) -> bool:
        return self.direction == "forward"

    @property
    def name(self) -> str:
        """Return 'F0' or 'B0'."""
        return f"{self.direction[0].upper()}{self.layer}"

    @cached_property
    def pieces(self) -> list[LayerSeconds]:
        return self.work.pieces(self.layer, self.direction, bits=self.bits)

    @cached_property
    def flows(self) -> list[Flow]:
        return self.work.flows(self.layer, self.direction, self.bits)


NUMBER = 4.0


def rank_memory(work: Work, layers: range, p: int, *, columns: float, moving: float, chunks: int = 1) -> Memory:
    """Return the peak bytes of the rank of part p with these layers.

    `columns`: source rows kept for folds that read them in backward; `moving`: elements in flight at once.
    """
    ir, parts = work.ir, work.parts
    n, e, halo = parts.nodes[p], parts.edges(p), sum(parts.halo[p])
    params = sum(ir.params_of[i] for i in layers)
    first, last = layers.start == 0, layers.stop == ir.num_layers
    folds = [f for i in layers for f in ir.folds(i)]
    kept = 0.0
    if work.held != "no":
        kept += halo * ir.in_dim if work.held == "rows" else n * sum(f.out for f in ir.folds(0))
    kept += sum((columns - n) * f.width for f in folds if f.needs_src)
    dense = 2 * n * ir.widest / chunks
    reading = [((columns * f.width + n * f.out) / chunks, f.passing_numbers(e / chunks)) for f in folds if f.needs_src]
    attention = max([rows for rows, _ in reading], default=0)
    folding = max(map(sum, reading), default=0)  # slices of edges are freed before products
    carried = n * sum(ir.cuts[layers.start - 1]) if not first else 0.0
    carried += 2 * n * sum(ir.cuts[layers.stop - 1]) / chunks if not last else n * ir.final * 3
    ids = 2 * 8.0 * e * any(f.ids for f in ir.every_fold)  # by destination and by source
    return Memory(
        parameters=5 * NUMBER * params + 4 * NUMBER * n * ir.learned * first,
        structure=structure_bytes(n, e, halo) + ids,
        features=n * ir.in_dim * NUMBER * first + n * 20.0,
        saved=n * sum(ir.saved_of[i] for i in layers) * NUMBER,
        halo=kept * NUMBER,
        transient=(max(max(moving, dense) + attention, moving + folding) + carried) * NUMBER,
    )


def held_to_evaluate(work: Work, p: int) -> Memory:
    """Return the bytes of part p for a method that trains on other data and only evaluates on it: no gradients."""
    nodes, halo = work.parts.nodes[p], sum(work.parts.halo[p])
    blocks = NUMBER * work.parts.edges(p) + 12.0 * nodes + 8.0 * (halo + work.parts.sent(p))  # by destination alone
    return Memory(structure=blocks, features=nodes * (NUMBER * work.ir.in_dim + 20.0))


def widest_fold(work: Work, layers: range) -> int:
    """Return the elements of the widest source row."""
    return max([f.width for i in layers for f in work.ir.folds(i)], default=0)


def structure_bytes(n: float, e: float, halo: float) -> float:
    """Return the bytes of 32-bit CSR by destination and by source, 64-bit destinations of edges and lists of rows."""
    return 2 * 4.0 * (e + n + halo) + 8.0 * e + 2 * 8.0 * halo
