"""What does not fit into this machine's memory is refused before it is allocated."""

from __future__ import annotations

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


def require_memory(nbytes: float, what: str, change: str) -> None:
    """ValueError where `nbytes`, which `what` takes at least, are more than there is. `change`: what to do instead."""
    there = memory_bytes()
    if nbytes > there:
        raise ValueError(
            f"{what} needs {nbytes / 2**30:,.0f} GiB at least, this machine has {there / 2**30:.0f}: {change}"
        )
