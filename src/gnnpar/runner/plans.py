"""The plan of a run, on rank 0: the given one, the strategy's own, and a new one where the first proves wrong."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gnnpar.models.gnn import GNN
from gnnpar.plan import Plan, Topology
from gnnpar.runner.facts import World
from gnnpar.runner.layer_costs import layer_seconds
from gnnpar.runner.machines import setting_of
from gnnpar.runner.sharded import Source
from gnnpar.runner.trained import DTYPES
from gnnpar.settings import Settings, instantiate
from gnnpar.strategies.strategy import Workload
from gnnpar.track.console import say


def make_plan(
    settings: Settings, world: World, dataset: Any, model: GNN, device: torch.device, source: Source | None = None
) -> Plan:
    """The given plan, verified, or the strategy's own."""
    if settings.plan is not None:
        codecs = [layer["codec"] for layer in Plan.data(settings.plan)["layers"]]
        plan = Plan.load(settings.plan, codecs=tuple(codec and instantiate(codec) for codec in codecs))
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


def with_strategy(plan: Plan, settings: Settings) -> Plan:
    """The plan, told whose it is."""
    return replace(plan, strategy={"name": settings.names.get("strategy"), **settings.resolved["strategy"]})


def workload_of(settings: Settings, world: World, dataset: Any, model: GNN, device: torch.device) -> Workload:
    return Workload(
        dataset=dataset, partition=settings.partition, cache=partition_cache(settings), num_layers=model.num_layers,
        say=heed, model=model, first_layer=settings.first_layer,
        setting=lambda: setting_of(settings, world.size, say)[0],
        layer_seconds=lambda: layer_seconds(model, dataset, device=device, dtype=DTYPES[settings.precision]),
    )  # fmt: skip


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
