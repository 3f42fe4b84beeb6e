"""Messages between ranks, and the proof that a schedule can run.

`lower` posts the receive of the next action before the current one computes: two buffers a direction are enough, and
messages overlap compute. The first and last virtual stage have no neighbour beyond them, and virtual stages on one rank
(S = 1) exchange nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from gnnpar.parallel.pipeline.schedule.action import Action, Kind, Schedule

_OUT: dict[Kind, tuple[Kind, Kind, int]] = {  # of a computation: its send, the receive on the other side, to where
    "forward": ("send_forward", "receive_forward", +1),
    "backward": ("send_backward", "receive_backward", -1),
}
_IN: dict[Kind, Kind] = {"forward": "receive_forward", "backward": "receive_backward"}
_MADE_BY: dict[Kind, Kind] = {"send_forward": "forward", "send_backward": "backward"}


def lower(schedule: Schedule) -> Schedule:
    """Return the same schedule with sends and receives; validated."""
    assert not schedule.lowered, "this schedule has its messages already"
    actions = tuple(tuple(_with_messages(schedule, mine)) for mine in schedule.actions)
    lowered = Schedule(stages=schedule.stages, slots=schedule.slots, virtual=schedule.virtual, actions=actions)
    validate(lowered)
    return lowered


def _with_messages(schedule: Schedule, mine: tuple[Action, ...]) -> Iterator[Action]:
    yield from _receive(schedule, mine[0])
    for action, following in zip(mine, (*mine[1:], None), strict=True):
        if following is not None:
            yield from _receive(schedule, following)
        yield action
        send, _, step = _OUT[action.kind]
        if _crosses(schedule, action.stage, action.stage + step):
            yield Action(send, action.stage, action.slot)


def _receive(schedule: Schedule, action: Action) -> Iterator[Action]:
    if _crosses(schedule, action.stage, action.stage - _OUT[action.kind][2]):
        yield Action(_IN[action.kind], action.stage, action.slot)


def _crosses(schedule: Schedule, stage: int, other: int) -> bool:
    """Is there a stage `other`, and on another rank?"""
    return 0 <= other < schedule.num_stages and schedule.rank_of(stage) != schedule.rank_of(other)


def message_of(schedule: Schedule, action: Action) -> tuple[int, int, Action]:
    """(sender's rank, receiver's rank, the receive) of a send or a receive."""
    for send, receive, step in _OUT.values():
        if action.kind == send:
            to = action.stage + step
            return schedule.rank_of(action.stage), schedule.rank_of(to), Action(receive, to, action.slot)
        if action.kind == receive:
            return schedule.rank_of(action.stage - step), schedule.rank_of(action.stage), action
    raise AssertionError(f"{action} is no message")


def inputs(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """Return the actions on any rank that must precede `action` (its rank's order aside). A receive is posted without
    waiting, so it needs nothing; a computation waits for its message. A receive is posted without waiting, so it needs
    nothing; a computation waits for its message."""
    stage, slot = action.stage, action.slot
    if action.kind in _MADE_BY:
        return (Action(_MADE_BY[action.kind], stage, slot),)
    if not action.computes:
        return ()
    needed = [Action("forward", stage, slot)] if action.kind == "backward" else []
    if action.kind == "forward" and slot:
        needed.append(Action("forward", stage, slot - 1))  # fresh rows are those of earlier slots, on every stage
    before = stage - _OUT[action.kind][2]
    if 0 <= before < schedule.num_stages:
        needed.append(Action(action.kind, before, slot))
        if schedule.lowered and _crosses(schedule, stage, before):
            needed.append(Action(_IN[action.kind], stage, slot))
            needed.append(Action(_OUT[action.kind][0], before, slot))
    return tuple(needed)


def validate(schedule: Schedule) -> None:
    """Refuses a schedule that cannot run, or runs something else, with the first dependency it violates."""
    if len(schedule.actions) != schedule.stages:
        raise ValueError(f"a schedule for {schedule.stages} ranks has {len(schedule.actions)} lists of actions")
    _complete(schedule)
    _matched(schedule)
    done: set[Action] = set()
    at = [0] * schedule.stages
    while any(at[rank] < len(mine) for rank, mine in enumerate(schedule.actions)):
        moved = False
        for rank, mine in enumerate(schedule.actions):
            while at[rank] < len(mine) and done.issuperset(inputs(schedule, mine[at[rank]])):
                done.add(mine[at[rank]])
                at[rank] += 1
                moved = True
        if not moved:
            raise ValueError(_stuck(schedule, at, done))


def _complete(schedule: Schedule) -> None:
    """Every forward and backward exactly once, on the rank of its stage; every message likewise."""
    ranks: dict[Action, int] = {}
    for rank, mine in enumerate(schedule.actions):
        for action in mine:
            if action.stage >= schedule.num_stages or action.slot >= schedule.slots:
                sizes = f"{schedule.num_stages} virtual stages and {schedule.slots} slots"
                raise ValueError(f"{action} on rank {rank} does not exist: there are {sizes}")
            if schedule.rank_of(action.stage) != rank:
                raise ValueError(
                    f"{action} is on rank {rank}, but its stage is on rank {schedule.rank_of(action.stage)}"
                )
            if action in ranks:
                raise ValueError(f"{action} is there twice on rank {rank}")
            ranks[action] = rank
    for stage in range(schedule.num_stages):
        for slot in range(schedule.slots):
            wanted = [Action(kind, stage, slot) for kind in _OUT]
            missing = [action for action in wanted if action not in ranks]
            if missing:
                raise ValueError(f"{missing[0]} is missing on rank {schedule.rank_of(stage)}")
    wanted_messages = Counter(_messages(schedule)) if schedule.lowered else Counter[Action]()
    given = Counter(action for action in ranks if not action.computes)
    for action in (wanted_messages - given) | (given - wanted_messages):
        problem = "is missing" if wanted_messages[action] else "has no neighbour to exchange with"
        raise ValueError(f"{action} {problem} on rank {schedule.rank_of(action.stage)}")


def _messages(schedule: Schedule) -> Iterator[Action]:
    for send, receive, step in _OUT.values():
        for stage in range(schedule.num_stages):
            for slot in range(schedule.slots):
                if _crosses(schedule, stage, stage + step):
                    yield Action(send, stage, slot)
                    yield Action(receive, stage + step, slot)


def _matched(schedule: Schedule) -> None:
    """Messages between two ranks are received in the order they are sent: they may share one channel."""
    pairs: set[tuple[int, int]] = set()
    sent: dict[tuple[int, int], list[Action]] = {}
    taken: dict[tuple[int, int], list[Action]] = {}
    for mine in schedule.actions:
        for action in mine:
            if action.computes:
                continue
            source, target, receive = message_of(schedule, action)
            pairs.add((source, target))
            side = taken if action == receive else sent
            side.setdefault((source, target), []).append(receive)
    for pair in sorted(pairs):
        for number, (ours, theirs) in enumerate(zip(sent[pair], taken[pair], strict=True)):
            if ours != theirs:
                raise ValueError(
                    f"message {number} from rank {pair[0]} to rank {pair[1]} is for {ours}, "
                    f"but the receiver posts {theirs} then"
                )


def _stuck(schedule: Schedule, at: Iterable[int], done: set[Action]) -> str:
    """Return the first violated dependency, or the circle of ranks that wait for each other."""
    waiting: list[str] = []
    for rank, (mine, here) in enumerate(zip(schedule.actions, at, strict=True)):
        if here == len(mine):
            continue
        missing = next(action for action in inputs(schedule, mine[here]) if action not in done)
        if missing in mine:  # later on the same rank: no other rank can help
            return f"{mine[here]} on rank {rank} comes before {missing}, which it needs"
        waiting.append(f"rank {rank} at {mine[here]} for {missing}")
    return f"deadlock: {'; '.join(waiting)}"
