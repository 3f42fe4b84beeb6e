"""Find the checkpoint to start from, and restore the parts that fit this run.

An equal run (graph, model, strategy, partition, ranks, precision, seed) resumes bit for bit. With other ranks or
another strategy, model and optimizer are restored and one line names the rest. Other graphs, splits and models are
refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gnnpar.comm import Communicator
from gnnpar.data.tasks import Task
from gnnpar.files import JsonDict, JsonObject, read_json, remove
from gnnpar.folds.edge_data import EdgeSizes, Schema
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.strategy import Strategy
from gnnpar.partition import learned
from gnnpar.placement import Plan
from gnnpar.settings import ConfigError, Settings, Stepper, instantiate, show
from gnnpar.track import jsonl
from gnnpar.track.console import say
from gnnpar.training.checkpoint import files as checkpoint
from gnnpar.training.checkpoint.files import Checkpoint
from gnnpar.training.result.result import CHANGES_NUMBERS, CHANGES_TIMES

_SAME = ("world_size", "strategy", "partition", "precision", "first_layer", "row_order", "seed")
_OUTPUTS = ("predictions.npy", "scores.npy", "export", "wandb.json")  # files of `predict`, `export` and wandb


@dataclass(frozen=True)
class Start:
    """The checkpoint that rank 0 found, if any.

    profile: measurements of the earlier run. same_setup: same strategy and ranks, so earlier times and bytes count.
    with_plan: use the plan in the checkpoint. changed_settings: settings that differed in earlier epochs.
    """

    found: Checkpoint | None = None
    profile: Path | None = None
    same_setup: bool = True
    with_plan: bool = False
    changed_settings: tuple[str, ...] = ()

    @property
    def epoch(self) -> int:
        return self.found.epoch if self.found else 0


def check(settings: Settings) -> None:
    """Raise ConfigError for a resume=PATH without checkpoints, and for replanning without checkpoints."""
    if settings.strategy.capabilities.plans_again and not settings.checkpoint.keep:
        raise ConfigError(
            "strategy.replan=true goes on from a checkpoint, but checkpoint.keep=0 keeps none; set checkpoint.keep=1"
        )
    path = settings.resume
    if isinstance(path, Path) and not checkpoint.is_checkpoint(path) and not checkpoint.folders(path):
        raise ConfigError(
            f"resume={path} holds no checkpoint; give the folder of a run with {checkpoint.FOLDER}/ in it, "
            "one of its checkpoints, or auto"
        )


def find(settings: Settings, run_dir: Path, num_ranks: int, *, restarted: bool) -> Start:
    """Find the checkpoint to start from, on rank 0. restarted: True if torchrun has restarted the ranks."""
    here, path = restarted or settings.resume == "auto", settings.resume
    found = checkpoint.latest(run_dir, say) if here else None
    if found is None and isinstance(path, Path):
        found = checkpoint.read(path) if checkpoint.is_checkpoint(path) else checkpoint.latest(path, say)
        if found is None:
            raise ValueError(f"resume={path} has no good checkpoint left; give another run's folder, or leave it out")
    if found is None:
        if here and checkpoint.all_folders(run_dir):  # damaged ones of later epochs would displace new ones
            _move_aside(run_dir / checkpoint.FOLDER, "has no good checkpoint")
        return Start(profile=_profile_in(run_dir, num_ranks) if restarted else None)
    if found.epoch > settings.epochs:
        raise ValueError(
            f"{found.folder} has {found.epoch} epochs behind it, and epochs={settings.epochs}: set epochs="
            f"{found.epoch} or more, or leave resume out"
        )
    if missing := jsonl.missing_epochs(found.run_dir, found.epoch):
        raise ValueError(
            f"{found.run_dir / jsonl.FILE} has no rows of epochs {missing}, which {found.folder} counts: put it back "
            "as it was, or leave resume out"
        )
    if found.run_dir.resolve() == run_dir.resolve():
        checkpoint.remove_after(run_dir, found.epoch)
    earlier = found.manifest["run"]
    same_setup = earlier["world_size"] == num_ranks and all(
        _without_profiles(earlier["settings"].get(name)) == _without_profiles(_json(settings.resolved.get(name)))
        for name in ("strategy", "partition", "precision", "first_layer")
    )
    with_plan = same_setup and earlier["seed"] == settings.seed and settings.plan is None and "plan" in found.manifest
    changed = changed_settings(found, _json(settings.resolved))
    return Start(found, _profile_in(found.run_dir, num_ranks), same_setup, with_plan, changed)


def _profile_in(run_dir: Path, num_ranks: int) -> Path | None:
    """Return profile.json of a run with as many ranks, if there is one."""
    profile = run_dir / "profile.json"
    try:
        return profile if read_json(profile)["num_ranks"] == num_ranks else None
    except (OSError, ValueError, KeyError):
        return None


def changed_settings(found: Checkpoint, resolved: JsonObject) -> tuple[str, ...]:
    """Return settings that change numbers or times and had another value in earlier epochs of a checkpoint."""
    earlier = found.manifest["run"]["settings"]
    deciding = [*CHANGES_NUMBERS, *CHANGES_TIMES]
    if resolved.get("optim", {}).get("schedule") == "cosine":  # reaches 0 at the last epoch
        deciding.append("epochs")
    common = [name for name in deciding if name in earlier and name in resolved]
    changed = {name for name in common if _without_profiles(earlier[name]) != _without_profiles(resolved[name])}
    return tuple(sorted(changed.union(found.manifest["progress"].get("begun_otherwise", ()))))


def clean(settings: Settings, run_dir: Path) -> None:
    """Move checkpoints, outputs and the profile of an earlier run aside, unless this run resumes in its folder."""
    if _resumes_in(settings, run_dir):
        return
    why = "is of an earlier run"
    if checkpoint.all_folders(run_dir):
        _move_aside(run_dir / checkpoint.FOLDER, why, "; resume=auto would have gone on from it")
    for made in _OUTPUTS:
        if os.path.lexists(run_dir / made):
            _move_aside(run_dir / made, why)
    profile = run_dir / "profile.json"
    if settings.profile is None or settings.profile.resolve() != profile.resolve():
        profile.unlink(missing_ok=True)


def _move_aside(path: Path, why: str, note: str = "") -> None:
    moved = path.with_stem(f"{path.stem}-before")
    remove(moved)
    path.rename(moved)
    say(f"{path} {why}: moved to {moved.name}{note}")


def _resumes_in(settings: Settings, run_dir: Path) -> bool:
    if isinstance(settings.resume, Path):
        source, own = settings.resume.resolve(), run_dir.resolve()
        return source == own or source.is_relative_to(own / checkpoint.FOLDER)  # not a run in a subfolder
    return settings.resume == "auto" and bool(checkpoint.folders(run_dir))


def replaying(settings: Settings, profile: Path | None) -> Strategy:
    """Return the strategy, with the profile of the resumed run wherever its YAML has `profile: null`."""
    data = settings.resolved["strategy"]
    given = data if profile is None else _with_profile(data, profile)
    return settings.strategy if given == data else instantiate(given, "strategy")


def _with_profile(tree: Any, profile: Path) -> Any:  # Any: resolved YAML
    if not isinstance(tree, Mapping):
        return tree
    return {k: str(profile) if (k, v) == ("profile", None) else _with_profile(v, profile) for k, v in tree.items()}


class EdgeFacts(NamedTuple):
    """Sizes of edge data. weighted: True if edges have weights."""

    weighted: bool = False
    sizes: EdgeSizes = EdgeSizes()

    @staticmethod
    def of(run: JsonObject) -> EdgeFacts:
        """Read them from the identity in a checkpoint."""
        types, attr = run.get("edge_types", 0), run.get("edge_attr", 0)
        degrees = tuple((degree, nodes) for degree, nodes in run.get("degrees", [(0, run.get("nodes", 0))]))
        text = run.get("node_types")
        schema = None if text is None else Schema.of(text)
        return EdgeFacts(bool(run.get("edge_weights", False)), EdgeSizes(int(types), int(attr), degrees, schema))


def identity(
    settings: Settings, plan: Plan, world_size: int, num_features: int, task: Task, edges: EdgeFacts
) -> JsonDict:
    """Return the identity of a run in its checkpoints, as plain JSON. `edges`: edge data of the dataset."""
    chosen = {"chosen": plan.predicted.get("candidate")} if plan.predicted else {}
    sizes = edges.sizes
    told = {
        **{name: plan.hashes.get(name, "") for name in ("graph", "split", "partition")},
        "world_size": world_size,
        "strategy": {**settings.resolved.get("strategy", {}), **chosen},
        "model": settings.resolved.get("model", {}),
        "precision": settings.precision,
        "first_layer": settings.first_layer,
        "row_order": settings.row_order,
        "seed": settings.seed,
        "num_features": num_features,
        "num_outputs": task.out_dim,
        "labels": task.name,
        "names": dict(settings.names),
        "settings": settings.resolved,
    }
    optional = {
        "features": settings.features if settings.features != "given" else None,
        "task": settings.resolved["task"] if settings.task.decoder is not None else None,
        "edge_weights": edges.weighted,
        "edge_types": sizes.types,
        "edge_attr": sizes.attr,
        "nodes": sum(nodes for _, nodes in sizes.degrees),  # a model may have a row per node
        "degrees": sizes.degrees if settings.model.reads_degrees else None,
        "node_types": sizes.schema and sizes.schema.text,
    }
    return _json(told | {key: value for key, value in optional.items() if value})


def _json(tree: object) -> JsonDict:
    """Return a tree after a round trip through JSON."""
    return json.loads(json.dumps(tree, default=str))


def refuse_another(found: Checkpoint, mine: JsonObject) -> None:
    """Raise ValueError for a checkpoint of another graph, split or model."""
    earlier = found.manifest["run"]
    for name in ("graph", "split"):
        if earlier[name] != mine[name]:
            raise ValueError(
                f"{found.folder} is of {name} {earlier[name][:12]}, this run's is {mine[name][:12]}: give the dataset "
                "it was trained on, or leave resume out"
            )
    for group in ("model", "task"):
        then, now = earlier.get(group, {}), mine.get(group, {})
        for key in sorted(then.keys() | now.keys()):
            if then.get(key) != now.get(key):
                name = group if key == "_target_" else f"{group}.{key}"
                raise ValueError(
                    f"{found.folder} is of a {group} with {key}={show(then.get(key))}, this run's has "
                    f"{key}={show(now.get(key))}: set {name} as it was, or leave resume out"
                )
    for name in ("features", "num_features", "num_outputs"):
        told, have = (run.get(name, "given") for run in (earlier, mine))
        if told != have:
            raise ValueError(f"{found.folder} is of a model with {name}={told}, this run's has {have}")


def differences(found: Checkpoint, mine: JsonObject) -> list[str]:
    """Return the reasons why a run cannot resume bit for bit, such as 'world_size 4 -> 2'; empty if it can."""
    both, lines = (found.manifest["run"], mine), []
    for name in _SAME:
        told, have = (_without_profiles(run.get(name)) for run in both)
        if told != have and name == "strategy":
            told, have = (run["names"].get("strategy", "") for run in both)
            lines.append(f"strategy {told} -> {have}" if told != have else f"settings of strategy {have}")
        elif told != have:
            lines.append(f"{name} {str(told)[:12]} -> {str(have)[:12]}")
    return lines


def _without_profiles(tree: object) -> object:
    """Remove paths of profiles, which do not identify measurements."""
    if isinstance(tree, Mapping):
        return {k: _without_profiles(v) for k, v in tree.items() if k != "profile"}
    return tree


def restore(
    start: Start, mine: JsonObject, engine: Engine, net: nn.Module, optimizer: Stepper, comm: Communicator
) -> JsonDict | None:
    """Load a checkpoint into a new engine and optimizer. Return the saved `Progress`. Collective."""
    found = start.found
    if found is None:
        return None
    refuse_another(found, mine)
    changed = differences(found, mine)
    device = comm.device
    if not changed:
        tree = found.rank(comm.rank, device)
        engine.load_state_dict(tree["engine"])
        weights, saved = tree["model"], tree["optimizer"]
        torch.set_rng_state(tree["random"]["cpu"])
        if device.type == "cuda" and tree["random"]["cuda"] is not None:
            torch.cuda.set_rng_state(tree["random"]["cuda"], device)
    else:
        weights, saved = found.merged(device)
    load_weights(engine, net, (weights, saved), found)
    dropped = ["the engine's state (codec, history, caches)"] if changed else []
    if saved["kind"] == type(optimizer.optimizer).__name__:
        optimizer.load_state_dict(saved)
    else:
        dropped.append(f"the optimizer's ({saved['kind']}, this run has {type(optimizer.optimizer).__name__})")
    if comm.rank == 0:
        lost = f"; dropped: {', '.join(dropped)}" + (f", because {', '.join(changed)}" if changed else "")
        say(f"resumed from {found.folder} at epoch {found.epoch}" + (lost if dropped else ""))
    return found.manifest["progress"] | {"begun_otherwise": changed_settings(found, mine["settings"])}


def load_weights(engine: Engine, model: nn.Module, given: tuple[JsonDict, JsonDict], found: Checkpoint) -> None:
    """Load the weights that an engine holds, and its learned vectors. Raise ValueError for missing or unequal shapes.
    given: (weights, optimizer) of a rank or of `Checkpoint.merged`; the optimizer gets the state of these vectors."""
    (weights, optimizer), mine = given, dict(engine.named_weights())
    learned.deal(weights, optimizer["state"], mine)
    for name, weight in mine.items():
        if name not in weights or (not checkpoint.is_extra(name) and weights[name].shape != weight.shape):
            have = tuple(weights[name].shape) if name in weights else "no such parameter"
            wanted = "one" if checkpoint.is_extra(name) else tuple(weight.shape)
            raise ValueError(f"{found.folder}: {name} is {have}, this run's model has {wanted}")
    model.load_state_dict({name: weights[name] for name in mine}, strict=False)
    for name in (name for name in mine if name.startswith(learned.PIECE)):
        mine[name].copy_(weights[name])
