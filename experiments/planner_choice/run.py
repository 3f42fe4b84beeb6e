"""The planner's choice against the measured best, cell by cell, from what planner_accuracy measured.

--pool measures every strategy that has a price, and one rank with all threads, in cells fixed before the first
measurement. Launches of a cell stand beside each other in a block, in an order of the block's own, so that what the
machine does meanwhile meets all of them. It needs a quiet machine, root and iproute2 for shaped links, and the raw
files of debian.
"""

import random
from dataclasses import replace
from pathlib import Path

import npz_graphs
import records
from blocks import run as run_blocks
from planner_accuracy.report import read
from planner_accuracy.run import CELLS, WARMUP, cells, launches
from planner_choice.report import choices
from records import Files

FEW, MANY, FAST = 8, 24, 0.12  # timed epochs; many where one is predicted to take less than so many seconds


def measure(files: Files, *, count: int) -> None:
    """Launch two ranks of one thread and one rank of two threads in each cell, in `count` blocks."""
    known = cells("smoke" if files.smoke else "cells", CELLS, Path(__file__).with_name("cells.yaml"))
    some = [cell for cell in known if cell.graph != "debian" or npz_graphs.untyped_debian()]
    alone = [replace(cell, ranks=1, threads=2, candidates=("single",)) for cell in some]
    epochs = {True: WARMUP + MANY, False: WARMUP + FEW}
    jobs = launches(files("pool_predictions"), [*some, *alone], lambda row: epochs[row["epoch_seconds"] < FAST])
    pairs = [{**two, **one} for two, one in zip(jobs[: len(some)], jobs[len(some) :], strict=True)]
    for block in range(count):
        for pair in random.Random(block).sample(pairs, len(pairs)):
            run_blocks(pair, blocks=[block], out=files("pool"))


def run(files: Files, *, pool: bool = False, blocks: int = 2) -> None:
    """Write what each rule chooses. pool: measure every strategy, and one rank with all threads, in so many blocks."""
    if pool or files.smoke:
        measure(files, count=blocks)
    if not pool:
        accuracy = replace(files, folder=files.folder.parent / "planner_accuracy")
        records.replace(files(), choices(read(accuracy("predictions"), accuracy())))
