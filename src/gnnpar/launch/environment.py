"""What torchrun, Slurm or a user has set for a rank, checked before anything reads it."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping

from gnnpar.folder_lock import started
from gnnpar.settings import MAX_RANKS, ConfigError
from gnnpar.track.text import printable

_BOUNDS = {  # the least and the most
    "RANK": (0, MAX_RANKS - 1),
    "WORLD_SIZE": (1, MAX_RANKS),
    "LOCAL_RANK": (0, MAX_RANKS - 1),
    "LOCAL_WORLD_SIZE": (1, MAX_RANKS),
    "MASTER_PORT": (1, 65535),
}
_ALL_INTERFACES = ("0.0.0.0", "0", "::", "::0")  # noqa: S104 - refused


def check_rank(env: Mapping[str, str]) -> None:
    """ConfigError in one line where RANK is set, and it or what belongs to it is no number that it can be."""
    for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"):
        number(env, name, 0, 1 << 30, "0")
    if "RANK" not in env:
        return
    if "WORLD_SIZE" not in env:
        raise ConfigError(f"RANK={printable(env['RANK'])} is set, but WORLD_SIZE is not: set both, or neither")
    for name, (least, most) in _BOUNDS.items():
        if name in env and not is_number(env[name], least, most):
            raise ConfigError(f"{name}={printable(env[name])} must be a whole number from {least} to {most}")
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    if rank >= size:
        raise ConfigError(f"RANK={rank} is none of WORLD_SIZE={size} ranks, numbered from 0: correct one of them")
    _check_hosts(env, size)
    check_master(env)


def _check_hosts(env: Mapping[str, str], size: int) -> None:
    """ConfigError where torchrun's hosts have more ranks than there are. How many hosts there are stands in its command
    line; how many ranks, it reads in its store, where anybody writes."""
    hosts, here = (env.get(name, "") for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if is_number(hosts, 1, MAX_RANKS) and is_number(here, 1, MAX_RANKS) and size < int(here) + int(hosts) - 1:
        raise ConfigError(
            f"WORLD_SIZE={size}, but torchrun has {hosts} hosts and {here} ranks on this one: a host has no ranks, or "
            "somebody else writes into torchrun's store"
        )


def agent() -> str:
    """The process that has started this rank: 'HOST PID TICKS', when it started in clock ticks since boot."""
    return f"{socket.gethostname()} {os.getppid()} {started(os.getppid())}"


def check_master(env: Mapping[str, str]) -> None:
    """ConfigError in one line where MASTER_ADDR can be no host, or is every address of one: rank 0 would listen on all
    interfaces. torchrun's own store listens there in any case."""
    master = env.get("MASTER_ADDR", "")
    try:
        master.encode("idna")
    except UnicodeError as error:
        raise ConfigError(f"MASTER_ADDR={printable(master)[:100]} is no name of a host ({error})") from error
    if master in _ALL_INTERFACES and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError(f"MASTER_ADDR={master} stands for all interfaces: give the address of rank 0's host")


def unpickles(env: Mapping[str, str]) -> bool:
    """Has torchrun chosen by itself how its agent meets others, as it does on one host without --master-port? That is
    c10d: its agent listens on all interfaces and unpickles what is put there. It then makes up an id, a UUID."""
    try:
        return str(uuid.UUID(env.get("TORCHELASTIC_RUN_ID", ""))) == env["TORCHELASTIC_RUN_ID"]
    except ValueError:
        return False


def number(env: Mapping[str, str], name: str, least: int, most: int, default: str = "") -> int:
    """ConfigError where a variable is no whole number within bounds."""
    if not is_number(text := env.get(name, default), least, most):
        raise ConfigError(f"{name}={printable(text)} must be a whole number from {least} to {most}")
    return int(text)


def is_number(text: str, least: int, most: int) -> bool:
    """Digits alone, within bounds."""
    return text.isascii() and text.isdecimal() and len(text) < 19 and least <= int(text) <= most
