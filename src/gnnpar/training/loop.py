"""The training loop of one rank, flat: plan, shard, build, go on where a checkpoint left off, then epochs.

Only rank 0 reads the dataset, plans, and talks to trackers; every figure it logs is already reduced over ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnpar.comm import Communicator
from gnnpar.data.tasks import make_task
from gnnpar.durable import write_json_whole
from gnnpar.launch import paced
from gnnpar.launch.namespaces import interface_sent_bytes
from gnnpar.launch.stop import Interrupted, Stop
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan
from gnnpar.planner import replan
from gnnpar.planner.replan import Again, Replanner, plan_again
from gnnpar.settings import Settings
from gnnpar.track.console import say
from gnnpar.track.tracker import Null, Tracker
from gnnpar.training import memory
from gnnpar.training.checkpoint import files as checkpoint
from gnnpar.training.checkpoint import resume
from gnnpar.training.checkpoint.policy import Keeper
from gnnpar.training.checkpoint.resume import Start
from gnnpar.training.diagnose import first_not_finite, is_out_of_memory, out_of_memory
from gnnpar.training.evaluate import evaluate, fidelity
from gnnpar.training.measure import EpochMeter, merge
from gnnpar.training.plans import make_plan
from gnnpar.training.result.facts import WARMUP_EPOCHS, World
from gnnpar.training.result.trained import DTYPES
from gnnpar.training.shards import source_of
from gnnpar.training.trace import Recorder, traced_epoch


@dataclass(frozen=True, eq=False)
class Run:
    """What one rank trains with; complete once made."""

    settings: Settings
    world: World
    comm: Communicator
    shard: Shard
    model: Any
    engine: Any
    optimizer: Any
    task: Any
    cold: dict[str, float]
    mesh: tuple[tuple[int, ...], ...]  # stage -> ranks of its parts
    run_dir: Path
    first_epoch: int
    identity: dict[str, Any]  # what a checkpoint of this run is of
    restored: dict[str, Any] | None = None  # Progress.kept() of the checkpoint it goes on from
    profile_hash: str = ""  # of what was measured beforehand and decides on numbers
    said: dict[str, Any] | None = None  # what a planner predicted of the plan
    replanned: Plan | None = None  # rank 0's plan where it is another one than the settings give

    @property
    def since(self) -> int:
        """The epoch in which the plan began."""
        return replan.since_of(self.said)


@dataclass
class Progress:
    """What the loop remembers from epoch to epoch, equal on every rank."""

    train_seconds: float = 0.0
    num_bytes: int = 0
    best_val: float = -math.inf
    evaluations_since: int = 0
    cold: dict[str, float] = field(default_factory=dict)

    def kept(self) -> dict[str, Any]:
        """For a checkpoint."""
        best = self.best_val if self.best_val > -math.inf else None
        return {
            "train_seconds": self.train_seconds,
            "num_bytes": self.num_bytes,
            "best_val": best,
            "evaluations_since": self.evaluations_since,
        }

    def take_up(self, kept: dict[str, Any] | None) -> None:
        if kept is not None:
            best = -math.inf if kept["best_val"] is None else kept["best_val"]
            self.train_seconds, self.num_bytes, self.best_val = kept["train_seconds"], kept["num_bytes"], best
            self.evaluations_since = kept["evaluations_since"]

    def stops(self, val: float | None, settings: Settings) -> bool:
        """Early stopping, told of one more evaluation."""
        stopping = settings.early_stopping
        if val is None:  # no validation nodes: nothing to stop by
            return False
        if val > self.best_val + (stopping.min_delta if self.best_val > -math.inf else 0.0):
            self.best_val, self.evaluations_since = val, 0
        else:
            self.evaluations_since += 1
        return stopping.patience is not None and self.evaluations_since >= stopping.patience


def train(
    settings: Settings,
    world: World,
    comm: Communicator,
    tracker: Tracker,
    run_dir: Path,
    *,
    start: Start | None = None,
    stop: Stop | None = None,
) -> None:
    """Train to the end, or to the end of the epoch in which `stop` is asked (Interrupted). Collective.

    `tracker`, `start` and `run_dir` are rank 0's; all ranks write their checkpoints under its `run_dir`.
    """
    run_dir = comm.broadcast(run_dir.absolute())  # pyright: ignore[reportAssignmentType]
    try:
        run = prepare(settings, world, comm, tracker, run_dir, start or Start())
        keeper = Keeper(settings, run_dir, stop or Stop(), say)
        while (again := epochs(run, tracker, keeper)) is not None:
            run.engine.drain()
            found = checkpoint.latest(run_dir, say) if comm.rank == 0 else None
            run = prepare(settings, world, comm, Null(), run_dir, Start(found, alike=False), again)
        run.engine.drain()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, settings, world.size) from error


def epochs(run: Run, tracker: Tracker, keeper: Keeper) -> Again | None:
    """From the first epoch that is not done to the last, or to where another plan takes over. Collective."""
    settings, comm = run.settings, run.comm
    progress = Progress(cold=run.cold)
    progress.take_up(run.restored)
    comparing = replan.Replanner(run.since) if replan.wanted(settings) and not run.since else None
    for epoch in range(run.first_epoch, settings.epochs):
        row, loss, everyone = train_epoch(run, epoch, progress, keeper)
        last = epoch + 1 == settings.epochs
        stop = False
        if last or (epoch + 1) % settings.eval_every == 0:
            began = time.perf_counter()
            values = evaluate(run.engine, run.shard, run.task, comm)
            seconds = time.perf_counter() - began
            row |= values | {"metric/name": run.task.metric_name, "time/evaluate_seconds": seconds}
            stop = progress.stops(values["metric/val"], settings)
        if comm.rank == 0:
            tracker.log(row)
        now = keeper.decide(comm, epoch + 1, everyone, ends=last or stop)
        if now.broken:
            raise ValueError(broken(run, epoch, loss) + keeper.last_good())
        if now.save:
            written = keeper.save(run, epoch + 1, progress.kept(), row.get("metric/val"))
            if now.interrupted and written:
                say(f"asked to end: checkpoint after epoch {epoch}; resume=auto in the same folder goes on")
        if now.interrupted:
            raise Interrupted
        if stop:
            break
        if comparing is not None and (again := replanned(run, epoch, row, comparing)) is not None:
            if comm.broadcast(keeper.save(run, epoch + 1, progress.kept(), row.get("metric/val"), again.plan)):
                return again
            if comm.rank == 0:
                say("tag: without a checkpoint there is no way over to the other plan: the run keeps its own")
    return None


def replanned(run: Run, epoch: int, row: Mapping[str, Any], comparing: Replanner) -> Again | None:
    """After the epochs that are compared: another plan, where it is better; one line says why. Collective.

    Ranks other than 0 learn that there is one, and no more.
    """
    if run.comm.rank == 0:
        comparing.add(row)
    if epoch != comparing.due:
        return None
    again = plan_again(run, epoch + 1, comparing) if run.comm.rank == 0 else None
    told = run.comm.broadcast(again is not None)
    return again or Again(None, None) if told else None


def broken(run: Run, epoch: int, loss: float) -> str:
    """Why an epoch's numbers are of no use, in one line. Collective."""
    what = first_not_finite(run.engine, run.model, run.shard, run.comm, epoch)
    told = f"the loss is {loss} in epoch {epoch}"
    if math.isfinite(loss):
        told = f"the gradient of epoch {epoch} is not finite (loss {loss:.4g})"
    return f"{told}: {what}; lower optim.lr or set optim.clip"


def prepare(
    settings: Settings,
    world: World,
    comm: Communicator,
    tracker: Tracker,
    run_dir: Path,
    start: Start,
    again: Again | None = None,
) -> Run:
    """Dataset, plan, shard, model, engine and optimizer of one rank, as a checkpoint left them. Collective.

    `again`: a plan to go on with.
    """
    cold: dict[str, float] = {}
    start = comm.broadcast(start)  # pyright: ignore[reportAssignmentType]
    device, dtype = comm.device, DTYPES[settings.precision]
    source = source_of(settings)
    dataset = again and again.dataset
    if comm.rank == 0 and dataset is None:
        with stopwatch(cold, "load"):
            dataset = source.dataset() if source else settings.dataset.load(settings.data_dir, settings.seed)
    facts: Any = comm.broadcast(dataset and (dataset.num_features, dataset.task, dataset.num_classes))
    num_features, task_name, num_classes = facts
    task = make_task(task_name, num_classes)
    cached = settings.first_layer == "cached"
    model = settings.model.build(num_features, task.out_dim, seed=settings.seed, cached_first_layer=cached)
    plan = None
    if dataset is not None:
        with stopwatch(cold, "partition"):
            plan = (again and again.plan) or make_plan(settings, world, dataset, model, device, source, start)
        plan.save(run_dir, part_of=source and source.part_of)
        tracker.start(start_facts(settings, world, source.manifest if source else dataset, plan, model.widths))
    with stopwatch(cold, "shard"):
        shared: Any = comm.broadcast(plan and plan.without_nodes())
        assert isinstance(shared, Plan)
        if source is not None:
            shard = source.part(model, comm, check=settings.shards.check)
        else:
            placement = shared.placement if plan is None else plan.placement
            shard = Shard.open(dataset, plan and plan.part_of, comm, edge_ids=model.needs_edge_ids, placement=placement)
        shard = shard.to(device, dtype)
        del dataset
        engine = resume.replaying(settings, start.profile, world.size).build(
            plan or shared,
            shard,
            model.to(device, dtype),
            task,
            comm,
            seed=settings.seed,
            first_layer=settings.first_layer,
        )
    optimizer = settings.optim.build(engine.named_parameters(), epochs=settings.epochs, layer_of=model.layer_of)
    mine = resume.identity(settings, shared.hashes, world.size, num_features, task, shared.predicted)
    restored = resume.restore(start, mine, engine, optimizer, comm, say=say)
    return Run(
        settings,
        world,
        comm,
        shard,
        model,
        engine,
        optimizer,
        task,
        cold,
        shared.placement.mesh,
        run_dir,
        start.epoch,
        mine,
        restored,
        save_profile(engine, comm, run_dir),
        shared.predicted,
        plan if replan.since_of(shared.predicted) else None,
    )


def save_profile(engine: Any, comm: Communicator, run_dir: Path) -> str:
    """Leave profile.json where the engine measured something that decides on numbers; its hash."""
    profile = getattr(engine, "profile", None)
    if profile is None:
        return ""
    if comm.rank == 0:
        write_json_whole(run_dir / "profile.json", profile.as_json())
    return profile.hash


def start_facts(settings: Settings, world: World, dataset: Any, plan: Plan, widths: Sequence[int]) -> dict[str, Any]:
    """What a run says about itself before its first epoch: scalars, a row a part, stage and layer, halo_from [P, P]."""
    names = settings.names
    facts: dict[str, Any] = {"strategy": names.get("strategy"), "model": names.get("model"), "dataset": dataset.name}
    facts |= {"nodes": dataset.num_nodes, "edges": dataset.num_edges, "ranks": world.size}
    facts |= {"threads": world.threads_per_rank, "transport": world.backend}
    facts |= {"links": paced.describe(world.network)} if world.network else {}
    facts |= {k: v for k, v in plan.statistics.items() if not isinstance(v, (list, dict)) and k not in facts}
    lists = {k: v for k, v in plan.statistics.items() if isinstance(v, list) and k != "halo_from"}
    mesh, layers_of = plan.placement.mesh, plan.placement.layers_of  # virtual stages go round the mesh
    stages = [(mesh[i % len(mesh)], layers) for i, layers in enumerate(layers_of)]
    facts["mesh"] = [{"ranks": list(ranks), "layers": [layers.start, layers.stop]} for ranks, layers in stages]
    facts["layers"] = [
        {"in": widths[i], "out": widths[i + 1], "mode": layer.mode, "how": layer.how}
        for i, layer in enumerate(settings.strategy.describe(plan))
    ]
    facts["halo_from"] = plan.statistics.get("halo_from")
    parts = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    return facts | {"parts": [{"part": i} | part for i, part in enumerate(parts)]}


def train_epoch(
    run: Run, epoch: int, progress: Progress, keeper: Keeper
) -> tuple[dict[str, Any], float, list[dict[str, Any]] | None]:
    """One epoch, measured: its row (complete on rank 0), its loss, and what all ranks told rank 0."""
    settings, comm, engine, optimizer = run.settings, run.comm, run.engine, run.optimizer
    probing = bool(settings.fidelity_every) and epoch % settings.fidelity_every == 0
    profiling = run.world.how != "threads" and epoch - run.since == memory_epoch(settings.epochs - run.since)
    exact = engine.exact_gradient(epoch) if probing else None
    optimizer.schedule(epoch)
    if (
        profiling
    ):  # the release of what was allocated before cannot be seen: let the epoch allocate its gradients itself
        optimizer.zero_grad()
    meter = EpochMeter(comm, interface_of(run.world, comm.rank))
    recorder = Recorder(engine, comm, on=settings.trace and epoch == traced_epoch(settings.epochs))
    with memory.measure_epoch(comm.device) if profiling else nullcontext() as allocations, recorder, meter:
        report = engine.train_epoch(epoch, optimizer, keep_gradient=probing)
    recorder.save(run.mesh, run.run_dir, {"epoch": epoch, "ranks": comm.size, "times": run.world.how})
    mine = meter.read() | {"peak_rss": memory.peak_rss()}
    if allocations is not None:
        mine |= {
            "peak": (allocations.peak or 0) + engine.peak_elsewhere(),
            "live": live_bytes(run, allocations.activations),
        }
    mine |= {"broken": optimizer.refused or not math.isfinite(report.loss), "asked": keeper.sign()}
    everyone = comm.gather(mine)
    row: dict[str, Any] = {"epoch": epoch, "loss/train": report.loss, "optim/lr": optimizer.lr}
    row["time/timed"] = int(not probing and not profiling)
    if exact is not None:
        row |= fidelity(report.gradient, exact, comm)
    if everyone is not None:
        row |= merge(everyone) | report.facts
        progress.train_seconds += row["time/epoch_seconds"]
        progress.num_bytes += row["comm/total_bytes"]
        row |= {"time/train_seconds": progress.train_seconds, "comm/total_bytes_so_far": progress.num_bytes}
        if epoch == 0:
            row |= {"profile/hash": run.profile_hash} if run.profile_hash else {}
            row |= {f"time/cold_{name}_seconds": seconds for name, seconds in progress.cold.items()}
    return row, report.loss, everyone


def interface_of(world: World, rank: int) -> Callable[[], int] | None:
    """The counter of what this rank's host sends; the first rank of a host reads it for all."""
    if world.network is None or world.network.host_of.index(world.network.host_of[rank]) != rank:
        return None
    return interface_sent_bytes


def memory_epoch(epochs: int) -> int:
    """The epoch whose allocations are recorded: the first after the warm-up, sooner in short runs; -1: none."""
    return min(WARMUP_EPOCHS, epochs - 2) if epochs > 2 else -1


def live_bytes(run: Run, activations: int) -> dict[str, int]:
    """Bytes a rank holds, by category."""
    parameters = memory.nbytes(p for _, p in run.engine.named_parameters())
    optimizer = memory.optimizer_nbytes(run.optimizer.state_dict())
    held = run.engine.live_bytes()
    kept = activations + held.pop("activations", 0)
    return {"parameters": parameters, "optimizer": optimizer, "activations": kept} | held


@contextmanager
def stopwatch(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began
