"""A share of the cores for every rank: groups of the kernel's cpu controller, cgroups v1 or v2. Needs root.

Names are gnnpar-PID-START-SPACE-rankR, as those of network namespaces; groups of dead builders are removed by the next
one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gnnpar.launch.namespaces import finishing, is_stale, own_prefix

_MOUNTS = Path("/proc/self/mounts")
_PERIOD_US = 4_000  # a rank never waits longer than this for its next share
_LEAST_US = 1_000  # the kernel takes no smaller share of a period
_GONE_SECONDS = 2.0  # for the processes of a group to be reaped


class SharesError(ValueError):
    """Shares cannot be given here: one line."""


@dataclass(frozen=True)
class Controller:
    """Where the cpu controller is mounted."""

    root: Path
    version: int

    def limit(self, group: Path, quota_us: int, period_us: int) -> None:
        """At most `quota_us` of CPU time in every period, over all cores."""
        if self.version == 2:
            (group / "cpu.max").write_text(f"{quota_us} {period_us}", encoding="ascii")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period_us), encoding="ascii")
            (group / "cpu.cfs_quota_us").write_text(str(quota_us), encoding="ascii")


def controller(mounts: str) -> Controller | None:
    """Of a machine with these mounts, the lines of /proc/mounts; None: it has none."""
    found = None
    for line in filter(None, mounts.split("\n")):  # other users may mount, at names of any letters but these two
        _, folder, kind, options = line.split(" ")[:4]
        if kind == "cgroup" and "cpu" in options.split(","):
            return Controller(Path(folder), 1)
        if kind == "cgroup2" and found is None:
            found = Controller(Path(folder), 2)
    return found


def missing() -> str | None:
    """What this machine lacks, and what to do; None: nothing that can be seen without trying."""
    try:
        there = controller(_MOUNTS.read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError:
        there = None
    if there is None or (there.version == 2 and "cpu" not in _controllers(there.root)):
        return "needs the kernel's cpu controller (cgroups), which is not mounted here"
    if os.geteuid() != 0 or not os.access(there.root, os.W_OK):
        return f"needs to make groups in {there.root}, which this process must not; run as root, with cgroups writable"
    return None


@contextmanager
def shared(cores: Sequence[float]) -> Iterator[str]:
    """A group for each rank, of at most so many `cores`, is there inside; the prefix of their names."""
    prefix = own_prefix()
    groups = [_group(prefix, rank) for rank in range(len(cores))]
    period = max(_PERIOD_US, round(_LEAST_US / min(cores)))
    try:
        _remove([group for group in groups[0].parent.glob("gnnpar-*") if is_stale(group.name)])
        there = _controller()
        if there.version == 2 and "cpu" not in (there.root / "cgroup.subtree_control").read_text().split():
            (there.root / "cgroup.subtree_control").write_text("+cpu", encoding="ascii")
        for group, share in zip(groups, cores, strict=True):
            group.mkdir(exist_ok=True)
            there.limit(group, round(share * period), period)
        yield prefix
    except OSError as error:
        raise SharesError(
            f"{error.filename or 'cgroups'}: {error.strerror}; set launch.dilation=1 and launch.speeds=null"
        ) from error
    finally:
        with finishing():
            _remove(groups)


def enter(prefix: str, rank: int) -> None:
    """Put this process, with all its threads, into the group of a rank."""
    (_group(prefix, rank) / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


def _controller() -> Controller:
    there = controller(_MOUNTS.read_text(encoding="utf-8", errors="surrogateescape"))
    if there is None:
        raise SharesError("the cpu controller is not mounted; set launch.dilation=1")
    return there


def _controllers(root: Path) -> list[str]:
    with suppress(OSError):
        return (root / "cgroup.controllers").read_text(encoding="ascii").split()
    return []


def _group(prefix: str, rank: int) -> Path:
    return _controller().root / f"{prefix}-rank{rank}"


def _remove(groups: list[Path]) -> None:
    """A group is busy until its last process was reaped."""
    deadline = time.monotonic() + _GONE_SECONDS
    for group in groups:
        while group.exists():
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
