"""Epochs per second of AdaQP's modes over a real link of limited bandwidth (network namespaces, shaped; needs root).

The link rate is found first, on vanilla alone, so that vanilla spends 72 % of its epoch in communication; then all
modes take turns on that link, in blocks of random order, and once more on links of other rates.
"""

import datetime
import os
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2] / "tests"))

import records
from blocks import rate_of
from records import Files

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import BFloat16
from gnnpar.codecs.uniform import Uniform
from gnnpar.comm import Communicator
from gnnpar.comm.world import Links
from gnnpar.config.compose import compose
from gnnpar.data.tasks import make_task
from gnnpar.launch.emulated.namespaces import Network
from gnnpar.launch.emulated.paced import burst_kib, reached_gbps
from gnnpar.models.gcn import GCN
from gnnpar.models.sage import SAGE
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.halo.adaqp import AdaQP
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.objective import NodeObjective
from gnnpar.parallel.strategy import Strategy, Workload
from gnnpar.partition.partition import Metis
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan, Topology
from gnnpar.training.meter import EpochMeter, evaluate, merge
from gnnpar.training.result.result import commit, processor
from worlds import run_world

TARGET, TOLERANCE = 0.72, 0.03
PERIOD, WARMUP = 20, 5
MODES: dict[str, Strategy] = {
    "vanilla": GraphParallel(overlap="none"),
    "bf16_overlap": GraphParallel(codec=BFloat16()),
    "adaqp_p": AdaQP(codec=GraphParallel().codec),  # fp32 halos, overlapped
    "adaqp_q": AdaQP(codec=Adaptive(period=PERIOD), overlap="none"),
    "uniform_8": AdaQP(codec=Uniform(bits=8)),
    "uniform_4": AdaQP(codec=Uniform(bits=4)),
    "uniform_2": AdaQP(codec=Uniform(bits=2)),
    "adaptive": AdaQP(codec=Adaptive(period=PERIOD)),
    "adaptive_paper": AdaQP(codec=Adaptive(period=PERIOD, trace="range", importance="square_of_sum", scope="exchange")),
}
MODELS = {"gcn": GCN, "sage": SAGE}
Work = Callable[[Communicator], list[dict[str, Any]]]  # of every rank


def turns(
    dataset: Any,
    config: Any,
    plan: Plan,
    modes: tuple[str, ...],
    blocks: int,
    epochs: int,
    warmup: int,
    comm: Communicator,
) -> list[dict[str, Any]]:
    """Return rows of rank 0: engines of some modes side by side, `epochs` of each a block, in shuffled order, after
    `warmup` epochs of each."""
    task = make_task(dataset.task, dataset.num_classes)
    shard = Shard.open(dataset if comm.rank == 0 else None, plan.part_of, comm)
    engines, rows, order = {}, [], random.Random(0)
    for mode in modes:
        model = config.build(dataset.num_features, task.out_dim, seed=0)
        engine = MODES[mode].build(BuildContext(plan=plan, shard=shard, model=model, task=task, comm=comm, seed=0))
        engines[mode] = engine, torch.optim.Adam([p for _, p in engine.named_parameters()], lr=0.01)
    for block in range(-1, blocks):
        count = warmup if block < 0 else epochs
        first = 0 if block < 0 else warmup + block * epochs
        for mode in order.sample(modes, k=len(modes)):
            for epoch in range(first, first + count):
                row = one_epoch(comm, *engines[mode], epoch)
                if block >= 0 and row is not None:
                    rows.append({"mode": mode, "block": block, "epoch": epoch, **row})
    tests = {mode: evaluate(engine, NodeObjective(task, shard, comm)) for mode, (engine, _) in engines.items()}
    return [row | {"test": tests[row["mode"]]["metric/test"]} for row in rows]


def one_epoch(comm: Communicator, engine: Any, optimizer: Any, epoch: int) -> dict[str, Any] | None:
    meter = EpochMeter(comm)
    with meter:
        report = engine.train_epoch(epoch, optimizer)
    everyone = comm.gather(meter.read() | {"peak_rss": 0})
    return None if everyone is None else {"loss": report.loss} | merge(everyone) | report.facts


def share(rows: list[dict[str, Any]]) -> float:
    """Of vanilla's epochs, what it spends waiting for messages."""
    mine = [row for row in rows if row["mode"] == "vanilla"]
    waits = sum(row["time/exposed_wire_seconds"] + row["time/exposed_skew_seconds"] for row in mine)
    return waits / sum(row["time/epoch_seconds"] for row in mine)


def over_link(work: Work, gbps: float, ranks: int) -> tuple[list[dict[str, Any]], list[float]]:
    """Rows of rank 0, and what each link reached."""
    hosts = (gbps,) * ranks
    links = Links(host_gbps=hosts, host_of=tuple(range(ranks)), burst_kib=burst_kib(gbps))
    with Network.built(links) as network:
        return run_world("gloo", ranks, work, network)[0], reached_gbps(network)


def spent(work: Work, ranks: int, rate: float) -> tuple[float, float, float]:
    """Return seconds of vanilla's epoch, in messages, and in the reduction."""
    rows, _ = over_link(work, rate, ranks)
    epoch, reduce = (statistics.fmean(row[f"time/{k}_seconds"] for row in rows) for k in ("epoch", "reduce"))
    return epoch, share(rows) * epoch, reduce


def run(
    files: Files, *, ranks: int = 2, blocks: int = 5, scale: float = 0.05, degree: float = 80.0, models: tuple = ()
) -> None:
    """Find the rate, then measure all modes there and at other rates.

    ranks: 4 on 2 cores say bytes and accuracy, no speed. scale: of sbm_reddit's nodes; degree: average, since a graph
    so small cannot have Reddit's 492. In a rehearsal a tiny graph, one model and a few epochs.
    """
    hidden, tolerance, warmup, length = 256, TOLERANCE, WARMUP, PERIOD // 5
    if files.smoke:  # else one whole period is measured, so that its re-assignment counts: 5 blocks of 4 epochs
        scale, degree, models, hidden, tolerance, blocks, warmup, length = 0.005, 12.0, ("gcn",), 32, 1.0, 2, 4, 2
    graph = ["dataset=sbm_reddit", f"dataset.scale={scale}", f"dataset.avg_degree={degree}"]
    dataset = compose(graph).dataset.load(None, 0)
    session = datetime.datetime.now().isoformat(timespec="seconds")
    for name in models or MODELS:
        config = MODELS[name](num_layers=3, hidden=hidden, dropout=0.5, norm="layer")
        plan = GraphParallel().plan(Workload(dataset, Metis(), 3), Topology(ranks))
        measured = partial(turns, dataset, config, plan)
        rate, found = rate_of(TARGET, tolerance, partial(spent, partial(measured, ("vanilla",), 1, 4, 2), ranks))
        points = [(rate, partial(measured, tuple(MODES), blocks, length, warmup), "operating")]
        if not files.smoke:
            points += [(rate * f, partial(measured, tuple(MODES), 2, 2, 3), "curve") for f in (16.0, 4.0, 0.4)]
        for gbps, what, kind in points:
            rows, reached = over_link(what, gbps, ranks)
            about = {"session": session, "kind": kind, "model": name, "scale": scale, "nodes": dataset.num_nodes}
            about |= {"edges": dataset.num_edges, "alpha": plan.statistics["alpha"], "ranks": ranks}
            about |= {"rate_gbps": gbps, "reached_gbps": reached, "share": share(rows), "found_share": found}
            about |= {"cores": os.cpu_count(), "processor": processor(), "torch": torch.__version__}
            about |= {"commit": commit(), "load": os.getloadavg()[0]}
            about |= {"oversubscribed": ranks > (os.cpu_count() or 1)}
            records.append(files(), [{**about, **row} for row in rows])
            print(f"{name} at {gbps:.4f} Gbit/s: share {about['share']:.1%}", flush=True)
