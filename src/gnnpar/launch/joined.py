"""A rank that torchrun or Slurm started, among the others.

It meets them; and when one is lost all end, each host with one line, rank 0 with result.json, and the last checkpoint
stays as it was.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gnnpar.comm.interfaces import MeetingError
from gnnpar.comm.world import Interrupted, Outcome
from gnnpar.durable import planted
from gnnpar.folder_lock import release_all
from gnnpar.launch import token
from gnnpar.launch.environment import unpickles
from gnnpar.launch.monitor import failure_of
from gnnpar.launch.peer_monitor import PeerFailure, PeerMonitor
from gnnpar.launch.rendezvous import JoinedWorld, rendezvous
from gnnpar.launch.signals import ended_after
from gnnpar.launch.slurm import rank_on_host
from gnnpar.settings import Comm, ConfigError
from gnnpar.track.console import complain

if TYPE_CHECKING:
    from gnnpar.launch.launch import RunHooks

_GRACE_SECONDS = 3.0  # for a rank that has noticed by itself to end in order
_SPEAKER_FIRST_SECONDS = 1.0


class PeerLost(Exception):
    """The run cannot go on: the line, and whether somebody else on this host reports it."""

    def __init__(self, line: str, *, quiet: bool, traceback: str = "") -> None:
        super().__init__(line)
        self.line, self.quiet, self.traceback = line, quiet, traceback


def assemble(hooks: RunHooks, seconds: float) -> JoinedWorld:
    """All ranks are there, run the same, reach each other and see the folder of the run. Collective.

    PeerLost in one line where that is not so, ConfigError where a rank cannot run what it was asked to.
    """
    rank = int(os.environ["RANK"])
    marker = hooks.run_dir.absolute() / f"{token.NAME}-{secrets.token_hex(4)}"
    with ExitStack() as leaving:
        if rank == 0:
            leaving.enter_context(ended_after(lambda: token.remove(marker)))
            leaving.callback(token.remove, marker)
            token.remove_old(marker.parent, seconds)
            token.leave(marker)
            if unpickles(os.environ):
                complain(
                    "torchrun without --master-port runs code that anybody who reaches this host sends it "
                    "(SECURITY.md): give --master-port, or leave torchrun out and give world_size"
                )
        try:
            return rendezvous(
                os.environ,
                about=hooks.agreed(),
                patience=seconds,
                marker=str(marker),
                check=lambda seen: "" if sees(Path(seen)) else hooks.unseen(Path(seen).parent),
            )
        except MeetingError as error:
            if error.refused:
                raise ConfigError(str(error)) from error
            local = rank_on_host()
            if local:  # most likely the first of the host says the same
                time.sleep(5 * _SPEAKER_FIRST_SECONDS)
            raise PeerLost(str(error), quiet=bool(local) and error.shared) from error


def sees(marker: Path) -> bool:
    """Is rank 0's file there for this rank as well?"""
    with suppress(OSError):
        os.listdir(marker.parent)  # file systems of networks look again
    try:
        there = marker.lstat()
    except OSError:
        return False
    return stat.S_ISREG(there.st_mode) and planted(marker) is None  # another user may have made a folder of its name


def refusal(error: ValueError, patience: float = Comm().connect_seconds) -> ValueError:
    """What a rank raises that cannot run what it was asked to: its own error or, where another rank has another one,
    that. All joined ranks know of it then, within `patience` seconds: none waits for one that does not come."""
    size = os.environ.get("WORLD_SIZE", "") if os.environ.get("RANK") is not None else ""
    if not size.isdecimal() or int(size) < 2:
        return error
    line = f"rank {os.environ['RANK']} on {socket.gethostname()}: {error}"
    try:
        rendezvous(os.environ, about={}, patience=patience, refusal=line)
    except MeetingError as refused:
        another = refused.refused and not str(refused).endswith(f": {error}")
        return ConfigError(str(refused)) if another else error
    except ValueError:
        return error
    return error


@dataclass
class JoinedRank:
    """This rank among the others. Whoever notices first that one is lost ends this process: the main thread in order
    or, when that hangs in a transfer with a rank that is gone, the thread of the monitor."""

    world: JoinedWorld
    hooks: RunHooks
    seconds: float

    def __post_init__(self) -> None:
        self._noticed, self._ending = threading.Event(), threading.Lock()
        self.monitor = PeerMonitor(self.world, lost_seconds=self.seconds, on_failure=self._end)

    def _end(self, failure: PeerFailure) -> None:
        if self._noticed.wait(_GRACE_SECONDS) or not self._ending.acquire(blocking=False):
            return
        line = self.line_of(failure)
        if self.world.me == 0:
            self.hooks.on_end(Outcome("failed", line))
        if self.is_quiet(failure):
            time.sleep(_SPEAKER_FIRST_SECONDS)
        else:
            complain(line)
        release_all()
        os._exit(1)

    def line_of(self, failure: PeerFailure) -> str:
        """What is wrong and what to do."""
        if failure.reported_on is not None:
            return failure.line
        return self.hooks.on_lost(failure.line, Path(self.world.marker).parent)

    def is_quiet(self, failure: PeerFailure) -> bool:
        """Somebody else on this host reports it, or has."""
        mine = self.world.members[self.world.me].home
        return failure.reported_on == mine or self.world.first_of_host(failure.lost) != self.world.me

    def settle(self, error: BaseException) -> PeerLost:
        """The main thread's end: its own failure, reported to all, or the loss that made it fail."""
        mine = failure_of(self.world.me, error)
        if not isinstance(error, Exception):
            self.monitor.report(f"rank {self.world.me}: interrupted by a signal")
            return PeerLost("interrupted by a signal", quiet=False)
        failure = self.monitor.wait() if mine.secondary else self.monitor.failure
        self._noticed.set()
        self._ending.acquire()  # never comes back where the other thread was first
        if failure is not None:
            quiet = self.is_quiet(failure)
            if quiet:
                time.sleep(_SPEAKER_FIRST_SECONDS)
            return PeerLost(self.line_of(failure), quiet=quiet)
        self.monitor.report(mine.line)
        return PeerLost(mine.line, quiet=False, traceback=mine.traceback)


@contextmanager
def monitored(hooks: RunHooks, world: JoinedWorld | None, seconds: float) -> Iterator[None]:
    """Inside, the loss of another rank ends this one, `seconds` after its last sign of life. PeerLost says why."""
    if world is None:
        yield
        return
    rank = JoinedRank(world, hooks, seconds)
    try:
        yield
    except Interrupted:
        raise
    except (Exception, KeyboardInterrupt) as error:
        lost = rank.settle(error)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise lost from error
    finally:
        rank.monitor.close()
