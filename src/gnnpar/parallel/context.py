"""The arguments from which a strategy builds an engine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from gnnpar.codecs.codec import Exactness, Identity
from gnnpar.comm import CodedExchange, Communicator
from gnnpar.data.tasks import Task
from gnnpar.models.gcn import inverse_root
from gnnpar.models.gnn import GNN
from gnnpar.parallel.local import Pass
from gnnpar.parallel.view import FeatureCache, FirstLayer
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan
from gnnpar.precision import is_narrow


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

    def normalised_for(self, exactness: Collection[Exactness]) -> BuildContext:
        """Return the context with GCN's scaling in the edge weights of its shard; unchanged if rows are scaled instead.

        Scaling rows before and after every sum takes two passes over [N, F] in each direction. With scaled weights rows
        travel unscaled, so only strategies that send rows without a codec can have them: codecs encode scaled rows, and
        checkpoints hold kept rows as they were sent (first_layer=cached). Weighted 16-bit rows are widened on a CPU.
        """
        shard = self.shard
        if set(exactness) != {"exact"} or self.first_layer == "cached" or is_narrow(shard.x.dtype):
            return self
        takes = self.model.takes_normalised(weighted=shard.in_weight is not None)
        return replace(self, shard=normalised(shard)) if takes else self


def normalised(shard: Shard) -> Shard:
    """Return the shard with the weights of D^-1/2 A D^-1/2, by the degrees of the whole graph."""
    own = inverse_root(shard.in_degree, shard.in_weight)
    parts = sorted(shard.halo)
    sizes = [shard.halo[p].num_src for p in parts]
    halo_roots = torch.split(inverse_root(shard.halo_in_degree, shard.halo_in_weight), sizes)
    halo = {p: shard.halo[p].scaled(own, roots) for p, roots in zip(parts, halo_roots, strict=True)}
    return replace(shard, inner=shard.inner.scaled(own, own), halo=halo, normalised=True)
