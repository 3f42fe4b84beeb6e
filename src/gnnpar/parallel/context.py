"""The arguments from which a strategy builds an engine."""

from __future__ import annotations

from dataclasses import dataclass

from gnnpar.codecs.codec import Identity
from gnnpar.comm import CodedExchange, Communicator
from gnnpar.data.tasks import Task
from gnnpar.models.gnn import GNN
from gnnpar.parallel.local import Pass
from gnnpar.parallel.view import FeatureCache, FirstLayer
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan


@dataclass(frozen=True, kw_only=True, eq=False)
class BuildContext:
    """Arguments of `Strategy.build` on one rank. `shard`: the rank's part, on its device. `seed`: of the run."""

    plan: Plan
    shard: Shard
    model: GNN
    task: Task
    comm: Communicator
    seed: int
    first_layer: FirstLayer = "live"

    @property
    def start(self) -> Pass:
        """Return the pass that a view starts with."""
        return Pass(self.seed)

    def new_cache(self) -> FeatureCache | None:
        """Return an empty cache of layer 0; None if layer 0 is computed in every epoch."""
        return FeatureCache() if self.first_layer == "cached" else None

    def exact_exchange(self) -> CodedExchange:
        """Return an exchange that sends the shard's boundary rows without a codec."""
        return CodedExchange(self.comm, Identity().build(self.shard.row_lists, self.comm, self.seed))
