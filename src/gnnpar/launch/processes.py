"""Ranks as processes: started, watched, and all started again after one was lost.

They find each other in a file: nothing of theirs listens but gloo, on the loopback interface. A rank imports neither
Hydra nor trackers' services nor PyG; what the parent of a command has imported is there, shared, and costs nothing.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gnnpar import allocator
from gnnpar.comm import interfaces
from gnnpar.comm.clock import dilate
from gnnpar.comm.world import Host, Interrupted, World
from gnnpar.durable import write_json_whole
from gnnpar.launch import cpu_shares
from gnnpar.launch.forked import Ranks, failing_by_limit
from gnnpar.launch.monitor import Failure, Monitor, RankFailed, failure_of, why_killed
from gnnpar.launch.namespaces import INTERFACE, Network, interface_sent_bytes
from gnnpar.launch.signals import Stop, blocked, handlers_of, listen_in_rank, postponed, received
from gnnpar.launch.slurm import rank_on_host
from gnnpar.settings import Comm, Launch
from gnnpar.track import progress
from gnnpar.track.console import complain, pulse, say

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from gnnpar.comm import Communicator
    from gnnpar.comm.flight_recorder import FlightRecorder
    from gnnpar.launch.launch import RunHooks, Work

_SHUTDOWN_SECONDS = 15.0  # for a rank to end after rank 0 has
_PATIENCE_SECONDS = 5.0
_PARENT_FIRST_SECONDS = 15.0  # the parent's monitor speaks before a rank's own time-out
_STOP = "stop"  # the file in the scratch folder by which the parent asks for the end
_MET = "met"  # the file in the scratch folder by which rank 0 says that it has met the others
_INTERRUPTED = 3  # exit code of a rank that ended because it was asked to


def start(
    world: World, work: Work, hooks: RunHooks, how: Launch, comm: Comm, network: Network | None, stop: Stop
) -> None:
    """One process a rank to the end; after the loss of one, all again, `how.max_restarts` times at most.

    Only a rank that was killed, or hung, is worth another try: what a rank raised it would raise again.
    """
    restarts = 0
    while True:
        try:
            return attempt(world, work, how, comm, network, stop)
        except RankFailed as error:
            failure = error.failure
            if not failure.lost or restarts >= how.max_restarts or stop.asked():
                raise
        restarts += 1
        where = hooks.on_restart(restarts)
        say(f"{failure.line}: starting all ranks again {where} (restart {restarts} of at most {how.max_restarts})")


def attempt(world: World, work: Work, how: Launch, comm: Comm, network: Network | None, stop: Stop) -> None:
    """All ranks once. RankFailed where one ended before its work, KeyboardInterrupt where they were asked to end."""

    def starting() -> str:
        return "" if progress.SHOWN in os.environ or (scratch / _MET).exists() else f"starting {world.size} ranks"

    handlers = handlers_of(lambda: stop.ask_within(how.grace_seconds))
    with tempfile.TemporaryDirectory(prefix="gnnpar-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        stop.kept_in(scratch / _STOP)
        monitor = Monitor(scratch, world.size, timeout_seconds=comm.timeout_seconds * world.dilation)
        job = Job(world, work, comm, network, scratch, secrets.token_bytes(32))
        of_ranks = {"OMP_NUM_THREADS": str(world.threads_per_rank)}
        with environment(**of_ranks), failing_by_limit():
            ranks = Ranks(world.size, job.run, fork=world.device == "cpu")
        try:
            with blocked(handlers):
                try:
                    with postponed(handlers), environment(**of_ranks), failing_by_limit():
                        ranks.start()  # before this process has other threads, which may start programs: see `Ranks`
                    with received(handlers), monitor, pulse(starting):
                        failed = first_to_fail(ranks, how.monitor_seconds, monitor.is_over)
                finally:
                    ranks.end()
        finally:
            stop.file = None
        if failed is not None:
            raise RankFailed(monitor.failure or blame(failed, ranks.exit_codes[failed], read_failures(scratch)))
    if _INTERRUPTED in ranks.exit_codes.values():
        raise KeyboardInterrupt


def first_to_fail(ranks: Ranks, seconds: float, is_over: Callable[[int], bool]) -> int | None:
    """The rank that ended first before its work, of several the one that a signal killed; None: all have
    done it, or rank 0 has and the others do not end. `is_over`: whether the end of a rank is no loss. A signal to this
    process waits for its handler for `seconds` at most."""
    deadline = math.inf
    while len(ranks.exit_codes) < ranks.size and time.monotonic() < deadline:
        ended = ranks.wait(seconds)
        lost = [rank for rank, code in ended.items() if code not in (0, _INTERRUPTED)]
        if failed := [rank for rank in lost if not is_over(rank)]:
            return min(failed, key=lambda rank: (ended[rank] >= 0 or ended[rank] == -signal.SIGABRT, rank))
        if 0 in ended:
            deadline = time.monotonic() + _SHUTDOWN_SECONDS
    return None


def blame(rank: int, exit_code: int, failures: list[Failure]) -> Failure:
    """The rank that really failed, given the first that was seen to end and what ranks had to say."""
    primary = next((failure for failure in failures if not failure.secondary), None)
    if primary is not None and (exit_code >= 0 or exit_code == -signal.SIGABRT):
        return primary
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = f" ({why_killed()}?)" if name == "SIGKILL" else ""
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


@dataclass(frozen=True)
class Job:
    """What a started rank gets from its parent, through a pipe. `scratch`: the folder of the attempt; `key`: what ranks
    prove to each other."""

    world: World
    work: Work
    comm: Comm
    network: Network | None
    scratch: Path
    key: bytes = field(repr=False)

    def run(self, rank: int) -> None:
        """The rank's process. Leaves `scratch/<rank>.json` when it fails; never prints."""
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(self.world.size)}
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.world.size)}
        stop = Stop(self.scratch / _STOP)
        listen_in_rank(stop)
        stack = (self.scratch / f"{rank}.stack").open("w")
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)  # the monitor asks a rank that hangs
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # a scheduler's may come before
        try:
            enter_network(self.network, rank)
            slow_down(self.network, rank)
            counts = self.network is not None and self.network.is_first_of_host(rank)
            host = Host(stop_asked=stop.asked, sent_bytes=interface_sent_bytes if counts else None)
            run_rank(rank, self.world, self.work, self.comm, host, key=self.key, scratch=self.scratch)
        except Interrupted:
            sys.exit(_INTERRUPTED)
        except BaseException as error:
            failure = failure_of(rank, error)
            try:
                write_json_whole(self.scratch / f"{rank}.json", vars(failure))
            except OSError:  # the disk is full
                complain(failure.line)
            if failure.secondary:  # let the parent notice the rank that is really gone before this one
                time.sleep(_PATIENCE_SECONDS)
            with suppress(OSError):  # of a log that takes no more
                sys.stdout.flush()
            os._exit(1)


def enter_network(network: Network | None, rank: int) -> None:
    """Before anything makes a socket: go to the rank's host, or, where all ranks are on this one, to the loopback
    interface, unless GLOO_SOCKET_IFNAME asks for another."""
    if network is not None:
        network.enter(network.host_of[rank])
        os.environ[interfaces.VARIABLE] = INTERFACE
    elif not interfaces.asked_for(os.environ):
        os.environ[interfaces.VARIABLE] = interfaces.own_loopback()


def slow_down(network: Network | None, rank: int) -> None:
    """Take the share of the cores that launch.dilation and launch.speeds give a rank, and the clocks of the former."""
    if network is not None and network.cores(1):
        cpu_shares.enter(network.prefix, rank)
        dilate(network.dilation)


def run_rank(
    rank: int,
    world: World,
    work: Work,
    comm: Comm,
    host: Host,
    *,
    key: bytes,
    scratch: Path | None = None,
    store: Store | None = None,
) -> None:
    """Connect, work, disconnect: a rank that has RANK and WORLD_SIZE in its environment.

    `key`: what ranks prove to each other. `scratch`: where a parent looks for what its ranks are doing. `store`: of
    ranks that have met already.
    """
    from gnnpar.comm.flight_recorder import FlightRecorder

    recorder = FlightRecorder(scratch and scratch / f"{rank}.at")
    mine = connected(world, comm, key=key, scratch=scratch, store=store, recorder=recorder)
    if scratch is not None and rank == 0:
        (scratch / _MET).touch()
    try:
        with work.session(first=rank == 0) as body:
            body(mine, host)
    except Interrupted:
        recorder.done()
        mine.close()
        raise
    recorder.done()
    mine.close()


def connected(
    world: World,
    comm: Comm,
    *,
    key: bytes,
    scratch: Path | None = None,
    store: Store | None = None,
    recorder: FlightRecorder | None = None,
) -> Communicator:
    """torch as the world has it, and the communicator of this rank; arguments as in `run_rank`."""
    import torch

    from gnnpar.comm import ThreadWorld
    from gnnpar.comm.process import connect

    world.prepare_torch()
    allocator.keep_freed()
    device = torch.device("cpu")
    if world.device == "cuda":
        device = torch.device("cuda", rank_on_host() % torch.cuda.device_count())
    if world.size == 1:
        return ThreadWorld(1, device=device).communicators()[0]
    return connect(
        "nccl" if world.backend == "nccl" else "gloo",
        device=device,
        key=key,
        timeout_seconds=comm.timeout_seconds * world.dilation + (_PARENT_FIRST_SECONDS if scratch else 0.0),
        init_method=f"file://{scratch}/rendezvous" if scratch else None,
        store=store,
        recorder=recorder,
    )


def read_failures(scratch: Path) -> list[Failure]:
    """What failed ranks left, the earliest first, lost peers last."""
    found = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in scratch.glob("*.json")]
    return sorted(found, key=lambda failure: (failure.secondary, failure.time))
