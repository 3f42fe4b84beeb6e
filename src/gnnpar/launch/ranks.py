"""What runs inside a rank that was started for it, and how its failure reaches the parent in one line.

Imports neither Hydra nor trackers' services nor PyG: an empty rank is up in two seconds.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnpar.comm import interfaces
from gnnpar.durable import write_json_whole
from gnnpar.launch.namespaces import INTERFACE, Network
from gnnpar.launch.slurm import rank_on_host
from gnnpar.launch.stop import Interrupted, Stop, listen_in_rank
from gnnpar.settings import Settings
from gnnpar.track.console import say
from gnnpar.track.tracker import Null, Tee, Tracker
from gnnpar.training.result.facts import World
from gnnpar.training.result.result import write_result

if TYPE_CHECKING:
    from gnnpar.training.checkpoint.resume import Start

_LOST_PEER = ("Connection closed by peer", "Connection reset", "Broken pipe", "is gone", "Socket", "connectionFailure")
_PATIENCE_SECONDS = 5.0
_PARENT_FIRST_SECONDS = 15.0  # the parent's watchdog speaks before a rank's own time-out
STOP = "stop"  # the file in the scratch folder by which the parent asks for the end


@dataclass(frozen=True)
class Failure:
    """Why a rank ended. `secondary`: it only lost its peer. `lost`: it was ended, and might have gone on."""

    rank: int
    reason: str
    traceback: str = ""
    time: float = 0.0
    secondary: bool = False
    lost: bool = False

    @property
    def line(self) -> str:
        return f"rank {self.rank}: {self.reason}"


class RankFailed(Exception):
    """A rank ended before its work."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.line)
        self.failure = failure


def reason_of(error: BaseException) -> str:
    """'ValueError: what was wrong', in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def failure_of(rank: int, error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    secondary = isinstance(error, (RuntimeError, ConnectionError)) and any(word in str(error) for word in _LOST_PEER)
    return Failure(rank, reason_of(error), text, time.time(), secondary)


def main(
    rank: int, settings: Settings, world: World, run_dir: str, facts: Mapping[str, Any], scratch: str, parent: int
) -> None:
    """The body of a started rank. Leaves `scratch/<rank>.json` when it fails; never prints."""
    from torch import multiprocessing

    # the terminal's Ctrl-C goes to the parent alone (SIGINT is blocked here); without a parent there is no run
    multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # pyright: ignore[reportAttributeAccessIssue]
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world.size)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world.size)}
    stop = Stop(Path(scratch) / STOP)
    listen_in_rank(stop)
    stack = (Path(scratch) / f"{rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)  # the watchdog asks a rank that hangs
    try:
        enter_network(world.network, rank)
        train_process(settings, world, Path(run_dir), facts, scratch=Path(scratch), stop=stop)
    except Interrupted:
        return
    except BaseException as error:
        failure = failure_of(rank, error)
        write_json_whole(Path(scratch) / f"{rank}.json", vars(failure))
        if failure.secondary:  # let the parent notice the rank that is really gone before this one
            time.sleep(_PATIENCE_SECONDS)
        sys.stdout.flush()
        os._exit(1)


def enter_network(network: Network | None, rank: int) -> None:
    """Before anything makes a socket: go to the rank's host, or, where all ranks are on this one, to the loopback
    interface, unless GLOO_SOCKET_IFNAME asks for another."""
    if network is not None:
        network.enter(network.host_of[rank])
        os.environ[interfaces.VARIABLE] = INTERFACE
    elif (loopback := interfaces.loopback()) is not None:
        os.environ.setdefault(interfaces.VARIABLE, loopback)


def train_process(
    settings: Settings,
    world: World,
    run_dir: Path,
    facts: Mapping[str, Any],
    *,
    scratch: Path | None = None,
    stop: Stop | None = None,
    store: Any = None,
) -> None:
    """Connect, train, disconnect: a rank that has RANK and WORLD_SIZE in its environment.

    `scratch`: where a parent looks for what its ranks are doing. `store`: of ranks that have met already.
    """
    import torch

    from gnnpar.comm import ThreadWorld
    from gnnpar.comm.flight_recorder import Whereabouts
    from gnnpar.comm.process import connect
    from gnnpar.training.checkpoint.resume import find
    from gnnpar.training.loop import train

    torch.set_num_threads(world.threads_per_rank)
    rank, local_rank = int(os.environ["RANK"]), rank_on_host()
    device = torch.device("cpu")
    if world.device == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
    backend = "nccl" if world.backend == "nccl" else "gloo"
    if world.size == 1:
        comm = ThreadWorld(1, device=device).communicators()[0]
    else:
        patience = settings.comm.timeout_seconds + (_PARENT_FIRST_SECONDS if scratch else 0.0)
        comm = connect(
            backend,
            device=device,
            timeout_seconds=patience,
            init_method=f"file://{scratch}/rendezvous" if scratch else None,
            store=store,
            whereabouts=Whereabouts(scratch and scratch / f"{rank}.at"),
        )
    start = find(settings, run_dir, world.size, restarted=facts["restarts"] > 0, say=say) if rank == 0 else None
    try:
        with tracking(settings, run_dir, facts, start) if rank == 0 else nullcontext(Null()) as tracker:
            train(settings, world, comm, tracker, run_dir, start=start, stop=stop)
    except Interrupted:
        comm.close()
        raise
    comm.close()


@contextmanager
def tracking(
    settings: Settings, run_dir: Path, facts: Mapping[str, Any], start: Start | None = None
) -> Iterator[Tracker]:
    """metrics.jsonl, and the configured tracker beside it; at the end they are told the result as rank 0 sees it."""
    from gnnpar.track.jsonl import Jsonl

    job = {**facts, "study": settings.study, "names": dict(settings.names), "resolved": settings.resolved}
    found, timed = (start.found, start.alike) if start else (None, True)
    rows = Jsonl(run_dir, source=found and found.run_dir, epochs_done=found.epoch if found else 0, timed=timed)
    tracker = Tee(trackers=(rows, settings.tracker.build(run_dir, settings.epochs, job)))
    status, reason = "completed", None
    try:
        yield tracker
    except KeyboardInterrupt:
        status, reason = "interrupted", "interrupted by a signal"
        raise
    except BaseException as error:
        status, reason = "failed", failure_of(getattr(error, "gnnpar_rank", 0), error).line
        raise
    finally:
        tracker.close(write_result(run_dir, facts, status, reason))


def read_failures(scratch: Path) -> list[Failure]:
    """What failed ranks left, the earliest first, lost peers last."""
    found = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in scratch.glob("*.json")]
    return sorted(found, key=lambda failure: (failure.secondary, failure.time))
