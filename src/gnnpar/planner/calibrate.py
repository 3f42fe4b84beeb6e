"""Measure rates and links of this machine within about 20 s, and cache them by machine. Costs are fitted by
non-negative least squares of relative errors. `residuals` holds the median |error| as the planner's uncertainty."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import secrets
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from gnnpar.codecs.adaptive.links import fit
from gnnpar.comm import Communicator, ThreadWorld
from gnnpar.comm.world import num_cores
from gnnpar.files import read_json, write_json_atomic
from gnnpar.launch.processes import end_with, without_main
from gnnpar.planner.overhead import candidates, trial_epochs, trials, with_overhead
from gnnpar.planner.samples import SIZES, Samples, measure
from gnnpar.pricing.rates import NOMINAL, DenseCost, FoldCost, Rates, derived
from gnnpar.track.text import counted
from gnnpar.training.result.record import contention
from gnnpar.training.result.result import processor

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess
    from multiprocessing.queues import SimpleQueue

MEASURING_SECONDS = 20.0  # after half of it samples repeat less, after three quarters trials are shorter
NOMINAL_LINK = 1 / 1e9, 5e-5  # seconds per byte, latency
_VERSION = 8  # of the measurements and the fit


@dataclass(frozen=True)
class Calibration:
    """Rates of one of `ranks` ranks with `threads` each, and the link between two (seconds per byte, latency)."""

    ranks: int
    threads: int
    rates: Rates
    link: tuple[float, float]

    def shared(self, ranks: int, cores: int) -> Calibration:
        """Return the calibration for more ranks than measured, which share cores and memory bandwidth."""
        factor = max(1.0, ranks * self.threads / max(1, cores))
        theta, gamma = self.link
        return replace(
            self, rates=replace(self.rates, scale=self.rates.scale * factor), link=(theta * factor, gamma * factor)
        )


def calibrate(
    ranks: int,
    *,
    threads: int,
    cache: Path | None,
    refresh: bool = False,
    measuring: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Return the calibration from the cache, or measure. Measure again with `refresh`, or if the cached rates are of a
    busy machine that is idle now. measuring=False: nominal rates if nothing is cached."""
    file = None if cache is None else cache / "calibration" / f"{_key(ranks, threads)}.json"
    if file is not None and file.exists() and not refresh:
        try:
            kept = read_calibration(file)
        except ValueError as error:
            say(f"{error}: measuring again")
        else:
            if not kept.rates.busy or not measuring:
                return kept
            if contention(ranks * threads, num_cores()):
                say("rates of a busy machine: the next plan measures again, once the machine is quiet")
                return kept
            say("the rates in the cache are those of a busy machine, and it is quiet now: measuring again")
    if not measuring:
        say("not measured: predictions are with the nominal rates of a server's core, and may be off by a factor")
        return Calibration(ranks, threads, NOMINAL, NOMINAL_LINK)
    here = f"{counted(ranks, 'rank')} with {counted(threads, 'thread')}"
    say(f"measuring what {here} can do here: about {MEASURING_SECONDS:.0f} s, once, kept in the cache; --no-measure")
    if others := contention(ranks * threads, num_cores()):
        say(f"busy machine: {others}, which makes it look slower than it is; measured again once it is quiet")
    calibration = fit_calibration(world_samples(ranks, threads, say), ranks=ranks, threads=threads)
    others = others or contention(ranks * threads, num_cores())
    calibration = replace(calibration, rates=replace(calibration.rates, busy=others))
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(file, asdict(calibration))
        except OSError as error:
            say(f"calibration not cached: {error.strerror} ({file})")
    return calibration


def read_calibration(file: Path) -> Calibration:
    """Read a cached calibration. ValueError for other content."""
    from pydantic import TypeAdapter

    try:
        return TypeAdapter(Calibration).validate_python(read_json(file))
    except (OSError, ValueError) as error:
        raise ValueError(f"the cached calibration {file} cannot be read ({type(error).__name__})") from error


def _key(ranks: int, threads: int) -> str:
    """Return the cache key. It includes the engines, since an engine without measurements would look free."""
    engines = sorted(candidate.engine for candidate in candidates(trials(ranks)[0], ranks))
    facts = [_VERSION, processor(), os.cpu_count(), version("torch"), version("gnnpar"), engines, ranks, threads]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def world_samples(ranks: int, threads: int, say: Callable[[str], None] = lambda _: None) -> list[Samples]:
    """Measure on every rank: processes over gloo, or this process alone. say: called with a line per step."""
    if ranks == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return [_measure_all(ThreadWorld(1).communicators()[0], say)]
        finally:
            torch.set_num_threads(before)
    with tempfile.TemporaryDirectory(prefix="gnnpar-") as scratch:
        folder = Path(scratch)
        context = multiprocessing.get_context("spawn")
        steps: SimpleQueue[str] = context.SimpleQueue()
        given = (ranks, threads, str(folder), secrets.token_bytes(32), steps, os.getpid())
        processes = [context.Process(target=_rank, args=(rank, *given)) for rank in range(ranks)]
        try:
            with without_main():
                for process in processes:
                    process.start()
            while any(process.is_alive() for process in processes):
                _refuse_failed(processes)
                time.sleep(0.1)
                while not steps.empty():
                    say(steps.get())
            _refuse_failed(processes)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _refuse_failed(processes: Sequence[BaseProcess]) -> None:
    for rank, process in enumerate(processes):
        if process.exitcode:
            raise ValueError(
                f"rank {rank} of the measurement ended with exit code {process.exitcode}; see its output above"
            )


def _measure_all(comm: Communicator, say: Callable[[str], None]) -> Samples:
    until = time.monotonic() + MEASURING_SECONDS / 2
    say("  1 of 2: kernels and messages")
    samples = measure(comm, until)
    say("  2 of 2: epochs of small graphs")
    samples.trials = trial_epochs(comm, until + MEASURING_SECONDS / 4)
    return samples


def _rank(rank: int, ranks: int, threads: int, folder: str, key: bytes, steps: SimpleQueue[str], parent: int) -> None:
    end_with(parent, signal.SIGKILL)
    from gnnpar.comm import interfaces
    from gnnpar.comm.process import connect

    torch.set_num_threads(threads)
    if "RANK" in os.environ:
        os.environ.pop(interfaces.VARIABLE, None)  # it names an external interface
    interfaces.choose(interfaces.loopback())
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    meet = f"file://{folder}/meet"
    comm = connect("gloo", device=torch.device("cpu"), key=key, timeout_seconds=300, init_method=meet)
    torch.save(_measure_all(comm, steps.put if rank == 0 else lambda _: None), Path(folder) / f"{rank}.pt")
    comm.barrier()
    comm.close()


def fit_calibration(samples: Sequence[Samples], *, ranks: int, threads: int) -> Calibration:
    """Fit one set of rates for all ranks; links are means over ranks."""
    costs, residuals = dict[str, list[float]](), dict[str, float]()
    for kind in samples[0].kernels:
        rows, seconds = zip(*(row for s in samples for row in s.kernels[kind]), strict=True)
        costs[kind], residuals[kind] = nonnegative(rows, seconds)
    const, *elementwise = costs["elementwise"]
    kinds = [kind.removesuffix(".forward") for kind in costs if kind.endswith(".forward")]
    number = {key: statistics.mean(s.per_number[key] for s in samples) for key in samples[0].per_number}
    second = {key: statistics.mean(s.seconds[key] for s in samples) for key in samples[0].seconds}
    params = second["numbers_large"] - second["numbers_small"]
    step = max(0.0, second["step_large"] - second["step_small"]) / params
    link, reduce = _links(samples)
    rates = Rates(
        gemm=DenseCost(*costs["gemm"]),
        elementwise=DenseCost(const, 0.0, *elementwise),
        folds={k: (FoldCost(*costs[f"{k}.forward"]), FoldCost(*costs[f"{k}.backward"])) for k in kinds},
        dropout=number["dropout"],
        undrop=number.get("undrop"),
        gather=number["gather"],
        coded={bits: number[f"code{bits}"] for bits in (2, 4, 8, 16)},
        message=second.get("message", 1e-5),
        interference=second.get("interference", 1.0),
        beside=second.get("beside", 0.0),
        order=second.get("order", 0.0),
        reduce=reduce,
        epoch=second["step_small"],
        step=step,
        source="measured",
        residuals=residuals,
    )
    if samples[0].trials:
        slowest = {
            engine: {trial: max(s.trials[engine][trial] for s in samples) for trial in by_trial}
            for engine, by_trial in samples[0].trials.items()
        }
        rates = with_overhead(rates, link, ranks, slowest)
    return Calibration(ranks, threads, rates, link)


def _links(samples: Sequence[Samples]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return ((seconds per byte, latency) of a message, (const, per byte) of a sum); nominal for one rank."""
    if len(samples) == 1:
        nominal = derived(20e9, 8e9)
        return NOMINAL_LINK, nominal.reduce
    pairs = [fit(SIZES, [t for _, t in rows]) for s in samples for rows in s.links.values()]
    theta = statistics.mean(theta for theta, _ in pairs)
    gamma = min(rows[0][1] for s in samples for rows in s.links.values())  # latency of the smallest undisturbed message
    reduces = [row for s in samples for row in s.reduce]
    (const, byte), _ = nonnegative([(1.0, n) for n, _ in reduces], [t for _, t in reduces])
    return (theta, gamma), (const, byte)


def nonnegative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Return the coefficients >= 0 with least squared relative errors, and the median |relative error|."""
    from scipy.optimize import nnls

    matrix, times = np.asarray(rows, dtype=float), np.asarray(seconds, dtype=float)
    weighted = matrix / times[:, None]
    scale = np.maximum(weighted.max(axis=0), 1e-300)
    solution, _ = nnls(weighted / scale, np.ones(len(times)))
    coefficients = solution / scale
    return coefficients.tolist(), float(np.median(np.abs(matrix @ coefficients / times - 1.0)))
