"""What a run is, known before it starts: the part of result.json that no measurement changes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch

from gnnpar.aliases import with_published_targets
from gnnpar.launch import paced
from gnnpar.launch.namespaces import Network
from gnnpar.parallel.strategy import Strategy
from gnnpar.paths import checkout_dir
from gnnpar.placement import Plan
from gnnpar.settings import Settings

WARMUP_EPOCHS = 5
How = Literal["alone", "threads", "processes", "joined"]


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of a run and what each may use.

    how: alone (one rank in this process), threads, processes (started here), joined (started by torchrun or Slurm).
    network: the shaped links between the ranks of launch=paced; None: what the machine has.
    jobs_at_once: runs that a sweep's launcher starts beside each other on this machine, this one included.
    """

    how: How
    size: int
    local_size: int
    threads_per_rank: int
    cores: int
    device: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl", "threads", "none"]
    network: Network | None = None
    jobs_at_once: int = 1

    @property
    def num_threads(self) -> int:
        """Of all that runs on this machine."""
        return self.jobs_at_once * self.local_size * self.threads_per_rank

    @property
    def oversubscribed(self) -> bool:
        """More threads than physical cores: bytes, memory and accuracy stand, times do not."""
        return self.num_threads > self.cores


def world_of(settings: Settings) -> World:
    """Decide how many ranks run, how, and with how many threads each."""
    joined = os.environ.get("RANK") is not None
    size = int(os.environ["WORLD_SIZE"]) if joined else settings.world_size
    limit = settings.strategy.capabilities.max_ranks
    if limit is not None and size > limit:
        if joined:
            name = settings.names.get("strategy")
            raise ValueError(f"strategy={name} runs on {limit} rank, but {size} were started; start {limit}")
        size = limit
    # a rank that is to be started again must be no part of the process that starts it
    alone = size == 1 and not settings.launch.max_restarts
    how: How = "joined" if joined else "alone" if alone else "processes"
    if how == "processes" and size > 1 and settings.comm.backend == "threads":
        how = "threads"
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size)) if joined else size
    cores = num_cores() if settings.topology.cores == "auto" else settings.topology.cores
    threads = max(1, cores // local_size) if settings.threads_per_rank == "auto" else settings.threads_per_rank
    device: Any = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    _check(settings, device, how, size, local_size)
    return World(
        how=how,
        size=size,
        local_size=local_size,
        threads_per_rank=threads,
        cores=cores,
        device=device,
        backend="none" if size == 1 else settings.comm.backend,
        network=paced.network_of(settings, size=size, joined=joined),
        jobs_at_once=int(os.environ.get("GNNPAR_JOBS_AT_ONCE", "1")),
    )


def _check(settings: Settings, device: str, how: How, size: int, local_size: int) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no GPU; set device=cpu or install a CUDA build of torch")
    check_strategy(settings, size)
    if size == 1:
        return
    if settings.comm.backend == "nccl" and device != "cuda":
        raise ValueError("comm=nccl needs GPUs, but device is cpu; set comm=gloo or comm=threads")
    if settings.comm.backend == "nccl" and local_size > torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"comm=nccl: {local_size} ranks on {count} GPUs; set world_size={count} or comm=threads")
    if how == "joined" and settings.comm.backend == "threads":
        raise ValueError("comm=threads runs all ranks in one process and cannot join RANK's world; set comm=gloo")


def check_strategy(settings: Settings, size: int) -> None:
    """Refuse what the strategy cannot do on so many ranks, with so many layers, in so many epochs."""
    strategy: Strategy = settings.strategy
    if settings.first_layer == "cached" and not strategy.capabilities.cached_first_layer:
        raise ValueError("first_layer=cached is for strategies without chunks or batches: set first_layer=live.")
    ranks, layers = (size, settings.model.num_layers) if settings.plan is None else Plan.size(settings.plan)
    strategy.check(ranks, layers, settings.epochs)


def num_cores() -> int:
    """Physical cores this process may use."""
    physical = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed))


def header(settings: Settings, world: World) -> dict[str, Any]:
    """The fields of result.json that are known beforehand."""
    provenance = "emulated" if world.how == "threads" else "measured" if world.network is None else "paced"
    return {
        "strategy": settings.names.get("strategy", type(settings.strategy).__name__),
        "exactness": sorted(settings.strategy.exactness),
        "model": settings.names.get("model", type(settings.model).__name__),
        "dataset": settings.names.get("dataset", type(settings.dataset).__name__),
        "world_size": world.size,
        "threads_per_rank": world.threads_per_rank,
        "cores": world.cores,
        "oversubscribed": world.oversubscribed,
        "transport": world.backend,
        "provenance": provenance,
        "paced": world.network and paced.facts(world.network),
        "session": session(settings),
        "block": settings.block,
        "seed": settings.seed,
        "device": world.device,
        "epochs": settings.epochs,
        "target": settings.target,
        "config_hash": config_hash(settings, world.network),
        "settings": {k: v for k, v in settings.resolved.items() if k not in NOT_COMPARED},
        "versions": versions(),
        "hardware": hardware(world),
        "commit": commit(),
        "load_before": os.getloadavg()[0],
        "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),  # torchrun's of this host
    }


def session(settings: Settings) -> str | None:
    """The sweep, and which start of it: what was resumed did not run side by side with what had run before."""
    return " ".join(filter(None, (settings.study, os.environ.get("GNNPAR_SESSION")))) or None


NOT_COMPARED = ("data_dir", "cache_dir", "tracker", "launch", "block", "checkpoint", "resume", "shards")


def config_hash(settings: Settings, network: Network | None) -> str:
    """Of everything that can change a number, times over a shaped link included."""
    relevant = {k: v for k, v in settings.resolved.items() if k not in NOT_COMPARED}
    if network is not None:
        relevant["paced"] = paced.facts(network)
    text = json.dumps({"names": dict(settings.names), **with_published_targets(relevant)}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def versions() -> dict[str, str | None]:
    """Read from the installed metadata: nothing is imported for it."""
    return {name: installed(name) for name in ("gnnpar", "torch", "triton")} | {"python": platform.python_version()}


def installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def hardware(world: World) -> str:
    """One line: processor, cores, memory, GPUs."""
    gib = psutil.virtual_memory().total / 2**30
    line = f"{processor()}, {world.cores} cores, {gib:.0f} GiB"
    if world.device == "cuda":
        line += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return line


def processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(names, platform.machine())
    except OSError:
        return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the checkout the package runs from, with + where files differ; None for an installed wheel."""
    root = checkout_dir()
    if root is None:
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD").strip()
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no").strip() else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Any, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout
