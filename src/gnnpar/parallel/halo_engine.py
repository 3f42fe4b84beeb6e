"""The flat engine of methods that read halo rows: one view trains by their exchange, one evaluates exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from gnnpar.codecs.codec import Codec, Exactness, Identity
from gnnpar.comm import CodedExchange, Communicator
from gnnpar.data.tasks import Task
from gnnpar.models.gnn import GNN
from gnnpar.parallel.engine import FlatEngine, Stateful
from gnnpar.parallel.halo_graph import EdgeOrder, HaloGraph, Overlap
from gnnpar.parallel.local import Pass
from gnnpar.parallel.normalised import normalised_for
from gnnpar.parallel.strategy import FirstLayer
from gnnpar.parallel.view import FeatureCache
from gnnpar.partition.shard import Shard

E = TypeVar("E", bound=FlatEngine)


def halo_engine(
    shard: Shard,
    model: GNN,
    task: Task,
    comm: Communicator,
    *,
    seed: int,
    first_layer: FirstLayer,
    overlap: Overlap,
    codec: Codec,
    exchange: CodedExchange,
    exactness: frozenset[Exactness],
    features_exact: bool,
    parts: Mapping[str, Stateful] | None = None,
    crosses_epochs: bool = False,
    engine: type[E] = FlatEngine,
) -> E:
    """`exchange`: of the training view, with `codec`. `features_exact`: features that are sent once travel as they are.

    `parts`, `crosses_epochs`: those of FlatEngine; the views' own parts are added. `engine`: its class.
    """
    shard = normalised_for(model, shard, exactness, first_layer)
    exact_exchange = CodedExchange(comm, Identity().build(shard.row_lists, comm, seed))
    edges = EdgeOrder(shard, overlap)
    cache = FeatureCache.of(first_layer)
    # what an inexact exchange kept must not leak into evaluation
    exact_cache = cache if "exact" in exactness else FeatureCache.of(first_layer)
    once = exact_exchange if features_exact else None
    view = HaloGraph(shard, Pass(seed), exchange=exchange, edges=edges, cache=cache, once=once)
    exact = HaloGraph(shard, Pass(seed), exchange=exact_exchange, edges=edges, cache=exact_cache)
    own: dict[str, Stateful] = {"held": view.held}
    if cache is not None:
        own["cache"] = cache
    return engine(
        view=view,
        exact=exact,
        shard=shard,
        model=model,
        task=task,
        comm=comm,
        seed=seed,
        codecs=(codec,),
        parts={**(parts or {}), **own},
        crosses_epochs=crosses_epochs,
    )
