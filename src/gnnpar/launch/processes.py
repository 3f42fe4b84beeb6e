"""Ranks as processes of this one, watched, and started again after a loss.

The parent alone sees Ctrl-C and SIGTERM: both are blocked in the thread that starts the ranks, which inherit that, and
a thread beside it receives them.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
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

_SHUTDOWN_SECONDS = 15.0


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
    """All ranks once. They find each other in a file: nothing of theirs listens but gloo, on the loopback interface."""
    scratch = Path(tempfile.mkdtemp(prefix="gnnpar-"))
    stop.file = scratch / STOP
    if stop.asked():  # before there was a file to say it in
        stop.ask()

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    def ask(signum: int, frame: object) -> None:
        stop.ask_within(settings.launch.grace_seconds)

    handlers = {signal.SIGINT: interrupt, signal.SIGTERM: ask, signal.SIGQUIT: interrupt}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup gnnpar train` outlives its terminal
        handlers[signal.SIGHUP] = interrupt
    watch = Watch(scratch, world.size, timeout_seconds=settings.comm.timeout_seconds)
    job = (settings, world, str(run_dir), dict(facts), str(scratch), os.getpid())
    spawn = multiprocessing.get_context("spawn")
    started = [spawn.Process(target=ranks.main, args=(rank, *job), name=f"rank{rank}") for rank in range(world.size)]
    try:
        with environment(OMP_NUM_THREADS=str(world.threads_per_rank)), signals_for_parent_only(handlers), watch:
            try:
                for process in started:
                    process.start()
                failed = first_to_fail(started, settings.launch.monitor_seconds)
            finally:
                end(started)
        if failed is not None:
            code = started[failed].exitcode or 0
            raise RankFailed(watch.verdict or blame(failed, code, ranks.read_failures(scratch)))
    finally:
        stop.file = None
        shutil.rmtree(scratch, ignore_errors=True)
    told = read_result(run_dir)
    if told is not None and told["status"] == "interrupted":
        raise KeyboardInterrupt


def first_to_fail(started: Sequence[BaseProcess], seconds: float) -> int | None:
    """The rank that ended first with another exit code than 0, of several the one that a signal killed; None: all have
    done their work. A signal to this process waits for its handler for `seconds` at most."""
    running = dict(enumerate(started))
    while running:
        wait([process.sentinel for process in running.values()], timeout=seconds)
        ended = {rank: code for rank, process in running.items() if (code := process.exitcode) is not None}
        if failed := [rank for rank, code in ended.items() if code]:
            return min(failed, key=lambda rank: (ended[rank] >= 0 or ended[rank] == -signal.SIGABRT, rank))
        for rank in ended:
            del running[rank]
    return None


def end(started: Sequence[BaseProcess]) -> None:
    """No rank is left: SIGTERM, and SIGKILL for those that do not follow it."""
    there = [process for process in started if process.pid is not None]
    for process in there:
        process.terminate()
    deadline = time.monotonic() + _SHUTDOWN_SECONDS
    for process in there:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()


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
