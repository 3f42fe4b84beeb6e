"""Where a run begins: at epoch 0, or where a checkpoint left off; and what of the checkpoint fits this run.

An equal run (graph, model, strategy, partition, ranks, precision, seed) goes on bit for bit. On other ranks or with
another strategy the model and the optimizer are taken and one line says what was dropped. Another graph, split or model
is refused.
"""

from __future__ import annotations

import json
import os
import tempfile
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
from gnnpar.settings import ConfigError, Settings, Stepper, instantiate, show
from gnnpar.track import jsonl
from gnnpar.training.checkpoint import files as checkpoint
from gnnpar.training.checkpoint.deciding import OF_NUMBERS, OF_TIME
from gnnpar.training.checkpoint.files import Checkpoint, Say
from gnnpar.training.checkpoint.state import is_extra

_SAME = ("world_size", "strategy", "partition", "precision", "first_layer", "row_order", "seed")
_OF_BEFORE = {"row_order": "none"}  # what checkpoints of before do not say


@dataclass(frozen=True)
class Start:
    """What rank 0 found to begin with. `profile`: what was measured beforehand, to be used again. `alike`: the epochs
    before were run by the same strategy on as many ranks, so that their times and bytes are those of this run.
    `with_plan`: the run had planned again, and its new plan is this run's."""

    found: Checkpoint | None = None
    profile: Path | None = None
    alike: bool = True
    with_plan: bool = False
    begun_otherwise: tuple[str, ...] = ()

    @property
    def epoch(self) -> int:
        return self.found.epoch if self.found else 0


def check(settings: Settings) -> None:
    """Refuse a resume=PATH that holds nothing, and plans that cannot change, before any rank starts."""
    if settings.strategy.capabilities.plans_again and not settings.checkpoint.keep:
        raise ConfigError(
            "strategy.replan=true goes on from a checkpoint, but checkpoint.keep=0 keeps none; set checkpoint.keep=1"
        )
    if isinstance(settings.resume, Path) and not _claims(settings.resume):
        raise ConfigError(
            f"resume={settings.resume} holds no checkpoint; give the folder of a run with {checkpoint.FOLDER}/ in it, "
            "one of its checkpoints, or auto"
        )


def _claims(path: Path) -> bool:
    return checkpoint.is_one(path) or bool(checkpoint.folders(path))


def find(settings: Settings, run_dir: Path, num_ranks: int, *, restarted: bool, say: Say) -> Start:
    """The checkpoint to begin with, on rank 0. `restarted`: this run has begun before, and lost a rank."""
    found = None
    if restarted or settings.resume == "auto":
        found = checkpoint.latest(run_dir, say)
    if found is None and isinstance(settings.resume, Path):
        path = settings.resume
        found = checkpoint.read(path) if checkpoint.is_one(path) else checkpoint.latest(path, say)
        if found is None:
            raise ValueError(f"resume={path} has no good checkpoint left; give another run's folder, or leave it out")
    if found is None:
        if settings.resume == "auto" or restarted:  # none is good, and what the run writes would count as older
            _put_aside(run_dir, say, "has no good checkpoint")
        return Start(None, profile_in(run_dir) if restarted else None)
    if found.epoch > settings.epochs:
        raise ValueError(
            f"{found.folder} has {found.epoch} epochs behind it, and epochs={settings.epochs}: set epochs="
            f"{found.epoch} or more, or leave resume out"
        )
    check_rows(found)
    if found.run_dir.resolve() == run_dir.resolve():
        checkpoint.forget_after(run_dir, found.epoch)
    theirs = found.manifest["run"]
    alike = theirs["world_size"] == num_ranks and all(
        _without_profiles(theirs["settings"].get(name)) == _without_profiles(_json(settings.resolved.get(name)))
        for name in ("strategy", "partition", "precision", "first_layer")
    )
    with_plan = alike and theirs["seed"] == settings.seed and settings.plan is None and found.manifest.get("plan")
    otherwise = begun_otherwise(found, _json(settings.resolved))
    return Start(found, profile_in(found.run_dir), alike, bool(with_plan), otherwise)


def begun_otherwise(found: Checkpoint, resolved: JsonObject) -> tuple[str, ...]:
    """Settings that decide on numbers or times which the epochs behind a checkpoint, or some of them, had otherwise
    than `resolved` says."""
    theirs = found.manifest["run"]["settings"]
    deciding = [*OF_NUMBERS, *OF_TIME]
    if _value(resolved, "optim", "schedule") == "cosine":  # to 0 at the last epoch
        deciding.append("epochs")
    common = [name for name in deciding if name in theirs and name in resolved]
    changed = {name for name in common if _without_profiles(theirs[name]) != _without_profiles(resolved[name])}
    return tuple(sorted(changed.union(found.manifest["progress"].get("begun_otherwise", ()))))


def _value(tree: JsonObject, group: str, key: str) -> object:
    of_group = tree.get(group)
    return of_group.get(key) if isinstance(of_group, Mapping) else None


def check_rows(found: Checkpoint) -> None:
    """Raise ValueError if metrics.jsonl lacks rows of the checkpoint's epochs, which the new run counts as its own."""
    if missing := jsonl.missing_epochs(found.run_dir, found.epoch):
        raise ValueError(
            f"{found.run_dir / jsonl.FILE} has no rows of epochs {missing}, which {found.folder} counts: put it back "
            "as it was, or leave resume out"
        )


def clean(settings: Settings, run_dir: Path, say: Say) -> None:
    """Before the first start: checkpoints and a profile of an earlier run in the same folder are not this run's, unless
    it is told to go on from them."""
    folder = run_dir / checkpoint.FOLDER
    if os.path.lexists(folder) and not folder.is_dir():
        raise ValueError(f"{folder} is no folder, and no checkpoint could be written: remove it")
    if _goes_on_in(settings, run_dir):
        return
    _put_aside(run_dir, say, "is of an earlier run", "; resume=auto would have gone on from it")
    for made in _MADE_OF_A_RUN:
        if os.path.lexists(there := run_dir / made):
            aside = there.with_stem(f"{there.stem}-before")
            remove(aside)
            there.rename(aside)
            say(f"{there} is of an earlier run: moved to {aside.name}")
    profile = run_dir / "profile.json"
    if settings.profile is None or settings.profile.resolve() != profile.resolve():
        profile.unlink(missing_ok=True)


_MADE_OF_A_RUN = ("predictions.npy", "scores.npy", "export", "wandb.json")
"""What `predict` and `export` leave in the folder of a run by themselves, and where it is on wandb."""


def _put_aside(run_dir: Path, say: Say, why: str, note: str = "") -> None:
    folder = run_dir / checkpoint.FOLDER
    if checkpoint.everything(run_dir):
        aside = folder.with_name(folder.name + "-before")
        remove(aside)
        folder.rename(aside)
        say(f"{folder} {why}: moved to {aside.name}{note}")


def _goes_on_in(settings: Settings, run_dir: Path) -> bool:
    if isinstance(settings.resume, Path):
        there, own = settings.resume.resolve(), run_dir.resolve()
        return there == own or there.is_relative_to(own / checkpoint.FOLDER)  # not of a run that lies below
    return settings.resume == "auto" and bool(checkpoint.folders(run_dir))


def profile_in(folder: Path) -> Path | None:
    file = folder / "profile.json"
    return file if file.is_file() else None


def of_rank_0(profile: Path | None, comm: Communicator) -> Path | None:
    """What rank 0 has found: hosts that do not share the folder of the run have another there, or none. Collective."""
    found = comm.broadcast(None if profile is None else _read(profile))
    if found is None or comm.rank == 0:
        return profile if comm.rank == 0 else None
    copy = Path(tempfile.mkdtemp()) / "profile.json"  # gone with the temporary files of this process
    copy.write_text(json.dumps(found), encoding="utf-8")
    return copy


def _read(profile: Path) -> object:
    try:
        return read_json(profile)
    except (OSError, ValueError):
        return None


def replaying(settings: Settings, profile: Path | None, num_ranks: int) -> Strategy:
    """The strategy with what was measured by the run it continues, wherever its YAML has a `profile` that is null."""
    if profile is None or _ranks_of(profile) != num_ranks:
        return settings.strategy
    data = settings.resolved["strategy"]
    given = _with_profile(data, profile)
    return settings.strategy if given == data else instantiate(given, "strategy")


def _ranks_of(profile: Path) -> int | None:
    try:
        return read_json(profile)["num_ranks"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _with_profile(tree: Any, profile: Path) -> Any:  # Any: resolved YAML
    if not isinstance(tree, Mapping):
        return tree
    return {k: str(profile) if (k, v) == ("profile", None) else _with_profile(v, profile) for k, v in tree.items()}


class EdgeFacts(NamedTuple):
    """What edges of a dataset carry: whether they have weights, and the sizes of the rest; the histogram of in-degrees
    where the model is made with it."""

    weighted: bool = False
    sizes: EdgeSizes = EdgeSizes()

    @staticmethod
    def of(run: JsonObject) -> EdgeFacts:
        """As `identity` wrote them into a checkpoint."""
        types, attr = run.get("edge_types", 0), run.get("edge_attr", 0)
        degrees = tuple((degree, nodes) for degree, nodes in run.get("degrees", [(0, run.get("nodes", 0))]))
        text = run.get("node_types")
        schema = None if text is None else Schema.of(text)
        return EdgeFacts(bool(run.get("edge_weights", False)), EdgeSizes(int(types), int(attr), degrees, schema))


def identity(
    settings: Settings,
    hashes: Mapping[str, str],
    world_size: int,
    num_features: int,
    task: Task,
    predicted: JsonObject | None = None,
    edges: EdgeFacts = EdgeFacts(),
) -> JsonDict:
    """What a checkpoint is of: plain data that JSON gives back as it was.

    `predicted`: by the planner that chose the strategy, of what it chose. `edges`: what the dataset's carry.
    """
    chosen = {"chosen": predicted.get("candidate")} if predicted else {}
    told = {
        "graph": hashes.get("graph", ""),
        "split": hashes.get("split", ""),
        "partition": hashes.get("partition", ""),
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
    if settings.features != "given":
        told["features"] = settings.features
    if settings.task.decoder is not None:
        told["task"] = settings.resolved["task"]
    carried: JsonDict = {"edge_weights": edges.weighted, "edge_types": edges.sizes.types, "edge_attr": edges.sizes.attr}
    carried["nodes"] = sum(nodes for _, nodes in edges.sizes.degrees)  # a model may hold a row for each
    if settings.model.reads_degrees:
        carried["degrees"] = edges.sizes.degrees
    if edges.sizes.schema is not None:
        carried["node_types"] = edges.sizes.schema.text
    return _json(told | {key: value for key, value in carried.items() if value})


def _json(tree: object) -> JsonDict:
    """As a file gives it back."""
    return json.loads(json.dumps(tree, default=str))


def refuse_another(found: Checkpoint, mine: JsonObject) -> None:
    """A checkpoint of another graph, split or model cannot be gone on from: one line with both values."""
    theirs = found.manifest["run"]
    for name, group in (("graph", "dataset"), ("split", "dataset")):
        if theirs[name] != mine[name]:
            raise ValueError(
                f"{found.folder} is of {name} {theirs[name][:12]}, this run's is {mine[name][:12]}: give the {group} "
                "it was trained on, or leave resume out"
            )
    for group in ("model", "task"):
        theirs_in, mine_in = theirs.get(group, {}), mine.get(group, {})
        for key in sorted(theirs_in.keys() | mine_in.keys()):
            told, have = theirs_in.get(key), mine_in.get(key)
            if told != have:
                raise ValueError(
                    f"{found.folder} is of a {group} with {key}={show(told)}, this run's has {key}={show(have)}: set "
                    f"{group if key == '_target_' else f'{group}.{key}'} as it was, or leave resume out"
                )
    for name in ("features", "num_features", "num_outputs"):
        told, have = (run.get(name, "given") for run in (theirs, mine))
        if told != have:
            raise ValueError(f"{found.folder} is of a model with {name}={told}, this run's has {have}")


def differences(found: Checkpoint, mine: JsonObject) -> list[str]:
    """'world_size 4 -> 2': why a run cannot go on bit for bit; empty where it can."""
    theirs = found.manifest["run"]
    lines = []
    for name in _SAME:
        told, have = (_without_profiles(run.get(name, _OF_BEFORE.get(name))) for run in (theirs, mine))
        if told != have:
            lines.append(
                f"{name} {_brief(told)} -> {_brief(have)}" if name != "strategy" else _strategies(theirs, mine)
            )
    return lines


def _strategies(theirs: JsonObject, mine: JsonObject) -> str:
    told, have = (run["names"].get("strategy", "") for run in (theirs, mine))
    return f"strategy {told} -> {have}" if told != have else f"settings of strategy {have}"


def _brief(value: object) -> str:
    return value[:12] if isinstance(value, str) else str(value)


def _without_profiles(tree: object) -> object:
    """Where a profile lies is not what it says."""
    if isinstance(tree, Mapping):
        return {k: _without_profiles(v) for k, v in tree.items() if k != "profile"}
    return tree


def restore(
    start: Start, mine: JsonObject, engine: Engine, net: nn.Module, optimizer: Stepper, comm: Communicator, *, say: Say
) -> JsonDict | None:
    """Put a checkpoint into an engine and an optimizer that were just made; what the loop remembered. Collective."""
    found = start.found
    if found is None:
        return None
    refuse_another(found, mine)
    changed = differences(found, mine)
    device = comm.device
    if not changed:
        tree = found.rank(comm.rank, device)
        try:
            engine.load_state_dict(tree["engine"])
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{found.folder} holds another state than this strategy leaves ({type(error).__name__} {error}): "
                "resume another checkpoint, or leave resume out"
            ) from error
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
    return found.manifest["progress"] | {"begun_otherwise": begun_otherwise(found, mine["settings"])}


def load_weights(engine: Engine, model: nn.Module, given: tuple[JsonDict, JsonDict], found: Checkpoint) -> None:
    """Of the engine's model, those that the engine holds, and its vectors of nodes. `given`: (weights, optimizer), as a
    rank left them or `Checkpoint.merged`; the latter gets slots of these vectors."""
    (weights, optimizer), mine = given, dict(engine.named_weights())
    learned.deal(weights, optimizer["state"], mine)
    for name, weight in mine.items():
        if name not in weights or (not is_extra(name) and weights[name].shape != weight.shape):
            have = tuple(weights[name].shape) if name in weights else "no such parameter"
            wanted = "one" if is_extra(name) else tuple(weight.shape)
            raise ValueError(f"{found.folder}: {name} is {have}, this run's model has {wanted}")
    model.load_state_dict({name: weights[name] for name in mine}, strict=False)
    for name in (name for name in mine if name.startswith(learned.PIECE)):
        mine[name].copy_(weights[name])
