"""By which network interface this host reaches another one, and what is wrong with the one that was asked for."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping

import psutil

VARIABLE = "GLOO_SOCKET_IFNAME"
_VIRTUAL = ("docker", "virbr", "br-", "veth", "cni", "flannel")


class MeetingError(ConnectionError):
    """The ranks cannot come together: one line, with what is wrong and what to change. `shared`: all ranks have it.
    `refused`: a rank cannot run what it was asked to."""

    shared = False
    refused = False


class UnknownMaster(MeetingError):
    """MASTER_ADDR leads nowhere: no rank can be reached."""


def addresses() -> dict[str, str]:
    """Interface -> its first IPv4 address, or IPv6 where it has no other; interfaces without one are left out."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    by_interface: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        given = [e.address for family in (socket.AF_INET, socket.AF_INET6) for e in entries if e.family == family]
        if name in up and given:
            by_interface[name] = given[0].partition("%")[0]
    return by_interface


def loopback() -> str | None:
    """The interface by which this host reaches itself."""
    return next((name for name, address in addresses().items() if address == "127.0.0.1"), None)


def own_loopback() -> str:
    """`loopback()`, for ranks of one host. MeetingError where there is none: gloo, which asks nobody for a password,
    takes the first address of an interface, or that of the host's name, and would listen where others reach it."""
    if (name := loopback()) is None:
        known = ", ".join(f"{n} ({a})" for n, a in addresses().items()) or "none"
        raise MeetingError(
            f"no interface of {socket.gethostname()} has 127.0.0.1 as its first address (it has {known}), and ranks "
            f"would be open to other hosts: bring lo up, or set {VARIABLE} to an interface that only you reach"
        )
    return name


def asked_for(env: MutableMapping[str, str]) -> str:
    """GLOO_SOCKET_IFNAME, also in `env` from now on without its empty parts, for which gloo would take the address of
    the host's name; '' where it names nothing."""
    given = env.pop(VARIABLE, "")
    if names := ",".join(filter(None, given.split(","))):
        env[VARIABLE] = names
    return names


def check_asked_for(asked: str) -> None:
    """MeetingError where GLOO_SOCKET_IFNAME=`asked` names what this host has not, or what is down."""
    there = addresses()
    for name in asked.split(",") if asked else ():
        if name not in there:
            state = "is down or has no address" if name in psutil.net_if_addrs() else "does not exist"
            known = ", ".join(f"{n} ({a})" for n, a in there.items()) or "none"
            raise MeetingError(
                f"{VARIABLE}={name} {state} on {socket.gethostname()}, which has {known}: name one of "
                "them, or leave it out and the one that leads to MASTER_ADDR is taken"
            )


def towards(master: str, port: int, *, asked: str, other_hosts: bool) -> tuple[str, str]:
    """(interface, address) of this host that gloo is to use: the one asked for, else the one that leads to the master.

    `asked`: GLOO_SOCKET_IFNAME. `other_hosts`: there are ranks elsewhere, to whom a loopback address says nothing.
    """
    check_asked_for(asked)
    there = addresses()
    if chosen := asked.split(",")[0]:
        return chosen, there[chosen]
    mine = _route(master, port)
    name = next((n for n, address in there.items() if address == mine), "")
    if not other_hosts and not name:  # without an interface, gloo would listen at the address of the host name
        name = ("" if mine.startswith("127.") else _holder_of(mine)) or own_loopback()
    if other_hosts and not name and (shared := _holder_of(mine)) in there:
        raise MeetingError(
            f"{mine}, by which this host reaches {master}, is another address of {shared} than {there[shared]}, where "
            f"gloo would listen: give it an interface of its own, or set {VARIABLE}={shared} if that address will do"
        )
    if other_hosts and (not name or mine.startswith("127.") or mine == "::1"):
        # the master's own name often leads to a loopback address on the master itself
        outward = [n for n, a in there.items() if not a.startswith("127.") and not n.startswith(("lo", *_VIRTUAL))]
        if not outward:
            raise MeetingError(
                f"{socket.gethostname()} has no network interface but the loopback: ranks of other "
                f"hosts cannot reach it; bring one up, or set {VARIABLE}"
            )
        name = outward[0]
        mine = there[name]
    return name, mine


def _holder_of(address: str) -> str:
    """The interface that has it among its addresses; '' where none has."""
    held = psutil.net_if_addrs().items()
    return next((name for name, all_of in held if any(e.address.partition("%")[0] == address for e in all_of)), "")


def _route(master: str, port: int) -> str:
    """The address of this host on the way to the master; nothing is sent."""
    try:
        resolved = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise UnknownMaster(
            f"MASTER_ADDR={master}: {socket.gethostname()} does not know that name ({error.strerror}); "
            "give the address of rank 0's host"
        ) from error
    last: OSError | None = None
    for family, kind, protocol, _, target in resolved:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return probe.getsockname()[0].partition("%")[0]
        except OSError as error:
            last = error
    why = last.strerror if last else "no address"
    raise UnknownMaster(
        f"MASTER_ADDR={master} cannot be reached from {socket.gethostname()}: {why}; is the interface "
        "up that leads there?"
    )
