"""Cuts of L layers into S stages of consecutive layers: even, balanced, and optimal on devices given in order.

`place_layers` minimises chain(): sum of stages and boundaries + (chunks - 1) x the slowest of them. Dynamic programming
over stages finds the least sum below a bound on the slowest; the bound is the slowest of the last cut found, until no
cut is left. The order of devices is fixed here; a search of places changes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, starmap

import numpy as np


def even(num_layers: int, stages: int) -> tuple[range, ...]:
    """Return equal numbers of layers; the first stages take the rest (33 layers on 8 stages: 5, then 4 each)."""
    _check(num_layers, stages)
    each, rest = divmod(num_layers, stages)
    ends = (each * stage + min(stage, rest) for stage in range(stages + 1))
    return tuple(starmap(range, pairwise(ends)))


def even_cuts(num_layers: int, stages: int) -> tuple[int, ...]:
    """Return the first layers of `even`."""
    return tuple(layers.start for layers in even(num_layers, stages))


def balanced(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """Return the cut with the least time of the slowest stage, exactly. Ties: the fewest layers in the first stages.

    `costs`: seconds (or any unit) of each layer.
    """
    _check(len(costs), stages)
    if min(costs) < 0:
        raise ValueError(f"a layer costs {min(costs)}: costs are seconds, zero or more")
    total = [0.0, *accumulate(costs)]
    bounds = sorted({last - first for first, last in combinations(total, 2)})
    least = bisect_left(bounds, True, key=lambda bound: _from_the_end(total, stages, bound)[0] == 0)
    firsts = _from_the_end(total, stages, bounds[least])
    return tuple(starmap(range, pairwise((*firsts, len(costs)))))


def _from_the_end(total: Sequence[float], stages: int, bound: float) -> list[int]:
    """Return the first layers of stages that, from the last one on, take as many layers as the bound allows. The first
    one is 0 if all layers fit. total: [L + 1] costs of the layers before each."""
    firsts, stop = list[int](), len(total) - 1
    for before in reversed(range(stages)):
        stop = next((first for first in range(before, stop) if total[stop] - total[first] <= bound), stop)
        firsts.append(stop)
    return firsts[::-1]


def _check(num_layers: int, stages: int) -> None:
    if stages < 1:
        raise ValueError(f"{stages} stages: at least one is needed")
    if stages > num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be cut into {stages} stages: a stage holds at least one layer. "
            f"Use at most {num_layers} stages, or set model.num_layers to {stages} or more."
        )


@dataclass(frozen=True, eq=False)
class Line:
    """Seconds of a chunk. Shapes: layers [S, L] of each layer on each stage; whole, alone [S - 1, L] of the message
    from a stage to the next where the next begins with layer l (index 0 unused), and of its bytes alone."""

    layers: np.ndarray
    whole: np.ndarray
    alone: np.ndarray

    @property
    def sums(self) -> np.ndarray:
        """[S, L + 1]: seconds of layers 0 to i."""
        return np.concatenate([np.zeros((len(self.layers), 1)), np.cumsum(self.layers, axis=1)], axis=1)


def place_layers(line: Line, *, chunks: int) -> tuple[float, tuple[int, ...]]:
    """Return (seconds of all chunks in both directions, first layers of the stages), exactly to 1e-9."""
    num_stages, num_layers = line.layers.shape
    _check(num_layers, num_stages)
    best, bound = (np.inf, ()), np.inf
    while (least := _least_sum(line, bound)) is not None:
        bound = slowest(line, least[1])
        seconds = least[0] + (chunks - 1) * bound
        best = (seconds, least[1]) if seconds <= best[0] else best
        if chunks == 1 or least[0] > best[0]:  # all further sums are larger
            break
    return best


def slowest(line: Line, cuts: tuple[int, ...]) -> float:
    """Return the most seconds of a stage, or of a message's bytes."""
    sums, ends = line.sums, (*cuts[1:], line.layers.shape[1])
    stages = [float(sums[s, b] - sums[s, a]) for s, (a, b) in enumerate(zip(cuts, ends, strict=True))]
    return max([*stages, *(float(line.alone[s, a]) for s, a in enumerate(cuts[1:]))])


def _least_sum(line: Line, bound: float) -> tuple[float, tuple[int, ...]] | None:
    """Return (least sum of stages and boundaries that all take less than the bound, first layers); None: no cut."""
    num_layers, sums = line.layers.shape[1], line.sums
    room = bound * (1 - 1e-9)
    later = np.triu(np.ones((num_layers + 1, num_layers + 1), dtype=bool), k=1)
    seconds = np.full(num_layers + 1, np.inf)
    seconds[0] = 0.0
    came: list[np.ndarray] = []
    for s in range(len(sums)):
        if s:
            seconds[:-1] += np.where(line.alone[s - 1] < room, line.whole[s - 1], np.inf)
            seconds[-1] = np.inf
        stage = sums[s][None, :] - sums[s][:, None]
        total = np.where(later & (stage < room), seconds[:, None] + stage, np.inf)
        came.append(total.argmin(axis=0))
        seconds = total.min(axis=0)
    if not np.isfinite(seconds[-1]):
        return None
    cuts: list[int] = []
    end = num_layers
    for starts in reversed(came):
        end = int(starts[end])
        cuts.append(end)
    return float(seconds[num_layers]), tuple(reversed(cuts))
