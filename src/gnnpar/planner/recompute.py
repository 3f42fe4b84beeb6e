"""Recompute rows of remote nodes or gradients of weights instead of receiving them, chosen by a minimum cut.

Source: TAG (arXiv 2302.06126), duplicated gradients. Operations of the cut: the message of every layer on a part's halo
rows. Recomputing a message needs its inputs: features, fetched once per run, or for a deeper layer the rows of the
halo's in-neighbours. Computing a weight's gradient on every rank needs its gathered factors, and saves its sum over
ranks. No other operation reads the factors, so each weight is decided separately.

A layer may be duplicated: every replica runs it in full, which costs compute and saves its messages. Rows that a
duplicated layer reads from a layer that is not duplicated must be fetched:

min  sum_i w_i x_i  +  sum_i beta_i (x_i - x_(i - 1))+

w_i = extra compute seconds - communication seconds saved, of either sign. The layers form a chain, so the minimum cut
is found by dynamic programming.

The runner executes it for layer 0 (first_layer=cached, which caches the sums of linear folds, and the halo's features
for other folds) and for weights (strategy.reduce=factors). Deeper layers are counted and reported only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gnnpar.models.gnn import GNN
from gnnpar.parallel.factors import break_even_rows
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.quantity import bytes_text, seconds_text
from gnnpar.pricing.work import DIRECTIONS, Held, Work

Best = tuple[float, int, tuple[int, ...]]
"""(seconds, number of duplicated layers, duplicated layers)"""


def duplicated(weights: Sequence[float], fetched: Sequence[float]) -> tuple[int, ...]:
    """Return the layers to duplicate, the fewest of equal choices. weights[i]: w_i above. fetched[i]: beta_i of the
    rows that layer i reads; 0 for layer 0."""
    plain: Best = (0.0, 0, ())  # with the last layer as it is
    chosen: Best = (math.inf, 0, ())  # with the last layer duplicated
    for layer, (weight, beta) in enumerate(zip(weights, fetched, strict=True)):
        seconds, count, layers = min(chosen, (plain[0] + beta, plain[1], plain[2]))
        plain, chosen = min(plain, chosen), (seconds + weight, count + 1, (*layers, layer))
    return min(plain, chosen)[2]


RUN_EPOCHS = 100
"""Epochs over which a one-time fetch is spread."""


@dataclass(frozen=True)
class Recompute:
    """The cut's choice. layers: layers with recomputed halo. factors: (number of weights by sufficient factors, number
    of weights). seconds: saved per epoch. nbytes: saved in layer 0, per epoch over all ranks."""

    held: Held
    layers: tuple[int, ...]
    depth: int
    factors: tuple[int, int]
    seconds: float
    nbytes: float

    def describe(self, *, chosen: bool) -> str:
        """Return one line for the user. chosen: the plan caches layer 0."""
        cheaper, weights = self.factors
        rest = f"; weights by sufficient factors: {cheaper} of {weights}" + " (strategy.reduce=factors)" * (cheaper > 0)
        if deeper := [i for i in self.layers if i > 0]:
            rest += f"; the cut would also recompute layers {', '.join(map(str, deeper))}, which the runner does not"
        if self.held == "no":
            return f"recomputing instead of receiving: halos of 0 of {self.depth} layers{rest}"
        stays = "stays" if chosen else "would stay under graph_parallel, which is not chosen with it"
        what = "what layer 0 sums up of the features" if self.held == "result" else "features of the halo"
        return (
            f"recomputing instead of receiving: halos of 1 of {self.depth} layers: {what} {stays} "
            f"(first_layer=cached), {bytes_text(self.nbytes)} and {seconds_text(self.seconds)} less an epoch{rest}"
        )


def how_held(model: GNN, ir: ModelIR) -> Held:
    """Return the cache of layer 0 with first_layer=cached: `rows` if its fold is not linear or its sources change
    between epochs (trained, or dropout on features), else `result`."""
    folds = ir.folds(0)
    fixed = folds and all(f.linear and not f.learned for f in folds) and not model.config.input_dropout
    return "result" if fixed else "rows"


def decide(live: Work, held: Work, machine: Machine) -> Recompute:
    """Return the cut for graph parallelism over the parts of `live`. held: the same work with layer 0 cached."""
    depth = live.ir.num_layers
    kinds = {i: _extra(live, i) - _received(live, machine, i) for i in set(live.ir.twins)}
    of_cut = {cut: _second_halo(live, machine, cut) for cut in set(live.ir.cuts[: depth - 1])}
    weights = [kinds[twin] for twin in live.ir.twins]
    weights[0] = _layer_seconds(held, 0) - _layer_seconds(live, 0) - _received(live, machine, 0)
    weights[0] += _features(held, machine)
    chosen = duplicated(weights, [0.0, *(of_cut[cut] for cut in live.ir.cuts[: depth - 1])])
    fires = 0 in chosen
    return Recompute(
        held=held.held if fires else "no",
        layers=chosen,
        depth=depth,
        factors=by_factors(live, machine),
        seconds=-weights[0] if fires else 0.0,
        nbytes=sum(n for d in DIRECTIONS for _, _, n in live.flows(0, d)) if fires else 0.0,
    )


def by_factors(work: Work, machine: Machine) -> tuple[int, int]:
    """Return the number of weights that are faster by sufficient factors of all rows, and of all weights."""
    parts, rates = work.parts.parts, work.rates[0]
    if parts == 1:
        return 0, 0
    rate = min(machine.fabric.rate(a, b) for a in range(parts) for b in range(parts) if a != b)
    gemms = [g for group in work.ir.groups for g in group.gemms]
    flop, rows = rates.scale * rates.gemm.flop, max(work.parts.nodes)
    most = [break_even_rows(g.width_in, g.width_out, replicas=parts, rate=rate, seconds_per_flop=flop) for g in gemms]
    return sum(rows < each for each in most), len(gemms)


def _layer_seconds(work: Work, layer: int) -> float:
    """Return compute seconds of the slowest part, both directions."""
    return sum(max(work.piece(layer, p, d).compute for p in range(work.parts.parts)) for d in DIRECTIONS)


def _received(work: Work, machine: Machine, layer: int) -> float:
    """Return seconds of a layer's exchanges, with packing and unpacking."""
    parts = range(work.parts.parts)
    pieces = [work.piece(layer, p, d) for d in DIRECTIONS for p in parts]
    wire = sum(machine.exchange(work.flows(layer, d)) for d in DIRECTIONS)
    return wire + 2 * max(p.pack + p.unpack for p in pieces)


def _extra(work: Work, layer: int) -> float:
    """Return compute seconds for the halo's rows: folds over their in-edges, and the dense work before the message."""
    largest = 0.0
    for p, rates in enumerate(work.rates):
        rows = sum(work.parts.halo[p])
        edges = rows * work.graph.edges / max(1, work.graph.nodes)
        dense = sum(
            rates.dense_seconds(g, rows, backward=backward) for g in work.ir.layer(layer) for backward in (False, True)
        )
        folds = sum(rates.fold_seconds(f, edges, rows, backward=b) for f in work.ir.folds(layer) for b in (False, True))
        largest = max(largest, dense + folds)
    return largest


def _features(held: Work, machine: Machine) -> float:
    """Return seconds to fetch the halo's features once, spread over a run."""
    row = 4.0 * held.ir.in_dim
    flows = [(q, p, row * rows) for p, halos in enumerate(held.parts.halo) for q, rows in enumerate(halos) if rows]
    return machine.exchange(flows) / RUN_EPOCHS


def _second_halo(work: Work, machine: Machine, widths: tuple[int, ...]) -> float:
    """Return seconds to receive, both ways, the rows of the halo's in-neighbours: at most all rows of the others."""
    degree = work.graph.edges / max(1, work.graph.nodes)
    width = sum(widths)
    parts, total = work.parts, sum(work.parts.nodes)
    flows = []
    for p, halos in enumerate(parts.halo):
        wanted = min(total - parts.nodes[p], sum(halos) * degree)
        share = wanted / max(1.0, sum(halos))
        flows += [(q, p, 4.0 * width * rows * share) for q, rows in enumerate(halos) if rows]
    return 2 * machine.exchange(flows)
