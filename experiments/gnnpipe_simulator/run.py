"""The event simulator against measured epochs of a pipeline of two ranks.

Costs come from a *profile*: one rank that holds both stages (strategy.stages=1 strategy.virtual=2) and computes every
chunk of every stage, beside a second copy of itself, as the two ranks of a pipeline compete for memory. Nothing of the
measured runs enters a prediction: links are taken at their set rate, with a latency fixed here beforehand.

Needs root and iproute2.
"""

import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import blocks
import numpy as np
import records
from records import Files

from gnnpar.parallel.pipeline.schedule import fill_drain
from gnnpar.parallel.pipeline.simulate import Link, simulate
from gnnpar.training.trace import costs_of

STAGES, HIDDEN, REPEATS = 2, 100, 3
LATENCY_SECONDS = 2e-4  # of a message between two processes of this machine, posting included
LOOPBACK_BYTES_PER_SECOND = 1e9
DEPTHS, CHUNKS, RATES = (8, 32), (8, 32), (0.05, 0.5, None)  # layers, K, Gbit/s (None: loopback)


def common(layers: int, chunks: int, nodes: int) -> list[str]:
    """The order of chunks is fixed, so that a slot is the same chunk in every epoch."""
    graph = ["dataset=sbm", f"dataset.num_nodes={nodes}", "dataset.num_features=100"]
    model = ["model=gcn", f"model.hidden={HIDDEN}", f"model.num_layers={layers}", "model.encoder=linear"]
    pipeline = ["strategy=gnnpipe", f"strategy.chunks={chunks}", "strategy.order=fixed"]
    about = ["threads_per_rank=1", "seed=0", "epochs=15", "eval_every=15", "tracker=jsonl"]
    return [*graph, *model, "model.decoder=linear", *pipeline, *about]


def twice(overrides: list[str], folders: Sequence[str]) -> None:
    """Train in all folders at once."""
    commands = [[*blocks.GNNPAR, "train", *overrides, f"hydra.run.dir={folder}"] for folder in folders]
    with ThreadPoolExecutor() as pool:
        list(pool.map(blocks.output_of, commands))


def read(folder: str) -> tuple[list[tuple[int, str, float, float]], list[int]]:
    """What the trace shows, nodes of each chunk."""
    here = Path(folder)
    events = json.loads((here / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    rows = [(e["pid"], e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["ph"] == "X"]
    chunk_of = np.load(here / json.loads((here / "plan.json").read_text(encoding="utf-8"))["arrays"]["chunk_of"])
    return rows, np.bincount(chunk_of).tolist()


def profile(layers: int, chunks: int, nodes: int) -> dict[str, Any]:
    """Seconds of every action by its text (medians over launches), the rest of an epoch, rows of every slot."""
    asked = [*common(layers, chunks, nodes), "world_size=1", "strategy.stages=1", "strategy.virtual=2", "trace=true"]
    costs: dict[str, list[float]] = {}
    rest, sizes = [], []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            twice(asked, (one, other))
            rows, sizes = read(one)
        mine = {str(action): seconds for (_, action), seconds in costs_of(rows).items() if action.computes}
        for text, seconds in mine.items():
            costs.setdefault(text, []).append(seconds)
        window = max(end for *_, end in rows)
        rest.append(window - sum(mine.values()))
    medians = {text: statistics.median(values) for text, values in costs.items()}
    return {"costs": medians, "rest": statistics.median(rest), "sizes": sizes}


def predict(found: dict[str, Any], chunks: int, rate: float | None) -> float:
    """Seconds of an epoch: the simulated schedule, and what an epoch does beside it."""
    bandwidth = LOOPBACK_BYTES_PER_SECOND if rate is None else rate * 1e9 / 8
    letter = {"forward": "F", "backward": "B"}
    timeline = simulate(
        fill_drain(STAGES, chunks),
        lambda kind, stage, slot: found["costs"][f"{letter[kind]}{slot}@{stage}"] if kind in letter else 0.0,
        link=Link(latency_seconds=LATENCY_SECONDS, bytes_per_second=bandwidth),
        nbytes=lambda _, __, slot: 4.0 * HIDDEN * found["sizes"][slot],
    )
    return timeline.makespan + found["rest"]


def measure(layers: int, chunks: int, nodes: int, rate: float | None) -> dict[str, Any]:
    links = [] if rate is None else ["launch=paced", "launch.hosts=2", f"launch.rate_gbps={rate}"]
    result = blocks.train([*common(layers, chunks, nodes), "world_size=2", *links])["result"]
    return {key: result[key] for key in ("epoch_seconds", "breakdown_seconds", "oversubscribed", "load", "hardware")}


def run(files: Files, *, nodes: int = 6000) -> None:
    """Profile, then measure cells in random order."""
    depths, chunk_counts, rates = ((4,), (4,), (None,)) if files.smoke else (DEPTHS, CHUNKS, RATES)
    nodes = 600 if files.smoke else nodes
    done = files.read()
    profiles = {(row["layers"], row["chunks"]): row for row in done if row["kind"] == "profile"}
    for layers, chunks in itertools.product(depths, chunk_counts):
        if (layers, chunks) not in profiles:
            found = {"kind": "profile", "layers": layers, "chunks": chunks, **profile(layers, chunks, nodes)}
            profiles[layers, chunks] = found
            records.append(files(), [found])
            print(f"profile of {layers} layers, {chunks} chunks", flush=True)
    cells = list(itertools.product(depths, chunk_counts, rates, range(REPEATS)))
    random.Random(0).shuffle(cells)
    seen = {(row["layers"], row["chunks"], row["rate"], row["repeat"]) for row in done if row["kind"] == "cell"}
    for layers, chunks, rate, repeat in (cell for cell in cells if cell not in seen):
        row = {"kind": "cell", "layers": layers, "chunks": chunks, "rate": rate, "repeat": repeat}
        row["predicted"] = predict(profiles[layers, chunks], chunks, rate)
        row |= measure(layers, chunks, nodes, rate)
        records.append(files(), [row])
        measured = row["epoch_seconds"]["median"]
        print(f"{row['predicted']:.4f} s predicted, {measured:.4f} s measured", flush=True)
