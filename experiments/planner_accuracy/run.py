"""Predicted and measured epoch time and peak memory of the configurations in cells.py.

The machine is calibrated, every configuration is planned, and what is predicted of it is written to predictions.jsonl,
all before the first measurement. Then each plan is run as it is, in blocks of random order. Needs root and iproute2 for
the shaped links.
"""

from blocks import run as run_blocks
from planner_accuracy.cells import CELLS, cells
from planner_accuracy.plans import launches
from records import Files


def run(files: Files, *, blocks: int = 1, predict: bool = False) -> None:
    """Predict, then launch every configuration `blocks` times. predict: predictions alone."""
    jobs = launches(files("predictions"), cells("smoke" if files.smoke else "cells", CELLS))
    if not predict:
        every = {job: overrides for each in jobs for job, overrides in each.items()}
        run_blocks(every, blocks=range(1 if files.smoke else blocks), out=files())
