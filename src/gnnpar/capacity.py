"""What does not fit into this machine's memory, on its disk or into its limits is refused before it is begun."""

from __future__ import annotations

import math
import resource
import shutil
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int:
    """Memory of the machine, or of the container that this process runs in."""
    total = psutil.virtual_memory().total
    try:
        limit = _CGROUP.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def require_disk(nbytes: float, folder: Path, what: str, change: str) -> None:
    """ValueError where `nbytes`, which `what` takes at least, are more than the disk of `folder` has free."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ValueError(
            f"{what} needs {nbytes / 2**30:,.1f} GiB of disk at least, {folder} has {free / 2**30:,.1f} free: {change}"
        )


def require_memory(nbytes: float, what: str, change: str) -> None:
    """ValueError where `nbytes`, which `what` takes at least, are more than there is. `change`: what to do instead."""
    there = memory_bytes()
    if nbytes > there:
        raise ValueError(
            f"{what} needs {nbytes / 2**30:,.0f} GiB at least, this machine has {there / 2**30:.0f}: {change}"
        )


def require_files(count: int, what: str, change: str) -> None:
    """So many may be open at once in this process, and in those that it starts; ValueError where they cannot."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if hard < count:
        raise ValueError(
            f"{what} has {count:,} files open at once, and the limit is {hard:,}: raise it (ulimit -n), or {change}"
        )
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, limits[1]))
