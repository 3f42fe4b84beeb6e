"""From Settings to a finished run: start the ranks or join those that are there, and leave result.json in any case."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnpar.launch import joined as company
from gnnpar.launch import paced, processes, ranks
from gnnpar.launch.ranks import RankFailed, failure_of, tracking
from gnnpar.launch.rendezvous import Met
from gnnpar.launch.stop import Stop
from gnnpar.settings import Cluster, Settings
from gnnpar.track.console import say
from gnnpar.track.tracker import Null, Tee
from gnnpar.training import shards as sharded
from gnnpar.training.checkpoint import resume
from gnnpar.training.result.facts import World, header, world_of
from gnnpar.training.result.result import Status, forget, read_result, write_result

Facts = Mapping[str, Any]
_BURST_SHARE = 0.05


@dataclass(frozen=True)
class Outcome:
    """How a run ended; `error` in one line."""

    status: Status
    error: str | None = None
    traceback: str = ""
    quiet: bool = False  # another rank says it

    @property
    def exit_code(self) -> int:
        return 0 if self.status == "completed" else 1


def launch(settings: Settings, run_dir: Path) -> Outcome:
    """Run to the end, to a failure or to an interruption; result.json is there in any case.

    Rank 0 writes it when its work is done, and its word stands unless the run failed beside it. ValueError where the
    run cannot begin: of joined ranks, which meet for it, all raise the same.
    """
    try:
        resume.check(settings)
        world = world_of(settings)
        sharded.check(settings, world)
    except ValueError as error:
        raise company.refusal(error, settings.comm.connect_seconds) from error
    facts = header(settings, world)
    writes = world.how != "joined" or int(os.environ["RANK"]) == 0
    stop, begun = Stop(), False
    try:
        met = company.assemble(settings, run_dir) if world.how == "joined" and world.size > 1 else None
        facts["restarts"] = max(facts["restarts"], met.generation - 1 if met else 0)  # torchrun's; ours come later
        if writes:
            begin(settings, world, run_dir, facts)
            begun = True
        with interruptible(stop, settings.launch.grace_seconds), links(world, facts):
            if world.how == "joined":
                _joined(settings, world, run_dir, facts, stop, met)
            else:
                _START[world.how](settings, world, run_dir, facts, stop)
        outcome = Outcome("completed")
    except KeyboardInterrupt:
        outcome = Outcome("interrupted", "interrupted by a signal")
    except RankFailed as error:
        outcome = Outcome("failed", error.failure.line, error.failure.traceback)
    except company.CompanyLost as error:
        outcome = Outcome("failed", error.line, error.traceback, error.quiet)
    kept = None if begun else read_result(run_dir)  # of a run before, which ranks that do not meet leave alone
    if not writes or (kept is not None and kept["status"] == "completed"):
        return outcome
    return conclude(outcome, run_dir, facts)


def begin(settings: Settings, world: World, run_dir: Path, facts: dict[str, Any]) -> None:
    """The run's folder as a run finds it that begins, or goes on after a restart."""
    say_what_is_special(settings, world)
    forget(run_dir)
    if not facts["restarts"]:
        resume.clean(settings, run_dir, say)
    if world.how == "joined":  # a rank that is killed cannot write: this stands until a better result does
        write_result(run_dir, facts, "failed", "ended without saying why")


def conclude(outcome: Outcome, run_dir: Path, facts: dict[str, Any]) -> Outcome:
    """result.json says how it ended."""
    told = read_result(run_dir) if outcome.status == "completed" else None
    try:
        if told is None or told["status"] != "completed":
            told = write_result(run_dir, facts, outcome.status, outcome.error)
    except OSError as error:  # the disk is full, and that is most likely why the run ended
        reason = f"{run_dir / 'result.json'} cannot be written ({error.strerror})"
        return Outcome("failed", "; ".join(filter(None, (outcome.error, reason))), outcome.traceback)
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
        jobs = f" of {world.jobs_at_once} jobs" if world.jobs_at_once > 1 else ""
        threads = f"{world.num_threads} threads{jobs}"
        say(f"oversubscribed: {threads} on {world.cores} cores; bytes and accuracy stand, times do not")
    if isinstance(settings.topology, Cluster) and world.network is None and world.size > 1:
        say(f"topology={settings.names.get('topology')} names rates of links, which only launch=paced sets")


def _threads(settings: Settings, world: World, run_dir: Path, facts: Facts, stop: Stop) -> None:
    """All ranks in this process."""
    import torch

    from gnnpar.comm import ThreadWorld
    from gnnpar.training.loop import train

    before = torch.get_num_threads()
    torch.set_num_threads(world.threads_per_rank)
    threads = ThreadWorld(world.size, device=torch.device(world.device))
    try:
        start = resume.find(settings, run_dir, world.size, restarted=False, say=say)
        with tracking(settings, run_dir, facts, start) as told:
            tracker = Tee(trackers=(StopWhen(threads.failed), told))

            def body(comm: Any) -> None:
                first = comm.rank == 0
                train(
                    settings,
                    world,
                    comm,
                    tracker if first else Null(),
                    run_dir,
                    start=start if first else None,
                    stop=stop,
                )

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


def _joined(settings: Settings, world: World, run_dir: Path, facts: Facts, stop: Stop, met: Met | None) -> None:
    """This process is one of the ranks that torchrun or Slurm started; `met`: with others."""
    try:
        with company.in_company(settings, met, facts):
            ranks.train_process(settings, world, run_dir, facts, stop=stop, store=met and met.store)
    except company.CompanyLost:
        raise
    except Exception as error:
        raise RankFailed(failure_of(int(os.environ["RANK"]), error)) from error


_START = {"alone": _threads, "threads": _threads, "processes": processes.start}


@contextmanager
def interruptible(stop: Stop, grace_seconds: float) -> Iterator[None]:
    """Ctrl-C ends a run at once, SIGTERM at the end of the epoch; the handlers that were there come back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    def ask(signum: int, frame: object) -> None:
        if os.environ.get("RANK"):  # whoever started the ranks has a grace of its own
            stop.ask()
        else:
            stop.ask_within(grace_seconds)

    kept = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in kept}
    signal.signal(signal.SIGINT, interrupt)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # USR1: what schedulers are asked to send ahead of the end
        signal.signal(number, ask)
    try:
        yield
    finally:
        stop.over()
        for number, handler in before.items():
            signal.signal(number, handler)
