"""Epoch time and peak memory of `single` and `graph_parallel` beside PyG's layers, ratios inside one run.

Variants take turns epoch by epoch, so that a slow minute of the machine hits all of them: programs of bench_peers.
"""

import datetime
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import reports
import torch
from bench_peers.run import measure
from records import Files

MODELS = ("gcn", "sage", "gat")
DROPOUT, CORES = 0.5, os.cpu_count() or 1


def compared(graph: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a line a model and base: seconds of both, their ratios in a round, peaks above what was alive."""
    for threads in sorted({1, CORES}):
        cell = {"graph": graph, "threads": threads, "dropout": DROPOUT, "rounds": rounds}
        for model in MODELS:
            lines = measure(f"{model} | {threads}", cell, {}, ("single", "pyg"))
            yield {"table": "pyg", "model": model, "threads": threads, **ratio(lines, "single", "pyg")}
    if CORES < 2:
        print("graph_parallel on 2 ranks needs 2 cores: not measured")
        return
    cell = {"graph": graph, "threads": 1, "ranks": 2, "dropout": DROPOUT, "rounds": rounds}
    for model in MODELS:
        lines = measure(f"{model} | ranks", cell, {}, ("single", "single threads=2", "graph_parallel"))
        for threads, base in ((1, "single"), (2, "single threads=2")):
            found = ratio(lines, base, "graph_parallel")
            found |= {"speedup": 1 / found["speedup"], "low": 1 / found["high"], "high": 1 / found["low"]}
            yield {"table": "ranks", "model": model, "threads": threads, **found}


def ratio(lines: Sequence[dict[str, Any]], one: str, other: str) -> dict[str, float]:
    """Return medians of both, and the other over the one in the same round."""
    single, beside = (
        [line["seconds"] for line in lines if line["kind"] == kind and line.get("round", -1) >= 0]
        for kind in (one, other)
    )
    pairs = [b / a for a, b in zip(single, beside, strict=True)]
    found = {"single_seconds": statistics.median(single), "other_seconds": statistics.median(beside)}
    found |= {"speedup": statistics.median(pairs), "low": min(pairs), "high": max(pairs)}
    peaks = {line["kind"]: line["live_mib"] for line in lines if "live_mib" in line}
    return found | {"single_mib": peaks[one], "other_mib": peaks[other]}


def run(files: Files, *, epochs: int = 7) -> None:
    """Measure; in a rehearsal on a tenth of the graph."""
    about = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "cores": CORES}
    rows = []
    for row in compared("sbm_tenth" if files.smoke else "sbm", epochs):
        print(" ".join(f"{each:.3f}" if isinstance(each, float) else str(each) for each in row.values()), flush=True)
        rows.append({**row, **about})
    reports.write_csv(files().with_suffix(".csv"), rows)
