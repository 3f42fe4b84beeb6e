"""Epochs on one GPU: `single`, captured, in bf16 and out of core, beside the same model of PyG's layers.

    python experiments/one_gpu/run.py --seconds 120            # writes results.jsonl, a line a measurement
    python experiments/one_gpu/run.py --device cpu --scale 0.01 --seconds 600 --out trial.jsonl

The graphs are random, of the sizes of ogbn-arxiv, Reddit and ogbn-products, with power-law degrees. One contender lives
at a time: a peak is its own. A cell whose time is up is not begun; those that are in the file are not measured again.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
import torch_geometric
import triton

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
sys.path[:0] = [str(HERE.parent), str(ROOT / "kernels")]


import records
from epoch_speed.pyg_models import PyGModel, adjacency
from epochs import Epoch, models, pyg_epoch

from bench.graphs import GRAPHS, Size, draw
from bench.report import commit, hardware
from gnnpar.comm import ThreadWorld
from gnnpar.data.dataset import Dataset
from gnnpar.data.tasks import make_task
from gnnpar.models.gnn import ModelConfig
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Strategy
from gnnpar.partition.shard import Shard
from gnnpar.training.captured import CapturedEpochs
from gnnpar.training.optim import Adam
from gnnpar.training.result.result import WARMUP_EPOCHS
from gnnpar.verify.conformance import make_job
from gnnpar_kernels.csr import accumulate_dtype

FEATURES, CLASSES, PARTS = 128, 40, 8
MODELS = dict(sorted(models(dropout=0.5).items()))
LARGE = 10_000_000  # edges
WARM_UP, EPOCHS = 3, 20
CAPTURED_BY = WARMUP_EPOCHS + 2  # epochs before a replay is measured
SHORT = 2.0  # seconds of measured epochs that are enough, after three of them


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


def gnnpar_epoch(
    data: Dataset,
    config: ModelConfig,
    device: torch.device,
    *,
    strategy: Strategy | None = None,
    dtype: torch.dtype = torch.float32,
    captured: bool = False,
) -> Epoch:
    """As `gnnpar train` builds it."""
    job = make_job(strategy or Single(), config, data, world=1, seed=0, dtype=dtype, optim=Adam(lr=0.01))
    (comm,) = ThreadWorld(1, device=device).communicators()
    model = job.model.to(device, accumulate_dtype(dtype))
    shard = Shard.open(data, job.plan.part_of, comm, edge_ids=model.needs_edge_ids, placement=job.plan.placement)
    task = make_task(data.task, data.num_classes)
    engine = job.strategy.build(
        BuildContext(plan=job.plan, shard=shard.to(device, dtype), model=model, task=task, comm=comm, seed=0)
    )
    optimizer = job.optim.build(engine.named_parameters(), epochs=1000, layer_of=model.layer_of)
    replays = CapturedEpochs(engine, optimizer, comm, 0, model) if captured else None
    number = 0

    def epoch() -> float:
        nonlocal number
        number += 1
        report = engine.train_epoch(number, optimizer) if replays is None else replays.train_epoch(number)
        comm.ledger.drain()
        return report.loss

    return epoch


def theirs(data: Dataset, config: ModelConfig, device: torch.device, *, kind: str, csr: bool) -> Epoch:
    widths = [FEATURES, *[config.hidden] * (config.num_layers - 1), CLASSES]
    edges = data.edge_index.to(device)
    model = PyGModel(kind, widths, heads=4, dropout=config.dropout).to(device)
    return pyg_epoch(model, data, adjacency(edges, data.num_nodes) if csr else edges)


Build = Callable[[Dataset, ModelConfig, torch.device], Epoch]


def contenders(kind: str, size: Size, device: torch.device) -> Iterator[tuple[str, Build]]:
    """Small graphs are bound by launches, so epochs are captured; large ones by memory, so parts lie out of core."""
    yield "single", gnnpar_epoch
    yield "single, bf16", partial(gnnpar_epoch, dtype=torch.bfloat16)
    if kind != "gat":
        yield "PyG, CSR", partial(theirs, kind=kind, csr=True)
    yield "PyG, edge list", partial(theirs, kind=kind, csr=False)
    if size.edges >= LARGE:
        yield f"sar, {PARTS} parts out of core", partial(gnnpar_epoch, strategy=SAR(logical_parts=PARTS))
    elif device.type == "cuda":
        yield "single, captured", partial(gnnpar_epoch, captured=True)
        yield "single, bf16, captured", partial(gnnpar_epoch, dtype=torch.bfloat16, captured=True)


def measure(
    build: Callable[[], Epoch], device: torch.device, *, warm_up: int, profile: Path | None
) -> Mapping[str, object]:
    """Milliseconds of epochs, each to the end of its last kernel; MiB at most, the graph and the weights among them."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    epoch = build()
    losses = [epoch() for _ in range(warm_up)]
    times: list[float] = []
    while len(times) < 3 or (len(times) < EPOCHS and sum(times) < SHORT * 1e3):
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        losses.append(epoch())
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None
    if profile is not None and on_gpu:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
            epoch()
            torch.cuda.synchronize()
        table = recorded.key_averages().table(sort_by="device_time_total", row_limit=14, max_name_column_width=60)
        profile.write_text(table)
    return {"milliseconds": times, "peak_mib": peak, "loss": [losses[0], losses[-1]]}


def cells(
    device: torch.device, graphs: Iterable[str], models: Iterable[str], scale: float
) -> Iterator[tuple[dict, Callable[[], Epoch]]]:
    for name in graphs:
        size = GRAPHS[name].scaled(scale)
        data = dataset_of(name, size, device)
        for kind in models:
            for contender, build in contenders(kind, size, device):
                row = {"graph": name, "nodes": size.nodes, "edges": data.num_edges, "model": kind}
                yield row | {"contender": contender}, partial(build, data, MODELS[kind], device)
        del data


def key_of(row: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(row[name] for name in ("graph", "nodes", "model", "contender", "hardware"))


def origin(device: torch.device) -> dict[str, object]:
    """Where, on which commit and with what a line is measured."""
    packages = {"torch": torch.__version__, "triton": triton.__version__, "pyg": torch_geometric.__version__}
    return {"hardware": hardware(device.type), "commit": commit(), "versions": packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--graphs", default="arxiv,products,reddit")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--contender", default="", help="only those whose name contains this")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the nodes and edges of each graph")
    parser.add_argument("--seconds", type=float, default=600, help="begin no cell after these")
    parser.add_argument("--out", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--profile", action="store_true", help="beside the file, the longest kernels of an epoch")
    given = parser.parse_args()
    device, began = torch.device(given.device), time.monotonic()
    about, done = origin(device), {key_of(row) for row in records.read(given.out)}
    for cell, build in cells(device, given.graphs.split(","), given.models.split(","), given.scale):
        row, contender = cell | about, str(cell["contender"])
        if key_of(row) in done or given.contender not in contender:
            continue
        if time.monotonic() - began > given.seconds:
            print(f"{given.seconds:.0f} s are over: call it again to go on")
            return
        told = "-".join(str(row[name]).replace(", ", "-").replace(" ", "-") for name in ("graph", "model", "contender"))
        profile = given.out.with_name(f"profile-{told}.txt") if given.profile else None
        try:
            warm_up = CAPTURED_BY if "captured" in contender else WARM_UP
            found = measure(build, device, warm_up=warm_up, profile=profile)
            times = found["milliseconds"]
            assert isinstance(times, list)
            said = f"{statistics.median(times):.2f} ms, {found['peak_mib'] or 0:.0f} MiB"
        except torch.OutOfMemoryError as error:  # is a result
            said = str(error).strip().splitlines()[0][:74]
            found = {"milliseconds": [], "peak_mib": None, "loss": None, "error": said}
        gc.collect()
        records.append(given.out, [{**row, **found}])
        print(f"{time.monotonic() - began:5.0f} s  {row['graph']} {row['model']}, {contender}: {said}", flush=True)


if __name__ == "__main__":
    main()
