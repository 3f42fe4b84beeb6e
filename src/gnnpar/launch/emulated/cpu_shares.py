"""A share of the cores for every rank: groups of the kernel's cpu controller, cgroups v1 or v2. Needs root. Groups are
named gnnpar-PID-START-rankR. The next run removes groups of dead processes."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gnnpar.files import process_start
from gnnpar.launch.failures import blocked

_NAME = re.compile(r"gnnpar-(\d+)-(\d+)-rank\d+")
_PERIOD_US = 4_000  # longest wait of a rank for its next share
_LEAST_US = 1_000  # smallest share of a period that the kernel accepts
_GONE_SECONDS = 2.0  # for the processes of a group to be reaped


@dataclass(frozen=True)
class Controller:
    """The mounted cpu controller."""

    root: Path
    version: int

    def limit(self, group: Path, quota_us: int, period_us: int) -> None:
        """Allow `quota_us` of CPU time in every period, over all cores."""
        if self.version == 2:
            (group / "cpu.max").write_text(f"{quota_us} {period_us}", encoding="ascii")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period_us), encoding="ascii")
            (group / "cpu.cfs_quota_us").write_text(str(quota_us), encoding="ascii")

    def has_cpu(self, file: str) -> bool:
        """Return True if a file of v2 at the root lists the cpu controller."""
        return "cpu" in (self.root / file).read_text(encoding="ascii").split()


def controller(mounts: str) -> Controller | None:
    """Return the controller in these lines of /proc/mounts, or None."""
    found = None
    for line in mounts.splitlines():
        _, folder, kind, options = line.split(" ")[:4]
        if kind == "cgroup" and "cpu" in options.split(","):
            return Controller(Path(folder), 1)
        if kind == "cgroup2" and found is None:
            found = Controller(Path(folder), 2)
    return found


def own_controller() -> Controller | None:
    """Return the controller of this machine, or None."""
    with suppress(OSError):
        found = controller(Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape"))
        if found is not None and (found.version == 1 or found.has_cpu("cgroup.controllers")):
            return found
    return None


def missing() -> str | None:
    """Return the missing requirement of this machine, and its remedy; None if nothing is known to be missing."""
    if (there := own_controller()) is None:
        return "needs the kernel's cpu controller (cgroups), which is not mounted here"
    if os.geteuid() != 0 or not os.access(there.root, os.W_OK):
        return f"needs to make groups in {there.root}, which this process must not; run as root, with cgroups writable"
    return None


@contextmanager
def shared(cores: Sequence[float]) -> Iterator[tuple[str, ...]]:
    """Make a group of at most `cores` for each rank, and remove it at the end. Yield their folders."""
    if not cores:
        yield ()
        return
    there, pid = own_controller(), os.getpid()
    assert there is not None, "`missing` tells"
    groups = [there.root / f"gnnpar-{pid}-{process_start(pid)}-rank{rank}" for rank in range(len(cores))]
    period = max(_PERIOD_US, round(_LEAST_US / min(cores)))
    try:
        _remove(filter(_is_stale, there.root.glob("gnnpar-*")))
        if there.version == 2 and not there.has_cpu("cgroup.subtree_control"):
            (there.root / "cgroup.subtree_control").write_text("+cpu", encoding="ascii")
        for group, share in zip(groups, cores, strict=True):
            group.mkdir(exist_ok=True)
            there.limit(group, round(share * period), period)
        yield tuple(map(str, groups))
    except OSError as error:
        raise ValueError(
            f"{error.filename or 'cgroups'}: {error.strerror}; set launch.dilation=1 and launch.speeds=null"
        ) from error
    finally:
        with blocked((signal.SIGINT, signal.SIGTERM)):  # a second Ctrl-C waits for the removal
            _remove(groups)


def enter(group: str) -> None:
    """Put this process, with all its threads, into a group."""
    Path(group, "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


def _is_stale(group: Path) -> bool:
    """Return True if the process that made a group is dead."""
    found = _NAME.fullmatch(group.name)
    return found is not None and process_start(int(found[1])) != int(found[2])


def _remove(groups: Iterable[Path]) -> None:
    """Remove groups. A group is busy until its last process is reaped."""
    deadline = time.monotonic() + _GONE_SECONDS
    for group in groups:
        while group.exists():
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
