"""A rank that torchrun or Slurm started, among the others.

It meets them; and when one is lost all end, each host with one line, rank 0 with result.json, and the last checkpoint
stays as it was.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gnnpar.comm.interfaces import MeetingError
from gnnpar.launch.peer_monitor import Ties, Verdict
from gnnpar.launch.ranks import failure_of
from gnnpar.launch.rendezvous import Met, meet
from gnnpar.launch.slurm import rank_on_host
from gnnpar.settings import Comm, ConfigError, Settings, show
from gnnpar.track.console import complain
from gnnpar.training.checkpoint import files as checkpoint
from gnnpar.training.result.facts import NOT_COMPARED, installed
from gnnpar.training.result.result import write_result

_GRACE_SECONDS = 3.0  # for a rank that has noticed by itself to end in order
_SPEAKER_FIRST_SECONDS = 1.0


class CompanyLost(Exception):
    """The run cannot go on: the line, and whether somebody else on this host says it."""

    def __init__(self, line: str, *, quiet: bool, traceback: str = "") -> None:
        super().__init__(line)
        self.line, self.quiet, self.traceback = line, quiet, traceback


def assemble(settings: Settings, run_dir: Path) -> Met:
    """All ranks are there, run the same, reach each other and see the folder of the run. Collective.

    CompanyLost in one line where that is not so, ConfigError where a rank cannot run what it was told.
    """
    rank = int(os.environ["RANK"])
    marker = run_dir.absolute() / f".meeting-{secrets.token_hex(4)}"
    if rank == 0:
        marker.touch()
    shared = settings.checkpoint.keep > 0
    try:
        return meet(
            os.environ,
            about=agreed(settings),
            patience=settings.comm.connect_seconds,
            word=str(marker),
            check=lambda word: unseen(Path(word), rank) if shared else "",
        )
    except MeetingError as error:
        if error.refused:
            raise ConfigError(str(error)) from error
        local = rank_on_host()
        if local:  # most likely the first of the host says the same
            time.sleep(5 * _SPEAKER_FIRST_SECONDS)
        raise CompanyLost(str(error), quiet=bool(local) and error.shared) from error
    finally:
        if rank == 0:
            marker.unlink(missing_ok=True)


def refusal(error: ValueError, patience: float = Comm().connect_seconds) -> ValueError:
    """What a rank raises that cannot run what it was told: its own error or, where another rank has another one, that.
    Of joined ranks all have heard of it then, within `patience` seconds: none waits for one that does not come."""
    size = os.environ.get("WORLD_SIZE", "") if os.environ.get("RANK") is not None else ""
    if not size.isdigit() or int(size) < 2:
        return error
    line = f"rank {os.environ['RANK']} on {socket.gethostname()}: {error}"
    try:
        meet(os.environ, about={}, patience=patience, refusal=line)
    except (MeetingError, ValueError) as told:
        another = getattr(told, "refused", False) and not str(told).endswith(f": {error}")
        return ConfigError(str(told)) if another else error
    return error


def agreed(settings: Settings) -> dict[str, str]:
    """What all ranks must have in common: every setting that can change a number, and what computes it."""
    relevant = {k: v for k, v in settings.resolved.items() if k not in NOT_COMPARED}
    flat = {name: show(value) for name, value in _flat(relevant)}
    return flat | {"the version of gnnpar": str(installed("gnnpar")), "the version of torch": torch.__version__}


def _flat(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, tree


def unseen(marker: Path, rank: int) -> str:
    """Why this rank cannot write its part of a checkpoint; empty where it sees rank 0's folder."""
    with suppress(OSError):
        os.listdir(marker.parent)  # file systems of networks look again
        if marker.exists():
            return ""
    return (
        f"rank {rank} on {socket.gethostname()} does not see {marker.parent}, the run's folder on rank 0's host, where "
        "every rank leaves its part of a checkpoint: put it on a file system that all hosts share "
        "(hydra.run.dir=FOLDER), or set checkpoint.keep=0"
    )


@dataclass
class Company:
    """The others of a joined world. Whoever comes first ends this process: the main thread in order, or, when that
    hangs in a transfer with somebody who is gone, the thread that was told."""

    met: Met
    run_dir: Path  # rank 0's
    facts: Mapping[str, Any]
    seconds: float

    def __post_init__(self) -> None:
        self._noticed, self._ending = threading.Event(), threading.Lock()
        self.ties = Ties(self.met, lost_seconds=self.seconds, on_verdict=self._end)

    def _end(self, verdict: Verdict) -> None:
        if self._noticed.wait(_GRACE_SECONDS) or not self._ending.acquire(blocking=False):
            return
        line = self.line_of(verdict)
        if self.met.me == 0:
            with suppress(OSError):
                write_result(self.run_dir, self.facts, "failed", line)
        if self.is_quiet(verdict):
            time.sleep(_SPEAKER_FIRST_SECONDS)
        else:
            complain(line)
        os._exit(1)

    def line_of(self, verdict: Verdict) -> str:
        """What is wrong and what to do."""
        if verdict.said_on is not None:
            return verdict.line
        found = checkpoint.folders(self.run_dir)
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > int(
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        ):
            return (
                f"{verdict.line}; torchrun starts all ranks again, from {found[0].name if found else 'the beginning'}"
            )
        if not found:
            return f"{verdict.line}; there is no checkpoint yet: start all ranks again (checkpoint.every makes more)"
        again = f"start all ranks again with resume=auto hydra.run.dir={self.run_dir}"
        return f"{verdict.line}; the last checkpoint is {found[0].name}: {again}"

    def is_quiet(self, verdict: Verdict) -> bool:
        """Somebody else on this host says it, or has."""
        mine = self.met.members[self.met.me].home
        return verdict.said_on == mine or self.met.first_of_host(verdict.lost) != self.met.me

    def settle(self, error: BaseException) -> CompanyLost:
        """The main thread's end: its own failure, told to all, or the loss that made it fail."""
        failure = failure_of(self.met.me, error)
        if not isinstance(error, Exception):
            self.ties.tell(f"rank {self.met.me}: interrupted by a signal")
            return CompanyLost("interrupted by a signal", quiet=False)
        verdict = self.ties.wait() if failure.secondary else self.ties.verdict
        self._noticed.set()
        self._ending.acquire()  # never comes back where the other thread was first
        if verdict is not None:
            quiet = self.is_quiet(verdict)
            if quiet:
                time.sleep(_SPEAKER_FIRST_SECONDS)
            return CompanyLost(self.line_of(verdict), quiet=quiet)
        self.ties.tell(failure.line)
        return CompanyLost(failure.line, quiet=False, traceback=failure.traceback)


@contextmanager
def in_company(settings: Settings, met: Met | None, facts: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the loss of another rank ends this one. CompanyLost says why."""
    if met is None:
        yield
        return
    company = Company(met, Path(met.word).parent, facts, settings.comm.lost_seconds)
    try:
        yield
    except KeyboardInterrupt as error:
        from gnnpar.launch.stop import Interrupted

        if not isinstance(error, Interrupted):
            company.settle(error)
        raise
    except Exception as error:
        raise company.settle(error) from error
    finally:
        company.ties.close()
