"""Check the settings of a run from shards on disk, and open a rank's part."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gnnpar.comm import Communicator
from gnnpar.comm.world import World
from gnnpar.data.dataset import Dataset, Learned
from gnnpar.files import JsonDict
from gnnpar.folds.edge_data import Degrees, degree_histogram, merged_histogram
from gnnpar.models.gnn import GNN
from gnnpar.parallel.needs import refuse_edge_data
from gnnpar.partition.manifest import PARTITION, Manifest, folder_of, read_manifest, verify
from gnnpar.partition.on_disk import in_degrees, open_part
from gnnpar.partition.shard import Shard, comm_check
from gnnpar.settings import ConfigError, Settings, WithLoops
from gnnpar.track.console import complain
from gnnpar.track.text import counted


def check(settings: Settings, world: World) -> None:
    """Raise ConfigError for shards that this run cannot use, before any rank starts."""
    if (folder := settings.shards.folder) is None:
        return
    name, manifest = settings.names.get("strategy"), read_manifest(folder)
    if not settings.strategy.capabilities.from_shards:
        raise ConfigError(
            f"strategy={name} cuts the whole graph, which shards={folder} hold for no rank: set "
            "strategy=graph_parallel, adaqp or sar (without logical_parts), or leave shards out"
        )
    if settings.task.decoder is not None:
        raise ConfigError(
            f"task={settings.names.get('task')} splits the edges of a whole graph, and shards={folder} are cut "
            "already: give dataset= instead of shards="
        )
    double = settings.precision == "fp64"
    kept = any(facts.dtype == "<f8" and "in_weight" not in file for file, facts in manifest.files.items())
    if manifest.rounded if double else kept:
        raise ConfigError(
            f"precision={settings.precision}: shards={folder} hold the dataset's float64 numbers in "
            f"{'float32' if double else 'float64'}; partition again with precision={settings.precision}"
        )
    if world.size != manifest.parts:
        raise ConfigError(
            f"shards={folder} are {manifest.parts} parts, but there are {counted(world.size, 'rank')}: set "
            f"world_size={manifest.parts}, or partition again with world_size={world.size}"
        )
    here = [int(os.environ["RANK"])] if world.how == "joined" else range(manifest.parts)
    if 0 in here:  # rank 0 copies it to the folder of plan.json
        if PARTITION not in manifest.files:
            raise ConfigError(f"shards={folder} list no {PARTITION}: partition again")
        verify(folder, PARTITION, manifest.files[PARTITION], "full")
        if remark := _changed_edges(settings, manifest):
            complain(f"shards={folder} {remark}")
    for part in here:
        for file, facts in manifest.of_part(part).items():
            verify(folder, f"{folder_of(part)}/{file}", facts, "header")


def _changed_edges(settings: Settings, manifest: Manifest) -> str:
    """Return a remark if the shards' edges differ from the edges of this PyG model without shards."""
    cut = {key: manifest.setup["dataset"].get(key) for key in ("self_loops", "drop_duplicates")}
    if not isinstance(model := settings.model, WithLoops) or None in cut.values():
        return ""
    if cut == {"self_loops": model.loops, "drop_duplicates": False}:
        return ""
    keys = " ".join(f"dataset.{key}={str(value).lower()}" for key, value in cut.items())
    return f"were cut with {keys}; for the edges as PyG's own loop reads them, partition again with the same model="


@dataclass(frozen=True)
class Source:
    """The shards of a run, on every rank."""

    folder: Path
    manifest: Manifest

    def dataset(self, settings: Settings) -> Dataset:
        """Return the dataset without rows: its name, width, task and hashes."""
        told, none = self.manifest, torch.zeros(0, dtype=torch.int64)
        rows: JsonDict = {"x": torch.zeros(0, told.num_features), "y": none, "masks": (none.bool(),) * 3}
        rows["edge_index"] = none.expand(2, 0)
        empty = Dataset.of(told.name, **rows, num_classes=told.num_classes, task=told.task)
        hashes = {"graph_hash": told.hashes["graph"], "split_hash": told.hashes["split"]}
        dataset = replace(empty, **hashes, edge_sizes=told.edge_sizes)
        return dataset.with_features(settings.features, settings.features_dim, settings.seed)

    def degrees(self, comm: Communicator) -> Degrees:
        """Return the histogram of in-degrees of the whole graph. Collective."""
        parts = comm.gather(degree_histogram(in_degrees(self.folder, self.manifest, comm.rank)))
        return comm.broadcast(merged_histogram(parts or ()))

    def part(self, settings: Settings, model: GNN, num_features: int, comm: Communicator) -> Shard:
        """Open this rank's part, memory-mapped. Raise ValueError if ranks have different shards. Collective."""
        if model.needs_edge_ids and not self.manifest.edge_ids:
            raise ValueError(
                f"shards={self.folder} hold no edge ids, which this model reads (for attention dropout, or attributes "
                "of edges): partition again with the same model=, or set its attention dropout to 0"
            )
        if other := unlike_rank(self.manifest.fingerprint, comm):
            raise ValueError(
                f"shards={self.folder}: rank {other} has other shards than rank 0; copy the same folder to every host"
            )
        ids, check = model.needs_edge_ids, settings.shards.check
        shard = open_part(self.folder, self.manifest, comm.rank, edge_ids=ids, check=check)
        comm_check(comm, shard)
        if settings.features != "given":
            given, learns = num_features - settings.features_dim, Learned(settings.features_dim, settings.seed)
            shard = replace(shard, x=shard.x[:, :given], learns=learns)
        kinds, name = shard.edge_kinds, self.manifest.name
        refuse_edge_data(settings.strategy, settings.model, kinds, shard.in_weight, name, settings.names)
        return shard


def unlike_rank(mine: str, comm: Communicator) -> int | None:
    """Return the first rank with another value than rank 0; None if all are equal. Collective."""
    everyone = comm.broadcast(comm.gather(mine))
    return next((rank for rank, each in enumerate(everyone) if each != everyone[0]), None)


def source_of(settings: Settings) -> Source | None:
    """Return the shards that the settings name."""
    folder = settings.shards.folder
    return None if folder is None else Source(folder, read_manifest(folder))
