"""Measure a case: check the op, then run all contenders in turns, with time and peak memory."""

import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import gnnpar_kernels as kernels
from bench.baselines import Build, Run
from bench.graphs import SMALL, Inputs, draw
from bench.registry import OURS, Case
from gnnpar_kernels.dispatch import functions_of

FLUSH = 1 << 31  # bytes written between runs on a GPU: several times its cache, and time for the host to launch ahead
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
UNKNOWN = float("nan")
Clock = Callable[[Run], tuple[float, float]]  # runs once: (wall, CPU) milliseconds


class Measurement(NamedTuple):
    """One contender in one case: milliseconds of every run, MiB; nan or empty if unknown. note: the reason."""

    contender: str
    wall: list[float]
    cpu: list[float]
    peak_mib: float
    note: str = ""


def _clock_cpu(run: Run) -> tuple[float, float]:
    started, busy = time.perf_counter(), time.process_time()
    run()
    return (time.perf_counter() - started) * 1e3, (time.process_time() - busy) * 1e3


def clock_of(device: str) -> Clock:
    """Return a clock: on a CPU wall and process time, on a GPU time between two events, after a flush of the cache."""
    if torch.device(device).type != "cuda":
        return _clock_cpu
    scratch = torch.empty(FLUSH, dtype=torch.int8, device=device)

    def clock(run: Run) -> tuple[float, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        scratch.zero_()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end), UNKNOWN

    return clock


def ceiling(case: Case, data: Inputs, clock: Clock) -> Measurement:
    """Return the measurement of the copy, a case without contenders and without a check."""
    run = partial(case.race(data).op, kernels)
    run()
    wall, cpu = zip(*(clock(run) for _ in range(9)), strict=True)
    return Measurement("torch copy", list(wall), list(cpu), 0.0)


def _status_kib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return float(line.split()[1])
    return UNKNOWN


def peak_mib(run: Run, device: str) -> float:
    """Return the peak memory of one call above the memory allocated before it."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_kib("VmRSS")
        run()
        return (_status_kib("VmHWM") - before) / 1024
    except OSError:
        return UNKNOWN


def release(device: str) -> None:
    """Free the memory of a case."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def _tensors(result: object) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple):
        for each in result:
            yield from _tensors(each)
    else:
        raise TypeError(f"an op returns a tensor or a tuple of tensors, not {type(result).__name__}")


def _rms_ratio(actual: Tensor, expected: Tensor) -> float:
    """Return RMS of the difference over RMS of the expected; infinite if infinities or NaNs differ."""
    actual, expected = actual.detach().double(), expected.detach().double()
    finite = torch.isfinite(expected)
    if actual.shape != expected.shape or not torch.equal(actual[~finite], expected[~finite]):
        return float("inf")
    actual, expected = actual[finite], expected[finite]
    difference = float((actual - expected).norm())
    return float("inf") if math.isnan(difference) else difference / max(float(expected.norm()), 1e-30)


@cache
def _small(device: str) -> Inputs:
    return draw(SMALL, device=device)


def gate(case: Case, device: str) -> str:
    """Return the error of the op on a small graph, or an empty string if it agrees with the specification."""
    race = case.race(_small(device))
    actual, expected = (tuple(_tensors(race.op(body))) for body in (kernels, functions_of("naive")))
    worst = max((_rms_ratio(a, b) for a, b in zip(actual, expected, strict=True)), default=0.0)
    limit = TOLERANCE[case.dtype]
    return "" if worst <= limit else f"RMS error {worst:.1e} of the specification's RMS, allowed {limit:.0e}"


def _reason(error: Exception) -> str:
    """Return a short reason why a contender is not measured."""
    text = str(error).strip()
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in text:
        return "out of memory"
    return (text.splitlines() or [type(error).__name__])[0][:80]


def _prepare(build: Build, device: str) -> tuple[Run | None, float, str]:
    """Run once to compile and tune, then again for memory. Return (call, peak memory, reason if there is no call)."""
    run = None
    try:
        run = build()
        run()
        return run, peak_mib(run, device), ""
    except (RuntimeError, ImportError) as error:
        run, note = None, _reason(error)
    release(device)  # after the error is gone, with the frames that hold tensors
    return None, UNKNOWN, note


def measure(
    case: Case, data: Inputs, clock: Clock, *, device: str, repeats: int, seconds: float, without: str = ""
) -> tuple[list[Measurement], str]:
    """Measure contenders in turns. Return measurements, the op's first, and the reason if the case failed.

    `without`: omit contenders with this in their name. Prepare the op on the measured graph before the check on a small
    one, since kernels keep the configuration that was fastest on their first run.
    """
    race = case.race(data)
    others = {name: build for name, build in race.others.items() if not without or without not in name}
    builds = {OURS: lambda: partial(race.op, kernels), **others}
    prepared = {OURS: _prepare(builds.pop(OURS), device)}
    failure = prepared[OURS][2] or gate(case, device)
    if failure:
        return [], failure
    prepared |= {name: _prepare(build, device) for name, build in builds.items()}
    wall: dict[str, list[float]] = {name: [] for name in prepared}
    cpu: dict[str, list[float]] = {name: [] for name in prepared}
    started = time.perf_counter()
    for turn in range(repeats):
        if turn >= 3 and time.perf_counter() - started > seconds:
            break
        for name, (run, _, _) in prepared.items():
            if run is not None:
                passed, busy = clock(run)
                wall[name].append(passed)
                cpu[name].append(busy)
    return [Measurement(name, wall[name], cpu[name], peak, note) for name, (_, peak, note) in prepared.items()], ""


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """Return the 20th, 50th and 80th percentile."""
    if not values:
        return UNKNOWN, UNKNOWN, UNKNOWN
    if len(values) == 1:
        return values[0], values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[1], statistics.median(values), tenths[7]
