"""Memory of a command and all it starts, over time: resident, anonymous, file-backed and proportional bytes."""

import subprocess
import time
from collections.abc import Mapping

import psutil

GIB = 2**30
EVERY_SECONDS = 0.25


def role_of(process: psutil.Process, root: int) -> str:
    """'rank 0' of a started rank, 'parent' of the command itself, else 'other'."""
    if process.pid == root:
        return "parent"
    rank = process.environ().get("RANK")
    return "other" if rank is None else f"rank {rank}"


def look(root: psutil.Process, roles: dict[int, str]) -> dict[str, list[int]]:
    """role -> bytes now. A process that ends while it is looked at is left out."""
    now: dict[str, list[int]] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            role = roles.setdefault(process.pid, role_of(process, root.pid))
            if role != "other":
                told = process.memory_full_info()
                now[role] = [told.rss, told.rss - told.shared, told.shared, told.pss]
        except (psutil.Error, OSError):
            continue
    return now


def run(command: list[str], *, limit_bytes: float, environment: Mapping[str, str] | None = None) -> dict:
    """Run to the end, or until all its processes together hold more than the limit.

    samples: [seconds, {role: bytes as in `look`}], the largest of every second; ended: the exit code, None where the
    limit ended it.
    """
    began = time.time()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    root, roles = psutil.Process(process.pid), dict[int, str]()
    samples: dict[int, dict[str, list[int]]] = {}
    peaks: dict[str, list[int]] = {}
    stopped = False
    while process.poll() is None:
        try:
            now = look(root, roles)
        except psutil.Error:
            break
        for role, values in now.items():
            for kept in (samples.setdefault(int(time.time() - began), {}), peaks):
                kept[role] = list(map(max, kept.get(role, values), values))
        if sum(values[-1] for values in now.values()) > limit_bytes:
            stopped = True
            for each in [*root.children(recursive=True), root]:
                each.kill()
            break
        time.sleep(EVERY_SECONDS)
    output = process.communicate()[0]
    return {
        "ended": None if stopped else process.returncode,
        "began": began,
        "seconds": round(time.time() - began, 1),
        "samples": list(samples.items()),
        "peaks": peaks,
        "output": output[-1500:],
    }
