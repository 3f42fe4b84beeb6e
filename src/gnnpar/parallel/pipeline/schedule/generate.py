"""Generators: lists of forwards and backwards a rank, without messages (schedule/lower.py adds them).

`fill_drain` is the schedule of GNNPipe (Chen et al., arXiv 2308.10087): all forwards in order, all backwards in
reverse, because a chunk's gradient needs those of the chunks that read its current rows. With v > 1 virtual stages a
rank it is the breadth-first loop of Lamy-Poirier (Breadth-First Pipeline Parallelism, MLSys 2023): a rank runs every
slot through its first layer group, then every slot through the next.
"""

from __future__ import annotations

from gnnpar.parallel.pipeline.schedule.action import Action, Schedule, count


def fill_drain(stages: int, slots: int, *, virtual: int = 1) -> Schedule:
    """Forwards in order, backwards last in first out. Bubble (S - 1) / (v K + S - 1) where K >= S."""
    count(stages, slots, virtual)
    actions = []
    for rank in range(stages):
        mine = [rank + group * stages for group in range(virtual)]
        forward = [Action("forward", stage, slot) for stage in mine for slot in range(slots)]
        backward = [Action("backward", action.stage, action.slot) for action in reversed(forward)]
        actions.append((*forward, *backward))
    return Schedule(stages=stages, slots=slots, virtual=virtual, actions=tuple(actions))


def one_forward_one_backward(stages: int, slots: int) -> Schedule:
    """1F1B (PipeDream-flush): backwards first in first out. To compare only: no gradient crosses chunks in it."""
    count(stages, slots)
    actions = []
    for rank in range(stages):
        ahead = min(stages - rank, slots)
        mine = [Action("forward", rank, slot) for slot in range(ahead)]
        for slot in range(slots):
            mine.append(Action("backward", rank, slot))
            if slot + ahead < slots:
                mine.append(Action("forward", rank, slot + ahead))
        actions.append(tuple(mine))
    return Schedule(stages=stages, slots=slots, actions=tuple(actions))
