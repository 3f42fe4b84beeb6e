"""Start the ranks of a world, or join ranks that others started, and run the same `Work` on each."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Literal, Protocol

from gnnpar.comm import Communicator
from gnnpar.comm.world import Host, How, Interrupted, Outcome, RunHooks, World, num_cores, restored_torch_settings
from gnnpar.files import require_files, require_memory
from gnnpar.launch import processes
from gnnpar.launch.emulated import paced
from gnnpar.launch.failures import Failure, Stop, failure_of, interruptible
from gnnpar.launch.join import Joined, join
from gnnpar.launch.slurm import check_rank, number, rank_on_host
from gnnpar.settings import MAX_RANKS, Comm, Launch, Settings
from gnnpar.track.console import say
from gnnpar.track.text import counted

_RANK_BYTES = 100 << 20  # of an empty rank, without memory that ranks share
_FILES, _FILES_A_PEER = 64, 8  # open files of a rank; measured: 63 with 8 ranks
RankWork = Callable[[Communicator, Host], None]


class Work(Protocol):
    """The work of every rank. It is pickled for ranks of a fork server."""

    def session(self, *, first: bool) -> AbstractContextManager[RankWork]:
        """Enter once in every process that has ranks. Yield the work of a rank. first: rank 0 is in this process."""
        ...


def world_of(settings: Settings) -> World:
    """Return the number of ranks, how they run, and their threads. Raise ValueError if they cannot run."""
    check_rank(os.environ)
    is_joined = os.environ.get("RANK") is not None
    size = int(os.environ["WORLD_SIZE"]) if is_joined else settings.world_size
    limit = settings.strategy.capabilities.max_ranks
    if limit is not None and size > limit:
        if is_joined:
            name = settings.names.get("strategy")
            raise ValueError(f"strategy={name} runs on {limit} rank, but {size} were started; start {limit}")
        size = limit
    # a rank that may be restarted must be a separate process
    alone = size == 1 and not settings.launch.max_restarts and not processes.is_fork_of_threads()
    how: How = "joined" if is_joined else "alone" if alone else "processes"
    if how == "processes" and size > 1 and settings.comm.backend == "threads":
        how = "threads"
    if how == "processes":
        require_memory(size * _RANK_BYTES, f"world_size={size}, a process a rank,", "lower it, or set comm=threads")
    if size > 1 and how != "threads":
        require_files(_FILES + _FILES_A_PEER * size, f"a rank of {size}", "start fewer ranks")
    local_size = (
        int(os.environ.get("LOCAL_WORLD_SIZE", 1 if "LOCAL_RANK" in os.environ else size)) if is_joined else size
    )
    cores = num_cores() if settings.topology.cores == "auto" else settings.topology.cores
    threads = settings.threads_per_rank
    if threads == "auto":
        threads = 1 if paced.is_dilated(settings.launch) else max(1, cores // local_size)
    found = paced.links_of(settings, size=size, joined=is_joined, threads=threads, cores=cores)
    return World(
        how=how,
        size=size,
        local_size=local_size,
        threads_per_rank=threads,
        cores=cores,
        device=_device(settings, how, size, local_size),
        backend="none" if size == 1 else settings.comm.backend,
        links=found,
        jobs_at_once=number(os.environ, "GNNPAR_JOBS_AT_ONCE", 1, MAX_RANKS, "1"),
        deterministic=settings.deterministic,
        tf32=settings.tf32,
    )


def device_of(asked: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """Return the device that `device=` means here; auto: a GPU if torch sees one."""
    import torch

    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise ValueError("device=cuda, but torch sees no GPU; set device=cpu or install a CUDA build of torch")
    return asked if asked != "auto" else "cuda" if there else "cpu"


def _device(settings: Settings, how: How, size: int, local_size: int) -> Literal["cpu", "cuda"]:
    import torch

    device = device_of(settings.device)
    if size == 1:
        return device
    if settings.comm.backend == "nccl" and device != "cuda":
        raise ValueError("comm=nccl needs GPUs, but device is cpu; set comm=gloo or comm=threads")
    if (
        settings.comm.backend == "nccl"
        and local_size > torch.cuda.device_count()
        and os.environ.get("GNNPAR_SHARE_GPU") != "1"
    ):
        count = torch.cuda.device_count()
        raise ValueError(f"comm=nccl: {local_size} ranks on {count} GPUs; set world_size={count} or comm=threads")
    if how == "joined" and settings.comm.backend == "threads":
        raise ValueError("comm=threads runs all ranks in one process and cannot join RANK's world; set comm=gloo")
    return device


def launch(world: World, work: Work, hooks: RunHooks, *, how: Launch, comm: Comm) -> Outcome:
    """Run to the end, a failure or an interruption. Raise ValueError, the same on all joined ranks, if one refuses."""
    speaks = world.how != "joined" or int(os.environ["RANK"]) == 0
    stop = Stop()
    with ExitStack() as until_end:
        try:
            several = world.how == "joined" and world.size > 1
            others = join(hooks, comm.connect_seconds) if several else None
            if speaks:
                restarts = others.restarts if others else int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
                hooks.before_start(restarts)
            network = paced.paced(world.links, world.threads_per_rank, hooks) if world.links else nullcontext()
            # until result.json is written: srun and torchrun send SIGTERM once another rank has ended
            until_end.enter_context(interruptible(stop, how.grace_seconds))
            with network as built:
                if world.how == "joined":
                    _join(world, work, comm, stop, others)
                elif world.how == "processes":
                    processes.start(world, work, hooks, how, comm, built, stop)
                else:
                    _threads(world, work, stop)
            outcome = Outcome("completed")
        except KeyboardInterrupt as error:
            quiet = isinstance(error, Interrupted) and rank_on_host() != 0  # all ranks have agreed to end
            outcome = Outcome("interrupted", "interrupted by a signal", quiet=quiet)
        except Failure as error:
            outcome = Outcome("failed", error.line, error.traceback, error.quiet)
        return hooks.on_end(outcome) if speaks else outcome


def _threads(world: World, work: Work, stop: Stop) -> None:
    """Run all ranks in this process."""
    import torch

    from gnnpar.comm import ThreadWorld

    gpus = [torch.cuda.current_device()] if world.device == "cuda" else []
    with restored_torch_settings(), torch.random.fork_rng(gpus):  # a resume sets the generators
        world.prepare()
        threads = ThreadWorld(world.size, device=torch.device(world.device))
        host = Host(stop_asked=stop.asked, others_failed=threads.failed.is_set)
        try:
            with work.session(first=True) as body:
                if world.size == 1:
                    body(threads.communicators()[0], host)
                else:
                    threads.run(lambda comm: body(comm, host))
        except Exception as error:
            rank = getattr(error, "gnnpar_rank", 0)  # set by ThreadWorld
            raise failure_of(rank, error) from error


def _join(world: World, work: Work, comm: Comm, stop: Stop, others: Joined | None) -> None:
    """Run this process as a rank that torchrun, Slurm or a user started. others: the ranks it has joined."""
    rank = int(os.environ["RANK"])
    if rank and others is not None and rank_on_host() == 0:  # rank 0 prints the run, other hosts only this line
        say(f"joined: {counted(world.local_size, 'rank')} here of {world.size}; rank 0 prints the run")
    try:
        with others.watched(comm.lost_seconds) if others else nullcontext():
            mine = processes.connected(world, comm, store=others and others.store)
            try:
                with work.session(first=rank == 0) as body:
                    body(mine, Host(stop_asked=stop.asked))
            except Interrupted:
                mine.close()
                raise
            mine.close()
    except Failure:
        raise
    except Exception as error:
        raise failure_of(rank, error) from error
