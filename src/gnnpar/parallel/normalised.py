"""GCN's scaling inside the sum: edge weights w_ij d_i^-1/2 d_j^-1/2, computed once at the start of a run.

Scaling rows before and after every sum takes two passes over [N, F] in each direction. With scaled weights rows travel
unscaled. Only for strategies that send rows without a codec in the epoch that computes them: codecs encode scaled rows,
and checkpoints hold kept rows as they were sent.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from gnnpar.codecs.codec import Exactness
from gnnpar.models.gcn import inverse_root
from gnnpar.parallel.context import BuildContext
from gnnpar.partition.shard import Shard
from gnnpar.precision import is_narrow


def normalised_for(context: BuildContext, exactness: Collection[Exactness]) -> BuildContext:
    """Return the context with scaled edge weights in its shard; unchanged if rows are scaled instead.

    first_layer=cached keeps unscaled sums in checkpoints; weighted 16-bit rows are widened on a CPU.
    """
    shard = context.shard
    if set(exactness) != {"exact"} or context.first_layer == "cached" or is_narrow(shard.x.dtype):
        return context
    takes = context.model.takes_normalised(weighted=shard.in_weight is not None)
    return replace(context, shard=normalised(shard)) if takes else context


def normalised(shard: Shard) -> Shard:
    """Return the shard with the weights of D^-1/2 A D^-1/2, by the degrees of the whole graph."""
    own = inverse_root(shard.in_degree, shard.in_weight)
    parts = sorted(shard.halo)
    sizes = [shard.halo[p].num_src for p in parts]
    halo_roots = torch.split(inverse_root(shard.halo_in_degree, shard.halo_in_weight), sizes)
    halo = {p: shard.halo[p].scaled(own, roots) for p, roots in zip(parts, halo_roots, strict=True)}
    return replace(shard, inner=shard.inner.scaled(own, own), halo=halo, normalised=True)
