"""Action and Schedule: the steps of every rank of a pipeline in an epoch, as data; and the generators of schedules.

S ranks, v virtual stages a rank (S v in all, virtual stage s on rank s mod S), K slots. A slot is a position in the
epoch's order of chunks, so one schedule serves every order. Text form: F3@1 is the forward of slot 3 at virtual stage
1; B backward; SF and RF send and receive activations, SB and RB their gradients.

A receive is posted and does not wait; the forward or backward that needs it does. A send is posted and does not wait.

The generators make lists of forwards and backwards a rank, without messages (schedule/lower.py adds them). `fill_drain`
is the schedule of GNNPipe (Chen et al., arXiv 2308.10087): all forwards in order, all backwards in reverse, because a
chunk's gradient needs the gradients of all readers of its current rows. With v > 1 virtual stages a rank it is the
breadth-first loop of Lamy-Poirier (Breadth-First Pipeline Parallelism, MLSys 2023): a rank runs every slot through its
first layer group, then every slot through the next.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

Kind = Literal["forward", "backward", "send_forward", "receive_forward", "send_backward", "receive_backward"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_LETTERS: dict[Kind, str] = dict(zip(KINDS, ("F", "B", "SF", "RF", "SB", "RB"), strict=True))
_KIND_OF = {letters: kind for kind, letters in _LETTERS.items()}
_TEXT = re.compile(r"([SR]?[FB])(\d+)@(\d+)")


@dataclass(frozen=True, order=True)
class Action:
    """One step of one rank. `stage`: virtual stage, 0 to S v - 1; `slot`: 0 to K - 1."""

    kind: Kind
    stage: int
    slot: int

    @property
    def computes(self) -> bool:
        return self.kind in ("forward", "backward")

    def __str__(self) -> str:
        return f"{_LETTERS[self.kind]}{self.slot}@{self.stage}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action of 'F3@1'."""
        match = _TEXT.fullmatch(text)
        if not match:
            raise ValueError(f"{text!r} is no action: write F3@1 (F, B, SF, RF, SB, RB; slot; virtual stage)")
        letters, slot, stage = match.groups()
        return cls(cast(Kind, _KIND_OF[letters]), int(stage), int(slot))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`actions[r]`: of pipeline rank r, in order. `stages`: S ranks; `slots`: K; `virtual`: v stages a rank."""

    stages: int
    slots: int
    virtual: int = 1
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """Virtual stages in all."""
        return self.stages * self.virtual

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank of a virtual stage."""
        return stage % self.stages

    @property
    def lowered(self) -> bool:
        """Return True if it has sends and receives."""
        return any(not action.computes for actions in self.actions for action in actions)

    def __str__(self) -> str:
        """Return a line a rank: 'F0@0 F1@0 B1@0 B0@0'."""
        return "\n".join(" ".join(map(str, actions)) for actions in self.actions)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Return the schedule of lines by rank; its sizes are read off the actions."""
        lines = [line.split() for line in text.strip().splitlines()]
        actions = tuple(tuple(Action.parse(word) for word in line) for line in lines)
        every = [action for line in actions for action in line]
        if not every:
            raise ValueError("a schedule without actions: one line a rank, actions such as F3@1 between blanks")
        num_stages = 1 + max(action.stage for action in every)
        if num_stages % len(actions):
            raise ValueError(f"{num_stages} virtual stages on {len(actions)} ranks: not the same number on each")
        slots = 1 + max(action.slot for action in every)
        return cls(stages=len(actions), slots=slots, virtual=num_stages // len(actions), actions=actions)


def fill_drain(stages: int, slots: int, *, virtual: int = 1) -> Schedule:
    """Return forwards in order, backwards last in first out. Bubble (S - 1) / (v K + S - 1) where K >= S."""
    check_sizes(stages, slots, virtual)
    actions: list[tuple[Action, ...]] = []
    for rank in range(stages):
        mine = [rank + group * stages for group in range(virtual)]
        forward = [Action("forward", stage, slot) for stage in mine for slot in range(slots)]
        backward = [Action("backward", action.stage, action.slot) for action in reversed(forward)]
        actions.append((*forward, *backward))
    return Schedule(stages=stages, slots=slots, virtual=virtual, actions=tuple(actions))


def one_forward_one_backward(stages: int, slots: int) -> Schedule:
    """1F1B (PipeDream-flush): backwards first in first out. To compare only: no gradient crosses chunks in it."""
    check_sizes(stages, slots)
    actions: list[tuple[Action, ...]] = []
    for rank in range(stages):
        ahead = min(stages - rank, slots)
        mine = [Action("forward", rank, slot) for slot in range(ahead)]
        for slot in range(slots):
            mine.append(Action("backward", rank, slot))
            if slot + ahead < slots:
                mine.append(Action("forward", rank, slot + ahead))
        actions.append(tuple(mine))
    return Schedule(stages=stages, slots=slots, actions=tuple(actions))


def check_sizes(stages: int, slots: int, virtual: int = 1) -> None:
    """Raise ValueError for sizes below one."""
    if min(stages, slots, virtual) < 1:
        raise ValueError(f"a schedule of stages={stages}, slots={slots}, virtual={virtual}: each must be at least 1")
