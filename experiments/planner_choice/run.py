"""The planner's choice against the measured best, cell by cell, from what planner_accuracy measured.

--pool needs a quiet machine, root and iproute2 for shaped links, and the raw files of debian.
"""

from dataclasses import replace

import records
from planner_accuracy.pairs import read
from planner_choice import pool as pools
from planner_choice.choices import choices
from records import Files


def run(files: Files, *, pool: bool = False, blocks: int = 2) -> None:
    """Write what each rule chooses. pool: measure every strategy, and one rank with all threads, in so many blocks."""
    if pool or files.smoke:
        pools.measure(files, count=blocks)
    if not pool:
        accuracy = replace(files, folder=files.folder.parent / "planner_accuracy")
        records.replace(files(), choices(read(accuracy("predictions"), accuracy())))
