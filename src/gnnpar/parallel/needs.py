"""The needs of a run and the capabilities of its strategy: one table of refusals, and refusals about edge data."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from gnnpar.data.tasks import TaskConfig
from gnnpar.folds.edge_data import EDGE_KINDS, EdgeKind
from gnnpar.models.gnn import ModelSource
from gnnpar.parallel.strategy import Strategy
from gnnpar.parallel.view import FirstLayer
from gnnpar.partition.row_order import Order


def refuse(strategy: Strategy, model: ModelSource, names: Mapping[str, str], task: TaskConfig | None = None) -> None:
    """Raise ValueError if the model or the task needs a capability that the strategy, as configured, lacks."""
    can, name = strategy.capabilities, names.get("strategy") or type(strategy).__name__
    kind = names.get("model") or ("pyg" if model.wraps else type(model).__name__)
    others = "choose single, graph_parallel or another that gnnpar check accepts"
    if model.wraps and can.no_pyg:
        raise ValueError(f"strategy={name} {can.no_pyg}, which model={kind} does not allow; {others}")
    if can.by_layers and (why := model.in_one_piece):
        raise ValueError(f"strategy={name} runs a model layer by layer, and of model={kind} {why}; {others}")
    if not can.whole_neighborhoods and (convolutions := model.whole_neighborhoods):
        raise ValueError(
            f"strategy={name} folds neighbourhoods in pieces, and {convolutions[0]} of model={kind} "
            "reads whole ones; choose single, graph_parallel or another that reads halo rows"
        )
    if not can.moments and (modules := model.moments):
        raise ValueError(
            f"strategy={name} never holds all rows of a layer at once, and {modules[0]} of model={kind} normalises by "
            "their mean and variance; choose single, graph_parallel, sar or another that does, or normalise row by row "
            "(model.norm=layer; of PyG nn.LayerNorm)"
        )
    if not can.moments and (readers := model.totals):
        raise ValueError(
            f"strategy={name} never holds all rows of a layer at once, and {readers[0]} of model={kind} reads sums "
            "over them; choose single, graph_parallel, sar or another that does"
        )
    if task is not None and task.decoder is not None and not can.pair_loss:
        raise ValueError(
            f"strategy={name} never has the output rows of all nodes of a rank at once, and task={names.get('task')} "
            "scores pairs of any two nodes; choose single, graph_parallel, sar (without logical_parts) or another "
            "strategy that works on full graphs without stages"
        )


def check_first_layer(strategy: Strategy, first_layer: FirstLayer) -> None:
    """Refuse first_layer=cached if the strategy cannot run with it."""
    if first_layer == "cached" and not strategy.capabilities.cached_first_layer:
        raise ValueError("first_layer=cached is for strategies without chunks or batches: set first_layer=live.")


def refuse_empty_clusters(strategy: Strategy, num_nodes: int) -> None:
    """Raise ValueError if the graph has fewer nodes than the clusters that the strategy asks for."""
    if (clusters := strategy.capabilities.clusters) > num_nodes:
        raise ValueError(
            f"strategy.clusters={clusters}, but the graph has {num_nodes} nodes: give at most one cluster a node"
        )


def orders_rows(strategy: Strategy, task: TaskConfig) -> bool:
    """Return True if the rows of a part may stand in any order. Pairs of nodes are looked up by ascending ids."""
    return strategy.capabilities.row_order and task.decoder is None


def refuse_row_order(strategy: Strategy, how: Order, task: TaskConfig, names: Mapping[str, str]) -> None:
    """Raise ValueError for a row order that the strategy or the task does not allow."""
    if how == "metis" and not orders_rows(strategy, task):
        group = "task" if strategy.capabilities.row_order else "strategy"
        raise ValueError(
            f"row_order=metis: {group}={names.get(group) or type(strategy).__name__} reads rows by their ascending "
            "ids; set row_order=auto, which then leaves them as they are"
        )


EDGE_TITLES: dict[EdgeKind, str] = {"weight": "weights", "type": "types", "attr": "attributes"}


def refuse_edge_data(
    strategy: Strategy,
    model: ModelSource,
    kinds: Collection[EdgeKind],
    in_weight: Tensor | None,
    dataset: str,
    names: Mapping[str, str],
) -> None:
    """Raise ValueError if the strategy or the model cannot handle the edge data, or these weights.

    Shapes: in_weight [n], weighted degrees of all nodes, or of a part's; None: edges have no weights.
    """
    refuse_edges_of_model(model, kinds, in_weight, dataset, names)
    for kind in EDGE_KINDS:
        if kind in kinds and kind not in strategy.capabilities.edge_data:
            raise ValueError(
                f"dataset {dataset} has {EDGE_TITLES[kind]} on edges, which "
                f"strategy={names.get('strategy') or type(strategy).__name__} does not carry; use single, "
                f"graph_parallel or another strategy that gnnpar check accepts with it, or remove edge_{kind} from the "
                "dataset, if the graph is meant without."
            )


def refuse_edges_of_model(
    model: ModelSource,
    kinds: Collection[EdgeKind],
    in_weight: Tensor | None,
    dataset: str,
    names: Mapping[str, str],
) -> None:
    """Raise ValueError if the model does not read the edge data, or cannot handle these weights.

    Shapes: in_weight [n], as for `refuse_edge_data`.
    """
    for kind in EDGE_KINDS:
        if kind in kinds and kind not in model.edge_data:
            raise ValueError(
                f"dataset {dataset} has {EDGE_TITLES[kind]} on edges, which "
                f"model={names.get('model') or type(model).__name__} does not read; remove edge_{kind} from the "
                "dataset, if the graph is meant without."
            )
    below = 0 if in_weight is None else int((in_weight < 0).sum())
    if in_weight is not None and below and model.takes_root:
        raise ValueError(
            f"dataset {dataset}: the weights of in-edges sum to less than 0 at {below} nodes (the least is "
            f"{float(in_weight.min()):.4g}), and model={names.get('model') or type(model).__name__} takes their root; "
            "make the weights positive."
        )
