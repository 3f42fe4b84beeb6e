"""The one truth about how a run is laid out: hand-written, derived by a strategy or found by a planner."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Topology:
    """The ranks at hand. `hosts[i]`: ranks on host i, together all of them; empty: one host."""

    num_ranks: int
    hosts: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Placement:
    """Who holds what. `mesh`: stage -> ranks of its parts; part_of, chunk_of [N]; layers_of: stage -> layers."""

    mesh: tuple[tuple[int, ...], ...]
    part_of: Tensor
    chunk_of: Tensor | None
    layers_of: tuple[range, ...]


@dataclass(frozen=True)
class LayerPolicy:
    """How one layer's aggregation runs; `codec` is the configuration of what its rows look like on the wire.

    Fields from `rounds` on are those of mode sar; None elsewhere, and left out of plan.json.
    """

    mode: Literal["whole", "halo", "sar", "chunk"]
    codec: Any = None
    overlap: Literal["none", "edges", "central_marginal"] = "edges"
    remat: bool = False
    rounds: float | str | None = None
    prefetch: int | None = None
    backward: Literal["push", "pull"] | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """Placement, one policy a layer, the strategy it came from, and hashes of what it was made for.

    `statistics`: what the partition costs (nodes, edges, halo rows a part, cut, alpha). `predicted`: by a planner.
    """

    placement: Placement
    layers: tuple[LayerPolicy, ...]
    strategy: dict = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    statistics: dict = field(default_factory=dict)
    predicted: dict | None = None

    @property
    def part_of(self) -> Tensor:
        return self.placement.part_of

    @property
    def num_parts(self) -> int:
        return len(self.placement.mesh[0])

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.placement.mesh))

    def without_nodes(self) -> Plan:
        """The plan less its per-node arrays: what ranks other than the first need."""
        return replace(self, placement=replace(self.placement, part_of=self.part_of[:0], chunk_of=None))

    def summary(self) -> dict:
        """Flat facts for a tracker."""
        flat = {f"partition/{k}": v for k, v in self.statistics.items()}
        return {"ranks": self.num_ranks, "stages": len(self.placement.mesh), **flat, **(self.predicted or {})}

    def verify(self, **hashes: str) -> None:
        """Refuse a plan made for something else."""
        for name, value in hashes.items():
            made_for = self.hashes.get(name)
            if made_for is not None and made_for != value:
                raise ValueError(
                    f"the plan was made for another {name} ({made_for[:12]}, here {value[:12]}): "
                    f"plan again, or give the {name} it was made for."
                )

    def save(self, folder: Path) -> Path:
        """plan.json, and its arrays beside it in files named by content."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {"part_of": self.part_of, "chunk_of": self.placement.chunk_of}
        data = {
            "schema": 1,
            "mesh": self.placement.mesh,
            "layers_of": [[r.start, r.stop] for r in self.placement.layers_of],
            "arrays": {k: _save_array(folder, v) for k, v in arrays.items() if v is not None},
            "layers": [_policy(p) for p in self.layers],
            "strategy": self.strategy,
            "hashes": self.hashes,
            "statistics": self.statistics,
            "predicted": self.predicted,
        }
        file = folder / "plan.json"
        file.write_text(json.dumps(data, indent=2) + "\n")
        return file

    @staticmethod
    def load(file: Path, *, codecs: tuple[Any, ...] = ()) -> Plan:
        """Read plan.json back. `codecs`: the codec configurations of its layers, rebuilt by the caller from "codec"."""
        with clear(file):
            data = Plan.data(file)
            arrays = {k: _load_array(file.parent / name) for k, name in data["arrays"].items()}
            policies = [LayerPolicy(**p) for p in data["layers"]]
            if codecs:
                policies = [replace(p, codec=c) for p, c in zip(policies, codecs, strict=True)]
            placement = Placement(
                tuple(tuple(map(int, ranks)) for ranks in data["mesh"]), arrays["part_of"], arrays.get("chunk_of"),
                tuple(range(*ends) for ends in data["layers_of"]),
            )  # fmt: skip
            told = (data[name] for name in ("strategy", "hashes", "statistics", "predicted"))
            return Plan(placement, tuple(policies), *told)

    @staticmethod
    def data(file: Path) -> dict[str, Any]:
        """What stands in plan.json; ValueError where it is no plan."""
        with clear(file):
            data = json.loads(file.read_text(encoding="utf-8"))
            shapes = {
                "mesh": list, "layers_of": list, "arrays": dict, "layers": list, "strategy": dict, "hashes": dict,
                "statistics": dict, "predicted": (dict, type(None)),
            }  # fmt: skip
            for name, kind in shapes.items():
                if not isinstance(data[name], kind):
                    raise ValueError(f"{name} is a {type(data[name]).__name__}")
            if not data["mesh"] or not all(isinstance(layer, dict) and "codec" in layer for layer in data["layers"]):
                raise ValueError("mesh or layers are empty")
            return data


@contextmanager
def clear(file: Path) -> Iterator[None]:
    """Whatever is wrong with a plan's file is one ValueError that names it."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, OverflowError, RecursionError) as error:
        if str(error).startswith(str(file)):
            raise
        what = " ".join(str(error).split())[:200] or type(error).__name__
        what = f"{what} is missing" if isinstance(error, KeyError) else what
        raise ValueError(
            f"{file} is no plan: {what}; give the plan.json of a run, with its arrays beside it"
        ) from error


def array_hash(array: Tensor) -> str:
    return hashlib.sha256(array.cpu().to(torch.int64).numpy().tobytes()).hexdigest()


def _save_array(folder: Path, array: Tensor) -> str:
    name = f"{array_hash(array)[:16]}.npy"
    np.save(folder / name, array.to(torch.int32).numpy())
    return name


def _load_array(file: Path) -> Tensor:
    """An array whose content is what its name says."""
    array = torch.from_numpy(np.load(file, allow_pickle=False)).long()
    if array.ndim != 1 or array_hash(array)[:16] != file.stem:
        raise ValueError(f"{file.name} has another content than its name says")
    return array


def _policy(policy: LayerPolicy) -> dict:
    given = {k: v for k, v in vars(policy).items() if v is not None}
    return {**given, "codec": _describe(policy.codec)}


def _describe(config: Any) -> Any:
    """A configuration dataclass as data: its class and fields."""
    if hasattr(config, "__dataclass_fields__"):
        kind = type(config)
        return {
            "_target_": f"{kind.__module__}.{kind.__qualname__}",
            **{k: _describe(v) for k, v in vars(config).items()},
        }
    return str(config) if isinstance(config, Path) else config
