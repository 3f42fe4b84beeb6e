"""The plan of a run, on rank 0: the given one, the strategy's own, and a new one where the first proves wrong."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gnnpar.models.gnn import GNN
from gnnpar.parallel.strategy import Workload
from gnnpar.placement import Plan, Topology, clear
from gnnpar.planner.machines import setting_of
from gnnpar.settings import Settings
from gnnpar.track.console import say
from gnnpar.training.checkpoint.files import MANIFEST
from gnnpar.training.checkpoint.resume import Start
from gnnpar.training.given_plan import given_plan
from gnnpar.training.layer_seconds import layer_seconds
from gnnpar.training.result.facts import World
from gnnpar.training.result.trained import DTYPES
from gnnpar.training.shards import Source


def make_plan(
    settings: Settings,
    world: World,
    dataset: Any,
    model: GNN,
    device: torch.device,
    source: Source | None = None,
    start: Start | None = None,
) -> Plan:
    """The given plan, verified, the one that the run had gone over to, or the strategy's own."""
    if start is not None and (kept := kept_plan(start, dataset, model)) is not None:
        return kept
    if settings.plan is not None:
        plan = given_plan(settings.plan, settings)
        plan.verify(
            num_layers=model.num_layers, num_nodes=dataset.num_nodes, graph=dataset.graph_hash, split=dataset.split_hash
        )
        if plan.num_ranks != world.size:
            raise ValueError(
                f"plan={settings.plan} is for {plan.num_ranks} ranks, but there are {world.size}: "
                f"set world_size={plan.num_ranks}"
            )
        return plan
    workload = replace(workload_of(settings, world, dataset, model, device), shards=source and source.manifest)
    return with_strategy(settings.strategy.plan(workload, Topology(world.size)), settings)


def kept_plan(start: Start, dataset: Any, model: GNN) -> Plan | None:
    """The plan of a checkpoint whose run had planned again, where this run goes on with it.

    None for another graph, split or model: those are refused where the checkpoint is read.
    """
    found = start.found
    if found is None or not start.with_plan:
        return None
    told, file = found.manifest["plan"], found.folder / MANIFEST
    with clear(file):
        theirs = told["hashes"]["graph"], told["hashes"]["split"], told["layers_of"][-1][1]
        if theirs != (dataset.graph_hash, dataset.split_hash, model.num_layers):
            return None
        arrays = {name: array.long() for name, array in found.rank(0, torch.device("cpu"))["plan"].items()}
        plan = Plan.of_data(told, arrays)
    plan.verify(num_nodes=dataset.num_nodes)
    return plan


def with_strategy(plan: Plan, settings: Settings) -> Plan:
    """The plan, told whose it is."""
    return replace(plan, strategy={"name": settings.names.get("strategy"), **settings.resolved["strategy"]})


def workload_of(settings: Settings, world: World, dataset: Any, model: GNN, device: torch.device) -> Workload:
    return Workload(
        dataset=dataset,
        partition=settings.partition,
        cache=partition_cache(settings),
        num_layers=model.num_layers,
        say=heed,
        model=model,
        first_layer=settings.first_layer,
        setting=lambda: setting_of(settings, world.size, say)[0],
        layer_seconds=lambda: layer_seconds(model, dataset, device=device, dtype=DTYPES[settings.precision]),
    )


def heed(line: str) -> None:
    """What a partitioner reports; only what is wrong is worth a line."""
    if not line.startswith("partitioned "):
        say(line)


def partition_cache(settings: Settings) -> Path | None:
    """Where finished partitions are kept; None where nothing can be written."""
    folder = settings.cache_dir / "partitions"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None
