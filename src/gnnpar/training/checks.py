"""What a run cannot do, found before any rank starts."""

from __future__ import annotations

from gnnpar.comm.world import World
from gnnpar.data.preprocess import Generated
from gnnpar.parallel.strategy import (
    Strategy,
    check_first_layer,
    refuse_empty_clusters,
    refuse_moments,
    refuse_neighborhoods,
    refuse_one_piece,
    refuse_pairs,
    refuse_row_order,
)
from gnnpar.placement import Plan
from gnnpar.settings import Settings
from gnnpar.training import shards
from gnnpar.training.checkpoint import resume


def check(settings: Settings, world: World) -> None:
    """ValueError in one line: a checkpoint, a number of ranks or shards that this run cannot use."""
    resume.check(settings)
    check_strategy(settings, world.size)
    shards.check(settings, world)


def check_strategy(settings: Settings, size: int) -> None:
    """Refuse what the strategy cannot do on so many ranks, with so many layers, in so many epochs."""
    strategy: Strategy = settings.strategy
    refuse_one_piece(strategy, settings.model, settings.names)
    refuse_neighborhoods(strategy, settings.model, settings.names)
    refuse_moments(strategy, settings.model, settings.names)
    refuse_pairs(strategy, settings.task, settings.names)
    refuse_row_order(strategy, settings.row_order, settings.task, settings.names)
    check_first_layer(strategy, settings.first_layer)
    if isinstance(settings.dataset, Generated):  # others are read by rank 0, which refuses the same then
        refuse_empty_clusters(strategy, settings.dataset.generated_nodes)
    ranks, layers = (size, settings.model.num_layers) if settings.plan is None else Plan.size(settings.plan)
    strategy.check(ranks, layers, settings.epochs)
