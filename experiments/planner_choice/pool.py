"""Every strategy that has a price, and one rank with all threads, in cells of a graph, a model and a link.

Fixed before the first measurement. Launches of a cell stand beside each other in a block, in an order of the block's
own, so that what the machine does meanwhile meets all of them.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any  # of JSON

from blocks import run as run_blocks
from planner_accuracy.cells import BF16, CHUNKS, FOUR, GRAPHS, LOOPBACK, MODELS, ONE, OVERLAP, SAR, Cell
from planner_accuracy.pairs import Pair, read
from planner_accuracy.plans import WARMUP, launches
from planner_choice.choices import RULES, Rule, always
from records import Files

import graphs

ALL_THREADS = 2
FEW, MANY, FAST = 8, 24, 0.12  # timed epochs; many where one is predicted to take less than so many seconds
EXACT = (OVERLAP, SAR, ONE, "feature", "cagnet")
LOSSY = (BF16, FOUR, "pipegcn", "digest, every 2 epochs", "sancus, every 2 epochs")
SAMPLED = ("bns", "cofree")
FLAT = (*EXACT, *LOSSY, *SAMPLED)
STEPS = "minibatch"  # an epoch of many steps: on the smallest graph alone

GRAPHS["debian"] = ("dataset=npz", f"dataset.path={graphs.UNTYPED}")
MODELS["sage 2"] = ("model=sage", "model.num_layers=2", "model.hidden=64")

CELLS = (
    Cell("sbm 8k", "gcn 3", LOOPBACK, (*FLAT, STEPS)),
    Cell("sbm 8k", "gcn 3", "0.3 Gbit/s", (*FLAT, STEPS)),
    Cell("sbm 20k", "sage 3", LOOPBACK, FLAT),
    Cell("sbm 20k", "sage 3", "1 Gbit/s", FLAT),
    Cell("debian", "sage 2", LOOPBACK, FLAT),
    Cell("sbm 4k", "resgcn 16", LOOPBACK, (*FLAT, CHUNKS)),
    Cell("sbm 4k", "resgcn 16", "0.1 Gbit/s", (*FLAT, CHUNKS)),
)
SMOKE = (Cell("sbm 4k", "gcn 3", LOOPBACK, (OVERLAP, "pipegcn", "bns")),)


def measure(files: Files, *, count: int) -> None:
    """Launch two ranks of one thread and one rank of all threads in each cell, in `count` blocks."""
    cells = [cell for cell in (SMOKE if files.smoke else CELLS) if cell.graph != "debian" or graphs.untyped_debian()]
    alone = [replace(cell, ranks=1, threads=ALL_THREADS, candidates=("single",)) for cell in cells]
    jobs = launches(files("pool_predictions"), [*cells, *alone], epochs_of)
    pairs = [{**two, **one} for two, one in zip(jobs[: len(cells)], jobs[len(cells) :], strict=True)]
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
