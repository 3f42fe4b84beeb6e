"""Ranks as processes of this host: start them, watch them, and start all again after one is lost.

They meet in a file; gloo listens only on the loopback interface. A process with one thread forks its ranks, which share
its imports. Forking a process with OpenMP threads would hang, so a fork server starts the ranks of such a process.
"""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import pickle
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import psutil

from gnnpar.comm import interfaces
from gnnpar.comm.clock import dilate
from gnnpar.comm.world import Host, Interrupted, RunHooks, World
from gnnpar.files import write_json_atomic
from gnnpar.launch import environment
from gnnpar.launch.emulated import cpu_shares
from gnnpar.launch.emulated.namespaces import INTERFACE, Network, enter, interface_sent_bytes
from gnnpar.launch.failures import Failure, HangTimer, Stop, answer_in_rank, blocked, failure_of, hanging
from gnnpar.settings import Comm, Launch
from gnnpar.track.console import SHOWN, complain, patient_streams, progress_lines, say

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from gnnpar.comm import Communicator
    from gnnpar.launch.launch import Work

_SHUTDOWN_SECONDS = 15.0  # for a rank to end after rank 0
_PATIENCE_SECONDS = 5.0
_TIMER_FIRST_SECONDS = 15.0  # the hang timer ends a rank so long before gloo's time-out
_POLL_SECONDS, _LOOK_SECONDS = 0.2, 1.0
_STOP = "stop"  # file of the parent: end after this epoch
_MET = "met"  # file of rank 0: all ranks are connected
_INTERRUPTED = 3  # exit code of a rank that ended on request
multiprocessing.set_forkserver_preload(["torch", "gnnpar.training.loop"])


def start(
    world: World, work: Work, hooks: RunHooks, how: Launch, comm: Comm, network: Network | None, stop: Stop
) -> None:
    """Run one process per rank to the end. After a rank was killed or hung, start all again, up to
    `how.max_restarts`."""
    restarts = 0
    while True:
        try:
            return attempt(world, work, how, comm, network, stop)
        except Failure as error:
            if not error.lost or restarts >= how.max_restarts or stop.asked():
                raise
            line = error.line
        restarts += 1
        where = hooks.on_restart(restarts)
        say(f"{line}: starting all ranks again {where} (restart {restarts} of at most {how.max_restarts})")


def attempt(world: World, work: Work, how: Launch, comm: Comm, network: Network | None, stop: Stop) -> None:
    """Run all ranks once. Raise Failure if one fails, KeyboardInterrupt if a stop was requested."""

    def starting() -> str:
        return "" if SHOWN in os.environ or (scratch / _MET).exists() else f"starting {world.size} ranks"

    with tempfile.TemporaryDirectory(prefix="gnnpar-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        stop.file = scratch / _STOP
        if stop.asked():
            stop.ask()  # an earlier request
        job = Job(world, work, comm, network, scratch, secrets.token_bytes(32))
        ranks: list[BaseProcess] = []
        try:
            with environment(OMP_NUM_THREADS=str(world.threads_per_rank)):
                start_ranks(ranks, world.size, job.run, fork=world.device == "cpu")
            with progress_lines(starting):
                failure = first_failure(ranks, scratch, comm.timeout_seconds * world.dilation)
        finally:
            stop.file = None
            begun = [each for each in ranks if each.pid is not None]
            for each in begun:
                each.kill()
            for each in begun:
                each.join()
    if failure is not None:
        raise failure
    if _INTERRUPTED in [each.exitcode for each in ranks]:
        raise KeyboardInterrupt


def start_ranks(ranks: list[BaseProcess], size: int, body: Callable[[int], None], *, fork: bool) -> None:
    """Append `size` processes that run body(rank) to `ranks`; they die with this one. Raise Failure if one cannot
    start. fork: whether forking is allowed (not with CUDA)."""
    if multiprocessing.current_process().daemon:
        raise ValueError(
            "a daemonic process, as those of multiprocessing.Pool, can start no ranks: use "
            "concurrent.futures.ProcessPoolExecutor, or comm=threads"
        )
    forked = fork and sys.platform == "linux" and has_one_thread()
    if not forked:
        resource_tracker.ensure_running()  # its start unblocks signals, which are about to be blocked
    context = multiprocessing.get_context("fork") if forked else multiprocessing.get_context("forkserver")
    path = [each or os.getcwd() for each in sys.path]
    run, given = (
        (_run, (body, os.getpid())) if forked else (_run_from_fork_server, (pickle.dumps(body), dict(os.environ), path))
    )
    gc.freeze()  # keep imported modules shared
    try:
        with blocked(), without_main(), patient_streams():
            for rank in range(size):
                process = context.Process(target=run, args=(rank, *given), name=f"rank{rank}")
                ranks.append(process)  # before the start, which may be interrupted
                process.start()
    except OSError as error:
        why = f"a process for a rank cannot be started ({error.strerror}; see `ulimit -u`): start fewer ranks"
        raise Failure(f"rank 0: {why}") from error
    finally:
        gc.unfreeze()


def _run(rank: int, body: Callable[[int], None], parent: int) -> None:
    """Run a forked rank."""
    end_with(parent, signal.SIGKILL)
    body(rank)


def _run_from_fork_server(rank: int, body: bytes, env: dict[str, str], path: list[str]) -> None:
    """Run a rank of the fork server, which has another environment and outlives the parent."""
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = path
    pickle.loads(body)(rank)


def _end_with_parent() -> None:
    if (other := multiprocessing.parent_process()) is not None:
        wait([other.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)


def end_with(parent: int, number: signal.Signals) -> None:
    """Send this process a signal when its parent dies (PR_SET_PDEATHSIG)."""
    from torch import multiprocessing as of_torch

    of_torch._prctl_pr_set_pdeathsig(number)  # pyright: ignore[reportAttributeAccessIssue]
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)


def is_fork_of_threads() -> bool:
    """Return True if this process, or an ancestor, was forked from a process with threads: OpenMP waits for them."""
    return _OF_THREADS[-1]


_OF_THREADS = [False]  # a process sets its own state around a fork; the child keeps it


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else threading.active_count()


os.register_at_fork(
    before=lambda: _OF_THREADS.append(is_fork_of_threads() or _num_threads() > 1),
    after_in_parent=lambda: _OF_THREADS.pop(),
)


def has_one_thread() -> bool:
    """Return True if this process may fork. Fork once first, which ends the threads of numpy's OpenBLAS."""
    if threading.active_count() > 1 or is_fork_of_threads():
        return False
    if (child := os.fork()) == 0:
        os._exit(0)
    with suppress(ChildProcessError):  # a SIGCHLD handler has reaped it
        os.waitpid(child, 0)
    return _num_threads() == 1


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the main module from processes started in the context, which would run the user's script again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def first_failure(ranks: Sequence[BaseProcess], scratch: Path, seconds: float) -> Failure | None:
    """Wait for all ranks. Return the first failure; None if all are done, or rank 0 is done and the others do not end.
    A rank that is stopped for `seconds` is lost."""
    running, deadline, looked = dict(enumerate(ranks)), math.inf, time.monotonic()
    stopped: dict[int, float] = {}
    while running and time.monotonic() < deadline:
        over = wait([each.sentinel for each in running.values()], _POLL_SECONDS)
        ended = {rank: _exit_code(each) for rank, each in running.items() if each.sentinel in over}
        running = {rank: each for rank, each in running.items() if rank not in ended}
        lost = {rank: code for rank, code in ended.items() if code not in (0, _INTERRUPTED)}
        done = {int(file.stem) for file in scratch.glob("*.done")}
        if failed := [rank for rank in lost if not done & {0, rank}]:  # rank 0 is the last to finish
            rank = min(failed, key=lambda rank: (lost[rank] >= 0 or lost[rank] == -signal.SIGABRT, rank))
            return root_failure(rank, lost[rank], ranks, scratch, seconds)
        if 0 in ended:
            deadline = time.monotonic() + _SHUTDOWN_SECONDS
        if (now := time.monotonic()) - looked < _LOOK_SECONDS:
            continue
        held, looked = now - looked > 3 * _LOOK_SECONDS, now  # this process was stopped, too
        stopped = {rank: now if held else stopped.get(rank, now) for rank in _stopped(running)}
        if long := {rank for rank, since in stopped.items() if now - since > seconds}:
            return hanging({}, long, seconds)
    return None


def _exit_code(process: BaseProcess) -> int:
    """Return the exit code of an ended process; 1 if a SIGCHLD handler has reaped it."""
    process.join()
    return 1 if process.exitcode is None else process.exitcode


def _stopped(running: dict[int, BaseProcess]) -> set[int]:
    """Return the ranks that are stopped by SIGSTOP or a debugger."""
    found: set[int] = set()
    for rank, each in running.items():
        with suppress(psutil.Error):
            if psutil.Process(each.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                found.add(rank)
    return found


def root_failure(rank: int, exit_code: int, ranks: Sequence[BaseProcess], scratch: Path, seconds: float) -> Failure:
    """Return the failure that caused the others, given the first rank that was seen to end."""
    stacks = {each: scratch / f"{each}.stack" for each in range(len(ranks))}
    if exit_code > 0 and stacks[rank].exists() and stacks[rank].stat().st_size:
        time.sleep(_LOOK_SECONDS)  # for the timers of the others
        alive = {each: process for each, process in enumerate(ranks) if process.is_alive()}
        if found := hanging(stacks, _stopped(alive), seconds):
            return found
    files = {int(file.stem): file for file in scratch.glob("*.json")}
    failures = {each: Failure(**json.loads(file.read_text(encoding="utf-8"))) for each, file in files.items()}
    primary = min(
        (failure for failure in failures.values() if not failure.secondary), key=lambda each: each.time, default=None
    )
    if primary is not None and (exit_code >= 0 or exit_code == -signal.SIGABRT):
        return primary
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return Failure(f"rank {rank}: killed by {name}{hint}", lost=True)
    said = failures.get(rank)
    return replace(said, lost=True) if said else Failure(f"rank {rank}: ended with exit code {exit_code}")


@dataclass(frozen=True)
class Job:
    """Arguments of a local rank from its parent. scratch: folder of the attempt. key: for the HMAC of objects."""

    world: World
    work: Work
    comm: Comm
    network: Network | None
    scratch: Path
    key: bytes = field(repr=False)

    def run(self, rank: int) -> None:
        """Run a rank. Write a failure to `scratch/<rank>.json`; print nothing."""
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(self.world.size)}
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.world.size)}
        stop = Stop(self.scratch / _STOP)
        answer_in_rank(stop)
        timer = HangTimer(self.scratch / f"{rank}.stack", self.comm.timeout_seconds * self.world.dilation)
        try:
            code = self._work(rank, stop, timer)
        except BaseException as error:
            timer.stop()
            failure = failure_of(rank, error)
            try:
                write_json_atomic(self.scratch / f"{rank}.json", vars(failure))
            except OSError:  # the disk is full
                complain(failure.line)
            if failure.secondary:  # the parent must see the end of the lost rank first
                time.sleep(_PATIENCE_SECONDS)
            with suppress(OSError):  # the disk is full
                sys.stdout.flush()
            os._exit(1)
        sys.exit(code)

    def _work(self, rank: int, stop: Stop, timer: HangTimer) -> int:
        """Connect, work, disconnect. Return the exit code."""

        def stop_asked() -> bool:
            if self.world.size > 1:  # without peers, an epoch may take any time
                timer.beat(start=True)
            return stop.asked()

        enter_network(self.network, rank)
        if self.network is not None and self.network.groups:  # launch.dilation, launch.speeds
            cpu_shares.enter(self.network.groups[rank])
            dilate(self.network.dilation)
        counts = self.network is not None and self.network.is_first_of_host(rank)
        host = Host(stop_asked=stop_asked, sent_bytes=interface_sent_bytes if counts else None)
        comm = connected(self.world, self.comm, key=self.key, scratch=self.scratch, beat=timer.beat)
        if rank == 0:
            (self.scratch / _MET).touch()
        code = 0
        try:
            with self.work.session(first=rank == 0) as body:
                try:
                    body(comm, host)
                finally:
                    timer.stop()  # the end of a session may take long
        except Interrupted:
            code = _INTERRUPTED
        with suppress(OSError):  # the disk is full
            (self.scratch / f"{rank}.done").touch()
        comm.close()
        return code


def enter_network(network: Network | None, rank: int) -> None:
    """Move to the rank's host, and set GLOO_SOCKET_IFNAME; on one host to the loopback, unless it is set."""
    if network is not None:
        enter(network.namespaces[network.host_of[rank]])
        os.environ[interfaces.VARIABLE] = INTERFACE
    else:
        interfaces.choose(interfaces.loopback())


def connected(
    world: World,
    comm: Comm,
    *,
    key: bytes = b"",
    scratch: Path | None = None,
    store: Store | None = None,
    beat: Callable[[], None] = lambda: None,
) -> Communicator:
    """Set up torch for the world, and connect the rank named by RANK and WORLD_SIZE. Collective. key: for the HMAC of
    objects. scratch: folder of local ranks. store: store of joined ranks. beat: as in `connect`."""
    import torch

    from gnnpar.comm import ThreadWorld
    from gnnpar.comm.process import connect

    world.prepare()
    device = torch.device("cpu")
    if world.device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        device = torch.device("cuda", local % torch.cuda.device_count())
    if world.size == 1:
        return ThreadWorld(1, device=device).communicators()[0]
    return connect(
        "nccl" if world.backend == "nccl" else "gloo",
        device=device,
        key=key,
        timeout_seconds=comm.timeout_seconds * world.dilation + (_TIMER_FIRST_SECONDS if scratch else 0.0),
        init_method=f"file://{scratch}/rendezvous" if scratch else None,
        store=store,
        beat=beat,
    )
