"""Measure an epoch on every rank, and merge it on rank 0: time, traffic, memory; outside of timed epochs, metrics of
exact logits and the fidelity of the strategy's gradient.

Peak memory is exact, from allocator events, also on a CPU. The resident set is no substitute: a step with an exact peak
of 98 MiB changes it by 0 to 180 MiB.
"""

from __future__ import annotations

import gc
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from gnnpar.comm import Communicator
from gnnpar.comm.clock import perf_counter
from gnnpar.files import JsonDict, JsonObject
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.objective import Objective
from gnnpar.settings import Stepper
from gnnpar.track.keys import BYTE_PHASES, PHASES, RARE_PHASES


class EpochMeter:
    """Measure wall time, phases, traffic and CPU time of an epoch, which ranks enter together."""

    def __init__(self, comm: Communicator, interface: Callable[[], int] | None = None) -> None:
        self.comm = comm
        self.interface = interface  # counts the bytes that this rank's host has sent
        self.wire = 0
        self.seconds = self.cpu_seconds = 0.0
        self._cpu_clock = time.thread_time if comm.transport == "threads" else time.process_time

    def __enter__(self) -> Self:
        self.comm.barrier()
        self.comm.ledger.drain()  # drop the bytes of evaluation and probes
        self.wire = self.interface() if self.interface else 0
        self._cpu = self._cpu_clock()
        self._began = perf_counter()
        self.comm.clock.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.comm.device.type == "cuda":
            torch.cuda.synchronize(self.comm.device)
        self.comm.clock.stop()
        self.seconds = perf_counter() - self._began
        self.cpu_seconds = self._cpu_clock() - self._cpu
        if self.interface:
            self.wire = self.interface() - self.wire

    def read(self) -> JsonDict:
        """Return the figures of this rank as plain data. Collective."""
        self.comm.settle_accounts()
        traffic, phases = self.comm.ledger.drain(), self.comm.clock.drain()
        exposed = phases.pop("exposed")
        skew = min(traffic.exposed_skew, exposed)
        bubble = min(traffic.bubble, exposed - skew)
        phases["bubble"] += bubble
        return {
            "seconds": self.seconds,
            "phases": {**phases, "exposed_skew": skew, "exposed_wire": exposed - skew - bubble},
            "comm_total": traffic.comm_total,
            "bytes": traffic.bytes,
            "layer_bytes": traffic.layer_bytes,
            "metadata": traffic.metadata,
            "messages": traffic.messages,
            "cpu": self.cpu_seconds,
            "peak_rss": peak_rss(),
        } | ({"wire": self.wire} if self.interface else {})


def merge(everyone: Sequence[JsonObject]) -> JsonDict:
    """Merge the figures of all ranks: times of the slowest, bytes summed."""
    slowest = max(range(len(everyone)), key=lambda rank: everyone[rank]["seconds"])
    slow = everyone[slowest]
    layers = sorted({layer for rank in everyone for layer in rank["layer_bytes"]})
    sent = {name: sum(rank["bytes"].get(name, 0) for rank in everyone) for name in BYTE_PHASES}
    sent = {name: count for name, count in sent.items() if count or name not in RARE_PHASES}
    row = {
        "time/epoch_seconds": slow["seconds"],
        "time/slowest_rank": slowest,
        **{f"time/{name}_seconds": slow["phases"][name] for name in PHASES},
        "time/comm_total_seconds": slow["comm_total"],
        "time/cpu_seconds": [rank["cpu"] for rank in everyone],
        "comm/total_bytes": sum(sent.values()),
        **{f"comm/{name}_bytes": count for name, count in sent.items()},
        "comm/layer_bytes": {str(i): sum(rank["layer_bytes"].get(i, 0) for rank in everyone) for i in layers},
        "comm/metadata_bytes": sum(rank["metadata"] for rank in everyone),
        "comm/messages": sum(rank["messages"] for rank in everyone),
        "memory/peak_rss_bytes": [rank["peak_rss"] for rank in everyone],
    }
    if any("wire" in rank for rank in everyone):
        row["comm/wire_bytes"] = sum(rank.get("wire", 0) for rank in everyone)
    if "live" in slow:
        row["memory/peak_bytes"] = [rank["peak"] for rank in everyone]
        row["memory/live_bytes"] = max(everyone, key=lambda rank: rank["peak"])["live"]
    if "pinned" in slow:
        row["memory/pinned_bytes"] = [rank["pinned"] for rank in everyone]
    return row


def evaluate(engine: Engine, objective: Objective) -> JsonDict:
    """Return `Objective.metrics` of exact logits, equal on every rank. Collective."""
    engine.drain()
    return objective.metrics(engine.predict())


def fidelity(gradient: Mapping[str, Tensor], exact: Mapping[str, Tensor], comm: Communicator) -> JsonDict:
    """Return cosine and relative error, overall and by layer, on rank 0; else {}. Collective. Each name counts once,
    whether ranks hold different parameters (stages) or the same ones (parts)."""
    everyone = comm.gather({name: _overlap(gradient[name], exact[name]) for name in exact})
    if everyone is None:
        return {}
    by_name = {name: overlap for part in everyone for name, overlap in part.items()}
    layers: dict[str, Tensor] = {}
    for name, overlap in by_name.items():
        layer = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.partition(".")[0]
        layers[layer] = layers[layer] + overlap if layer in layers else overlap
    cosine, relative_error = _agreement(sum(by_name.values(), torch.zeros(4, dtype=torch.float64)))
    found = {name: _agreement(overlap) for name, overlap in layers.items()}
    errors = {name: error for name, (_, error) in found.items() if error is not None}
    worst = max(errors, key=lambda name: errors[name], default=None)
    return {
        "fidelity/cosine": cosine,
        "fidelity/relative_error": relative_error,
        "fidelity/worst_layer": worst,
        "fidelity/worst_relative_error": None if worst is None else errors[worst],
        "fidelity/layers": {name: list(pair) for name, pair in found.items()},
    }


def _overlap(gradient: Tensor, exact: Tensor) -> Tensor:
    """Return <a, b>, |a|^2, |b|^2 and |a - b|^2 on the CPU, [4] float64."""
    a, b = gradient.double().flatten(), exact.double().flatten()
    return torch.stack([a @ b, a @ a, b @ b, (a - b).square().sum()]).cpu()


def _agreement(overlap: Tensor) -> tuple[float | None, float | None]:
    """Return cosine and relative error; None for a zero gradient."""
    dot, square, exact, difference = overlap.tolist()
    norm = math.sqrt(square * exact)
    return dot / norm if norm else None, math.sqrt(difference / exact) if exact else None


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


@contextmanager
def measure_epoch(device: torch.device) -> Iterator[MemoryReport]:
    """Measure the block; the report is filled at its end."""
    held = live_storages()
    report = MemoryReport(_initial=frozenset(held))
    with torch.autograd.graph.saved_tensors_hooks(report.saved, lambda s: s.tensor if isinstance(s, _Saved) else s):
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
    return _storages(o for o in gc.get_objects() if issubclass(type(o), Tensor))


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


def live_bytes(engine: Engine, optimizer: Stepper, activations: int) -> dict[str, int]:
    """Return the bytes that a rank holds, by category. activations: saved by autograd."""
    held = engine.live_bytes()
    return {
        "parameters": nbytes(p for _, p in engine.named_parameters()),
        "optimizer": optimizer_nbytes(optimizer.state_dict()),
        "activations": activations + held.pop("activations", 0),
        **held,
    }


def peak_rss() -> int:
    """Return the largest resident set of this process so far."""
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rss if sys.platform == "darwin" else rss * 1024
