"""Layers, weighted sums and mapped models beside what they are held to, and what a start from Python costs.

Calls of a race take turns, in an order of the block's own, so that a slow minute of the machine hits all of them. The
checkout must be clean: each line names its commit.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from timeit import timeit
from typing import Any  # of JSON

import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))

import records
from blocks import shuffled
from epochs import facts, peak_bytes
from layer_speed.contenders import CLOSE, Call, Race, races
from records import Files

import startup
from gnnpar.training.result.result import commit

NODES, SMALL = 50_000, 1_000
BLOCKS, SMOKE_BLOCKS = 10, 3
THREADS = (1, 2)
BLOCK_SECONDS = 0.2  # a call that is shorter is repeated
LONG_SECONDS = 1.0
PARTS = ("start", "layers", "sums", "models")
STARTS: Mapping[str, Mapping[str, object]] = {
    "one rank": {"strategy": "single"},
    "two ranks": {"strategy": "graph_parallel", "world_size": 2, "threads_per_rank": 1},
}


def warm(call: Call) -> float:
    """Seconds of a second call, or of a first one that is long."""
    first = timeit(call, number=1)
    return first if first > LONG_SECONDS else timeit(call, number=1)


def differences(race: Race) -> dict[str, float]:
    """Of every call from the first, before anything is timed: of the output and of the gradient of the input, RMS of
    the difference over RMS."""
    if race.part != "layers":
        return {}
    outputs = {name: [each.double() for each in call()[:2]] for name, call in race.calls.items()}
    expected = outputs.pop(next(iter(race.calls)))
    found = {
        name: max(float((x - y).norm() / y.norm()) for x, y in zip(output, expected, strict=True))
        for name, output in outputs.items()
    }
    if max(found.values()) > CLOSE:
        raise SystemExit(f"{race.case}: calls do not compute the same: {found}")
    return found


def measure(race: Race, *, blocks: int, threads: Iterable[int]) -> Iterator[dict[str, Any]]:
    """A line a block and number of threads, and one of memory, which is measured on one thread."""
    row = {"part": race.part, "case": race.case, "nodes": race.graph.num_nodes, "edges": race.graph.num_edges}
    agreed = differences(race)
    for count in threads:
        torch.set_num_threads(count)
        times = {name: max(1, round(BLOCK_SECONDS / warm(call))) for name, call in race.calls.items()}
        for block in range(blocks):
            order = shuffled(race.calls, block)
            seconds = {name: timeit(race.calls[name], number=times[name]) / times[name] for name in order}
            yield {**row, "threads": count, "block": block, "calls": times, "seconds": seconds, **facts()}
    torch.set_num_threads(1)
    peaks = {name: peak_bytes(call) for name, call in race.calls.items()}
    yield {**row, "difference": agreed, "peak_bytes": peaks, **facts()}


def measure_start(case: str, *, blocks: int) -> Iterator[dict[str, Any]]:
    """The same training from the command line and from Python, on a graph of 3,000 nodes: CPU seconds of all processes
    until the line of the first epoch. A line a block."""
    given, python = {**STARTS[case], "tracker.every": 1}, [sys.executable, "-P"]
    line = ["-m", "gnnpar", "train", "dataset=sbm", "model=gcn", "epochs=3", "hydra.run.dir=run"]
    script = f"import gnnpar; gnnpar.train('gcn', 'sbm', epochs=3, folder='run', **{given!r})"
    both = {"gnnpar train": [*python, *line, *(f"{key}={value}" for key, value in given.items())]}
    both["gnnpar.train"] = [*python, "-c", script]
    for block in range(blocks):
        order = shuffled(both, block)
        seconds = {name: startup.cpu_seconds_of(both[name], "epoch 1/", ROOT) for name in order}
        yield {"part": "start", "case": case, "block": block, "seconds": seconds, **facts()}


def keep(out: Path, found: Iterable[dict[str, Any]]) -> None:
    """All lines of a case, or none."""
    rows = []
    for row in found:
        rows.append(row)
        if "seconds" in row:
            shown = ", ".join(f"{name} {seconds:.4f} s" for name, seconds in row["seconds"].items())
            threads = f", {row['threads']} threads" if "threads" in row else ""
            print(f"{row['part']} {row['case']}{threads}, block {row['block']}: {shown}", flush=True)
    records.append(out, rows)


def run(files: Files, *, part: tuple = PARTS, blocks: int = BLOCKS) -> None:
    """Measure races and starts. part: start, layers, sums, models. In a rehearsal, on a fiftieth of the graph."""
    if not files.smoke and str(commit()).endswith("+"):
        raise SystemExit("the checkout has changes: commit them, each line names its commit")
    blocks, threads = (SMOKE_BLOCKS, (1,)) if files.smoke else (blocks, THREADS)
    done = {(row["part"], row["case"]) for row in files.read()}
    for case in STARTS if "start" in part else ():
        if ("start", case) not in done:
            keep(files(), measure_start(case, blocks=blocks))
    for race in races(SMALL if files.smoke else NODES, part):
        if (race.part, race.case) not in done:
            keep(files(), measure(race, blocks=blocks, threads=threads))
