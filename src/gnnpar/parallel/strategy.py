"""What the runner sees of a strategy: pure configuration with two methods, plan and build."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from gnnpar.codecs.codec import Exactness
from gnnpar.comm import Communicator
from gnnpar.data.dataset import Dataset
from gnnpar.data.tasks import Task
from gnnpar.models.gnn import GNN
from gnnpar.parallel.engine import Engine
from gnnpar.partition.manifest import Manifest
from gnnpar.partition.partition import Partitioner, partition
from gnnpar.partition.shard import Shard, partition_statistics
from gnnpar.placement import LayerPolicy, Placement, Plan, Topology, array_hash
from gnnpar.pricing.machine import Machine

FirstLayer = Literal["live", "cached"]


@dataclass(frozen=True, eq=False)
class Workload:
    """What there is to run, on rank 0. `cache`: folder of finished partitions, None for none.

    For a strategy that plans: the model, and where ranks run with what their devices need (None: nominal figures).
    `layer_seconds()`: of each layer, measured when asked. `shards`: where the graph was cut on disk beforehand; the
    dataset is then without rows, and only `flat_plan` is of use.
    """

    dataset: Dataset
    partition: Partitioner
    num_layers: int
    cache: Path | None = None
    say: Callable[[str], None] = lambda _: None
    model: GNN | None = None
    setting: Callable[[], Machine] | None = None
    first_layer: FirstLayer = "live"
    layer_seconds: Callable[[], Sequence[float]] | None = None
    shards: Manifest | None = None

    def part_of(self, parts: int) -> Tensor:
        return partition(self.dataset, parts, by=self.partition, cache=self.cache, say=self.say)

    def flat_plan(self, topology: Topology, policy: LayerPolicy, *, chunks: int | None = None) -> Plan:
        """One part a rank, all layers on every rank, one policy. `chunks`: so many parts, on one rank in time."""
        if self.shards is not None:
            return self._cut_plan(self.shards, policy)
        ranks, parts = topology.num_ranks, chunks or topology.num_ranks
        part_of = self.part_of(parts)
        whole = torch.zeros_like(part_of)
        nodes = (part_of, None) if chunks is None else (whole, part_of)
        placement = Placement((tuple(range(ranks)),), *nodes, (range(self.num_layers),))
        return Plan(
            placement,
            (policy,) * self.num_layers,
            hashes={
                "graph": self.dataset.graph_hash,
                "split": self.dataset.split_hash,
                "partition": array_hash(part_of),
            },
            statistics=partition_statistics(self.dataset, part_of, parts),
        )

    def _cut_plan(self, shards: Manifest, policy: LayerPolicy) -> Plan:
        """`flat_plan` of a partition that only its hash is known of."""
        placement = Placement((tuple(range(shards.parts)),), torch.zeros(0).long(), None, (range(self.num_layers),))
        return Plan(placement, (policy,) * self.num_layers, hashes=shards.hashes, statistics=shards.statistics)


class Strategy(Protocol):
    """Implemented by frozen, keyword-only dataclasses: fields = YAML keys.

    One whose plan is `flat_plan` of a part a rank may say `from_shards = True`: then it runs from shards on disk.
    """

    @property
    def exactness(self) -> frozenset[Exactness]: ...
    @property
    def max_ranks(self) -> int | None:
        """The most ranks it can use; None: any number."""
        ...

    def exact_limit(self) -> Strategy:
        """The same strategy where it must equal the single device: itself; identity codec; one chunk."""
        ...

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        """Pure; on rank 0, then broadcast."""
        ...

    def build(
        self,
        plan: Plan,
        shard: Shard,
        model: GNN,
        task: Task,
        comm: Communicator,
        *,
        seed: int,
        first_layer: FirstLayer = "live",
    ) -> Engine: ...
