"""Ranks as processes of this one, started through torch's elastic launcher and started again after a loss.

The parent alone sees Ctrl-C and SIGTERM: both are blocked in the thread that starts the ranks, which inherit that, and
a thread beside it receives them.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnnpar.launch import ranks
from gnnpar.launch.monitor import Watch
from gnnpar.launch.ranks import STOP, Failure, RankFailed
from gnnpar.launch.stop import Stop
from gnnpar.settings import Settings
from gnnpar.track.console import say
from gnnpar.training.checkpoint import files as checkpoint
from gnnpar.training.result.facts import World
from gnnpar.training.result.result import forget, read_result

_NOISY = ("torch.distributed", "torch.multiprocessing")


def start(settings: Settings, world: World, run_dir: Path, facts: dict[str, Any], stop: Stop) -> None:
    """One process a rank to the end; after the loss of one, all again from the last checkpoint, `max_restarts` times.

    Only a rank that was killed, or hung, is worth another try: what a rank raised it would raise again.
    """
    while True:
        try:
            return attempt(settings, world, run_dir, facts, stop)
        except RankFailed as error:
            failure, left = error.failure, settings.launch.max_restarts - facts["restarts"]
            if not failure.lost or left <= 0 or stop.asked():
                raise
        facts["restarts"] += 1
        forget(run_dir)
        found = checkpoint.folders(run_dir)
        where = f"from {found[0]}" if found else "from the beginning, for there is no checkpoint yet"
        say(
            f"{failure.line}: starting all ranks again {where} (restart {facts['restarts']} of at most "
            f"{settings.launch.max_restarts})"
        )


def attempt(settings: Settings, world: World, run_dir: Path, facts: Mapping[str, Any], stop: Stop) -> None:
    """All ranks once."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    scratch = Path(tempfile.mkdtemp(prefix="gnnpar-"))
    stop.file = scratch / STOP
    if stop.asked():  # before there was a file to say it in
        stop.ask()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world.size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=settings.launch.monitor_seconds,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch / "logs")),
        signals_to_handle="SIGHUP,SIGQUIT",
        shutdown_timeout=15,
    )

    def interrupt(signum: int, frame: object) -> None:
        raise SignalException("interrupted", sigval=signal.SIGTERM)

    def ask(signum: int, frame: object) -> None:
        stop.ask_within(settings.launch.grace_seconds)

    watch = Watch(scratch, world.size, timeout_seconds=settings.comm.timeout_seconds)
    try:
        with (
            silence(),
            environment(OMP_NUM_THREADS=str(world.threads_per_rank)),
            signals_for_parent_only({signal.SIGINT: interrupt, signal.SIGTERM: ask}),
            watch,
        ):
            elastic_launch(config, ranks.main)(settings, world, str(run_dir), dict(facts), str(scratch))
    except SignalException:
        raise KeyboardInterrupt from None
    except ChildFailedError as error:
        rank, process = error.get_first_failure()
        raise RankFailed(watch.verdict or blame(rank, process.exitcode, ranks.read_failures(scratch))) from None
    finally:
        stop.file = None
        shutil.rmtree(scratch, ignore_errors=True)
    told = read_result(run_dir)
    if told is not None and told["status"] == "interrupted":
        raise KeyboardInterrupt


def blame(rank: int, exit_code: int, failures: list[Failure]) -> Failure:
    """The rank that really failed, given the first that was seen to end and what ranks had to say."""
    primary = next((failure for failure in failures if not failure.secondary), None)
    if primary is not None and (exit_code >= 0 or exit_code == -signal.SIGABRT):
        return primary
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return Failure(rank, f"killed by {name}{hint}", lost=True)
    said = next((failure for failure in failures if failure.rank == rank), None)
    return replace(said, lost=True) if said else Failure(rank, f"ended with exit code {exit_code}")


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
def signals_for_parent_only(handlers: Mapping[signal.Signals, Callable[[int, Any], None]]) -> Iterator[None]:
    """Block signals in this thread, whose children inherit it, and receive them in a thread that does nothing else."""
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return
    done, taken = threading.Event(), set(handlers)

    def receive() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)
        while not done.wait(0.2):  # Python runs the handler in the main thread once any thread got the signal
            pass

    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    receiver = threading.Thread(target=receive, name="signals", daemon=True)
    receiver.start()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, taken)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        done.set()
        receiver.join()
        for number, handler in before.items():
            signal.signal(number, handler)
