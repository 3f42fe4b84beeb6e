"""Modules that were renamed, for the `_target_` of run folders, checkpoints, plans and YAML written before.

A file keeps the name of the class as it was published; hashes of configurations are made with the first published
name, so that a job stays the same job when its code moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnnpar.durable import JsonDict, JsonObject

MOVED = {  # 0.1.0 -> now
    "gnnpar.codecs.adaptive": "gnnpar.codecs.adaptive.codec",
    "gnnpar.planning.topology": "gnnpar.pricing.topology",
    "gnnpar.runner.optim": "gnnpar.training.optim",
    "gnnpar.shard.partition": "gnnpar.partition.partition",
    "gnnpar.shard.streaming": "gnnpar.partition.streaming",
    "gnnpar.strategies.adaqp": "gnnpar.parallel.halo.adaqp",
    "gnnpar.strategies.gnnpipe": "gnnpar.parallel.pipeline.strategy",
    "gnnpar.strategies.graph_parallel": "gnnpar.parallel.halo.strategy",
    "gnnpar.strategies.hybrid": "gnnpar.parallel.pipeline.hybrid",
    "gnnpar.strategies.minibatch": "gnnpar.parallel.sampling.strategy",
    "gnnpar.strategies.sar": "gnnpar.parallel.sequential.strategy",
    "gnnpar.strategies.single": "gnnpar.parallel.single.strategy",
    "gnnpar.strategies.tag": "gnnpar.planner.strategy",
}
_LATER = {
    "deterministic": False,
    "features": "given",
    "features_dim": 64,
    "row_order": "none",
    "task": {"_target_": "gnnpar.data.tasks.Labels"},
    "tf32": False,
}
_LATER_OF_MODELS = {"jump": "none"}
_LATER_OF_LAUNCHERS = {"cuda_graph": False}
_LATER_OF_TASKS = {"loss": None, "class_weight": None, "label_smoothing": 0.0, "metric": None, "metrics": []}
_LATER_OF_GROUPS = {"model": _LATER_OF_MODELS, "launch": _LATER_OF_LAUNCHERS, "task": _LATER_OF_TASKS}
_PUBLISHED = {now: before for before, now in MOVED.items()}


def current(target: str) -> str:
    """The path of a class today, given the one it had in any version."""
    return _moved(target, MOVED)


def published(target: str) -> str:
    """The path under which a class was first published."""
    return _moved(target, _PUBLISHED)


def with_current_targets(tree: object) -> Any:  # Any: plain data of JSON or YAML
    """The tree with every `_target_` as it is called today."""
    return _mapped(tree, MOVED)


def with_published_targets(tree: object) -> Any:  # Any: plain data of JSON or YAML
    """The tree with every `_target_` as it was first published, for hashes."""
    return _mapped(tree, _PUBLISHED)


def with_published_keys(settings: JsonObject) -> JsonDict:
    """A configuration without keys of later versions whose value is what every run had before, for hashes."""
    return _without(_without_later(settings, _LATER_OF_GROUPS), _LATER)


def with_compared_keys(settings: JsonObject) -> JsonDict:
    """The same of the model and the task alone, for what is compared with configurations of before."""
    return _without_later(settings, {group: _LATER_OF_GROUPS[group] for group in ("model", "task")})


def _without_later(settings: JsonObject, later: Mapping[str, Mapping[str, object]]) -> JsonDict:
    kept = dict(settings)
    for group, keys in later.items():
        if isinstance(of_group := kept.get(group), Mapping):
            kept[group] = _without(of_group, keys)
    return kept


def _without(keys: JsonObject, later: Mapping[str, object]) -> JsonDict:
    return {key: value for key, value in keys.items() if key not in later or value != later[key]}


def with_published_names(names: Mapping[str, str]) -> dict[str, str]:
    """Names of the files chosen in groups, without groups of later versions where they say what every run was."""
    return {group: name for group, name in names.items() if (group, name) != ("task", "labels")}


def _moved(target: str, table: Mapping[str, str]) -> str:
    module, _, name = target.rpartition(".")
    return f"{table[module]}.{name}" if module in table else target


def _mapped(tree: object, table: Mapping[str, str]) -> Any:  # Any: as above
    if isinstance(tree, Mapping):
        return {
            key: _moved(value, table) if key == "_target_" and isinstance(value, str) else _mapped(value, table)
            for key, value in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        return [_mapped(value, table) for value in tree]
    return tree
