"""Memory of a command and all it starts, over time: resident, anonymous, file-backed and proportional bytes."""

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

GIB = 2**30
EVERY_SECONDS = 0.25


def fields(file: Path, names: tuple[str, ...]) -> dict[str, int]:
    """Bytes of the lines 'Name:  123 kB' of a file in /proc."""
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        if name in names:
            found[name] = int(rest.split()[0]) * 1024
    return found


def role_of(process: psutil.Process, root: int) -> str:
    """'rank 0' of a started rank, 'parent' of the command itself, else 'other'."""
    if process.pid == root:
        return "parent"
    rank = process.environ().get("RANK")
    return "other" if rank is None else f"rank {rank}"


def look(root: psutil.Process, roles: dict[int, str]) -> dict[str, dict[str, int]]:
    """role -> bytes now. A process that ends while it is looked at is left out."""
    now: dict[str, dict[str, int]] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            role = roles.setdefault(process.pid, role_of(process, root.pid))
            proc = Path("/proc") / str(process.pid)
            status = fields(proc / "status", ("VmRSS", "RssAnon", "RssFile"))
            told = status | fields(proc / "smaps_rollup", ("Pss",))
            if "VmRSS" in told and role != "other":
                now[role] = told
        except (psutil.Error, OSError):
            continue
    return now


def run(command: list[str], *, limit_bytes: float, environment: Mapping[str, str] | None = None) -> dict:
    """Run to the end, or until all its processes together hold more than the limit.

    samples: [seconds, {role: [VmRSS, RssAnon, RssFile, Pss]}], the largest of every second; ended: the exit code, None
    where the limit ended it.
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
        for role, told in now.items():
            values = [told.get(name, 0) for name in ("VmRSS", "RssAnon", "RssFile", "Pss")]
            for kept in (samples.setdefault(int(time.time() - began), {}), peaks):
                kept[role] = [max(pair) for pair in zip(kept.get(role, values), values, strict=True)]
        if sum(told.get("Pss", 0) for told in now.values()) > limit_bytes:
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
        "samples": [[second, roles] for second, roles in samples.items()],
        "peaks": peaks,
        "output": output[-1500:],
    }
