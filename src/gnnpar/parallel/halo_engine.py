"""The flat engine of methods that read halo rows: one view trains by their exchange, one evaluates exactly."""

from __future__ import annotations

from typing import TypeVar

from gnnpar.codecs.adaptive.codec import with_edge_weights
from gnnpar.codecs.codec import Codec, FirstAndRest, Identity
from gnnpar.comm import CodedExchange
from gnnpar.comm.rows import RowLists
from gnnpar.parallel.base import CodedStrategy
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.cover import Exchanges, make_covers
from gnnpar.parallel.edges import EdgeOrder, Overlap
from gnnpar.parallel.engine import FlatEngine, Stateful
from gnnpar.parallel.halo_graph import HaloGraph
from gnnpar.parallel.row_bytes import Halo, RowBytes
from gnnpar.parallel.stale import RowPolicy, StaleExchange

E = TypeVar("E", bound=FlatEngine)


def halo_engine(
    context: BuildContext,
    strategy: CodedStrategy,
    *,
    overlap: Overlap,
    features_exact: bool,
    halo: Halo = "rows",
    policy: RowPolicy | None = None,
    kept: str = "",
    crosses_epochs: bool = False,
    engine: type[E] = FlatEngine,
) -> E:
    """Build the engine of a strategy that reads halo rows.

    `policy`: how old the rows of the training view are; `kept`: its exchanges are parts of the engine, under this name.
    `features_exact`: features that are sent once travel as they are. `crosses_epochs`: as for FlatEngine. `engine`: its
    class.
    """
    exactness = strategy.exactness
    context = context.normalised_for(exactness)
    shard, model, comm, run = context.shard, context.model, context.comm, context.start
    config, codecs, parts = with_edge_weights(strategy.codec, model), list[Codec](), dict[str, Stateful]()

    def coded(lists: RowLists, name: str = "", *, values: bool = False) -> CodedExchange:
        """Return an exchange of the training view. `values`: the first operand goes by the codec, the others as they
        are."""
        codecs.append(config.build(lists, comm, context.seed))
        wire = FirstAndRest(codecs[-1], exactly) if values else codecs[-1]
        if policy is None:
            return CodedExchange(comm, wire)
        made = parts[kept + name] = StaleExchange(comm, wire, policy)
        return made

    exactly = Identity().build(shard.row_lists, comm, context.seed)
    exact_exchange, edges = CodedExchange(comm, exactly), EdgeOrder(shard, overlap)
    row_bytes = RowBytes(config, halo=halo, linear=policy is not None)
    covers, facts, rest = make_covers(shard, model, row_bytes, comm, overlap)
    split: dict[int, Exchanges] = {}
    for types, cover in covers.items():
        name = f" {types}" if types else ""
        rows = coded(cover.edges.shard.row_lists, f" under cover{name}")
        split[types] = rows, coded(cover.lists, f" partial{name}", values=True), exact_exchange
    whole = coded(shard.row_lists) if rest else next(iter(split.values()))[0]
    cache = context.new_cache()
    # state of an inexact exchange must not leak into evaluation
    exact_cache = cache if "exact" in exactness else context.new_cache()
    once = exact_exchange if features_exact else None
    view = HaloGraph(shard, run, exchange=whole, edges=edges, cache=cache, once=once, covers=covers, coded=split)
    exact = HaloGraph(shard, run, exchange=exact_exchange, edges=edges, cache=exact_cache, covers=covers)
    return engine(
        context,
        view=view,
        exact=exact,
        codecs=codecs,
        structure=tuple(covers.values()),
        parts=parts | {"held": view.held, "cache": cache},
        crosses_epochs=crosses_epochs,
        facts=facts,
    )
