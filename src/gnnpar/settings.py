"""The typed shape of conf/config.yaml.

Hydra composes plain YAML; `build_settings` turns it into frozen dataclasses and checks every key, type, range and
Literal before any rank starts. The dataclass is the only schema of a group. This module imports neither Hydra nor the
project's upper layers, because every rank unpickles a Settings.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar, runtime_checkable

import annotated_types as at

from gnnpar.files import Json, JsonDict, JsonObject
from gnnpar.paths import locate, path_of
from gnnpar.pricing.topology import Machines
from gnnpar.targets import is_own, values_in
from gnnpar.track.text import printable
from gnnpar.track.tracker import Tracker

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance
    from torch import nn

    from gnnpar.codecs.codec import CodecConfig
    from gnnpar.data.dataset import Dataset
    from gnnpar.data.preprocess import DatasetConfig
    from gnnpar.data.tasks import TaskConfig
    from gnnpar.folds.edge_data import EdgeSizes
    from gnnpar.models.gnn import GNN, ModelSource
    from gnnpar.parallel.strategy import Strategy
    from gnnpar.partition.partition import Partitioner
else:

    class _Group(Protocol):
        """The object of a group; the modules of its classes import torch."""

    Strategy = ModelSource = DatasetConfig = TaskConfig = Partitioner = CodecConfig = _Group

T = TypeVar("T", bound="DataclassInstance")
Positive = Annotated[int, at.Ge(1)]
Count = Annotated[int, at.Ge(0)]
Rate = Annotated[float, at.Gt(0)]
PLAN_SETUP = ("model", "dataset", "partition", "first_layer", "seed")
"""Settings that a plan sets besides its strategy; a file sets no folders, trackers or launchers."""
WRITTEN_FOLDERS = ("cache_dir", "host_dir", "submitit_folder")
"""Keys of folders that a run or a launcher writes to, at any depth: plans and foreign sweeps must not set them."""
MAX_RANKS = 4096
"""Largest number of ranks: tables with a row and a column per rank stay below a GiB."""
MAX_THREADS = 1024
"""Largest number of threads of a rank: with 2,048, loops of torch crash (torch 2.13, `index_add_`)."""
Ranks = Annotated[int, at.Ge(1), at.Le(MAX_RANKS)]
Threads = Annotated[int, at.Ge(1), at.Le(MAX_THREADS)] | Literal["auto"]


class ConfigError(ValueError):
    """A wrong configuration, in one line: the key, the value, the problem, the allowed values, the fix."""

    def __str__(self) -> str:
        return printable(super().__str__())  # parts of it may come from files, and tracebacks print it


@contextmanager
def config_errors(where: str = "") -> Iterator[None]:
    """Raise a ValueError of the block as a ConfigError of one line. where: its first words, also of a ConfigError."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, ConfigError) and not where:
            raise
        line = str(error) if isinstance(error, ConfigError) else " ".join(str(error).split())
        raise ConfigError(f"{where}: {line}" if where else line) from error


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Communication of ranks: processes over gloo or NCCL, or threads of one process (bytes exact, time not).

    Under torchrun and Slurm: `connect_seconds` to wait for the other ranks, `lost_seconds` without an answer until a
    host counts as lost.
    """

    backend: Literal["gloo", "nccl", "threads"] = "gloo"
    timeout_seconds: Annotated[float, at.Gt(0), at.Le(10_000_000)] = 1800.0
    connect_seconds: Annotated[float, at.Gt(0), at.Le(1_000_000)] = 120.0
    lost_seconds: Annotated[float, at.Ge(3), at.Le(86_400)] = 30.0  # within the bounds of TCP keepalive


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How `gnnpar train` starts its ranks. cuda_graph: on a GPU, capture an epoch as a CUDA graph and replay it."""

    max_restarts: Count = 0
    grace_seconds: Annotated[float, at.Ge(0)] = 30.0
    cuda_graph: bool = False


@dataclass(frozen=True, kw_only=True)
class Host:
    """Resources of one host. cores: physical cores that ranks may use; auto reads the machine."""

    cores: Positive | Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Measured(Host):
    """This machine, measured for the planner. refresh: measure again."""

    refresh: bool = False


@dataclass(frozen=True, kw_only=True)
class Paced(Launch):
    """Several hosts emulated on one machine by paced links. hosts: auto is one per rank.

    burst_kib: KiB that an idle link passes unpaced; auto is 2 ms of its rate, 256 at 1 Gbit/s. dilation: D gives each
    rank 1 / D of its cores, each link 1 / D of its rate, and slows the clocks of ranks by D; auto is the least D that
    gives all ranks their cores. speeds: the share of its cores that each rank uses; null is all of them.
    """

    rate_gbps: Rate = 1.0
    dilation: Annotated[float, at.Ge(1), at.Le(1000)] | Literal["auto"] = 1.0
    burst_kib: Annotated[int, at.Ge(4)] | Literal["auto"] = "auto"
    hosts: Annotated[int, at.Ge(2)] | Literal["auto"] = "auto"
    speeds: tuple[Annotated[float, at.Ge(0.05), at.Le(1)], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster(Host):
    """Several hosts with link rates in 10^9 bit/s; null: launch.rate_gbps, or no further limit. host_gbps: rate of each
    host and direction. link_gbps: rates [sender][receiver], null on the diagonal."""

    host_gbps: tuple[Rate, ...] | None = None
    link_gbps: tuple[tuple[Rate | None, ...], ...] | None = None

    def __post_init__(self) -> None:
        if not self.num_hosts:
            raise ValueError("neither host_gbps nor link_gbps is given; give one of them, or choose topology=flat")
        if self.num_hosts < 2:
            raise ValueError("there is one host; name at least 2, or choose topology=flat")
        if self.host_gbps is not None and len(self.host_gbps) != self.num_hosts:
            raise ValueError(
                f"host_gbps has {len(self.host_gbps)} hosts, but link_gbps {self.num_hosts}; make them equal"
            )
        for i, row in enumerate(self.link_gbps or ()):
            if len(row) != self.num_hosts:
                raise ValueError(f"link_gbps[{i}] has {len(row)} entries for {self.num_hosts} hosts; give one a host")
            if row[i] is not None:
                raise ValueError(f"link_gbps[{i}][{i}]={row[i]} is a host's link to itself; make it null")

    @property
    def num_hosts(self) -> int:
        return len(self.link_gbps or self.host_gbps or ())


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When to write checkpoints: after `every` epochs and after `minutes` (0: off), at the end, and on SIGTERM. keep:
    number of checkpoints to keep, in addition to the best weights on validation; 0: no checkpoints."""

    every: Count = 0
    minutes: Annotated[float, at.Ge(0)] = 10.0
    keep: Count = 2


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Train from a folder of `gnnpar partition`. check: verify all bytes of a rank's files (full), or their headers."""

    folder: Path | None = None
    check: Literal["full", "header"] = "full"


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop when validation has not risen by `min_delta` for `patience` evaluations; null: never."""

    patience: Positive | None = None
    min_delta: Annotated[float, at.Ge(0)] = 0.0


class Stepper(Protocol):
    """An optimizer with its schedule. refused: the last step was skipped for a non-finite gradient. A step on a GPU is
    `prepare` on the host and then `launch`, which a CUDA graph may capture."""

    optimizer: torch.optim.Optimizer

    @property
    def refused(self) -> bool: ...
    @property
    def lr(self) -> float: ...
    def schedule(self, epoch: int) -> None: ...
    def zero_grad(self) -> None: ...
    def step(self, norm: float | None = None) -> None: ...
    def prepare(self) -> None: ...
    def launch(self, norm: float | None = None) -> None: ...
    def state_dict(self) -> JsonDict: ...
    def load_state_dict(self, state: JsonDict) -> None: ...


class OptimizerConfig(Protocol):
    """A frozen dataclass with the keys of conf/optim."""

    def build(
        self, parameters: Iterable[tuple[str, nn.Parameter]], *, epochs: int, layer_of: Callable[[str], int | None]
    ) -> Stepper: ...


class TrackerConfig(Protocol):
    """A frozen dataclass with the keys of conf/tracker. job: fields of result.json that are known before a run."""

    def build(self, run_dir: Path, epochs: int, job: JsonObject) -> Tracker: ...


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one run, passed to every rank."""

    strategy: Strategy
    model: ModelSource
    dataset: DatasetConfig
    task: TaskConfig
    partition: Partitioner
    codec: CodecConfig
    optim: OptimizerConfig
    tracker: TrackerConfig
    comm: Comm
    launch: Launch
    topology: Host | Machines
    world_size: Ranks
    epochs: Positive
    eval_every: Positive
    fidelity_every: Count
    seed: Count
    block: Count | None
    device: Literal["auto", "cpu", "cuda"]
    precision: Literal["fp32", "fp64", "bf16"]
    first_layer: Literal["live", "cached"]
    row_order: Literal["none", "metis", "auto"] = "none"
    threads_per_rank: Threads
    data_dir: Path
    cache_dir: Path
    trace: bool
    deterministic: bool = False
    tf32: bool = False
    features: Literal["given", "learned", "both"] = "given"
    features_dim: Positive = 64
    plan: Path | None
    shards: Shards = Shards()
    profile: Path | None
    target: float | None
    early_stopping: EarlyStopping
    checkpoint: Checkpoint
    resume: Literal["auto"] | Path | None
    names: Mapping[str, str] = field(default_factory=dict)  # group -> the file chosen in it; not a YAML key
    resolved: JsonObject = field(default_factory=dict)  # the resolved YAML of these settings; not a YAML key
    study: str = ""  # the sweep this run belongs to; not a YAML key

    @property
    def caches_first_layer(self) -> bool:
        return self.first_layer == "cached"

    def build_model(self, in_dim: int, out_dim: int, edges: EdgeSizes | None = None) -> GNN:
        """Build the model with fresh weights. edges: edge sizes of the dataset."""
        model = self.model if edges is None else self.model.on(edges)
        built = model.build(in_dim, out_dim, seed=self.seed, cached_first_layer=self.caches_first_layer)
        if self.task.decoder is None:
            return built
        from gnnpar.models.pairs import with_scorer

        return with_scorer(built, self.task.decoder, self.seed)

    def read_dataset(self) -> DatasetConfig:
        """Return the dataset configuration, adapted to task and precision."""
        from gnnpar.data.preprocess import Preprocess

        dataset = self.dataset
        if self.task.decoder is not None and isinstance(dataset, Preprocess):
            dataset = dataset.without_labels()
        return dataset.in_float64() if self.precision == "fp64" and isinstance(dataset, Preprocess) else dataset

    def load_dataset(self) -> Dataset:
        """Load the dataset with the examples of the task and the features that `features` selects."""
        dataset = self.read_dataset()
        prepared = self.task.prepare(dataset.load(self.data_dir, self.seed), self.seed)
        return prepared.with_features(self.features, self.features_dim, self.seed)


_MEMBERS = {  # group -> required members of its object
    "model": ("build", "on", "num_layers", "in_one_piece", "wraps"),
    "dataset": ("load",),
    "task": ("prepare", "of", "decoder"),
    "partition": ("part_of",),
    "codec": ("build", "exactness"),
}
NOT_KEYS = ("names", "resolved", "study")


def build_settings(config: JsonObject, names: Mapping[str, str], study: str = "") -> Settings:
    """Build settings from a resolved configuration. Raise ConfigError for the first error."""
    values = _construct_values(Settings, config, path="", skip=NOT_KEYS)
    with config_errors():
        values |= {name: path_of(values[name], name).absolute() for name in ("data_dir", "cache_dir")}
    from gnnpar.parallel.strategy import check_members  # imports torch, which the strategy's module has imported

    with config_errors(f"strategy={names.get('strategy')}"):
        check_members(values["strategy"])
    for group, members in _MEMBERS.items():
        if lacking := _lacking(values[group], members):
            kind = type(values[group])
            name = f"{kind.__module__}.{kind.__qualname__}"
            raise ConfigError(f"{group}: {name} has no {lacking[0]}, which a {group} needs")
    if (given := _as_given(values["dataset"], values["model"])) is not None:
        model = {"self_loops": given["self_loops"]} if config["model"].get("self_loops") == "auto" else {}
        given = {"dataset": {**config["dataset"], **given}, "model": {**config["model"], **model}}
        return build_settings({**config, **given}, names, study)
    resolved = {key: _plain(value) for key, value in config.items()}
    return Settings(**values, names=dict(names), resolved=resolved, study=study)


def _as_given(dataset: DataclassInstance, model: object) -> JsonDict | None:
    """Return values for a dataset's keys that are auto; None if no key is. A PyG model runs on the given
    edges, with the self loops that its convolutions add; other models use the default of the dataset's class."""
    keys = {name: vars(dataset)[name] for name in ("self_loops", "drop_duplicates") if name in vars(dataset)}
    if "auto" not in keys.values():
        return None
    from gnnpar.data.preprocess import Preprocess  # imports torch, which the dataset's module has imported

    wanted: JsonDict = {"self_loops": True, "drop_duplicates": True}
    if isinstance(dataset, Preprocess):
        wanted["self_loops"] = dataset.loops
    if isinstance(model, WithLoops):
        wanted = {"self_loops": model.loops, "drop_duplicates": False}
    return {name: wanted[name] if value == "auto" else value for name, value in keys.items()}


@runtime_checkable
class WithLoops(Protocol):
    """A model that declares the self loops of its graph."""

    @property
    def loops(self) -> object: ...


def instantiate(node: JsonObject, path: str = "") -> Any:  # Any: an object of the class in the YAML
    """Build the object that a node with `_target_` describes, its fields checked against the class."""
    target = node["_target_"]
    named = _locate(target, path)
    rest = {k: v for k, v in node.items() if k != "_target_"}
    if isinstance(named, type) and dataclasses.is_dataclass(named):
        return construct(named, rest, path)
    if not callable(named) or (not isinstance(named, type) and is_own(target)):
        raise ConfigError(f"{_join(path, '_target_')}={target} is no class")
    try:
        return named(**{key: _value(object, value, _join(path, key)) for key, value in rest.items()})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} ({target}): {error}") from error


def construct(cls: type[T], node: JsonObject, path: str = "") -> T:
    """Build a dataclass from the data of a file, with the checks of a group."""
    values = _construct_values(cls, node, path)
    try:
        return cls(**values)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path and path + ': '}{' '.join(str(error).split())}") from error


def _construct_values(
    cls: type[DataclassInstance], node: JsonObject, path: str, skip: tuple[str, ...] = ()
) -> JsonDict:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init and f.name not in skip}
    for key, value in node.items():
        if key not in fields:
            raise ConfigError(unknown_key(_join(path, key), value, fields))
    for name, f in fields.items():
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and name not in node:
            raise ConfigError(f"{_join(path, name)} is missing; it must be {describe(hints[name])}")
    return {key: _value(hints[key], value, _join(path, key)) for key, value in node.items()}


def _value(hint: object, value: object, path: str) -> Any:  # Any: of the hint's type
    if isinstance(value, Mapping):
        if "_target_" in value:
            if _is_plain(hint):
                raise ConfigError(f"{path}={show(value)} must be {describe(hint)}")
            wanted = _dataclasses_in(hint)
            named = _locate(value["_target_"], path) if wanted else None
            if wanted and not (isinstance(named, type) and set(wanted) & set(named.__mro__)):  # do not call it
                raise ConfigError(f"{path}={show(value['_target_'])} is no {' or '.join(c.__name__ for c in wanted)}")
            built = instantiate(value, path)
            for protocol in (each for each in _options(hint) if isinstance(each, type) and _is_protocol(each)):
                if lacking := _lacking(built, _members(protocol)):
                    needs = f"which a {protocol.__name__} needs"
                    raise ConfigError(f"{path}={value['_target_']} has no {lacking[0]}, {needs}")
            return built
        if nested := _dataclasses_in(hint):
            return construct(nested[0], value, path)
    elif isinstance(value, list) and any(isinstance(v, Mapping) and "_target_" in v for v in value):
        if (item := _item(hint)) is None:
            raise ConfigError(f"{path}={show(value)} must be {describe(hint)}")
        return tuple(_value(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    return checked(hint, value, path)


def checked(hint: Any, value: object, path: str) -> Any:  # Any: a type in any form, and a value of it
    """Convert a value to the type of the hint, strictly as JSON. Raises ConfigError.

    Text of a number or truth value, which `${oc.env:NAME}` resolves to, is read as such.
    """
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticSchemaGenerationError

    if any(isinstance(each, (int, float)) and not abs(each) < _NUMBERS_END for each in values_in(value)):
        raise ConfigError(f"{path}={show(value)} must be finite and below 2^63 in size")
    try:
        adapter = TypeAdapter(hint)
    except PydanticSchemaGenerationError:  # a Protocol: only an object with _target_ can satisfy it
        if value is None and type(None) in _options(hint):
            return None
        raise ConfigError(f"{path}={show(value)} must be a group or an object with _target_") from None
    try:
        return adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        if isinstance(value, str) and _PLAIN.fullmatch(value):
            return checked(hint, json.loads(value), path)
        allowed = describe(hint) or error.errors()[0]["msg"]
        words = [str(a) for o in _options(hint) if typing.get_origin(o) is Literal for a in typing.get_args(o)]
        meant = closest(value, words) if isinstance(value, str) else ""
        raise ConfigError(f"{path}={show(value)} must be {allowed}{meant}") from None


_NUMBERS_END = 2**63
_PLAIN = re.compile(r"true|false|-?(0|[1-9]\d*)(\.\d+)?(e[+-]?\d+)?", re.ASCII)  # JSON's numbers and truth values


def describe(hint: object) -> str:
    """Describe the values that a type allows."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        bounds = [b for b in map(_bound, args[1:]) if b]
        return " ".join([describe(args[0]), " and ".join(bounds)]).strip()
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(str(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if origin in (tuple, list):
        length = "a list of" if origin is list or Ellipsis in args else f"a list of {len(args)}, each"
        return f"{length} {describe(args[0])}"
    words: dict[object, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    words |= {Path: "a path", type(None): "null"}
    return words.get(hint, hint.__name__ if isinstance(hint, type) else str(hint))


def _bound(constraint: object) -> str:
    """Return bounds such as '>= 0 and < 1'. Print 0.0 as 0: Python caches equal hints and keeps the first imported."""
    if not isinstance(constraint, (at.Ge, at.Gt, at.Le, at.Lt, at.Interval)):
        return ""
    limits, signs = dataclasses.asdict(constraint), {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return " and ".join(f"{sign} {limits[name]:.15g}" for name, sign in signs.items() if limits.get(name) is not None)


def unknown_key(path: str, value: object, known: Iterable[str]) -> str:
    """Return the line for an unknown key."""
    parent, _, key = path.rpartition(".")
    names = sorted(k for k in known if k != "_target_")
    if "/" in path:
        return f"{path}={show(value)}: there is no folder {path} with {show(value)}.yaml here or in the configuration"
    where = f"{parent} has" if parent else "there are"
    return f"unknown key {path}={show(value)}{closest(key, names)}; {where} {', '.join(names) or 'no keys'}"


def closest(word: str, choices: Iterable[str]) -> str:
    """Return ', did you mean x?' or nothing."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f", did you mean {found[0]}?" if found else ""


def show(value: object) -> str:
    """Return a value as typed on the command line, on one line of at most 60 characters."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    text = "\\n".join(text.splitlines())
    return text if len(text) <= 60 else text[:57] + "..."


def _options(hint: object) -> tuple[object, ...]:
    """Return the members of a union, without bounds; a tuple of one for other types."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return tuple(option for each in args for option in _options(each))
    return _options(args[0]) if origin is Annotated else (hint,)


def _dataclasses_in(hint: object) -> tuple[type[DataclassInstance], ...]:
    return tuple(o for o in _options(hint) if isinstance(o, type) and dataclasses.is_dataclass(o))


def _is_plain(hint: object) -> bool:
    """Return True for types of numbers, text and paths."""
    plain = (bool, int, float, str, Path, type(None))
    return all(typing.get_origin(o) is Literal or o in plain for o in _options(hint))


def _item(hint: object) -> object | None:
    """Return the type of the items of a list; None if the type is not a list."""
    for option in _options(hint):
        if option in (object, typing.Any, list, tuple):
            return object
        if typing.get_origin(option) in (list, tuple, Sequence):
            return typing.get_args(option)[0]
    return None


def _is_protocol(cls: type) -> bool:
    return Protocol in cls.__bases__


def _members(protocol: type) -> list[str]:
    return [name for cls in protocol.__mro__ if _is_protocol(cls) for name in vars(cls) if not name.startswith("_")]


def _lacking(built: object, members: Iterable[str]) -> list[str]:
    """Return the members that an object lacks."""
    return [name for name in members if inspect.getattr_static(built, name, None) is None]


def _locate(target: str, path: str) -> object:
    try:
        return locate(str(target))
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        why = str(error) if len(str(error)) <= 200 else f"{str(error)[:197]}..."
        raise ConfigError(f"{_join(path, '_target_')}={str(target)[:200]} cannot be imported: {why}") from error


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else str(key)


def _plain(node: Json) -> Json:
    if isinstance(node, Mapping):
        return {str(k): _plain(v) for k, v in node.items()}
    return [_plain(v) for v in node] if isinstance(node, (list, tuple)) else node


def iter_groups() -> Iterator[str]:
    """Yield the configuration groups: fields of Settings that hold an object."""
    yield from ("strategy", "model", "dataset", "task", "partition", "codec")
    yield from ("comm", "launch", "topology", "optim", "tracker")
