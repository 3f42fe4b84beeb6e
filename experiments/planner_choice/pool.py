"""Every strategy that has a price, and one rank with all threads, in cells of a graph, a model and a link: what is
predicted of each, and what launches of its plan take.

Fixed before the first measurement. Launches of a cell stand beside each other: one sweep over its plans a block, in an
order of the block's own, so that what the machine does meanwhile meets all of them.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any  # of JSON

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "planner_accuracy"), str(HERE.parent)]

import blocks
import cells
import records
from cells import BF16, CHUNKS, FOUR, LOOPBACK, ONE, OVERLAP, SAR, Cell
from choices import RULES, Rule, always
from pairs import Pair, read
from plans import KEPT, WARMUP, folder_of, predictions

import graphs

PLANS = HERE / "smoke_plans"  # not committed
PREDICTED, MEASURED = HERE / "pool_predictions.jsonl", HERE / "pool.jsonl"
ALL_THREADS = 2
FEW, MANY, FAST = 8, 24, 0.12  # timed epochs; many where one is predicted to take less than so many seconds
EXACT = (OVERLAP, SAR, ONE, "feature", "cagnet")
LOSSY = (BF16, FOUR, "pipegcn", "digest, every 2 epochs", "sancus, every 2 epochs")
SAMPLED = ("bns", "cofree")
FLAT = (*EXACT, *LOSSY, *SAMPLED)
STEPS = "minibatch"  # an epoch of many steps: on the smallest graph alone

cells.GRAPHS["debian"] = ("dataset=npz", f"dataset.path={PLANS / 'debian.npz'}")
cells.MODELS["sage 2"] = ("model=sage", "model.num_layers=2", "model.hidden=64")

Place = tuple[str, str, str, tuple[str, ...]]
PLACES: Sequence[Place] = (
    ("sbm 8k", "gcn 3", LOOPBACK, (*FLAT, STEPS)),
    ("sbm 8k", "gcn 3", "0.3 Gbit/s", (*FLAT, STEPS)),
    ("sbm 20k", "sage 3", LOOPBACK, FLAT),
    ("sbm 20k", "sage 3", "1 Gbit/s", FLAT),
    ("debian", "sage 2", LOOPBACK, FLAT),
    ("sbm 4k", "resgcn 16", LOOPBACK, (*FLAT, CHUNKS)),
    ("sbm 4k", "resgcn 16", "0.1 Gbit/s", (*FLAT, CHUNKS)),
)
SMOKE = (("sbm 4k", "gcn 3", LOOPBACK, (OVERLAP, "pipegcn", "bns")),)


def cells_of(place: Place) -> tuple[Cell, Cell]:
    """Two ranks of one thread, and one rank of all threads."""
    graph, model, link, candidates = place
    two = Cell(graph=graph, model=model, link=link, candidates=candidates)
    return two, replace(two, ranks=1, threads=ALL_THREADS, candidates=("single",))


def available(data_dir: Path) -> list[Place]:
    """Those whose raw files are there."""
    source = data_dir / "debian" / "debian.npz"
    if source.exists():
        PLANS.mkdir(exist_ok=True)
        graphs.untyped(source, PLANS / "debian.npz")
        return list(PLACES)
    print(f"debian skipped: no {source}", flush=True)
    return [place for place in PLACES if place[0] != "debian"]


def measure(places: Sequence[Place], *, count: int, minutes: float, smoke: bool) -> None:
    """`count` blocks; none of a cell begins after so many minutes. Lines that are there are not measured again."""
    began = time.monotonic()
    predicted, measured = (file.with_name("smoke_" * smoke + file.name) for file in (PREDICTED, MEASURED))
    pairs = [cells_of(place) for place in places]
    said = {row["job"]: row for row in predictions(predicted, [cell for pair in pairs for cell in pair], PLANS)}
    done = {(row["block"], row["job"]) for row in records.read(measured)}
    for block in range(count):
        for pair in random.Random(block).sample(pairs, len(pairs)):
            jobs = [f"{cell.name}; {label}" for cell in pair for label in cell.candidates]
            if all((block, job) in done for job in jobs):
                continue
            if time.monotonic() - began > 60 * minutes:
                print(f"stopped after {minutes:g} minutes; the same command goes on", flush=True)
                return
            rows = [
                {"block": block, "job": job, "result": result}
                for cell in random.Random(block).sample(pair, 2)
                for job, result in launched(cell, [said[f"{cell.name}; {label}"] for label in cell.candidates], block)
            ]
            records.append(measured, rows)
            spent = time.monotonic() - began
            print(f"block {block}, {pair[0].name}: {len(rows)} launches, {spent:.0f} s since the start", flush=True)


def launched(cell: Cell, rows: Sequence[Mapping[str, Any]], block: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(job, what its launch says): a sweep over plans of as many epochs."""
    shuffled = sorted(random.Random(block).sample(rows, len(rows)), key=epochs_of)
    links = [o for o in cell.overrides if o.startswith(("launch", "world_size", "threads_per_rank"))]
    for epochs, group in groupby(shuffled, key=epochs_of):
        jobs = [row["job"] for row in group]
        plans = ",".join(str(PLANS / folder_of(job) / "plan.json") for job in jobs)
        with tempfile.TemporaryDirectory() as folder:
            common = [*links, f"epochs={epochs}", f"eval_every={epochs}", "checkpoint.keep=0"]
            blocks.call(["-m", f"plan={plans}", *common, f"hydra.sweep.dir={folder}"])
            for number, job in enumerate(jobs):
                result = json.loads((Path(folder) / str(number) / "result.json").read_text(encoding="utf-8"))
                yield job, {key: result[key] for key in KEPT} | {"peak_bytes": result["memory_bytes"]["peak"]}


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


def pairs() -> list[Pair]:
    """Of what was launched; an epoch is the mean of a launch, which holds whole periods."""
    return read(PREDICTED, MEASURED, epoch="mean") if records.read(MEASURED) else []
