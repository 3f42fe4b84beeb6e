"""Schedules: the steps of every rank of a pipeline in an epoch as data, their messages, and their validation.

S ranks, v virtual stages a rank (S v in all, virtual stage s on rank s mod S), K slots. A slot is a position in the
epoch's order of chunks, so one schedule serves every order. Text form: F3@1 is the forward of slot 3 at virtual stage
1; B backward; SF and RF send and receive activations, SB and RB their gradients.

A receive is posted and does not wait; the forward or backward that needs it does. A send is posted and does not wait.

Generators make lists of forwards and backwards a rank, without messages. `lower` adds these: the receive of the next
action is posted before the current one computes, so two buffers a direction are enough, and messages overlap compute.
The first and last virtual stage have no neighbour beyond them, and virtual stages on one rank (S = 1) exchange nothing.

`fill_drain` is the schedule of GNNPipe (Chen et al., arXiv 2308.10087): all forwards in order, all backwards in
reverse, because a chunk's gradient needs the gradients of all readers of its current rows. With v > 1 virtual stages a
rank it is the breadth-first loop of Lamy-Poirier (Breadth-First Pipeline Parallelism, MLSys 2023): a rank runs every
slot through its first layer group, then every slot through the next.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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


_OUT: dict[Kind, tuple[Kind, Kind, int]] = {  # of a computation: its send, the receive on the other side, to where
    "forward": ("send_forward", "receive_forward", +1),
    "backward": ("send_backward", "receive_backward", -1),
}
_MADE_BY: dict[Kind, Kind] = {"send_forward": "forward", "send_backward": "backward"}


def lower(schedule: Schedule) -> Schedule:
    """Return the same schedule with sends and receives; validated."""
    assert not schedule.lowered, "this schedule has its messages already"
    actions = tuple(tuple(_with_messages(schedule, mine)) for mine in schedule.actions)
    lowered = replace(schedule, actions=actions)
    validate(lowered)
    return lowered


def _with_messages(schedule: Schedule, mine: Sequence[Action]) -> Iterator[Action]:
    yield from _receive(schedule, mine[0])
    for action, following in zip(mine, (*mine[1:], None), strict=True):
        if following is not None:
            yield from _receive(schedule, following)
        yield action
        send, _, step = _OUT[action.kind]
        if _crosses(schedule, action.stage, action.stage + step):
            yield Action(send, action.stage, action.slot)


def _receive(schedule: Schedule, action: Action) -> Iterator[Action]:
    _, receive, step = _OUT[action.kind]
    if _crosses(schedule, action.stage, action.stage - step):
        yield Action(receive, action.stage, action.slot)


def _crosses(schedule: Schedule, stage: int, other: int) -> bool:
    """Return True if there is a stage `other`, on another rank."""
    return 0 <= other < schedule.num_stages and schedule.rank_of(stage) != schedule.rank_of(other)


def message_of(schedule: Schedule, action: Action) -> tuple[int, int, Action]:
    """Return (rank of the sender, rank of the receiver, the receive) of a send or a receive."""
    for send, receive, step in _OUT.values():
        if action.kind == send:
            to = action.stage + step
            return schedule.rank_of(action.stage), schedule.rank_of(to), Action(receive, to, action.slot)
        if action.kind == receive:
            return schedule.rank_of(action.stage - step), schedule.rank_of(action.stage), action
    raise AssertionError(f"{action} is no message")


def inputs(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """Return the actions on any rank that must precede `action`, except earlier ones on its rank. A receive is
    posted without waiting, so it needs nothing; a computation waits for its message."""
    stage, slot = action.stage, action.slot
    if action.kind in _MADE_BY:
        return (Action(_MADE_BY[action.kind], stage, slot),)
    if not action.computes:
        return ()
    needed = [Action("forward", stage, slot)] if action.kind == "backward" else []
    if action.kind == "forward" and slot:
        needed.append(Action("forward", stage, slot - 1))  # earlier slots' rows are fresh on every stage
    send, receive, step = _OUT[action.kind]
    before = stage - step
    if 0 <= before < schedule.num_stages:
        needed.append(Action(action.kind, before, slot))
        if schedule.lowered and _crosses(schedule, stage, before):
            needed += [Action(receive, stage, slot), Action(send, before, slot)]
    return tuple(needed)


def validate(schedule: Schedule) -> None:
    """Raise ValueError for a schedule that cannot run, or runs something else, with the first problem."""
    if len(schedule.actions) != schedule.stages:
        raise ValueError(f"a schedule for {schedule.stages} ranks has {len(schedule.actions)} lists of actions")
    _check_complete(schedule)
    _check_order_of_messages(schedule)
    done: set[Action] = set()
    left = [list(reversed(mine)) for mine in schedule.actions]
    moved = True
    while moved:
        moved = False
        for mine in left:
            while mine and done.issuperset(inputs(schedule, mine[-1])):
                done.add(mine.pop())
                moved = True
    waiting: list[str] = []
    for rank, mine in enumerate(left):
        if mine:
            missing = next(action for action in inputs(schedule, mine[-1]) if action not in done)
            if missing in mine:  # later on the same rank: no other rank can help
                raise ValueError(f"{mine[-1]} on rank {rank} comes before {missing}, which it needs")
            waiting.append(f"rank {rank} at {mine[-1]} for {missing}")
    if waiting:
        raise ValueError(f"deadlock: {'; '.join(waiting)}")


def _check_complete(schedule: Schedule) -> None:
    """Every forward and backward is there once, on the rank of its stage; every message likewise."""
    found: dict[Action, None] = {}  # an ordered set
    for rank, mine in enumerate(schedule.actions):
        for action in mine:
            if action.stage >= schedule.num_stages or action.slot >= schedule.slots:
                sizes = f"{schedule.num_stages} virtual stages and {schedule.slots} slots"
                raise ValueError(f"{action} on rank {rank} does not exist: there are {sizes}")
            if schedule.rank_of(action.stage) != rank:
                raise ValueError(
                    f"{action} is on rank {rank}, but its stage is on rank {schedule.rank_of(action.stage)}"
                )
            if action in found:
                raise ValueError(f"{action} is there twice on rank {rank}")
            found[action] = None
    full = fill_drain(schedule.stages, schedule.slots, virtual=schedule.virtual)
    wanted = [action for mine in full.actions for action in (_with_messages(full, mine) if schedule.lowered else mine)]
    for action in wanted:
        if action not in found:
            raise ValueError(f"{action} is missing on rank {schedule.rank_of(action.stage)}")
    known = set(wanted)
    if strangers := [action for action in found if action not in known]:
        rank = schedule.rank_of(strangers[0].stage)
        raise ValueError(f"{strangers[0]} has no neighbour to exchange with on rank {rank}")


def _check_order_of_messages(schedule: Schedule) -> None:
    """Messages between two ranks are received in the order they are sent: they may share one channel."""
    sent, taken = (defaultdict[tuple[int, int], list[Action]](list) for _ in range(2))
    for mine in schedule.actions:
        for action in (a for a in mine if not a.computes):
            source, target, receive = message_of(schedule, action)
            (taken if action == receive else sent)[source, target].append(receive)
    for pair in sorted(sent):
        for number, (ours, theirs) in enumerate(zip(sent[pair], taken[pair], strict=True)):
            if ours != theirs:
                raise ValueError(
                    f"message {number} from rank {pair[0]} to rank {pair[1]} is for {ours}, "
                    f"but the receiver posts {theirs} then"
                )
