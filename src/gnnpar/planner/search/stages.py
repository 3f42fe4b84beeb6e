"""Layers onto a pipeline of different devices, exactly. Source: specs/tag.md 8.10 B (Alpa's enumeration of
bottlenecks).

A stage takes consecutive layers on one device of a class; classes are used in any order, devices of a class are alike.
A stage of more layers must never be faster.
For each bound on the slowest stage or boundary, dynamic programming finds the least sum of stages and boundaries that
respects it; the best of sum + (chunks - 1) x bound over all bounds is the least of chain().
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

StageCost = Callable[[int, int, int], float]
"""(first layer, after the last, class) -> seconds of a chunk; infinite where it does not fit in memory."""
CutCost = Callable[[int, int, int], tuple[float, float]]
"""(layer before which it is cut, class before, class after) -> (seconds of a message, of its bytes alone)."""


@dataclass(frozen=True)
class Assignment:
    """`cuts`: first layer of each stage; `classes`: of its device. seconds: of all chunks in one direction."""

    seconds: float
    cuts: tuple[int, ...]
    classes: tuple[int, ...]


def assign_stages(
    num_layers: int, counts: Sequence[int], stage: StageCost, cut: CutCost, *, chunks: int, stages: int | None = None
) -> Assignment:
    """The best pipeline of at most counts[c] devices of class c; `stages`: of exactly so many. Exact."""
    most = sum(counts)
    if stages is not None and not 1 <= stages <= min(most, num_layers):
        raise ValueError(
            f"{stages} stages cannot be made of {num_layers} layers and {most} devices: use at most "
            f"{min(most, num_layers)} stages"
        )
    best: Assignment | None = None
    for bound in _bounds(num_layers, len(counts), stage, cut):
        if best is not None and (chunks - 1) * bound >= best.seconds:
            break
        found = _least_sum(num_layers, tuple(counts), stage, cut, bound, stages)
        if found is not None:
            seconds = found[0] + (chunks - 1) * _slowest(found[1], found[2], num_layers, stage, cut)
            if best is None or seconds < best.seconds - 1e-15:
                best = Assignment(seconds, found[1], found[2])
    if best is None:
        raise ValueError(f"no pipeline of {num_layers} layers fits on these {most} devices: use more of them, or sar")
    return best


def _bounds(num_layers: int, num_classes: int, stage: StageCost, cut: CutCost) -> list[float]:
    """Values that the slowest stage or boundary can have, ascending: all of them, or where there are many 1 % apart."""
    values = {
        stage(a, b, c) for c in range(num_classes) for a in range(num_layers) for b in range(a + 1, num_layers + 1)
    }
    values |= {cut(a, c, d)[1] for a in range(1, num_layers) for c in range(num_classes) for d in range(num_classes)}
    ordered = sorted(v for v in values if v < float("inf"))
    if len(ordered) <= _MANY:
        return ordered
    kept: list[float] = []
    for value in reversed(ordered):  # of those within 1 % the largest, which allows what the others allow
        if not kept or value < kept[-1] / 1.01:
            kept.append(value)
    return kept[::-1]


_MANY = 600


def _least_sum(
    num_layers: int, counts: tuple[int, ...], stage: StageCost, cut: CutCost, bound: float, stages: int | None
) -> tuple[float, tuple[int, ...], tuple[int, ...]] | None:
    """(sum, cuts, classes) of stages and boundaries all within the bound."""

    @cache
    def rest(first: int, left: tuple[int, ...], last: int, remaining: int) -> tuple[float, tuple, tuple] | None:
        """Layers from `first` on. last: class of the stage before, -1 none. remaining: stages to make, -1 any."""
        if first == num_layers:
            return (0.0, (), ()) if remaining <= 0 else None
        best = None
        for c, count in enumerate(left):
            if count == 0 or remaining == 0:
                continue
            whole, alone = cut(first, last, c) if last >= 0 else (0.0, 0.0)
            if alone > bound:
                continue
            fewer = (*left[:c], count - 1, *left[c + 1 :])
            for end in range(first + 1, num_layers + 1):
                seconds = stage(first, end, c)
                if seconds > bound:
                    break
                after = rest(end, fewer, c, remaining - 1 if remaining > 0 else remaining)
                if after is not None and (best is None or seconds + whole + after[0] < best[0]):
                    best = (seconds + whole + after[0], (first, *after[1]), (c, *after[2]))
        return best

    return rest(0, counts, -1, -1 if stages is None else stages)


def _slowest(cuts: tuple[int, ...], classes: tuple[int, ...], num_layers: int, stage: StageCost, cut: CutCost) -> float:
    ends = (*cuts[1:], num_layers)
    stages = [stage(a, b, c) for a, b, c in zip(cuts, ends, classes, strict=True)]
    ways = [cut(a, c, d)[1] for a, c, d in zip(cuts[1:], classes, classes[1:], strict=False)]
    return max([*stages, *ways])
