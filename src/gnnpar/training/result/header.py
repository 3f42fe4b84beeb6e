"""The header of result.json: facts of a run before it starts."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from gnnpar.files import JsonDict
from gnnpar.paths import checkout_dir
from gnnpar.settings import Settings

if TYPE_CHECKING:
    from gnnpar.comm.world import Links, World

WARMUP_EPOCHS = 5
KERNELS = "GNNPAR_KERNELS"  # gnnpar_kernels.dispatch.VARIABLE; that package imports torch
CHANGES_NUMBERS = ("strategy", "partition", "optim", "precision", "first_layer", "row_order", "seed", "task")
CHANGES_NUMBERS += ("world_size", "tf32", "deterministic", "eval_every", "early_stopping")
"""Settings that change losses, weights or the choice of the best epoch, and may differ on resume."""
CHANGES_TIMES = ("comm", "launch", "device", "threads_per_rank")
"""Settings that change only times."""


def header(settings: Settings, world: World) -> JsonDict:
    """Return the fields of result.json that are known before the run."""
    provenance = "emulated" if world.how == "threads" else "measured" if world.links is None else "paced"
    return {
        "strategy": settings.names.get("strategy", type(settings.strategy).__name__),
        "exactness": sorted(settings.strategy.exactness),
        "model": settings.names.get("model", type(settings.model).__name__),
        "dataset": dataset_name(settings),
        "world_size": world.size,
        "threads_per_rank": world.threads_per_rank,
        "cores": world.cores,
        "oversubscribed": world.oversubscribed,
        "transport": world.backend,
        "provenance": provenance,
        "paced": world.links and world.links.facts(),
        "session": session(settings),
        "block": settings.block,
        "seed": settings.seed,
        "device": world.device,
        "epochs": settings.epochs,
        "target": settings.target,
        "config_hash": config_hash(settings, world.links),
        "settings": _compared(settings),
        "versions": versions(),
        "hardware": hardware(world),
        "commit": commit(),
        "load_before": os.getloadavg()[0],
        "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),  # set by torchrun
    }


def dataset_name(settings: Settings) -> str:
    """Return dataset.name of the user's graph, else the name of the chosen file of conf/dataset."""
    usual, given = vars(type(settings.dataset)).get("name"), settings.resolved["dataset"].get("name")
    own = given if usual is not None and given != usual else None
    return own or settings.names.get("dataset", type(settings.dataset).__name__)


def _compared(settings: Settings) -> JsonDict:
    """Return the settings that distinguish configurations, with launch.cuda_graph and forced kernels."""
    kept = comparable(settings) | ({"launch": {"cuda_graph": True}} if settings.launch.cuda_graph else {})
    return kept | ({"kernels": forced} if (forced := os.environ.get(KERNELS)) else {})


def session(settings: Settings) -> str | None:
    """Return the sweep and its start, because jobs of a resumed sweep did not run concurrently with earlier ones."""
    return " ".join(filter(None, (settings.study, os.environ.get("GNNPAR_SESSION")))) or None


NOT_COMPARED = ("data_dir", "cache_dir", "tracker", "launch", "block", "checkpoint", "resume", "shards")


def comparable(settings: Settings) -> JsonDict:
    """Return the settings that can change a number."""
    return {k: v for k, v in settings.resolved.items() if k not in NOT_COMPARED}


def config_hash(settings: Settings, links: Links | None) -> str:
    """Hash all settings that can change a number, including times over shaped links."""
    relevant = comparable(settings)
    if links is not None:
        relevant["paced"] = links.facts()
    text = json.dumps({"names": dict(settings.names), **relevant}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def versions() -> dict[str, str | None]:
    """Return versions from installed metadata, without imports."""
    return {name: installed(name) for name in ("gnnpar", "torch", "triton")} | {"python": platform.python_version()}


@functools.cache
def installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def hardware(world: World) -> str:
    """Return one line: processor, cores, memory, GPUs."""
    gib = psutil.virtual_memory().total / 2**30
    line = f"{processor()}, {world.cores} cores, {gib:.0f} GiB"
    if world.device == "cuda":
        import torch

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
    """Return the commit of the checkout, with + if files differ; None for an installed wheel."""
    root = checkout_dir()
    if root is None:
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD").strip()
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no").strip() else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout
