"""Epochs on one GPU: `single`, captured, in bf16 and out of core, beside the same model of PyG's layers.

The graphs are random, of the sizes of ogbn-arxiv, Reddit and ogbn-products, with power-law degrees. One contender lives
at a time: a peak is its own. A cell whose time is up is not begun. Away from a GPU: --device cpu --scale 0.01.
"""

import functools
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "kernels"))

import records
import torch
import torch_geometric
import triton
from bench_peers.peer_pyg import PyGModel, adjacency
from epochs import Epoch, alone, gnnpar_epoch, models, pyg_epoch
from records import Files
from torch import Tensor

from bench.graphs import GRAPHS, Size, draw
from bench.report import commit, hardware
from gnnpar.data.dataset import Dataset
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.partition.partition import Random
from gnnpar.training.result.result import WARMUP_EPOCHS

FEATURES, CLASSES, PARTS = 128, 40, 8
MODELS = dict(sorted(models(dropout=0.5).items()))
LARGE = 10_000_000  # edges
WARM_UP, EPOCHS = 3, 20
CAPTURED_BY = WARMUP_EPOCHS + 2  # epochs before a replay is measured
SHORT = 2.0  # seconds of measured epochs that are enough, after three of them
KEY = ("graph", "nodes", "model", "contender", "hardware")  # of a line


@functools.lru_cache(maxsize=1)
def dataset_of(name: str, size: Size, device: torch.device) -> Dataset:
    """A loop at every node, features and labels at random, a tenth of the nodes to train on. On the CPU."""
    graph, nodes = draw(size, device=device.type), size.nodes
    every = torch.arange(nodes, device=device)
    key = torch.cat([graph.dst * nodes + graph.src, every * (nodes + 1)]).sort().values
    generator = torch.Generator().manual_seed(0)
    train = torch.rand(nodes, generator=generator) < 0.1
    return Dataset.of(
        name,
        x=torch.randn(nodes, FEATURES, generator=generator),
        y=torch.randint(CLASSES, (nodes,), generator=generator),
        edge_index=torch.stack([key % nodes, key // nodes]).cpu(),
        masks=(train, ~train, ~train),
        num_classes=CLASSES,
        task="single_label",
    )


def contenders(data: Dataset, kind: str, device: torch.device) -> Iterator[tuple[str, Callable[[], Epoch]]]:
    """Small graphs are bound by launches, so epochs are captured; large ones by memory, so parts lie out of core."""

    def ours(strategy: Single | SAR = Single(), **how: Any) -> Callable[[], Epoch]:
        return lambda: gnnpar_epoch(data, strategy, MODELS[kind], alone(device), by=Random(), **how)

    def pyg(graph_of: Callable[[Tensor, int], Tensor]) -> Epoch:
        config = MODELS[kind]
        widths = [FEATURES, *[config.hidden] * (config.num_layers - 1), CLASSES]
        model = PyGModel(kind, widths, heads=4, dropout=config.dropout).to(device)
        return pyg_epoch(model, data, graph_of(data.edge_index.to(device), data.num_nodes))

    yield "single", ours()
    yield "single, bf16", ours(dtype=torch.bfloat16)
    if kind != "gat":
        yield "PyG, CSR", lambda: pyg(adjacency)
    yield "PyG, edge list", lambda: pyg(lambda edges, _: edges)
    if data.num_edges >= LARGE:
        yield f"sar, {PARTS} parts out of core", ours(SAR(logical_parts=PARTS))
    elif device.type == "cuda":
        yield "single, captured", ours(captured=True)
        yield "single, bf16, captured", ours(dtype=torch.bfloat16, captured=True)


def measure(build: Callable[[], Epoch], device: torch.device, *, warm_up: int, profile: Path | None) -> dict[str, Any]:
    """Milliseconds of epochs, each to the end of its last kernel; MiB at most, the graph and the weights among them."""
    on_gpu = device.type == "cuda"
    finish = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    epoch = build()
    losses = [epoch() for _ in range(warm_up)]
    times: list[float] = []
    while len(times) < 3 or (len(times) < EPOCHS and sum(times) < SHORT * 1e3):
        finish()
        began = time.perf_counter()
        losses.append(epoch())
        finish()
        times.append((time.perf_counter() - began) * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None
    if profile is not None and on_gpu:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
            epoch()
            finish()
        table = recorded.key_averages().table(sort_by="device_time_total", row_limit=14, max_name_column_width=60)
        profile.write_text(table)
    return {"milliseconds": times, "peak_mib": peak, "loss": [losses[0], losses[-1]]}


def run(
    files: Files,
    *,
    device: str = "cuda",
    graphs: tuple = ("arxiv", "products", "reddit"),
    models: tuple = tuple(MODELS),
    contender: str = "",
    scale: float = 1.0,
    seconds: float = 600.0,
    profile: bool = False,
) -> None:
    """Measure cells that are not in the file.

    contender: only those with this in their names. scale: share of the nodes and edges of each graph. seconds: begin no
    cell after these. profile: write the longest kernels of an epoch beside the lines.
    """
    where, began = torch.device(device), time.monotonic()
    packages = {"torch": torch.__version__, "triton": triton.__version__, "pyg": torch_geometric.__version__}
    about = {"hardware": hardware(where.type), "commit": commit(), "versions": packages}
    done = {tuple(row[name] for name in KEY) for row in files.read()}
    for name, kind in itertools.product(graphs, models):
        size = GRAPHS[name].scaled(scale)
        data = dataset_of(name, size, where)
        for told, build in contenders(data, kind, where):
            cell = (name, size.nodes, data.num_edges, kind, told)
            row = dict(zip(("graph", "nodes", "edges", "model", "contender"), cell, strict=True)) | about
            if tuple(row[key] for key in KEY) in done or contender not in told:
                continue
            if time.monotonic() - began > seconds:
                print(f"{seconds:.0f} s are over: call it again to go on")
                return
            kept = files.folder / f"profile-{name}-{kind}-{told.replace(', ', '-').replace(' ', '-')}.txt"
            try:
                warm_up = CAPTURED_BY if "captured" in told else WARM_UP
                found = measure(build, where, warm_up=warm_up, profile=kept if profile else None)
                said = f"{statistics.median(found['milliseconds']):.2f} ms, {found['peak_mib'] or 0:.0f} MiB"
            except torch.OutOfMemoryError as error:  # is a result
                said = str(error).strip().splitlines()[0][:74]
                found = {"milliseconds": [], "peak_mib": None, "loss": None, "error": said}
            gc.collect()
            records.append(files(), [{**row, **found}])
            print(f"{time.monotonic() - began:5.0f} s  {name} {kind}, {told}: {said}", flush=True)
