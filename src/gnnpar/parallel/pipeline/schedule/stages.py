"""Cuts of L layers into S stages of consecutive layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def even(num_layers: int, stages: int) -> tuple[range, ...]:
    """Equal numbers of layers; the first stages take the rest (33 layers on 8 stages: 5, then 4 each)."""
    _check(num_layers, stages)
    each, rest = divmod(num_layers, stages)
    return _ranges([each + (stage < rest) for stage in range(stages)])


def balanced(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """Return the cut whose slowest stage is fastest, exactly; of equal ones that with the fewest layers first.

    `costs`: seconds (or any unit) of each layer. Dynamic programming over suffixes, O(L^2 S).
    """
    num_layers = len(costs)
    _check(num_layers, stages)
    if min(costs) < 0:
        raise ValueError(f"a layer costs {min(costs)}: costs are seconds, zero or more")
    total = [0.0, *accumulate(costs)]
    slowest = [[float("inf")] * (num_layers + 1) for _ in range(stages + 1)]  # [stages left][first layer]
    slowest[0][num_layers] = 0.0
    for left in range(1, stages + 1):
        for first in range(num_layers - left + 1):
            slowest[left][first] = min(
                max(total[stop] - total[first], slowest[left - 1][stop])
                for stop in range(first + 1, num_layers - left + 2)
            )
    sizes: list[int] = []
    first = 0
    for left in range(stages - 1, -1, -1):
        stop = first + 1
        while max(total[stop] - total[first], slowest[left][stop]) > slowest[stages][0]:
            stop += 1
        sizes.append(stop - first)
        first = stop
    return _ranges(sizes)


def _check(num_layers: int, stages: int) -> None:
    if stages < 1:
        raise ValueError(f"{stages} stages: at least one is needed")
    if stages > num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be cut into {stages} stages: a stage holds at least one layer. "
            f"Use at most {num_layers} stages, or set model.num_layers to {stages} or more."
        )


def _ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    ends = [0, *accumulate(sizes)]
    return tuple(range(a, b) for a, b in pairwise(ends))
