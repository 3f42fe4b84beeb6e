"""Refuse runs that cannot work, before any rank starts."""

from __future__ import annotations

from gnnpar.comm.world import World
from gnnpar.data.preprocess import Generated
from gnnpar.data.tasks import Labels
from gnnpar.models.gnn import ModelConfig
from gnnpar.parallel.needs import check_first_layer, refuse, refuse_empty_clusters, refuse_row_order
from gnnpar.parallel.strategy import Strategy
from gnnpar.placement import Plan
from gnnpar.settings import Settings
from gnnpar.training import shards
from gnnpar.training.checkpoint import resume


def check(settings: Settings, world: World) -> None:
    """Raise ValueError for a checkpoint, a number of ranks or shards that this run cannot use."""
    resume.check(settings)
    if isinstance(settings.task, Labels):
        settings.task.functions()
    check_strategy(settings, world.size)
    refuse_unbuilt(settings, world)
    refuse_capture(settings, world)
    shards.check(settings, world)


def refuse_unbuilt(settings: Settings, world: World) -> None:
    """Raise ValueError for a PyG model that cannot be built. Read the dataset if the model needs its widths."""
    if not settings.model.wraps or world.how == "joined" or settings.shards.folder is not None:
        return
    try:
        settings.build_model(11, 5)  # any widths
    except ValueError:
        dataset = settings.load_dataset()
        task = settings.task.of(dataset.task, dataset.num_classes)
        settings.build_model(dataset.num_features, task.out_dim, dataset.edge_sizes)


def refuse_capture(settings: Settings, world: World) -> None:
    """Raise ValueError if epochs cannot be captured as a CUDA graph."""
    if not settings.launch.cuda_graph:
        return
    names, off = settings.names, "or set launch.cuda_graph=false"
    strategy = names.get("strategy") or type(settings.strategy).__name__
    if world.device != "cuda":
        raise ValueError(f"launch.cuda_graph=true replays work of a GPU, and this run is on the CPU: use a GPU, {off}")
    if not settings.strategy.capabilities.captured:
        raise ValueError(
            f"launch.cuda_graph=true: with strategy={strategy} as it is configured the host decides within an epoch; "
            f"choose single, graph_parallel, sar, cagnet or feature with codec=identity or bf16, {off}"
        )
    if settings.task.decoder is not None:
        raise ValueError(
            f"launch.cuda_graph=true: task={names.get('task')} draws other pairs in every epoch: {off[3:]}"
        )
    if world.size > 1 and world.backend != "nccl":
        raise ValueError(
            f"launch.cuda_graph=true: messages of comm={world.backend} go through the host: use comm=nccl, {off}"
        )


def refuse_learned_features(settings: Settings) -> None:
    """Raise ValueError if features cannot be learned with the strategy, the model or another key."""
    how, strategy, model = f"features={settings.features}", settings.strategy, settings.model
    if settings.features == "given":
        return
    if not strategy.capabilities.learned_features:
        raise ValueError(
            f"{how}: strategy={settings.names.get('strategy') or type(strategy).__name__} as it is configured reads "
            "rows and returns no gradient to their rank; choose single, graph_parallel, sar (without "
            "logical_parts) or another strategy that works on full graphs"
        )
    if settings.caches_first_layer:
        raise ValueError(f"first_layer=cached keeps what {how} changes in every epoch; set first_layer=live")
    if settings.launch.cuda_graph:
        raise ValueError(f"launch.cuda_graph=true: the host waits for a norm with {how}; set launch.cuda_graph=false")
    if isinstance(model, ModelConfig) and model.carried_columns:
        raise ValueError(f"{how}: with model.num_node_types the last features are types of nodes; set features=given")


def check_strategy(settings: Settings, size: int) -> None:
    """Raise ValueError if the strategy cannot train with these ranks, layers and epochs."""
    strategy: Strategy = settings.strategy
    refuse(strategy, settings.model, settings.names, settings.task)
    refuse_row_order(strategy, settings.row_order, settings.task, settings.names)
    refuse_learned_features(settings)
    check_first_layer(strategy, settings.first_layer)
    if isinstance(settings.dataset, Generated):  # rank 0 checks other datasets when it reads them
        refuse_empty_clusters(strategy, settings.dataset.generated_nodes)
    ranks, layers = (size, settings.model.num_layers) if settings.plan is None else Plan.size(settings.plan)
    try:
        strategy.check(ranks, layers, settings.epochs)
    except ValueError as error:
        own = settings.resolved["strategy"].get("codec") != settings.resolved["codec"]
        if own and str(error).startswith("codec."):  # the strategy's YAML sets its own codec
            raise ValueError(f"strategy.{error}") from error
        raise
