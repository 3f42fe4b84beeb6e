"""Plans: the layout of a run, written by hand, derived by a strategy or found by a planner."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import annotated_types as at

from gnnpar.files import JsonDict, JsonObject, open_atomic, read_json, require_memory, write_json_atomic

if TYPE_CHECKING:
    from pydantic import BaseModel
    from torch import Tensor


Quality = Literal["exact", "rounded", "quantized", "stale", "sampled"]
"""Classes of plans by their exactness."""
QUALITIES: tuple[Quality, ...] = ("exact", "rounded", "quantized", "stale", "sampled")


@dataclass(frozen=True)
class Topology:
    """The ranks of a run. hosts[i]: number of ranks on host i; empty: one host."""

    num_ranks: int
    hosts: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Placement:
    """Placement of nodes, edges and layers. mesh: stage -> ranks of its parts. layers_of: stage -> layers. Shapes:
    part_of, chunk_of [N]; edge_part_of [E], the part of each edge in a vertex cut; None: its destination's."""

    mesh: tuple[tuple[int, ...], ...]
    part_of: Tensor
    chunk_of: Tensor | None
    layers_of: tuple[range, ...]
    edge_part_of: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """A placement, the strategy, and hashes of the graph and the split that it was made for.

    statistics: of the partition (nodes, edges, halo rows per part, cut, alpha). predicted: the planner's predictions.
    quality: allowed classes of inexactness, None: any. devices: rank -> device of the planner's topology. setup:
    settings of the plan (settings.PLAN_SETUP), which `gnnpar train plan=` adopts.
    """

    placement: Placement
    strategy: JsonDict = field(default_factory=JsonDict)
    hashes: dict[str, str] = field(default_factory=dict)
    statistics: JsonDict = field(default_factory=JsonDict)
    predicted: JsonDict | None = None
    quality: tuple[str, ...] | None = None
    devices: tuple[str, ...] = ()
    setup: JsonDict = field(default_factory=JsonDict)

    @property
    def part_of(self) -> Tensor:
        return self.placement.part_of

    @property
    def num_parts(self) -> int:
        return len(self.placement.mesh[0])

    @property
    def num_layers(self) -> int:
        return self.placement.layers_of[-1].stop

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.placement.mesh))

    def without_nodes(self) -> Plan:
        """Return the plan without its arrays, for ranks other than the first."""
        nodes = replace(self.placement, part_of=self.part_of[:0], chunk_of=None, edge_part_of=None)
        return replace(self, placement=nodes)

    def verify(
        self,
        *,
        num_layers: int | None = None,
        num_nodes: int | None = None,
        num_edges: int | None = None,
        **hashes: str,
    ) -> None:
        """Raise ValueError for a plan that is inconsistent or made for another graph, split or model."""
        for name, value in hashes.items():
            made_for = self.hashes.get(name)
            if made_for is not None and made_for != value:
                raise ValueError(
                    f"the plan was made for another {name} ({made_for[:12]}, here {value[:12]}): "
                    f"plan again, or give the {name} it was made for."
                )
        sizes = ("nodes", self.part_of, num_nodes), ("edges", self.placement.edge_part_of, num_edges)
        for name, array, number in sizes:
            if array is not None and number is not None and len(array) != number:
                raise ValueError(f"the plan places {len(array)} {name}, the graph has {number}: plan again")
        for problem in self._problems():
            raise ValueError(f"the plan cannot run: {problem}")
        if num_layers is not None and self.num_layers != num_layers:
            raise ValueError(
                f"the plan has {self.num_layers} layers, the model {num_layers}: set model.num_layers={self.num_layers}"
            )

    def _problems(self) -> Iterator[str]:
        """Yield every inconsistency in one line."""
        yield from self._placement_problems()
        yield from self._array_problems()
        if not isinstance(self.strategy.get("name", ""), str):
            yield f"strategy.name={self.strategy['name']} is no name"
        if self.devices and len(self.devices) != self.num_ranks:
            yield f"devices names {len(self.devices)} places for {self.num_ranks} ranks"
        if len(set(self.devices)) != len(self.devices):
            yield "devices puts two ranks on one device"

    def _placement_problems(self) -> Iterator[str]:
        mesh, layers_of = self.placement.mesh, self.placement.layers_of
        ranks = sorted(rank for stage in mesh for rank in stage)
        if not mesh or not all(mesh):
            yield f"a stage of mesh={str(list(map(list, mesh)))[:80]} has no rank"
        if ranks != list(range(len(ranks))):
            yield f"mesh has the ranks {str(ranks)[:80]}, not 0 to {len(ranks) - 1}"
        if len(widths := {len(stage) for stage in mesh}) > 1:
            yield f"stages have {sorted(widths)} parts, but one partition serves all of them"
        if not layers_of or len(layers_of) % max(1, len(mesh)):  # a stage may have several groups of layers
            yield f"layers_of has {len(layers_of)} stages, mesh {len(mesh)}"
        expected = 0
        for stage, layers in enumerate(layers_of):
            if len(layers) == 0:
                yield f"stage {stage} has no layer"
            if layers.start != expected:
                yield f"stage {stage} begins with layer {layers.start}, not with {expected}"
            expected = layers.stop

    def _array_problems(self) -> Iterator[str]:
        import torch

        arrays, num_nodes = self.arrays, len(self.part_of)  # no nodes on ranks other than the first
        if "chunk_of" in arrays and len(arrays["chunk_of"]) != num_nodes:
            yield f"chunk_of has {len(arrays['chunk_of'])} nodes, part_of {num_nodes}"
        for name, array in arrays.items():
            if not len(array):
                continue
            kind, most = ("chunk", num_nodes) if name == "chunk_of" else ("part", self.num_parts)
            low, high = map(int, array.aminmax())
            if low < 0 or high >= most:
                yield f"{name} goes from {low} to {high}, but there are {most} {kind}s"
            elif name != "edge_part_of":
                counts = torch.bincount(array, minlength=self.num_parts if kind == "part" else 0)
                if empty := (counts == 0).nonzero().flatten().tolist():
                    yield f"{kind} {empty[0]} has no node"

    def save(self, folder: Path, *, part_of: Path | None = None) -> Path:
        """Write plan.json, and its arrays in files named by their hash in the same folder. part_of: the file of the
        partition, if this plan has only its hash."""
        folder.mkdir(parents=True, exist_ok=True)
        named = {} if part_of is None else {"part_of": f"{self.hashes['partition'][:16]}.npy"}
        if part_of is not None:
            with open_atomic(folder / named["part_of"]) as out, part_of.open("rb") as array:
                shutil.copyfileobj(array, out)
        names = {k: named.get(k) or _save_array(folder, v) for k, v in self.arrays.items()}
        file = folder / "plan.json"
        write_json_atomic(file, self.as_data(names), indent=2)
        return file

    @property
    def arrays(self) -> dict[str, Tensor]:
        """Return the existing arrays by name: part_of [N], chunk_of [N], edge_part_of [E]."""
        placement = self.placement
        arrays = {"part_of": self.part_of, "chunk_of": placement.chunk_of, "edge_part_of": placement.edge_part_of}
        return {k: v for k, v in arrays.items() if v is not None}

    def as_data(self, names: Mapping[str, str]) -> JsonDict:
        """Return the content of plan.json. names: array -> its file."""
        return {
            "schema": 1,
            "mesh": self.placement.mesh,
            "layers_of": [[r.start, r.stop] for r in self.placement.layers_of],
            "arrays": dict(names),
        } | {each.name: vars(self)[each.name] for each in fields(self) if each.name != "placement"}

    @staticmethod
    def load(file: Path) -> Plan:
        """Read plan.json and its arrays. Raises ValueError in one line."""
        with clear(file):
            data = Plan.data(file)
            return Plan.of_data(data, {k: _load_array(file.parent / name) for k, name in data["arrays"].items()})

    @staticmethod
    def of_data(data: JsonObject, arrays: Mapping[str, Tensor]) -> Plan:
        """Build a plan from `as_data` and its arrays. Raises ValueError or KeyError."""
        _check(data)
        mesh, layers_of = tuple(map(tuple, data["mesh"])), tuple(range(*ends) for ends in data["layers_of"])
        return Plan(
            Placement(mesh, arrays["part_of"], arrays.get("chunk_of"), layers_of, arrays.get("edge_part_of")),
            **{name: data[name] for name in ("strategy", "hashes", "statistics", "predicted")},
            quality=None if data.get("quality") is None else tuple(data["quality"]),
            devices=tuple(data.get("devices", ())),
            setup=data.get("setup", {}),
        )

    @staticmethod
    def size(file: Path) -> tuple[int, int]:
        """Return (ranks, layers) of the plan in a file. Raise ValueError if it is not a plan."""
        data = Plan.data(file)
        return sum(map(len, data["mesh"])), data["layers_of"][-1][1]

    @staticmethod
    def data(file: Path) -> JsonDict:
        """Return the checked content of plan.json. Raise ValueError if it is not a plan."""
        with clear(file):
            _check(data := read_json(file))
            return data


@contextmanager
def clear(file: Path) -> Iterator[None]:
    """Raise any error of the block as a ValueError that names the plan's file."""
    try:
        yield
    except Exception as error:  # numpy and torch raise errors of all kinds
        if type(error) is ValueError and str(file.parent) in str(error):
            raise
        what = " ".join(str(error).split())[:200] or type(error).__name__
        what = f"{what} is missing" if isinstance(error, KeyError) else what
        raise ValueError(
            f"plan={file} is no plan: {what}; give the plan.json of a run, with its arrays beside it, or plan again"
        ) from error


_Layer = Annotated[int, at.Ge(0), at.Le(10_000)]  # as model.num_layers
_Figure = Annotated[float, at.Gt(1e-12), at.Lt(1e30)]  # seconds or bytes


@functools.cache
def _schema() -> type[BaseModel]:
    """Return the model of plan.json; pydantic is imported when a plan is read."""
    from pydantic import BaseModel, ConfigDict, Field

    class Replanned(BaseModel):
        epoch: int

    class Predicted(BaseModel):
        peak_bytes: Annotated[list[_Figure], Field(min_length=1)]
        epoch_seconds: _Figure
        label: str = ""
        replanned: Replanned | None = None

    class PlanFile(BaseModel):
        model_config = ConfigDict(extra="forbid")

        schema_: Annotated[Literal[1], Field(alias="schema")]
        mesh: Annotated[list[list[int]], Field(min_length=1)]
        layers_of: Annotated[list[tuple[_Layer, _Layer]], Field(min_length=1)]
        arrays: dict[Literal["part_of", "chunk_of", "edge_part_of"], Annotated[str, Field(pattern="^[^/]+$")]]
        strategy: dict[str, object]
        hashes: dict[str, Annotated[str, Field(pattern="^[0-9a-f]*$")]]
        statistics: dict[str, object]
        predicted: Predicted | None
        quality: list[str] | None = None
        devices: list[str] = []
        setup: dict[str, object] = {}

    return PlanFile


def _check(data: JsonObject) -> None:
    """Raise ValueError in one line if `data` is not a plan of schema 1."""
    from pydantic import ValidationError

    try:
        _schema().model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key, value = ".".join(map(str, first["loc"])), str(first["input"])[:80]
        raise ValueError(
            f"{key}={value}: {first['msg']}" if first["type"] != "missing" else f"{key} is missing"
        ) from None


def _load_array(file: Path) -> Tensor:
    """Read an array [N] int64 from a file named by the hash of its contents."""
    import numpy as np
    import torch

    try:
        table = np.load(file, mmap_mode="r", allow_pickle=False)
        require_memory(8 * table.size, "an array of the plan", "plan for a smaller graph")
        array = torch.from_numpy(np.array(table, dtype=np.int64))
    except Exception as error:  # numpy raises errors of all kinds
        raise ValueError(
            f"{file} of the plan cannot be read ({type(error).__name__}); it lies beside plan.json"
        ) from error
    if array.ndim != 1 or array_hash(array)[:16] != file.stem:
        raise ValueError(f"{file} of the plan was changed: its contents differ from the hash in its name; plan again")
    return array


def array_hash(array: Tensor) -> str:
    return hashlib.sha256(array.cpu().long().numpy().tobytes()).hexdigest()


def _save_array(folder: Path, array: Tensor) -> str:
    import numpy as np

    name = f"{array_hash(array)[:16]}.npy"
    with open_atomic(folder / name) as out:
        np.save(out, array.int().numpy())
    return name
