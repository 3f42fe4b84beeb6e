"""Exact peak memory of one training epoch, from allocator events, also on a CPU. The resident set is no substitute: a
step with an exact peak of 98 MiB changes it by 0 to 180 MiB."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnnpar.files import JsonDict


@dataclass
class MemoryReport:
    """Bytes of one epoch: the peak of the allocator, and of the activations that autograd saved. pinned: the peak of
    pinned host memory on a GPU."""

    peak: int | None = None
    pinned: int | None = None
    activations: int = 0
    _initial: frozenset[int] = frozenset()  # storages held at the start
    _holders: dict[int, int] = field(default_factory=dict)  # storage -> saved tensors that use it
    _level: int = 0

    def saved(self, tensor: Tensor) -> Tensor | _Saved:
        if tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        alone = tensor.detach()  # the tensor itself would keep its own graph alive
        return alone if storage.data_ptr() in self._initial else _Saved(alone, self)

    def hold(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        self._holders[address] = self._holders.get(address, 0) + 1
        if self._holders[address] == 1:
            self._level += storage.nbytes()
            self.activations = max(self.activations, self._level)

    def release(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        self._holders[address] -= 1
        if not self._holders[address]:
            self._level -= storage.nbytes()


class _Saved:
    """A tensor that autograd saved; it counts until autograd releases it."""

    def __init__(self, tensor: Tensor, report: MemoryReport) -> None:
        self.tensor, self._report, self._storage = tensor, report, tensor.untyped_storage()
        report.hold(self._storage)

    def __del__(self) -> None:
        self._report.release(self._storage)


def _given_back(saved: Tensor | _Saved) -> Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved


@contextmanager
def measure_epoch(device: torch.device) -> Iterator[MemoryReport]:
    """Measure the block; the report is filled at its end."""
    held = live_storages()
    report = MemoryReport(_initial=frozenset(held))
    with torch.autograd.graph.saved_tensors_hooks(report.saved, _given_back):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.reset_peak_host_memory_stats()
            yield report
            report.peak = torch.cuda.max_memory_allocated(device)
            report.pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak")
            return
        with _profiled() as profile:
            yield report
    report.peak = sum(held.values()) + _highest(profile)


def peak_allocated_bytes(body: Callable[[], object]) -> int:
    """Run `body` on the CPU. Return its peak of allocated bytes, without earlier allocations."""
    with _profiled() as profile:
        body()
    return _highest(profile)


@contextmanager
def _profiled() -> Iterator[torch.autograd.profiler.profile]:
    """Record allocations on the CPU, but no operators: gloo ends its own in other threads, even after the profiler
    stops, which corrupted the heap in 5 of 14 runs."""
    # torch.profiler's backend; importing torch.profiler loads torch's compiler, 1.5 s of CPU
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        assert profile is not None
        _record_operators(False)
        try:
            yield profile
        finally:
            _record_operators(True)


def _record_operators(on: bool) -> None:
    torch._C._autograd._enable_record_function(on)  # pyright: ignore[reportAttributeAccessIssue]


def _highest(profile: Any) -> int:  # Any: torch declares no types for kineto's results
    """Return the largest sum of allocations minus releases over time."""
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    level = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        highest = max(highest, level)
    return highest


def live_storages() -> dict[int, int]:
    """Return address -> bytes of every storage that a Python tensor holds."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    return _storages(tensors)


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of tensors."""
    return sum(_storages(tensors).values())


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    found: dict[int, int] = {}
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse tensors have no storage, traced ones no address
            continue
    return found


def optimizer_nbytes(state: JsonDict) -> int:
    """Return the bytes of an optimizer's state tensors."""
    return nbytes(v for slot in state["state"].values() for v in slot.values() if isinstance(v, Tensor))


def peak_rss() -> int:
    """Return the largest resident set of this process so far."""
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rss if sys.platform == "darwin" else rss * 1024
