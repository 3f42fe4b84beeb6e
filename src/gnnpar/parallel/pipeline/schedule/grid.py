"""A schedule as a text grid: a row a rank, a column a step in which every action takes one; dots are the bubble."""

from __future__ import annotations

from gnnpar.parallel.pipeline.schedule.action import Action, Schedule
from gnnpar.parallel.pipeline.schedule.simulate import simulate


def grid(schedule: Schedule) -> str:
    """'rank 0  F0 F1 .  .  B1 B0', and how much of it is bubble. With virtual stages a cell names its stage: F0@2."""
    timeline = simulate(schedule, lambda kind, stage, slot: 1.0 if kind in ("forward", "backward") else 0.0)
    steps = round(timeline.makespan)
    cells = [["."] * steps for _ in range(schedule.stages)]
    for span in timeline.spans:
        if span.action.computes:
            cells[span.rank][round(span.start)] = _cell(span.action, schedule.virtual)
    width = max(len(cell) for row in cells for cell in row)
    named = max(len(f"rank {rank}") for rank in range(schedule.stages))
    lines = [
        f"{f'rank {rank}':{named}}  {' '.join(cell.ljust(width) for cell in row).rstrip()}"
        for rank, row in enumerate(cells)
    ]
    sizes = f"{schedule.stages} ranks, {schedule.slots} slots"
    sizes += f", {schedule.virtual} virtual stages a rank" if schedule.virtual > 1 else ""
    return "\n".join([*lines, f"{sizes}: {steps} steps, bubble {timeline.bubble_share:.1%}"])


def _cell(action: Action, virtual: int) -> str:
    text = str(action)
    return text if virtual > 1 else text.partition("@")[0]
