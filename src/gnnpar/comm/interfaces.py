"""Choose the network interface that gloo listens on."""

from __future__ import annotations

import os
import socket

import psutil

VARIABLE = "GLOO_SOCKET_IFNAME"
_VIRTUAL = ("lo", "docker", "virbr", "br-", "veth", "cni", "flannel")


class JoinError(ConnectionError):
    """This host has no interface for gloo. The message is one line."""


def addresses() -> dict[str, str]:
    """Return interface -> first IPv4 (else IPv6) address, for interfaces that are up."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        given = [e.address for family in (socket.AF_INET, socket.AF_INET6) for e in entries if e.family == family]
        if name in up and given:
            found[name] = given[0].partition("%")[0]
    return found


def loopback() -> str:
    """Return the name of the loopback interface."""
    return next((name for name, address in addresses().items() if address == "127.0.0.1"), "lo")


def choose(default: str = "") -> None:
    """Raise JoinError if GLOO_SOCKET_IFNAME names an interface that is missing or down. Set `default` if it is empty:
    gloo would use the address of the host name."""
    there = addresses()
    names = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    for name in names:
        if name not in there:
            state = "is down or has no address" if name in psutil.net_if_addrs() else "does not exist"
            known = ", ".join(f"{n} ({a})" for n, a in there.items()) or "none"
            raise JoinError(
                f"{VARIABLE}={name} {state} on {socket.gethostname()}, which has {known}: name one of "
                "them, or leave it out and the one that leads to MASTER_ADDR is taken"
            )
    if default and not names:
        os.environ[VARIABLE] = default


def towards(master: str, port: int) -> tuple[str, str, str]:
    """Return this host's interface and address on the route to `master`, and the address of `master` as seen from here.

    A host name that resolves to the loopback on its own host (127.0.1.1 of Debian) is replaced by the address of the
    first interface that other hosts may reach. Raises OSError for an unknown name or without a route.
    """
    last = OSError(f"no address of {master}")
    for family, kind, protocol, _, target in socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # sends nothing
                mine, there = (str(each[0]).partition("%")[0] for each in (probe.getsockname(), target))
                break
        except OSError as error:
            last = error
    else:
        raise last
    if mine.startswith("127.") or mine == "::1":
        outward = [(n, a, a) for n, a in addresses().items() if not a.startswith("127.") and not n.startswith(_VIRTUAL)]
        if not outward:
            raise JoinError(
                f"{socket.gethostname()} has no network interface but the loopback: ranks of other hosts cannot "
                f"reach it; bring one up, or set {VARIABLE}"
            )
        return outward[0]
    held = psutil.net_if_addrs().items()
    name = next((n for n, entries in held if any(e.address.partition("%")[0] == mine for e in entries)), "")
    return name, mine, there
