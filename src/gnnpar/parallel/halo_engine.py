"""The flat engine of methods that read halo rows: one view trains by their exchange, one evaluates exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gnnpar.codecs.adaptive.codec import with_edge_weights
from gnnpar.codecs.codec import Codec, CodecConfig, Drop, Exactness, FirstAndRest, Identity
from gnnpar.comm import CodedExchange, Communicator
from gnnpar.comm.rows import RowLists, Wire
from gnnpar.data.tasks import Task
from gnnpar.models.gnn import GNN
from gnnpar.parallel.cover.cover import Covers, make_covers
from gnnpar.parallel.cover.weights import Halo
from gnnpar.parallel.engine import FlatEngine, Stateful
from gnnpar.parallel.halo_graph import Covered, EdgeOrder, HaloGraph, Overlap
from gnnpar.parallel.local import Pass
from gnnpar.parallel.normalised import normalised_for
from gnnpar.parallel.sketch import sketch
from gnnpar.parallel.strategy import FirstLayer
from gnnpar.parallel.view import FeatureCache
from gnnpar.partition.shard import Shard

E = TypeVar("E", bound=FlatEngine)
MakeExchange = Callable[[Communicator, Wire], CodedExchange]


def halo_engine(
    shard: Shard,
    model: GNN,
    task: Task,
    comm: Communicator,
    *,
    seed: int,
    first_layer: FirstLayer,
    overlap: Overlap,
    codec: CodecConfig,
    exactness: frozenset[Exactness],
    features_exact: bool,
    halo: Halo = "rows",
    exchange: MakeExchange = CodedExchange,
    kept: str | None = None,
    crosses_epochs: bool = False,
    engine: type[E] = FlatEngine,
) -> E:
    """Build the engine of a strategy that reads halo rows.

    `exchange`: makes those of the training view, with the codec. `features_exact`: features that are sent once travel
    as they are. `kept`: the exchanges are parts of the engine, under this name. `crosses_epochs`: as for FlatEngine.
    `engine`: its class.
    """
    shard = normalised_for(model, shard, exactness, first_layer)
    config, codecs, parts = with_edge_weights(codec, model), list[Codec](), dict[str, Stateful]()

    def coded(lists: RowLists, name: str = "", *, values: bool = False) -> CodedExchange:
        """An exchange of the training view. `values`: the first operand goes by the codec, the others as they are."""
        codecs.append(config.build(lists, comm, seed))
        made = exchange(comm, FirstAndRest(codecs[-1], exactly) if values else codecs[-1])
        if kept is not None:
            parts[kept + name] = made
        return made

    exactly = Identity().build(shard.row_lists, comm, seed)
    exact_exchange, edges = CodedExchange(comm, exactly), EdgeOrder(shard, overlap)
    found = _covers(shard, model, config, comm, halo, linear=kept is not None)
    of_training, of_exact = dict[int, Covered](), dict[int, Covered]()
    for types, cover in found.covers.items():
        order, name = EdgeOrder(cover.shard, overlap), f" {types}" if types else ""
        of_exact[types] = Covered(cover, order, exact_exchange, exact_exchange, exact_exchange)
        rows = coded(cover.shard.row_lists, f" under cover{name}")
        of_training[types] = of_exact[types].by(rows, coded(cover.row_lists, f" partial{name}", values=True))
    whole = coded(shard.row_lists) if found.rest else next(iter(of_training.values())).rows
    cache = FeatureCache.of(first_layer)
    # what an inexact exchange kept must not leak into evaluation
    exact_cache = cache if "exact" in exactness else FeatureCache.of(first_layer)
    once = exact_exchange if features_exact else None
    view = HaloGraph(shard, Pass(seed), exchange=whole, edges=edges, cache=cache, once=once, covers=of_training)
    exact = HaloGraph(shard, Pass(seed), exchange=exact_exchange, edges=edges, cache=exact_cache, covers=of_exact)
    parts["held"] = view.held
    if cache is not None:
        parts["cache"] = cache
    return engine(
        view=view,
        exact=exact,
        shard=shard,
        model=model,
        task=task,
        comm=comm,
        seed=seed,
        codecs=codecs,
        structure=tuple(found.covers.values()),
        parts=parts,
        crosses_epochs=crosses_epochs,
        facts=found.facts,
    )


def _covers(shard: Shard, model: GNN, codec: CodecConfig, comm: Communicator, halo: Halo, *, linear: bool) -> Covers:
    if halo == "rows" or comm.size == 1 or isinstance(codec, Drop):
        return Covers()
    return make_covers(shard, sketch(model, shard, gradients=True), codec, comm, auto=halo == "auto", linear=linear)
