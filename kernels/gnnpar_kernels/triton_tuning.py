"""Choose the tile of a kernel for this kind of GPU.

Training times nothing: ranks that time separately could choose tiles with another order of additions, and differ in the
last bits. `tuned/ARCH.json` (sm_90.json, gfx942.json) holds recorded choices; without an entry, use the first
candidate. GNNPAR_TUNE=record times missing entries and writes the file; GNNPAR_TUNE=0 always uses the first candidate.
"""

import functools
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import JITFunction

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns at the first compilation if it is unset

VARIABLE = "GNNPAR_TUNE"
FOLDER = Path(__file__).parent / "tuned"
NOISE = 0.97  # another candidate must take less than this share of the first one's time


def interpreting() -> bool:
    """Return True if kernels run in Triton's interpreter, on a CPU: if TRITON_INTERPRET=1 when they are imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def configs(*meta: dict[str, int], num_warps: Sequence[int] = (1,)) -> list[triton.Config]:
    """Return all pairs of meta-parameters and warp counts, best guess first."""
    return [triton.Config(dict(each), num_warps=warps) for warps in num_warps for each in meta]


class Timing(NamedTuple):
    """Time of a launch with one tile; infinite if it cannot run."""

    kernel: str
    shape: str
    tile: dict[str, int]
    milliseconds: float


timings: list[Timing] = []
"""Timings of this process, from GNNPAR_TUNE=record."""


class Table:
    """The chosen tiles of one kind of GPU by kernel and shape class, as a file. Threads may share it."""

    def __init__(self, path: Path, versions: Mapping[str, str]) -> None:
        self.path, self.versions = path, dict(versions)
        self.lock = threading.Lock()
        read = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.chosen: dict[str, dict[str, dict[str, int]]] = read.get("chosen", {})
        self.measured_with: dict[str, str] = read.get("versions", self.versions)

    def find(self, kernel: str, shape: str) -> dict[str, int] | None:
        return self.chosen.get(kernel, {}).get(shape)

    def measured(self, kernel: str, shape: str) -> dict[str, int] | None:
        """Return the entry if it was recorded on this GPU with these versions."""
        return self.find(kernel, shape) if self.measured_with == self.versions else None

    def add(self, kernel: str, shape: str, config: dict[str, int]) -> None:
        """Remove entries of other versions of Triton or torch, add one, and write the file. The caller holds `lock`."""
        if self.measured_with != self.versions:
            self.chosen, self.measured_with = {}, self.versions
        self.chosen.setdefault(kernel, {})[shape] = config
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self.path.with_suffix(".part")
        tree = {"versions": self.measured_with, "chosen": self.chosen}
        whole.write_text(json.dumps(tree, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        whole.replace(self.path)


@functools.cache
def _table(device: int) -> Table:
    """Return the table of the GPU with this number."""
    found = torch.cuda.get_device_properties(device)
    arch = found.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{found.major}{found.minor}"
    versions = {"gpu": found.name, "torch": torch.__version__, "triton": triton.__version__}
    return Table(FOLDER / f"{arch}.json", versions)


def table() -> Table:
    """Return the table of the current GPU."""
    return _table(torch.cuda.current_device())


class Tuned:
    """A kernel launched with the tile of its table. It keeps no state of a launch, so rank threads may share it."""

    def __init__(
        self,
        fn: JITFunction,
        candidates: Sequence[triton.Config],
        *,
        key: Sequence[str],
        types: Sequence[str],
        restores: Sequence[str] = (),
        name: str = "",
    ) -> None:
        if unknown := {*key, *types, *restores} - set(fn.arg_names):
            raise ValueError(f"{fn.__name__} has no arguments {sorted(unknown)}: name its own")
        self.fn, self.candidates = fn, list(candidates)
        self.key, self.types, self.restores = tuple(key), tuple(types), tuple(restores)
        self.name = name or f"{fn.__module__.removeprefix('gnnpar_kernels.')}.{fn.__name__}"  # in the table

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return functools.partial(self.run, grid)

    def run(self, grid: object, *args: object, **kwargs: object) -> None:
        """Launch over a grid, with the arguments of the kernel except the tuned ones."""
        given = dict(zip(self.fn.arg_names, args, strict=False)) | kwargs
        config = self.choose(given, lambda config: self.launch(grid, args, kwargs, config))
        self.launch(grid, args, kwargs, config)

    def choose(self, given: Mapping[str, Any], launch: Callable[[triton.Config], None]) -> triton.Config:
        """Return the configuration for these arguments. Call `launch` only to time it."""
        how = os.environ.get(VARIABLE, "")
        if how not in ("", "0", "record"):
            raise ValueError(f"{VARIABLE}={how} is neither 0 nor record: unset it to read kernels/gnnpar_kernels/tuned")
        if len(self.candidates) == 1 or how == "0" or interpreting():
            return self.candidates[0]
        known, name, shape = table(), self.name, self.shape_class(given)
        if how != "record":
            chosen = known.find(name, shape)
        elif (chosen := known.measured(name, shape)) is None:
            with known.lock:  # one thread measures, the others use its result
                if (chosen := known.measured(name, shape)) is None:
                    chosen = _as_json(self._fastest(given, launch))
                    known.add(name, shape, chosen)
        return next((each for each in self.candidates if _as_json(each) == chosen), self.candidates[0])

    def shape_class(self, given: Mapping[str, Any]) -> str:
        """Return the shapes and types that determine the best tile, as a key of the table: 'W=128 ACCUMULATE=False
        x=float32'."""
        values = [f"{name}={given[name]}" for name in self.key]
        return " ".join(values + [f"{name}={str(given[name].dtype).removeprefix('torch.')}" for name in self.types])

    def _fastest(self, given: Mapping[str, Any], launch: Callable[[triton.Config], None]) -> triton.Config:
        """Return the fastest candidate on the given tensors. Restore updated tensors once, from one copy, so that times
        include no copying."""
        before = {name: given[name].clone() for name in self.restores if given[name] is not None}
        milliseconds = [_milliseconds(functools.partial(launch, each)) for each in self.candidates]
        for name, copy in before.items():
            given[name].copy_(copy)
        name, shape = self.name, self.shape_class(given)
        timings.extend(
            Timing(name, shape, _as_json(each), ms) for each, ms in zip(self.candidates, milliseconds, strict=True)
        )
        best = milliseconds.index(min(milliseconds))
        return self.candidates[best if milliseconds[best] < NOISE * milliseconds[0] else 0]

    def launch(self, grid: object, args: Sequence[object], kwargs: Mapping[str, object], config: triton.Config) -> None:
        """Launch with one of the candidates."""
        self.fn[grid](*args, **kwargs, **config.kwargs, num_warps=config.num_warps)


def _milliseconds(call: Callable[[], None]) -> float:
    """Return the median time of a launch; infinite if it cannot run with this tile."""
    from triton.testing import do_bench

    try:
        median = do_bench(call, warmup=10, rep=40, return_mode="median")
    except (triton.CompilationError, OutOfResources, PTXASError):
        return float("inf")
    assert isinstance(median, float)
    return median


def _as_json(config: triton.Config) -> dict[str, int]:
    return {**config.kwargs, "num_warps": config.num_warps}
