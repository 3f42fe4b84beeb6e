"""From Settings to a finished run: start the ranks or join those that are there, and leave result.json in any case.

Ranks are started through torch's elastic launcher. The parent alone sees Ctrl-C: SIGINT is blocked in the thread that
starts the ranks, which inherit that, and a thread beside it receives it.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnpar.runner import paced, ranks
from gnnpar.runner.facts import World, header, world_of
from gnnpar.runner.ranks import Failure, failure_of, tracking
from gnnpar.runner.result import Status, forget, read_result, write_result
from gnnpar.settings import Cluster, Settings
from gnnpar.track.console import say
from gnnpar.track.tracker import Null, Tee

Facts = Mapping[str, Any]
_BURST_SHARE = 0.05
_NOISY = ("torch.distributed", "torch.multiprocessing")


@dataclass(frozen=True)
class Outcome:
    """How a run ended; `error` in one line."""

    status: Status
    error: str | None = None
    traceback: str = ""

    @property
    def exit_code(self) -> int:
        return 0 if self.status == "completed" else 1


class RankFailed(Exception):
    """A rank ended before its work."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.line)
        self.failure = failure


def launch(settings: Settings, run_dir: Path) -> Outcome:
    """Run to the end, to a failure or to an interruption; result.json is there in any case.

    Rank 0 writes it when its work is done, and its word stands unless the run failed beside it.
    """
    world = world_of(settings)
    facts = header(settings, world)
    writes = world.how != "joined" or int(os.environ["RANK"]) == 0
    if writes:
        say_what_is_special(settings, world)
        forget(run_dir)
        if world.how == "joined":  # a rank that is killed cannot write: this stands until a better result does
            write_result(run_dir, facts, "failed", "ended without saying why")
    try:
        with interruptible(), links(world, facts):
            _START[world.how](settings, world, run_dir, facts)
        outcome = Outcome("completed")
    except KeyboardInterrupt:
        outcome = Outcome("interrupted", "interrupted by a signal")
    except RankFailed as error:
        outcome = Outcome("failed", error.failure.line, error.failure.traceback)
    if writes:
        told = read_result(run_dir) if outcome.status == "completed" else None
        if told is None or told["status"] != "completed":
            told = write_result(run_dir, facts, outcome.status, outcome.error)
        say_if_bursts_undercut(told)
    return outcome


@contextmanager
def links(world: World, facts: dict[str, Any]) -> Iterator[None]:
    """The shaped links of launch=paced are there inside; the facts learn what they reach."""
    if world.network is None:
        yield
        return
    with paced.paced(world.network) as reached:
        facts["paced"]["reached_gbps"] = reached
        say(f"paced: {paced.describe(world.network)}; payload reached: {', '.join(f'{r:.2f}' for r in reached)} Gbit/s")
        for line in paced.shortfalls(world.network, reached):
            say(f"{line}; the results carry both rates")
        yield


def say_if_bursts_undercut(result: Facts) -> None:
    """Links that pass much of an epoch at once are faster than their rate."""
    if result["paced"] and (share := result["paced"]["burst_share"] or 0.0) > _BURST_SHARE:
        kib = result["paced"]["rates"]["burst_kib"]
        passed = f"after every pause links pass {share:.0%} of an epoch's bytes at once (launch.burst_kib={kib})"
        say(f"paced: {passed}: its times undercut the rate; send more or lower the burst")


def say_what_is_special(settings: Settings, world: World) -> None:
    if world.how != "joined" and world.size != settings.world_size:
        name = settings.names.get("strategy")
        say(f"strategy={name} runs on {world.size} rank; world_size={settings.world_size} is for others")
    if world.oversubscribed:
        threads = world.local_size * world.threads_per_rank
        say(f"oversubscribed: {threads} threads on {world.cores} cores; bytes and accuracy stand, times do not")
    if isinstance(settings.topology, Cluster) and world.network is None and world.size > 1:
        say(f"topology={settings.names.get('topology')} names rates of links, which only launch=paced sets")


def _alone(settings: Settings, world: World, run_dir: Path, facts: Facts) -> None:
    _threads(settings, world, run_dir, facts)


def _threads(settings: Settings, world: World, run_dir: Path, facts: Facts) -> None:
    """All ranks in this process."""
    import torch

    from gnnpar.comm import ThreadWorld
    from gnnpar.runner.train import train

    before = torch.get_num_threads()
    torch.set_num_threads(world.threads_per_rank)
    threads = ThreadWorld(world.size, device=torch.device(world.device))
    try:
        with tracking(settings, run_dir, facts) as told:
            tracker = Tee(trackers=(StopWhen(threads.failed), told))

            def body(comm: Any) -> None:
                train(settings, world, comm, tracker if comm.rank == 0 else Null(), run_dir)

            try:
                if world.size == 1:
                    body(threads.communicators()[0])
                else:
                    threads.run(body)
            except KeyboardInterrupt:
                threads.abort()
                wait_for_ranks()
                raise
    except Exception as error:
        raise RankFailed(failure_of(getattr(error, "gnnpar_rank", 0), error)) from error
    finally:
        torch.set_num_threads(before)


class StopWhen(Null):
    """Ends rank 0 at its next epoch once the event is set; the others then wait for it in vain and end as well."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def log(self, row: Any) -> None:
        if self.event.is_set():
            raise RuntimeError("interrupted")


def wait_for_ranks(seconds: float = 20.0) -> None:
    """Let rank threads finish their epoch: the interpreter must not end under a thread that computes."""
    deadline = time.monotonic() + seconds
    ranks_left = [t for t in threading.enumerate() if t.name.startswith("rank") and t is not threading.current_thread()]
    for thread in ranks_left:
        thread.join(max(0.0, deadline - time.monotonic()))


def _joined(settings: Settings, world: World, run_dir: Path, facts: Facts) -> None:
    """This process is one of the ranks that torchrun or Slurm started."""
    try:
        ranks.train_process(settings, world, run_dir, facts)
    except Exception as error:
        raise RankFailed(failure_of(int(os.environ["RANK"]), error)) from error


def _processes(settings: Settings, world: World, run_dir: Path, facts: Facts) -> None:
    """One process a rank, through torch's elastic launcher."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    scratch = Path(tempfile.mkdtemp(prefix="gnnpar-"))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=world.size, run_id=uuid.uuid4().hex,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
        max_restarts=settings.launch.max_restarts, monitor_interval=settings.launch.monitor_seconds,
        start_method="spawn", logs_specs=DefaultLogsSpecs(log_dir=str(scratch / "logs")),
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT", shutdown_timeout=15,
    )  # fmt: skip

    def stop(signum: int, frame: object) -> None:
        raise SignalException("interrupted", sigval=signal.SIGTERM)

    try:
        with silence(), environment(OMP_NUM_THREADS=str(world.threads_per_rank)), sigint_for_parent_only(stop):
            elastic_launch(config, ranks.main)(settings, world, str(run_dir), facts, str(scratch))
    except SignalException:
        raise KeyboardInterrupt from None
    except ChildFailedError as error:
        rank, process = error.get_first_failure()
        raise RankFailed(blame(rank, process.exitcode, ranks.read_failures(scratch))) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


_START = {"alone": _alone, "threads": _threads, "joined": _joined, "processes": _processes}


def blame(rank: int, exit_code: int, failures: list[Failure]) -> Failure:
    """The rank that really failed, given the first that was seen to end and what ranks had to say."""
    primary = next((failure for failure in failures if not failure.secondary), None)
    if primary is not None:
        return primary
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return Failure(rank, f"killed by {name}{hint}")
    said = next((failure for failure in failures if failure.rank == rank), None)
    return said or Failure(rank, f"ended with exit code {exit_code}")


@contextmanager
def silence() -> Iterator[None]:
    """Elastic reports in its own words at length; the reason reaches the user in ours."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_NOISY)]
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables for the processes started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends a run the way Ctrl-C does; the handlers that were there come back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    # ranks that were joined keep the default: a handler cannot run while they wait in gloo
    taken = [signal.SIGINT] if os.environ.get("RANK") else [signal.SIGINT, signal.SIGTERM]
    kept = (*taken, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in kept}
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def sigint_for_parent_only(handler: Any) -> Iterator[None]:
    """Block SIGINT in this thread, whose children inherit it, and receive it in a thread that does nothing else."""
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return
    done = threading.Event()

    def receive() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while not done.wait(0.2):  # Python runs the handler in the main thread once any thread got the signal
            pass

    before = signal.signal(signal.SIGINT, handler)
    receiver = threading.Thread(target=receive, name="sigint", daemon=True)
    receiver.start()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        done.set()
        receiver.join()
        signal.signal(signal.SIGINT, before)
