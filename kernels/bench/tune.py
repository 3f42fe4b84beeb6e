"""Time every tile that attention may take, and write the table of this GPU: `python kernels/bench/tune.py [--jobs N]`.

First, N processes compile all tiles on a graph of a hundredth of the size. Then one process launches and times them,
and writes gnnpar_kernels/tuned/ARCH.json and, with --csv, every time. Entries of the same GPU and versions are timed
again only with --again. On a CPU there are no tiles: the launches run, and no table is written.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import gnnpar_kernels as kernels
from bench.graphs import GRAPHS, Inputs, draw
from bench.registry import attend, attend_grad, layer
from gnnpar_kernels import triton_tuning

HEADS = ((4, 64), (4, 32), (8, 32))
TYPES = (torch.float32, torch.bfloat16)
Launch = Callable[[], object]


def launches(data: Inputs) -> Iterator[Launch]:
    """Yield the launches of attention in training and evaluation, by shape and type."""
    for shape, dtype in product(HEADS, TYPES):
        for case in (attend(*shape, dtype), attend_grad(*shape, dtype), layer("gatv2", *shape, dtype)):
            yield lambda case=case: case.race(data).op(kernels)


def compile_share(data: Inputs, share: int, jobs: int) -> None:
    """Run every `jobs`-th launch. Discard the times, since the graph is small."""
    with tempfile.TemporaryDirectory() as folder:
        triton_tuning.FOLDER = Path(folder)
        for number, launch in enumerate(launches(data)):
            if number % jobs == share:
                launch()


def compile_all(given: argparse.Namespace) -> None:
    """Compile in separate processes, which fill Triton's cache on disk."""
    command = [sys.executable, __file__, "--graph", given.graph, "--device", given.device, "--jobs", str(given.jobs)]
    command += ["--scale", str(given.scale / 100), "--compile"]
    shares = [subprocess.Popen([*command, str(share)]) for share in range(given.jobs)]
    codes = [share.wait() for share in shares]
    if any(codes):
        raise SystemExit("a process that compiles failed; its output says why")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--graph", default="products", choices=GRAPHS)
    parser.add_argument("--scale", type=float, default=1.0, help="share of its nodes and edges")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile (default 1: none but this one)")
    parser.add_argument("--again", action="store_true", help="also what the table has")
    parser.add_argument("--csv", type=Path, help="file for every time")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ[triton_tuning.VARIABLE] = "record"
    if given.jobs > 1 and given.compile is None:
        compile_all(given)
    data = draw(GRAPHS[given.graph].scaled(given.scale), device=given.device)
    if given.compile is not None:
        compile_share(data, given.compile, given.jobs)
        return
    if given.again and data.device.type == "cuda":
        triton_tuning.table().chosen.clear()
    for launch in launches(data):
        launch()
    rows = [(given.graph, t.kernel, t.shape, t.tile["TILE"], round(t.milliseconds, 3)) for t in triton_tuning.timings]
    if given.csv is not None:
        with given.csv.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([("graph", "kernel", "shape", "tile", "ms"), *rows])
    where = (
        f"; the fastest tiles are in {triton_tuning.table().path}" if data.device.type == "cuda" else ": a CPU has none"
    )
    print(f"{len(rows)} times on {given.graph} x {given.scale:g}{where}")


if __name__ == "__main__":
    main()
