"""Read and check the variables that torchrun, srun or a user set for a rank.

A task of a Slurm step (`srun gnnpar train ...`) is a rank. Only srun sets SLURM_STEP_NUM_TASKS; a batch script outside
of srun starts its own ranks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from gnnpar.settings import MAX_RANKS, ConfigError
from gnnpar.track.text import printable

_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below Linux's range of ports for outgoing connections
_BOUNDS = {
    "RANK": (0, MAX_RANKS - 1),
    "WORLD_SIZE": (1, MAX_RANKS),
    "LOCAL_RANK": (0, MAX_RANKS - 1),
    "LOCAL_WORLD_SIZE": (1, MAX_RANKS),
    "MASTER_PORT": (1, 65535),
}


def number(env: Mapping[str, str], name: str, least: int, most: int, default: str = "") -> int:
    """Return a whole number of the environment. Raises ConfigError outside its bounds."""
    text = env.get(name, default)
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and least <= int(text) <= most):
        raise ConfigError(f"{name}={printable(text)} must be a whole number from {least} to {most}")
    return int(text)


def check_rank(env: Mapping[str, str]) -> None:
    """Raise ConfigError if RANK is set, and a variable of the rank has a bad value."""
    if "RANK" not in env:
        return
    if "WORLD_SIZE" not in env:
        raise ConfigError(f"RANK={printable(env['RANK'])} is set, but WORLD_SIZE is not: set both, or neither")
    for name, (least, most) in _BOUNDS.items():
        if name in env:
            number(env, name, least, most)
    if int(env["RANK"]) >= int(env["WORLD_SIZE"]):
        raise ConfigError(f"RANK={env['RANK']}: must be below WORLD_SIZE={env['WORLD_SIZE']}")
    try:
        env.get("MASTER_ADDR", "").encode("idna")
    except UnicodeError as error:
        raise ConfigError(f"MASTER_ADDR={printable(env['MASTER_ADDR'])[:100]} is no host name ({error})") from error


def as_rank(env: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and so on for a task of a Slurm step with several tasks, unless RANK is set."""
    if "RANK" in env or (size := number(env, "SLURM_STEP_NUM_TASKS", 1, MAX_RANKS, "1")) < 2:
        return {}
    try:
        rank, local = (number(env, name, 0, MAX_RANKS, env[name]) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env["SLURM_NODELIST"]
        per_node = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", str(size)))
        here = per_node[number(env, "SLURM_NODEID", 0, len(per_node) - 1, "0")]
        job, step = (number(env, name, 0, 10**18 - 1, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    except KeyError as error:
        raise ConfigError(
            f"SLURM_STEP_NUM_TASKS={size}, but Slurm's environment lacks {error}: start with srun, or with torchrun"
        ) from error
    port = _FIRST_PORT + (job * 31 + step) % _NUM_PORTS  # equal on all hosts, different for every step
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": env.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": env.get("MASTER_PORT") or str(port),
    }


def rank_on_host() -> int:
    """Return LOCAL_RANK; 0 if it is not set or not a number."""
    text = os.environ.get("LOCAL_RANK", "0")
    return int(text) if text.isdecimal() else 0


def tasks_per_node(text: str) -> list[int]:
    """Parse '2(x3),1' to [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,4})(?:\(x(\d{1,4})\))?", part.strip())
        if found is None:
            raise ConfigError(
                f"SLURM_TASKS_PER_NODE={printable(text)} cannot be read: start with srun, or with torchrun"
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first host of a node list, by `scontrol` or from the notation: 'gpu[07-09,12],a1' -> gpu07."""
    if shutil.which("scontrol"):
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode == 0 and done.stdout.split():
            return done.stdout.split()[0]
    first = re.match(r"[^,\[]+(\[[^\]]*\][^,\[]*)*|(\[[^\]]*\][^,\[]*)+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else nodes
