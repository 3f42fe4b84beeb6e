"""trace=true: write trace.json of one epoch, and schedule.svg and schedule.txt of a pipeline.

Every engine reports the phases of its clock. An engine with a `timeline` also reports its actions: (text, start, end)
on the host's monotonic clock. Times are seconds from the start of the epoch, which ranks enter together.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median

from gnnpar.comm import Communicator
from gnnpar.files import JsonDict, write_json_atomic, write_text_atomic
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.pipeline.schedule import Action, Schedule
from gnnpar.parallel.pipeline.simulate import grid, simulate
from gnnpar.track.timelines import Row, chrome_trace, schedule_picture
from gnnpar.training.result.result import WARMUP_EPOCHS

TRACE, PICTURE, TEXT = "trace.json", "schedule.svg", "schedule.txt"
_WAITS = ("bubble", "exposed")


def traced_epoch(epochs: int) -> int:
    """Return the second epoch after the warm-up (the first records allocations), or the last."""
    return min(WARMUP_EPOCHS + 1, epochs - 1)


def save_timelines(
    engine: Engine, comm: Communicator, mesh: tuple[tuple[int, ...], ...], folder: Path, facts: JsonDict
) -> None:
    """Write the files on rank 0 after an epoch with `engine.timeline`, before the clock is drained. `mesh`: stage ->
    ranks of its parts. Collective."""
    actions, engine.timeline = engine.timeline or [], None
    mine = [(comm.rank, text, start - comm.clock.began, end - comm.clock.began) for text, start, end in actions]
    mine += [(comm.rank, phase, start, end) for phase, start, end in comm.clock.spans() if end > start]
    everyone = comm.gather(mine)
    if everyone is None:
        return
    rows = [row for rank in everyone for row in rank]
    write_json_atomic(folder / TRACE, chrome_trace(rows, facts), indent=None)
    if schedules := schedules_of(rows, mesh):
        measured = [row for row in rows if "@" in row[1] or row[1] in _WAITS]
        planned = "planned: median seconds of a stage's forward and backward, messages free"
        taken = f"measured: epoch {facts['epoch']}, {max(row[3] for row in measured) * 1e3:.1f} ms"
        write_text_atomic(folder / PICTURE, schedule_picture({planned: plan_of(rows, schedules), taken: measured}))
        schedule = next(iter(schedules.values()))
        write_text_atomic(folder / TEXT, f"{grid(schedule)}\n\n{schedule}\n")


def schedules_of(rows: list[Row], mesh: tuple[tuple[int, ...], ...]) -> dict[tuple[int, ...], Schedule]:
    """Return ranks of a part, stage by stage -> their schedule; empty without actions."""
    done: dict[int, list[str]] = defaultdict(list)
    for rank, text, _, _ in rows:
        if "@" in text:
            done[rank].append(text)
    parts = [tuple(stage[part] for stage in mesh) for part in range(min(map(len, mesh)))]
    return {
        ranks: Schedule.parse("\n".join(" ".join(done[rank]) for rank in ranks))
        for ranks in parts
        if all(done[rank] for rank in ranks)
    }


def plan_of(rows: list[Row], schedules: dict[tuple[int, ...], Schedule]) -> list[Row]:
    """Simulate the schedules with the median cost of each stage."""
    costs, planned = costs_of(rows), []
    for ranks, schedule in schedules.items():
        by_kind: dict[tuple[str, int], list[float]] = defaultdict(list)
        for (rank, action), seconds in costs.items():
            if rank in ranks and action.computes:
                by_kind[action.kind, action.stage].append(seconds)
        typical = {key: median(values) for key, values in by_kind.items()}
        timeline = simulate(schedule, lambda kind, stage, _, m=typical: m.get((kind, stage), 0.0))
        planned += [(ranks[rank], text, start, end) for rank, text, start, end in timeline.rows()]
    return planned


def costs_of(rows: list[Row]) -> dict[tuple[int, Action], float]:
    """Return (rank, action) -> seconds without waits (bubble and exposed phases of its rank)."""
    waits: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for rank, text, start, end in rows:
        if text in _WAITS:
            waits[rank].append((start, end))
    return {
        (rank, Action.parse(text)): end - start - sum(max(0.0, min(end, b) - max(start, a)) for a, b in waits[rank])
        for rank, text, start, end in rows
        if "@" in text
    }
