"""Every strategy that has a price, and one rank with all threads, in cells of a graph, a model and a link.

Fixed before the first measurement. Launches of a cell stand beside each other in a block, in an order of the block's
own, so that what the machine does meanwhile meets all of them.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any  # of JSON

import npz_graphs
from blocks import run as run_blocks
from planner_accuracy.cells import CELLS, cells
from planner_accuracy.pairs import Pair, read
from planner_accuracy.plans import WARMUP, launches
from planner_choice.choices import RULES, Rule, always
from records import Files

ALL_THREADS = 2
FEW, MANY, FAST = 8, 24, 0.12  # timed epochs; many where one is predicted to take less than so many seconds
ONE = "gnnpipe 2 stages, 1 chunk"


def measure(files: Files, *, count: int) -> None:
    """Launch two ranks of one thread and one rank of all threads in each cell, in `count` blocks."""
    known = cells("smoke" if files.smoke else "cells", CELLS, Path(__file__).with_name("cells.yaml"))
    some = [cell for cell in known if cell.graph != "debian" or npz_graphs.untyped_debian()]
    alone = [replace(cell, ranks=1, threads=ALL_THREADS, candidates=("single",)) for cell in some]
    jobs = launches(files("pool_predictions"), [*some, *alone], epochs_of)
    pairs = [{**two, **one} for two, one in zip(jobs[: len(some)], jobs[len(some) :], strict=True)]
    for block in range(count):
        for pair in random.Random(block).sample(pairs, len(pairs)):
            run_blocks(pair, blocks=[block], out=files("pool"))


def epochs_of(row: Mapping[str, Any]) -> int:
    return WARMUP + (MANY if row["epoch_seconds"] < FAST else FEW)


SINGLE = f"single, {ALL_THREADS} threads"
POOL_KEYS = ("graph", "model", "link")
POOL_CLASSES = {
    "exact": {"exact"},
    "all but sampled": {"exact", "rounded", "quantized", "stale"},
    "all": {"exact", "rounded", "quantized", "stale", "sampled"},
}


def one_device(pairs: Sequence[Pair]) -> Pair:
    return next(p for p in pairs if p.family == "single")


def twelve_layers(pairs: Sequence[Pair]) -> Pair:
    """The rule of one line that did as well as the planner before: a pipeline of one chunk for 12 layers or more."""
    found = [p for p in pairs if p.label == ONE and p.said["layers"] >= 12]
    return found[0] if found else always(pairs)


POOL_RULES: Mapping[str, Rule] = {**RULES, "12 layers": twelve_layers, SINGLE: one_device}


def measured(files: Files) -> list[Pair]:
    """Return what was launched; an epoch is the mean of a launch, which holds whole periods."""
    return read(files("pool_predictions"), files("pool"), epoch="mean") if files.read("pool") else []
