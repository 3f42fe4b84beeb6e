"""`srun gnnpar train ...`: a task of a Slurm step is a rank, with no launcher between.

srun sets SLURM_STEP_NUM_TASKS; a batch script outside of srun has no such variable and starts its own ranks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from gnnpar.launch.environment import is_number, number
from gnnpar.settings import MAX_RANKS, ConfigError
from gnnpar.track.text import printable

_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below the range that Linux gives to outgoing connections


def as_rank(env: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE and so on for a task of a step with several; nothing elsewhere, or where they are set."""
    given = env.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in env:
        return {}
    if not is_number(given, 1, MAX_RANKS):
        raise ConfigError(f"SLURM_STEP_NUM_TASKS={printable(given)} must be a whole number from 1 to {MAX_RANKS}")
    if (size := int(given)) < 2:
        return {}
    try:
        rank, local = (_number(env, name, env[name]) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
        node = _number(env, "SLURM_NODEID", "0")
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env["SLURM_NODELIST"]
        per_node = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", str(size)))
        here = per_node[node]
        job, step = (_number(env, name, "0", 10**18 - 1) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    except ConfigError:
        raise
    except IndexError as error:
        raise ConfigError(
            f"SLURM_NODEID={printable(env.get('SLURM_NODEID', ''))} is beyond the nodes that Slurm's environment "
            "counts: start with srun, or with torchrun"
        ) from error
    except (KeyError, ValueError) as error:
        lacks = "lacks" if isinstance(error, KeyError) else "cannot be read, it needs"
        raise ConfigError(
            f"SLURM_STEP_NUM_TASKS={size}, but Slurm's environment {lacks} {error}: start with srun, or with torchrun"
        ) from error
    port = _FIRST_PORT + (job * 31 + step) % _NUM_PORTS  # the same on all hosts, another for every step
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": env.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": env.get("MASTER_PORT") or str(port),
    }


def _number(env: Mapping[str, str], name: str, default: str, most: int = MAX_RANKS) -> int:
    return number(env, name, 0, most, default)


def rank_on_host() -> int:
    """Of a joined rank; 0 of any other process."""
    text = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    size = os.environ.get("WORLD_SIZE", "")
    most = int(size) - 1 if is_number(size, 1, MAX_RANKS) else MAX_RANKS
    return int(text) if is_number(text, 0, most) else 0  # what is none is refused by this very line


def tasks_per_node(text: str) -> list[int]:
    """'2(x3),1' -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None or not all(is_number(each or "1", 1, MAX_RANKS) for each in found.groups()):
            raise ValueError(f"a readable SLURM_TASKS_PER_NODE (it is {printable(text)})")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """The host of rank 0: by `scontrol`, or where it is not installed by the notation, 'gpu[07-09,12],a1' -> gpu07."""
    if shutil.which("scontrol"):
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode == 0 and done.stdout.split():
            return done.stdout.split()[0]
    first = re.match(r"[^,\[]+(\[[^\]]*\][^,\[]*)*|(\[[^\]]*\][^,\[]*)+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else nodes
