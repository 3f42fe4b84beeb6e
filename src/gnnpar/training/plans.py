"""Make the plan of a run, on rank 0: from a checkpoint, from plan=FILE or by a plan source."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnnpar.comm.clock import perf_counter
from gnnpar.comm.world import World
from gnnpar.data.dataset import Dataset
from gnnpar.folds.block import Rows
from gnnpar.models.gnn import GNN
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.local import Pass
from gnnpar.parallel.strategy import Workload, check_plan
from gnnpar.partition.shard import cut
from gnnpar.placement import Plan, Topology, clear
from gnnpar.precision import TYPES
from gnnpar.settings import PLAN_SETUP, WRITTEN_FOLDERS, Settings
from gnnpar.track.console import say
from gnnpar.track.text import counted
from gnnpar.training.checkpoint.files import MANIFEST
from gnnpar.training.checkpoint.resume import Start
from gnnpar.training.shards import Source
from gnnpar_kernels.csr import accumulate_dtype

if TYPE_CHECKING:
    from gnnpar.training.loop import Job, Replanner, Run


class PlanSource:
    """Make the plan of a run, by its strategy, and new ones during it. Pickled for ranks that are processes."""

    def plan(self, settings: Settings, world: World, workload: Workload) -> Plan:
        """Make a plan, on rank 0."""
        return settings.strategy.plan(workload, Topology(world.size))

    def replanner(self, run: Run) -> Replanner | None:
        """Return a function to call after every epoch of this plan, or None."""
        return None


def make_plan(
    job: Job, dataset: Dataset, model: GNN, device: torch.device, source: Source | None, start: Start
) -> Plan:
    """Return the verified plan of a replanned checkpoint, of plan=FILE or of the plan source."""
    settings = job.settings
    if (saved := saved_plan(start, dataset, model)) is not None:
        return saved
    if settings.plan is not None:
        plan = given_plan(settings.plan, settings)
        plan.verify(
            num_layers=model.num_layers,
            num_nodes=dataset.num_nodes,
            num_edges=dataset.num_edges,
            graph=dataset.graph_hash,
            split=dataset.split_hash,
        )
        if plan.num_ranks != job.world.size:
            raise ValueError(
                f"plan={settings.plan} is for {counted(plan.num_ranks, 'rank')}, but there are {job.world.size}: "
                f"set world_size={plan.num_ranks}"
            )
        return plan
    workload = replace(workload_of(settings, dataset, model, device), shards=source and source.manifest)
    return with_strategy(job.plan_source.plan(settings, job.world, workload), settings)


def saved_plan(start: Start, dataset: Dataset, model: GNN) -> Plan | None:
    """Return the plan of a checkpoint that planned again, if this run continues with it; None for another graph, split
    or model, which `resume.restore` refuses."""
    found = start.found
    if found is None or not start.with_plan:
        return None
    data, file = found.manifest["plan"], found.folder / MANIFEST
    with clear(file):
        saved_facts = data["hashes"]["graph"], data["hashes"]["split"], data["layers_of"][-1][1]
        if saved_facts != (dataset.graph_hash, dataset.split_hash, model.num_layers):
            return None
        arrays = {name: array.long() for name, array in found.rank(0, torch.device("cpu"))["plan"].items()}
        plan = Plan.of_data(data, arrays)
    plan.verify(num_nodes=dataset.num_nodes)
    return plan


def with_strategy(plan: Plan, settings: Settings) -> Plan:
    """Add the strategy to a plan without one, except its output folders."""
    if plan.strategy:
        return plan
    fields = {k: None if k in WRITTEN_FOLDERS else v for k, v in settings.resolved["strategy"].items()}
    return replace(plan, strategy={"name": settings.names.get("strategy"), **fields})


def workload_of(settings: Settings, dataset: Dataset, model: GNN, device: torch.device) -> Workload:
    return Workload(
        dataset=dataset,
        partition=settings.partition,
        cache=partition_cache(settings),
        num_layers=model.num_layers,
        say=log_problems,
        model=model,
        first_layer=settings.first_layer,
        layer_seconds=lambda: layer_seconds(model, dataset, device=device, dtype=TYPES[settings.precision].rows),
    )


def log_problems(line: str) -> None:
    """Print the messages of a partitioner, except "partitioned ..."."""
    if not line.startswith("partitioned "):
        say(line)


def partition_cache(settings: Settings) -> Path | None:
    """Return the folder of cached partitions; None if it is not writable."""
    folder = settings.cache_dir / "partitions"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def layer_seconds(
    model: GNN, dataset: Dataset, *, device: torch.device, dtype: torch.dtype = torch.float32
) -> list[float]:
    """Measure seconds of each layer on the whole graph, forward and backward, the fastest of three, to balance stages.
    The encoder counts for the first layer, the decoder for the last."""
    model = copy.deepcopy(model).to(device, accumulate_dtype(dtype))
    shard = cut(dataset, torch.zeros(dataset.num_nodes, dtype=torch.int64), 1, edge_ids=model.needs_edge_ids)[0]
    shard = shard.to(device, dtype)
    graph = WholeGraph(shard, Pass(0, training=True))
    x, seconds = shard.inputs().detach(), []
    activations = model.begin(graph, x)
    for i in range(model.num_layers):
        entering = tuple(t.detach() for t in activations)
        runs = [_run(model, graph, i, x, entering) for _ in range(3)]
        activations = runs[-1][0]
        seconds.append(min(each for _, each in runs))
    return seconds


def _run(model: GNN, graph: WholeGraph, i: int, x: Tensor, entering: Rows) -> tuple[Rows, float]:
    """Return activations and seconds of one layer."""
    leaves = tuple(t.clone().requires_grad_() for t in entering)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    began = perf_counter()
    activations = model.run_layer(i, graph, model.begin(graph, x) if i == 0 else leaves)
    ends = (model.end(graph, activations),) if i == model.num_layers - 1 else activations
    if wanted := [t for t in ends if t.requires_grad]:  # none for frozen layers
        torch.autograd.backward(wanted, [torch.ones_like(t) for t in wanted])
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return activations, perf_counter() - began


def given_plan(file: Path, settings: Settings) -> Plan:
    """Read plan=FILE. Raise ValueError if the strategy cannot run it, or a field has no effect."""
    plan = Plan.load(file)
    plan.verify()
    check_plan(settings.strategy, plan)
    if unknown := sorted(plan.setup.keys() - {*PLAN_SETUP, "names"}):
        raise ValueError(f"plan={file}: nothing reads setup.{unknown[0]}; remove it")
    if plan.predicted:  # another run's replanning does not concern this one
        plan = replace(plan, predicted={key: value for key, value in plan.predicted.items() if key != "replanned"})
    resolved = settings.resolved
    if any(plan.setup.get(key, resolved[key]) != resolved[key] for key in ("model", "precision", "first_layer")):
        plan = replace(plan, predicted=None)  # the prediction is for another model
    return plan
