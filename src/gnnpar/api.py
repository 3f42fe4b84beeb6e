"""gnnpar from Python, with the names of the command line: `gnnpar.train(model, data, strategy="sar", world_size=4)`.

`model`: a name, a class or an instance of gnnpar's model configurations, or the class of a PyG model. `data`: the name
of a dataset, a file (.npz, .pt), or a graph in memory (PyG's Data, a NetworkX graph, a mapping of arrays or with a
SciPy adjacency matrix). Further keywords are the keys of the command line: `epochs=50`, `codec="uniform"`,
`optim={"lr": 0.1}`, or `**{"optim.lr": 0.1, "model.hidden": 32}`. Ranks are processes, as under `gnnpar train`; they
cannot import the calling notebook or script.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, cast

from gnnpar.comm.world import torch_defaults
from gnnpar.config.compose import compose
from gnnpar.config.inputs import as_value, group_of, key_of, sets
from gnnpar.files import JsonDict, JsonObject, numbered, working_in
from gnnpar.launch import ENVIRONMENT, environment
from gnnpar.paths import path_of
from gnnpar.settings import ConfigError, Settings, build_settings, config_errors, show
from gnnpar.track.console import say

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from gnnpar.data.metrics import Rows
    from gnnpar.models.gnn import ModelConfig
    from gnnpar.report.comparison import Comparison
    from gnnpar.session import Session
    from gnnpar.training.loop import Callback
    from gnnpar.training.result.trained import Trained
    from gnnpar.verify.conformance import Case

    Model = str | type[ModelConfig] | ModelConfig | Callable[..., nn.Module]

_ONE_CALL = threading.RLock()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Run one call at a time, because it changes the environment of the process; restore torch's defaults."""
    with _ONE_CALL, torch_defaults():
        yield


class TrainingFailed(RuntimeError):
    """A started run failed; the message names the rank and the reason. folder: the run's folder."""

    def __init__(self, line: str, folder: Path) -> None:
        super().__init__(line)
        self.folder = folder


@dataclass(frozen=True)
class Run:
    """A finished run, read from its folder on demand. named: its settings if this process trained it; the classes in
    them are trusted in the folder's files."""

    folder: Path
    named: object = field(default=None, repr=False)

    @property
    def result(self) -> JsonDict:
        """result.json. ConfigError if it is missing or damaged."""
        from gnnpar.training.result.result import valid_result

        if (result := valid_result(self.folder)) is None:
            raise ConfigError(f"{self.folder} holds no result.json that can be read: its run has not ended")
        return result

    @property
    def history(self) -> pd.DataFrame:
        """metrics.jsonl, a row per epoch."""
        from gnnpar.report import history

        return history(self.folder)

    @property
    def model(self) -> Trained:
        """The trained model of the best epoch on validation: call it with a Data, or with x and edge_index, for logits.

        Raises ValueError for classes that are not trusted: `gnnpar.load(folder, trust=True)` runs them.
        """
        from gnnpar.training.result.trained import find, opened

        with torch_defaults():  # as `gnnpar.load`
            return opened(*find(self.folder, "best", named=self.named))


@_one_at_a_time()
def train(
    model: Model,
    data: object,
    *,
    strategy: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    **overrides: object,
) -> Run:
    """Train and return the finished run; print progress as `gnnpar train` does.

    strategy: by default the configuration's, or the one in plan=FILE. folder: the run's folder, by default
    outputs/DATE/TIME. callbacks: functions of (epoch, its row of metrics.jsonl), or objects with such a method
    on_epoch_end, called on rank 0; one that returns True or raises gnnpar.StopTraining ends the run after the epoch.
    loss=, metrics=: as task.loss and task.metrics, or importable functions of (outputs, y); metrics is a mapping from
    names, or a list. A loss returns one value per row, or their mean.
    Raises ConfigError (a ValueError) before the run, TrainingFailed or KeyboardInterrupt once all ranks have ended.
    """
    chosen = {} if strategy is None else {"strategy": strategy}
    return _train(_settings(model, data, {**chosen, **overrides}), _run_folder(folder), callbacks)


@_one_at_a_time()
def sweep(
    model: Model | list[Model],
    data: object,
    *,
    folder: str | os.PathLike[str] | None = None,
    **axes: object,
) -> Compared:
    """Train every combination of the values given as lists: sweep([GCN, GAT], data, strategy=["single", "sar"]).

    Runs are sequential; failed ones are reported and left out. folder: the sweep's folder, by default
    multirun/DATE/TIME. ConfigError if it already holds runs: `gnnpar train -m` resumes sweeps.
    """
    models = model if isinstance(model, list) else [model]
    listed = {key: list(value) for key, value in axes.items() if isinstance(value, list | tuple)}
    fixed = {key: value for key, value in axes.items() if key not in listed}
    combinations = [dict(zip(listed, values, strict=True)) for values in itertools.product(*listed.values())]
    parent = _run_folder(folder, "multirun")
    jobs = list(itertools.product(models, combinations))
    runs: list[Run] = []
    with working_in(parent, remedy="choose another folder=", say=say):
        if there := [each.name for each in parent.iterdir() if each.name.isdecimal()]:
            raise ConfigError(f"{parent} holds run {min(there, key=int)} of an earlier sweep: choose another folder=")
        for number, (each, values) in enumerate(jobs):
            shown = " ".join(f"{key}={value}" for key, value in values.items())
            say(f"run {number} of {len(jobs)}: model={_name(each)} {shown}")
            try:
                settings = _settings(each, data, {**fixed, **values}, study="/".join(parent.parts[-2:]))
                runs.append(_train(settings, parent / str(number)))
            except (ValueError, OSError, TrainingFailed) as error:
                say(f"run {number}: {error}")
    if not runs:
        raise ConfigError(f"none of the {len(jobs)} runs of the sweep has completed; the lines above say why")
    return compare(runs)


def distribute(
    model: Model,
    data: object,
    *,
    strategy: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    **overrides: object,
) -> Session:
    """Join a training as one rank, for the caller's own training loop. Collective.

    Call it in every process of torchrun or Slurm; without these there is one rank. Arguments as for `train`; `epochs`
    sets learning-rate schedules. folder: for plan.json.

        with gnnpar.distribute(Net, data, strategy="sar") as session:
            optimizer = torch.optim.Adam(session.parameters(), lr=0.01)
            for _ in range(100):
                loss = session.train_epoch(optimizer)
            logits = session.gather(session.predict())
    """
    from gnnpar.cli.train import plan_source_of, probed, refusals
    from gnnpar.launch.slurm import as_rank
    from gnnpar.session import open_session

    os.environ.update(as_rank(os.environ))
    alone = {} if "RANK" in os.environ else {"world_size": 1}
    chosen = {} if strategy is None else {"strategy": strategy}
    with refusals():
        settings = _settings(model, data, {"checkpoint": {"keep": 0}, **alone, **chosen, **overrides})
        probed(settings, int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1)
    unused = None if os.environ.get("RANK", "0") == "0" else "outputs"  # rank 0's folder is used
    return open_session(settings, plan_source_of(settings), _run_folder(folder or unused))


@dataclass(frozen=True)
class Compared:
    """A comparison of runs, as in `gnnpar compare`."""

    runs: tuple[Run, ...]
    baseline: str
    allow_unfair: bool

    @property
    def frame(self) -> pd.DataFrame:
        """One row per run: times in seconds, sizes in bytes; `ratio` = epoch time of the baseline / of the run."""
        from gnnpar.report import load

        folders = [run.folder for run in self.runs]
        return load(*folders, baseline=self.baseline, allow_unfair=self.allow_unfair)

    @property
    def answers(self) -> list[str]:
        """One or two lines per task: the best strategy, why, and open questions."""
        return self._comparison().answers

    def page(self, file: str | os.PathLike[str]) -> Path:
        """Write the self-contained page of `gnnpar compare --html`."""
        from gnnpar.report.page import write_page

        return write_page(self._comparison(), path_of(file, "file"))

    def __str__(self) -> str:
        return "\n".join([self.frame[[*_SHOWN]].to_string(index=False), *self.answers])

    def _comparison(self) -> Comparison:
        from gnnpar.report.comparison import compare as compared
        from gnnpar.report.runs import collect

        results = collect([run.folder for run in self.runs])
        return compared(results, baseline=self.baseline, allow_unfair=self.allow_unfair)

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{escape(line)}</p>" for line in self.answers)
        return lines + self.frame[[*_SHOWN]].to_html(index=False)


_SHOWN = ("strategy", "variant", "settings", "model", "seed", "world_size")
_SHOWN += ("epoch_seconds", "ratio", "bytes_per_epoch", "val", "test")


def compare(
    runs: Sequence[Run | str | os.PathLike[str]], *, baseline: str = "single", allow_unfair: bool = False
) -> Compared:
    """Compare runs, or folders of runs and sweeps; ratios only where they are fair."""
    from gnnpar.report.runs import collect

    if isinstance(runs, Run | str | os.PathLike) or not isinstance(runs, Iterable):
        raise ConfigError(f"runs={str(runs)[:80]} must be a list of runs or folders")
    folders = [each.folder if isinstance(each, Run) else path_of(each, "runs").absolute() for each in runs]
    named = {each.folder.resolve(): each.named for each in runs if isinstance(each, Run)}
    results = tuple(Run(folder, named.get(folder.resolve())) for folder, _ in collect(folders))
    return Compared(results, baseline, allow_unfair)


@dataclass(frozen=True)
class Planned:
    """The planner's answer. file: plan.json, for train(..., plan=file). candidates: best first, as in `--json`."""

    file: Path
    chosen: str
    candidates: Sequence[JsonObject]


@_one_at_a_time()
def plan(
    model: Model,
    data: object,
    topology: str = "measured",
    *,
    world_size: int | None = None,
    quality: str = "exact",
    out: str | os.PathLike[str] = ".",
    **overrides: object,
) -> Planned:
    """Search for a strategy and its parameters, as `gnnpar plan` does. quality: exact, or exact,stale,..."""
    from gnnpar.cli import plan as command

    place = path_of(out, "out")
    if place.exists() and not place.is_dir():
        raise ConfigError(f"out={place} is a file: name a folder, for plan.json")
    if not isinstance(quality, str):
        raise ConfigError(f"quality={quality!r} must be text: 'exact', or classes separated by commas")
    given = {**overrides, "topology": topology} | ({} if world_size is None else {"world_size": world_size})
    lines = list(as_overrides(given))
    command.refuse_strategy(lines)
    settings = _settings(model, data, given)
    planned = command.searched(settings, lines, say, allowed=command.qualities(quality))
    file = command.plan_of(planned, lines, settings).save(place)
    say(f"chosen: {planned.chosen.label}  ->  {file}")
    return Planned(file.absolute(), planned.chosen.label, command.candidates(planned))


@_one_at_a_time()
def check(
    model: Model,
    data: object = None,
    *,
    strategy: str = "graph_parallel",
    worlds: Sequence[int] = (1, 2, 3, 4),
    **overrides: object,
) -> list[Case]:
    """Check the model, and the strategy against the single device, on a small graph or on `data` (as for `train`).
    Print the table of `gnnpar check`. A case has `passed` and `error`."""
    from gnnpar.cli.check import asks_for_graph, cases_of, refuse_unread

    if isinstance(worlds, str) or not isinstance(worlds, Sequence) or not all(type(w) is int and w > 0 for w in worlds):
        raise ConfigError(f"worlds={worlds!r} must be a list of numbers of ranks, as (1, 2, 4)")
    spelled = list(as_overrides(overrides))
    refuse_unread(spelled)
    small = {"dataset": "sbm"} if data is None else {}
    settings = _settings(model, data, {**small, **overrides, "strategy": strategy})
    own_graph = data is not None or any(map(asks_for_graph, spelled))
    return cases_of(settings, {_name(model): settings.model}, worlds=worlds, own_graph=own_graph)


def _train(settings: Settings, folder: Path, callbacks: Sequence[Callback] = ()) -> Run:
    from gnnpar.cli.train import trained
    from gnnpar.data.tasks import Labels
    from gnnpar.launch.launch import world_of

    if "RANK" in os.environ:
        raise ConfigError(
            "gnnpar.train starts its own ranks and cannot join those of torchrun; run the script without torchrun, or "
            "use the command gnnpar train"
        )
    if world_of(settings).how == "processes":
        _refuse_main(settings.resolved["model"])
        own = {f"callbacks[{i}]": each for i, each in enumerate(callbacks)}
        _refuse_unsendable({**own, **(settings.task.given if isinstance(settings.task, Labels) else {})})
    for_ranks = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    with working_in(folder, remedy="choose another folder=", say=say), environment(**for_ranks):
        outcome = trained(settings, folder, callbacks)
    if outcome.status == "interrupted":
        raise KeyboardInterrupt
    if outcome.status != "completed":
        raise TrainingFailed(outcome.error or "the run has failed and gives no reason", folder)
    return Run(folder, settings.resolved)


def _settings(model: Model, data: object, overrides: Mapping[str, object], study: str = "") -> Settings:
    """Compose as the command line does; `model` may be an object. data=None: `overrides` name the dataset or plan."""
    if data is None and not {"dataset", "plan"} & overrides.keys():
        raise ConfigError("data is None: give a graph, or the name of a dataset")
    if of_hydra := next((key for key in overrides if group_of(key) == "hydra"), None):
        raise ConfigError(f"{of_hydra} is read by the commands alone: leave it out, and give folder= for the folder")
    if data is not None and isinstance(overrides.get("dataset"), str):
        raise ConfigError(f"data is given, and dataset={overrides['dataset']}: leave one of them out")
    own = {key.removeprefix("model."): value for key, value in overrides.items() if key.startswith("model.")}
    of_task = {key: value for key, value in overrides.items() if key in ("loss", "metrics")}
    rest = {key: value for key, value in overrides.items() if not key.startswith("model.") and key not in of_task}
    named = [f"model={model}", *as_overrides({"model": own})] if isinstance(model, str) else []
    labelled, featured = overrides.get("task") != "link", overrides.get("features") != "learned"
    dataset, others = _dataset(data, labelled=labelled, featured=featured), list(as_overrides(rest))
    named_twice = ("dataset.path", "dataset._target_")
    if len(dataset) > 1 and (another := next((each for each in others if key_of(each) in named_twice), None)):
        raise ConfigError(f"data is given, and {show(another)}: leave one of them out")
    settings = _with_own(compose([*dataset, *named, *others]), of_task)
    if isinstance(model, str):
        return dataclasses.replace(settings, study=study)
    nested: JsonDict = {key: value for key, value in own.items() if not key.startswith("kwargs.")}
    single = {key.removeprefix("kwargs."): value for key, value in own.items() if key.startswith("kwargs.")}
    if single and isinstance(whole := own.get("kwargs", {}), Mapping):
        nested["kwargs"] = {**whole, **single}
    node = _model_node(model, settings.resolved["dataset"]) | nested
    names = {**settings.names, "model": _name(model).lower()}
    resolved = {**settings.resolved, "model": _plain(node, "model")}
    if node["_target_"] == PYG and not {"plan", "shards"} & overrides.keys():
        free = [key for key in ("self_loops", "drop_duplicates") if not sets(others, f"dataset.{key}")]
        resolved["dataset"] = resolved["dataset"] | {key: "auto" for key in free if key in resolved["dataset"]}
        if "self_loops" not in nested:
            resolved["model"] |= {"self_loops": resolved["dataset"].get("self_loops", "keep")}
    return dataclasses.replace(build_settings(resolved, names, study), task=settings.task)


def _with_own(settings: Settings, given: Mapping[str, object]) -> Settings:
    """Add the caller's loss and metrics to the settings: names, or import paths of functions."""
    from gnnpar.data.tasks import Labels

    if not given:
        return settings
    if not isinstance(settings.task, Labels):
        raise ConfigError(f"{next(iter(given))}= is of task=labels, and this task has its own; leave it out")
    metrics = given.get("metrics", ())
    metrics = [metrics] if isinstance(metrics, str) or callable(metrics) else metrics
    if not isinstance(metrics, Mapping | list | tuple):
        raise ConfigError(f"metrics={show(metrics)} must be a mapping from names to functions or metrics, or a list")
    if not isinstance(metrics, Mapping):
        metrics = {(each if isinstance(each, str) else _path_of(each)).rpartition(".")[2]: each for each in metrics}
    each = {f"metrics.{name}": value for name, value in metrics.items()}
    each |= {"loss": given["loss"]} if "loss" in given else {}
    if bad := next((key for key, value in each.items() if not isinstance(value, str) and not callable(value)), None):
        raise ConfigError(f"{bad}={show(each[bad])} must be a name or a function of (outputs, y)")
    named = {key: value if isinstance(value, str) else _path_of(value) for key, value in each.items()}
    keys: JsonDict = {"loss": named["loss"]} if "loss" in named else {}
    keys |= {"metrics": {name: named[f"metrics.{name}"] for name in metrics}} if metrics else {}
    resolved = {**settings.resolved, "task": {**settings.resolved["task"], **keys}}
    built = build_settings(resolved, settings.names, settings.study)
    assert isinstance(built.task, Labels)
    functions = {key: cast("Rows", value) for key, value in each.items() if callable(value)}
    return dataclasses.replace(built, task=built.task.with_functions(functions))


def _path_of(function: object) -> str:
    """Return module.name of a function, or of the class of a callable object."""
    named = function if isinstance(function, type | FunctionType) else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _refuse_unsendable(own: Mapping[str, object]) -> None:
    """Raise ConfigError for callbacks, losses and metrics that other processes cannot import."""
    for key, each in own.items():
        try:
            why = "of the script or notebook itself" if b"__main__" in pickle.dumps(each) else ""
        except (pickle.PicklingError, AttributeError, TypeError):
            why = "in no module by name"
        if why:
            raise ConfigError(
                f"{key}: {_path_of(each)} is {why}, where ranks do not find it: move it to a module, or choose "
                "comm='threads' or world_size=1"
            )


def _dataset(data: object, *, labelled: bool, featured: bool) -> list[str]:
    """Return the overrides that name the dataset. Write a graph in memory to a file of the cache. `labelled`,
    `featured`: whether it must have labels, and features."""
    if data is None:
        return []
    if isinstance(data, str | Path):
        kind = {".npz": "npz", ".pt": "pt"}.get(Path(data).suffix)
        if kind is None:
            return list(as_overrides({"dataset": data}))
        return list(as_overrides({"dataset": kind, "dataset.path": Path(data).absolute()}))
    from gnnpar.data.saved import write_given

    with config_errors():
        file = write_given(data, labelled=labelled, featured=featured)
    return list(as_overrides({"dataset": "pt", "dataset.path": file}))


PYG = "gnnpar.models.pyg.model.PyG"


def _model_node(model: object, dataset: JsonObject) -> JsonDict:
    """Return the YAML of a model given as an object: its class and its fields."""
    from torch import nn

    if isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__} that is made already, and every rank makes its own: give its class, "
            "and the arguments as **{'model.kwargs': {...}}"
        )
    cls = model if isinstance(model, type | FunctionType) else type(model)
    is_net = isinstance(cls, FunctionType) or issubclass(cls, nn.Module)
    if not is_net and not dataclasses.is_dataclass(cls):
        raise ConfigError(
            f"model is a {cls.__name__}; give a name, a dataclass made from gnnpar.models.gnn.ModelConfig, or the "
            "class of a PyG model"
        )
    if cls.__name__ == "<lambda>":
        raise ConfigError("the model is a lambda, which has no name to import it by; write a class or a function")
    if "<locals>" in cls.__qualname__:
        raise ConfigError(f"{cls.__name__} is defined inside a function, where it cannot be imported; move it out")
    if is_net:
        loops = dataset.get("self_loops", "keep")
        return {"_target_": PYG, "target": _path_of(cls), "kwargs": {}, "self_loops": loops}
    node: JsonDict = {"_target_": _path_of(cls)}
    if dataclasses.is_dataclass(model) and not isinstance(model, type):
        node |= {field.name: vars(model)[field.name] for field in dataclasses.fields(model) if field.init}
    return node


def _refuse_main(model: JsonObject) -> None:
    """Raise ConfigError for a class of the script or notebook itself, which other processes cannot import."""
    module, _, name = str(model.get("target") or model["_target_"]).rpartition(".")
    if module == "__main__":
        file = f"{name.lower()}.py"
        raise ConfigError(
            f"{name} is defined in the script or notebook itself, which ranks do not import: move it to a file "
            f"({file}; in a notebook, %%writefile {file}) and import it from there, or choose comm='threads'"
        )


def _name(model: Model) -> str:
    if isinstance(model, str):
        return model
    return model.__name__ if isinstance(model, type | FunctionType) else type(model).__name__


def as_overrides(given: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yield key=value as on the command line; the values of a mapping are keys below it."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from as_overrides(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={_text(value)}"


def _text(value: object) -> str:
    value = _number(value)
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    if "${" in (text := str(value)):
        raise ConfigError(f"{text}: ${{ would be read as the value of another key; give the value itself")
    return as_value(text)


def _plain(value: object, key: str) -> object:
    """Convert a value to plain YAML data, numbers of NumPy and torch to Python's. Raise ConfigError for other types."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each, f"{key}.{name}") for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, f"{key}[{i}]") for i, each in enumerate(value)]
    value = _number(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConfigError(
        f"{key} is a {type(value).__name__}, which no file of settings holds: give numbers, text or lists"
    )


def _number(value: object) -> object:
    """Convert a number of NumPy or torch to Python's; return anything else unchanged."""
    import numpy as np
    import torch

    return value.item() if isinstance(value, np.generic | np.ndarray | torch.Tensor) and value.ndim == 0 else value


def _run_folder(folder: str | os.PathLike[str] | None, parent: str = "outputs") -> Path:
    """Return the absolute folder, because the program may change its directory before it reads the run. Without one,
    make parent/DATE/TIME, as the command line does, with a number if it is taken."""
    if folder is not None:
        return path_of(folder, "folder").absolute()
    first = Path(parent, time.strftime("%Y-%m-%d/%H-%M-%S")).absolute()
    first.parent.mkdir(parents=True, exist_ok=True)
    for each in numbered(first):
        with suppress(FileExistsError):  # taken by a run started in the same second
            each.mkdir()
            return each
    raise AssertionError("unreachable: one of all numbers is free")
