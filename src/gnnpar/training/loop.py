"""The training of one rank, from top to bottom: plan, shard, build, restore a checkpoint, then epochs. Only rank 0
reads the dataset, plans, and calls trackers. Every figure it logs is already reduced over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from gnnpar.comm import Communicator
from gnnpar.comm.clock import perf_counter
from gnnpar.comm.world import Host, Interrupted, World
from gnnpar.data.dataset import Dataset, content_hash
from gnnpar.data.tasks import Task
from gnnpar.files import JsonDict, JsonObject, require_memory, write_json_atomic
from gnnpar.folds.edge_data import EdgeSizes
from gnnpar.models.gnn import GNN
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.needs import orders_rows, refuse_edge_data
from gnnpar.parallel.objective import Objective, fit_task, objective_of
from gnnpar.partition.manifest import PARTITION, Manifest
from gnnpar.partition.row_order import in_order
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan
from gnnpar.precision import TYPES
from gnnpar.settings import Settings, Stepper
from gnnpar.track.console import say
from gnnpar.track.keys import goodness
from gnnpar.track.tracker import Null, Tracker
from gnnpar.training.captured import CapturedEpochs
from gnnpar.training.checkpoint import files as checkpoint
from gnnpar.training.checkpoint import resume
from gnnpar.training.checkpoint.policy import CheckpointPolicy
from gnnpar.training.diagnose import finite_weights, is_out_of_memory, non_finite_line, out_of_memory
from gnnpar.training.meter import EpochMeter, evaluate, fidelity, live_bytes, measure_epoch, merge
from gnnpar.training.plans import PlanSource, make_plan
from gnnpar.training.result.record import RunRecord
from gnnpar.training.result.result import WARMUP_EPOCHS
from gnnpar.training.shards import Source, source_of
from gnnpar.training.trace import save_timelines, traced_epoch


@dataclass(frozen=True, eq=False)
class NewPlan:
    """A plan to continue with, and its graph; None on ranks other than 0."""

    plan: Plan | None
    dataset: Dataset | None


Replanner = Callable[[int, JsonObject], NewPlan | None]
"""(epoch, its row) -> a plan to continue with after the epoch, or None. Collective."""


class StopTraining(Exception):
    """Raise in a callback to end the run after this epoch."""


@runtime_checkable
class EpochCallback(Protocol):
    """Called on rank 0 after every epoch with its row of metrics.jsonl. Return True to end the run."""

    def on_epoch_end(self, epoch: int, metrics: JsonDict) -> object: ...


Callback = EpochCallback | Callable[[int, JsonDict], object]


@dataclass(frozen=True)
class Training:
    """The launcher's `Work` for training."""

    record: RunRecord
    plan_source: PlanSource
    callbacks: tuple[Callback, ...] = ()

    @contextmanager
    def session(self, *, first: bool) -> Iterator[Callable[[Communicator, Host], None]]:
        """Open trackers in the process of rank 0 (`first`), and yield the function of a rank."""
        record = self.record
        job = Job(record.settings, record.world, record.run_dir, self.plan_source, self.callbacks)
        if not first:
            yield partial(train, job, start=resume.Start(), tracker=Null())
            return
        restarted = record.header["restarts"] > 0
        start = resume.find(record.settings, record.run_dir, record.world.size, restarted=restarted)
        with record.tracking(start) as tracker:
            yield partial(train, job, start=start, tracker=tracker)


@dataclass(frozen=True)
class Job:
    """Facts of a run that all ranks share before it begins. run_dir: rank 0's, after `train` has broadcast it."""

    settings: Settings
    world: World
    run_dir: Path
    plan_source: PlanSource
    callbacks: tuple[Callback, ...] = ()


def train(job: Job, comm: Communicator, host: Host, *, start: resume.Start, tracker: Tracker) -> None:
    """Train to the end, or to the end of the epoch in which the host requests a stop. Collective. Raises Interrupted.
    tracker, start: only rank 0's are used. All ranks write their checkpoints under its `run_dir`."""
    job = replace(job, run_dir=comm.broadcast(job.run_dir.absolute()))
    try:
        run = prepare(job, comm, host, tracker, start)
        policy = CheckpointPolicy(job.settings, job.run_dir, host.stop_asked)
        while (new := epochs(run, tracker, policy)) is not None:
            run.engine.drain()
            found = checkpoint.latest(job.run_dir, say) if comm.rank == 0 else None
            run = prepare(job, comm, host, Null(), resume.Start(found, same_setup=False), new)
        run.engine.drain()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, job.settings, job.world.size) from error


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """The objects that one rank trains with.

    mesh: stage -> ranks of its parts. identity: the run's identity in checkpoints. restored: `Progress` of the resumed
    checkpoint. captured: None unless epochs are replayed. predicted: by the planner. replanned: rank 0's plan if the
    run planned again.
    """

    job: Job
    comm: Communicator
    host: Host
    shard: Shard
    model: GNN
    engine: Engine
    optimizer: Stepper
    task: Task
    objective: Objective
    setup_seconds: Mapping[str, float]
    mesh: tuple[tuple[int, ...], ...]
    first_epoch: int
    identity: JsonObject
    restored: JsonObject | None
    captured: CapturedEpochs | None
    predicted: JsonObject | None
    replanned: Plan | None

    @property
    def settings(self) -> Settings:
        return self.job.settings

    @property
    def world(self) -> World:
        return self.job.world


def since_of(predicted: JsonObject | None) -> int:
    """Return the first epoch of the plan with these predictions."""
    return ((predicted or {}).get("replanned") or {}).get("epoch", 0)


def prepare(
    job: Job, comm: Communicator, host: Host, tracker: Tracker, start: resume.Start, new: NewPlan | None = None
) -> Run:
    """Build dataset, plan, shard, model, engine and optimizer of one rank, and restore a checkpoint. Collective. new: a
    plan to continue with."""
    settings, run_dir = job.settings, job.run_dir
    setup_seconds: dict[str, float] = {}
    start = comm.broadcast(start)
    source = source_of(settings)
    dataset = new and new.dataset
    if comm.rank == 0 and dataset is None:
        with stopwatch(setup_seconds, "load"):
            dataset = source.dataset(settings) if source else settings.load_dataset()
    num_features, edge_sizes, model, task = build_model(settings, dataset, source, comm)
    plan = None
    if dataset is not None:
        with stopwatch(setup_seconds, "partition"):
            plan = new and new.plan
            plan = plan or make_plan(job, dataset, model, comm.device, source, start)
        plan.save(run_dir, part_of=source and source.folder / PARTITION)
        tracker.start(start_facts(job, source.manifest if source else dataset, plan, model.widths))
        for layers in plan.placement.layers_of[1:]:
            if line := model.cut_before(layers.start):
                say(line)
    with stopwatch(setup_seconds, "shard"):
        types = TYPES[settings.precision]
        shared = comm.broadcast(plan and plan.without_nodes())
        if source is None:
            placement = shared.placement if plan is None else plan.placement
            shard = Shard.open(dataset, plan and plan.part_of, comm, edge_ids=model.needs_edge_ids, placement=placement)
        else:
            shard = source.part(settings, model, num_features, comm)
        shard = in_rows(shard, settings, task, comm).to(comm.device, types.rows)
        task = fit_task(task, shard, comm, in_parts=settings.strategy.capabilities.chunks)
        if settings.early_stopping.patience is not None:
            refuse_no_validation(shard, comm)
        del dataset
        context = BuildContext(
            plan=plan or shared,
            shard=shard,
            model=model.to(comm.device, types.parameters),
            task=task,
            comm=comm,
            seed=settings.seed,
            first_layer=settings.first_layer,
        )
        engine = resume.replaying(settings, start.profile).build(context)
    optimizer = settings.optim.build(engine.named_parameters(), epochs=settings.epochs, layer_of=model.layer_of)
    edges = resume.EdgeFacts(shard.in_weight is not None, edge_sizes)
    mine = resume.identity(settings, shared, job.world.size, num_features, task, edges)
    restored = resume.restore(start, mine, engine, model, optimizer, comm)
    if comm.rank == 0 and engine.profile is not None:
        write_json_atomic(run_dir / "profile.json", engine.profile.as_json())
    return Run(
        job=job,
        comm=comm,
        host=host,
        shard=shard,
        model=model,
        engine=engine,
        optimizer=optimizer,
        task=task,
        objective=objective_of(task, shard, model, comm, settings.seed),
        setup_seconds=setup_seconds,
        mesh=shared.placement.mesh,
        first_epoch=start.epoch,
        identity=mine,
        restored=restored,
        captured=CapturedEpochs(engine, optimizer, comm, settings.seed, model) if settings.launch.cuda_graph else None,
        predicted=shared.predicted,
        replanned=plan if since_of(shared.predicted) else None,
    )


def build_model(
    settings: Settings, dataset: Dataset | None, source: Source | None, comm: Communicator
) -> tuple[int, EdgeSizes, GNN, Task]:
    """Return the number of features, the sizes of edge data, the model and the task. dataset: on rank 0. Collective.
    Raises ValueError if the model cannot train on the dataset."""
    facts = dataset and (dataset.num_features, dataset.task, dataset.num_classes, dataset.edge_sizes)
    num_features, task_name, num_classes, edge_sizes = comm.broadcast(facts)
    task = settings.task.of(task_name, num_classes)
    if dataset is not None:
        kinds, name = dataset.edges.kinds, dataset.name
        refuse_edge_data(settings.strategy, settings.model, kinds, dataset.in_weight, name, settings.names)
    if source is not None and settings.model.reads_degrees:
        edge_sizes = edge_sizes._replace(degrees=source.degrees(comm))
    model = settings.build_model(num_features, task.out_dim, edge_sizes)
    if settings.features == "given" and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient (requires_grad_): there is nothing to train")
    refuse_unequal_weights(model, comm)
    return num_features, edge_sizes, model, task


def refuse_unequal_weights(model: nn.Module, comm: Communicator) -> None:
    """Raise ValueError on every rank if initial parameters or buffers differ from rank 0's. Collective. The cause is a
    model that draws from a source that gnnpar does not seed, such as numpy, random or the time."""
    held = (*model.named_parameters(), *model.named_buffers())
    everyone = comm.gather({name: _digest(tensor) for name, tensor in held}) or []
    unlike = [(rank, name) for rank, each in enumerate(everyone) for name in each if each[name] != everyone[0][name]]
    for rank, name in comm.broadcast(unlike[:1]):
        raise ValueError(
            f"{name} of the model has other initial values on rank {rank} than on rank 0; draw them from torch's "
            "generator (torch.nn.init), which gnnpar seeds, not from numpy, random or a generator without a seed"
        )


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1)
    data = [flat.view(torch.uint8)] if flat.numel() else []
    return content_hash(data, label=f"{tensor.dtype} {tuple(tensor.shape)}")


def in_rows(shard: Shard, settings: Settings, task: Task, comm: Communicator) -> Shard:
    """Order the rows of a shard by `row_order`. Raise MemoryError if outputs of its nodes do not fit."""
    how = settings.row_order if orders_rows(settings.strategy, settings.task) else "none"
    shard, changed = in_order(shard, how)
    if changed and comm.rank == 0:
        say(f"row_order={how}: {changed}")
    outputs = f"{len(shard.y):,} nodes of a rank with {task.out_dim:,} outputs each"
    copies = 1 if settings.strategy.capabilities.chunks else 6  # measured: 6.5 arrays of this shape
    require_memory(4 * copies * len(shard.y) * task.out_dim, outputs, "check that dataset.task fits the labels")
    return shard


def refuse_no_validation(shard: Shard, comm: Communicator) -> None:
    """Raise ValueError on all ranks for early stopping without validation examples. Collective."""
    examples = shard.rows_of_split["val"] if shard.pairs is None else shard.pairs.val
    if not any(comm.broadcast(comm.gather(len(examples)))):
        raise ValueError(
            "early_stopping.patience: there are no validation nodes to stop by; give val_mask or dataset.split=random, "
            "or set early_stopping.patience=null"
        )


@dataclass
class Progress:
    """State of the loop between epochs, equal on every rank. Saved in checkpoints."""

    train_seconds: float = 0.0
    num_bytes: int = 0
    best_val: float | None = None
    evaluations_since: int = 0
    begun_otherwise: Sequence[str] = ()

    def stops(self, val: float | None, settings: Settings) -> bool:
        """Return whether to stop early after another evaluation. val: higher is better; None: undefined."""
        stopping = settings.early_stopping
        if val is None:
            if stopping.patience is None or self.best_val is not None:
                return False
            raise ValueError(
                f"early_stopping.patience={stopping.patience}: the metric of the validation split is not defined (one "
                "class, or a constant target): choose another task.metric, or set early_stopping.patience=null"
            )
        if val > (-math.inf if self.best_val is None else self.best_val + stopping.min_delta):
            self.best_val, self.evaluations_since = val, 0
        else:
            self.evaluations_since += 1
        return self.has_stopped(settings)

    def has_stopped(self, settings: Settings) -> bool:
        """Return whether the run has stopped early, also before it was resumed."""
        patience = settings.early_stopping.patience
        return patience is not None and self.evaluations_since >= patience


def epochs(run: Run, tracker: Tracker, policy: CheckpointPolicy) -> NewPlan | None:
    """Train the remaining epochs. Return a new plan if the run must continue with one. Collective."""
    settings, comm = run.settings, run.comm
    progress = Progress(**(run.restored or {}))
    if run.first_epoch and progress.has_stopped(settings):
        return None
    replanner = run.job.plan_source.replanner(run)
    for epoch in range(run.first_epoch, settings.epochs):
        row, loss, everyone = train_epoch(run, epoch, progress, policy)
        last = epoch + 1 == settings.epochs
        stop = False
        if last or (epoch + 1) % settings.eval_every == 0:
            row |= evaluated(run)
            stop = progress.stops(val_of(row), settings)
        if run.job.callbacks and comm.broadcast(
            run_callbacks(run.job.callbacks, epoch, row) if not comm.rank else None
        ):
            row |= {} if "metric/name" in row else evaluated(run)
            stop = True
        if comm.rank == 0:
            if run.host.others_failed():
                raise RuntimeError("interrupted")
            tracker.log(row)
        val = val_of(row)
        now = policy.decide(comm, epoch + 1, everyone, ends=last or stop)
        if now.broken:
            policy.save_best(run)
            raise ValueError(non_finite_line(run, epoch, loss) + policy.last_good())
        policy.remember(run, epoch + 1, asdict(progress), val)
        if now.save:
            written = policy.save(run, epoch + 1, asdict(progress), val)
            if now.interrupted and written:
                say(f"asked to end: checkpoint after epoch {epoch}; resume=auto in the same folder goes on")
        if now.interrupted:
            raise Interrupted
        if stop:
            break
        if replanner is not None and (new := replanner(epoch, row)) is not None:
            if comm.broadcast(policy.save(run, epoch + 1, asdict(progress), val, new.plan)):
                return new
            if comm.rank == 0:
                say("tag: without a checkpoint there is no way over to the other plan: the run keeps its own")
    return None


def evaluated(run: Run) -> JsonDict:
    """Evaluate, and return entries of a row. Collective."""
    began = perf_counter()
    values = evaluate(run.engine, run.objective)
    return values | {"metric/name": run.task.metric_name, "time/evaluate_seconds": perf_counter() - began}


def val_of(row: JsonObject) -> float | None:
    """Return the validation metric of a row, negated if lower is better; None without one."""
    val = row.get("metric/val")
    return None if val is None else goodness(row["metric/name"], val)


def run_callbacks(callbacks: Sequence[Callback], epoch: int, row: JsonObject) -> bool:
    """Call all callbacks, on rank 0. Return whether one requests the end of the run."""
    asked = []
    for each in callbacks:
        try:
            call = each.on_epoch_end if isinstance(each, EpochCallback) else each
            asked.append(call(epoch, dict(row)) is True)
        except StopTraining:
            asked.append(True)
    return any(asked)


def train_epoch(
    run: Run, epoch: int, progress: Progress, policy: CheckpointPolicy
) -> tuple[JsonDict, float, list[JsonDict] | None]:
    """Train and measure one epoch. Return its row (complete on rank 0), its loss and, on rank 0, all reports."""
    settings, comm, engine, optimizer = run.settings, run.comm, run.engine, run.optimizer
    probing = bool(settings.fidelity_every) and epoch % settings.fidelity_every == 0
    since = since_of(run.predicted)
    profiling = run.world.how != "threads" and epoch - since == memory_epoch(settings.epochs - since)
    exact = engine.exact_gradient(epoch) if probing else None
    optimizer.schedule(epoch)
    if profiling:  # the recorder misses releases of earlier allocations, so let the epoch allocate its own gradients
        optimizer.zero_grad()
    meter = EpochMeter(comm, run.host.sent_bytes)
    if tracing := settings.trace and epoch == traced_epoch(settings.epochs):
        engine.timeline = []
    captured = None if probing or profiling or tracing else run.captured
    timed = not (probing or profiling or (captured is not None and captured.captures))
    with measure_epoch(comm.device) if profiling else nullcontext() as allocations, meter:
        if captured is None:
            report = engine.train_epoch(epoch, optimizer, keep_gradient=probing)
        else:
            report = captured.train_epoch(epoch)
    if tracing:
        facts = {"epoch": epoch, "ranks": comm.size, "times": run.world.how}
        save_timelines(engine, comm, run.mesh, run.job.run_dir, facts)
    mine = meter.read()
    if allocations is not None:
        peak = (allocations.peak or 0) + engine.peak_elsewhere()
        mine |= {"peak": peak, "live": live_bytes(engine, optimizer, allocations.activations)}
        mine |= {} if allocations.pinned is None else {"pinned": allocations.pinned}
    broken = optimizer.refused or not math.isfinite(report.loss) or not finite_weights(engine)
    mine |= {"broken": broken, "asked": policy.stop_asked()}
    everyone = comm.gather(mine)
    row: JsonDict = {"epoch": epoch, "loss/train": report.loss, "optim/lr": optimizer.lr, "time/timed": int(timed)}
    if exact is not None:
        assert report.gradient is not None
        row |= fidelity(report.gradient, exact, comm)
    if everyone is not None:
        row |= merge(everyone) | report.facts
        progress.train_seconds += row["time/epoch_seconds"]
        progress.num_bytes += row["comm/total_bytes"]
        row |= {"time/train_seconds": progress.train_seconds, "comm/total_bytes_so_far": progress.num_bytes}
        if epoch == 0:
            row |= {"profile/hash": engine.profile.hash} if engine.profile else {}
            row |= {f"time/cold_{name}_seconds": seconds for name, seconds in run.setup_seconds.items()}
    return row, report.loss, everyone


def memory_epoch(epochs: int) -> int:
    """Return the epoch to record allocations in: the first after the warm-up, earlier in short runs; -1: none."""
    return min(WARMUP_EPOCHS, epochs - 2) if epochs > 2 else -1


@contextmanager
def stopwatch(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = perf_counter()
    yield
    seconds[name] = perf_counter() - began


def start_facts(job: Job, graph: Dataset | Manifest, plan: Plan, widths: Sequence[int]) -> JsonDict:
    """Describe a run before its first epoch: scalars, one row per part, stage and layer, halo_from [P, P]."""
    settings, world = job.settings, job.world
    facts: JsonDict = {name: settings.names.get(name) for name in ("strategy", "model")} | {"dataset": graph.name}
    facts |= {"nodes": graph.num_nodes, "edges": graph.num_edges, "ranks": world.size}
    facts |= {"threads": world.threads_per_rank, "transport": world.backend}
    facts |= {"links": world.links.describe()} if world.links else {}
    if isinstance(graph, Dataset):  # self loops count for PyG models only: other models need them
        changes = graph.edge_changes._asdict().items()
        loops = "self_loops" in vars(settings.model)
        facts |= {name: count for name, count in changes if count and (loops or name != "self_loops_added")}
    facts |= {k: v for k, v in plan.statistics.items() if not isinstance(v, (list, dict)) and k not in facts}
    lists = {k: v for k, v in plan.statistics.items() if isinstance(v, list) and k != "halo_from"}
    mesh, layers_of = plan.placement.mesh, plan.placement.layers_of  # virtual stages wrap around the mesh
    stages = [(mesh[i % len(mesh)], layers) for i, layers in enumerate(layers_of)]
    facts["mesh"] = [{"ranks": list(ranks), "layers": [layers.start, layers.stop]} for ranks, layers in stages]
    facts["layers"] = [
        {"in": widths[i], "out": widths[i + 1], "mode": layer.mode, "how": layer.how}
        for i, layer in enumerate(settings.strategy.describe(plan))
    ]
    facts["halo_from"] = plan.statistics.get("halo_from")
    parts = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    return facts | {"parts": [{"part": i} | part for i, part in enumerate(parts)]}
