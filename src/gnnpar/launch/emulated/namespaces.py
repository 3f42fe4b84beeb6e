"""A small cluster on one machine: each host a network namespace, its link shaped in both directions.

    host 0 [eth0]----[port0]  switch  [port1]----[eth0] host 1      every [end] a token bucket: `tbf` at the host's rate

The host's end shapes outgoing traffic, the switch's end incoming traffic: three senders to one receiver share the
receiver's link. The bridge has a namespace of its own. Per-link rates become classes (`htb`) at the sending end. Needs
root and iproute2 (`missing`).

A namespace has no name, only a descriptor of the process that built it: the kernel removes it with that process and its
ranks, also after kill -9.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gnnpar.comm.world import LATENCY_SECONDS, SWITCH_LATENCY_SECONDS, Links

INTERFACE = "eth0"
CONGESTION_CONTROL = "cubic"  # the kernel's default, so that all machines measure the same
_CLONE_NEWNET, _SIOCGIFFLAGS, _IFF_RUNNING = 0x40000000, 0x8913, 0x40
_PATH = os.pathsep.join([os.environ.get("PATH") or os.defpath, "/usr/sbin", "/sbin"])
_HERE = "/proc/thread-self/ns/net"


class NetworkError(ValueError):
    """The network cannot be built. The message is one line."""


@dataclass(frozen=True, kw_only=True)
class Network(Links):
    """Links between network namespaces. namespaces: file of each host's, and of the switch's. groups: folder of each
    rank's share of the cores; (): no limit."""

    namespaces: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    @staticmethod
    @contextmanager
    def built(links: Links) -> Iterator[Network]:
        """Build the namespaces, and remove them at the end."""
        with ExitStack() as descriptors:
            made = list[str]()
            for _ in range(links.num_hosts + 1):
                with netns(None):
                    descriptor = descriptors.enter_context(open(_HERE, "rb")).fileno()
                    made.append(f"/proc/{os.getpid()}/fd/{descriptor}")
            network = Network(**vars(links), namespaces=tuple(made))
            network._connect()
            network.pace()
            yield network

    def wait_until_up(self, seconds: float) -> None:
        """Wait for the links: gloo needs IFF_RUNNING, which the kernel sets up to a second after a link is up."""
        deadline = time.monotonic() + seconds
        for host in range(self.num_hosts):
            with netns(self.namespaces[host]):
                while not _is_running(INTERFACE):
                    if time.monotonic() > deadline:
                        raise NetworkError(f"the link of host {host} is not up after {seconds:g} s")
                    time.sleep(0.01)

    def _connect(self) -> None:
        *hosts, switch = self.namespaces
        ports = [f"link add port{i} type veth peer name {INTERFACE} netns {host}" for i, host in enumerate(hosts)]
        ports += [f"link set port{i} master bridge addrgenmode none up" for i in range(self.num_hosts)]
        _batch("ip", ["link add bridge type bridge", "link set bridge up", *ports], switch)
        for i, host in enumerate(hosts):
            link = [f"addr add {address(i)}/16 dev {INTERFACE}", f"link set {INTERFACE} addrgenmode none up"]
            _batch("ip", ["link set lo up", *link], host)
            with netns(host), suppress(OSError):  # a kernel without it keeps its default
                Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(CONGESTION_CONTROL, encoding="ascii")

    def pace(self) -> None:
        """Shape both ends of every link of an existing network."""
        into = [self.bucket(gbps, SWITCH_LATENCY_SECONDS) for gbps in self.host_gbps]
        ports = [f"qdisc replace dev port{i} root {bucket}" for i, bucket in enumerate(into)]
        _batch("tc", ports, self.namespaces[-1])
        for host in range(self.num_hosts):
            _batch("tc", self.shape(host), self.namespaces[host])

    def shape(self, host: int) -> list[str]:
        """Return the tc commands for a host's outgoing traffic: a token bucket, or a class per peer under its own."""
        mine = self.host_gbps[host]
        if self.link_gbps is None:
            return [f"qdisc replace dev {INTERFACE} root {self.bucket(mine)}"]
        commands = [
            f"qdisc replace dev {INTERFACE} root handle 1: htb default 1",
            f"class add dev {INTERFACE} parent 1: classid 1:ffff {self.limit(mine)}",
            f"class add dev {INTERFACE} parent 1:ffff classid 1:1 {self.limit(mine)}",  # ARP, and other targets
        ]
        for peer in range(self.num_hosts):
            if peer == host:
                continue
            link = self.gbps(host, peer)
            queue_bytes = self.burst_kib * 1024 + int(LATENCY_SECONDS * link * 1e9 / 8)
            commands += [
                f"class add dev {INTERFACE} parent 1:ffff classid 1:{peer + 2:x} {self.limit(link)}",
                f"qdisc add dev {INTERFACE} parent 1:{peer + 2:x} bfifo limit {queue_bytes}",
                f"filter add dev {INTERFACE} parent 1: protocol ip prio 1 u32 "
                f"match ip dst {address(peer)}/32 flowid 1:{peer + 2:x}",
            ]
        return commands

    def bucket(self, gbps: float, latency: float = LATENCY_SECONDS) -> str:
        """Return the token bucket of one direction of a link, with a queue of `latency` seconds."""
        rate, queue = gbps * 1e9 / self.dilation, latency * 1e3 * self.dilation
        return f"tbf rate {rate:.0f}bit burst {self.burst_kib}kb latency {queue:.0f}ms"

    def limit(self, gbps: float) -> str:
        """Return the rate of one class of traffic."""
        rate, burst = f"{gbps * 1e9 / self.dilation:.0f}bit", f"{self.burst_kib}kb"
        return f"htb rate {rate} ceil {rate} burst {burst} cburst {burst} quantum 65536"


def address(host: int) -> str:
    """Return the address of a host inside the namespaces."""
    return f"10.77.{(host + 1) // 256}.{(host + 1) % 256}"


def missing() -> str | None:
    """Return the missing requirement of this machine for namespaces, and its remedy; None if nothing is known."""
    if not sys.platform.startswith("linux"):
        return f"needs Linux, this is {sys.platform}"
    lacking = [name for name in ("ip", "tc") if shutil.which(name, path=_PATH) is None]
    if lacking:
        return f"needs {' and '.join(lacking)} of iproute2, not found on PATH; install iproute2"
    if os.geteuid() != 0:
        return f"needs root to make network namespaces, this is user {os.geteuid()}; run as root"
    return None


def enter(namespace: str | None) -> None:
    """Put the calling thread, and threads that it starts later, into a network namespace; None: a new one."""
    libc = ctypes.CDLL(None, use_errno=True)  # `os.setns` exists from Python 3.12 on
    if namespace is None:
        failed = libc.unshare(_CLONE_NEWNET)
    else:
        with open(namespace, "rb") as file:
            failed = libc.setns(file.fileno(), _CLONE_NEWNET)
    if failed:
        raise NetworkError(f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")


@contextmanager
def netns(namespace: str | None) -> Iterator[None]:
    """Move this thread to a network namespace (None: a new one), and back at the end."""
    with open(_HERE, "rb") as before:
        enter(namespace)
        try:
            yield
        finally:
            enter(f"/proc/self/fd/{before.fileno()}")


def _is_running(interface: str) -> bool:
    """Return True if an interface and its peer are up, in the namespace of this thread."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH14x", interface.encode(), 0)
        flags: int = struct.unpack("16xH14x", fcntl.ioctl(probe, _SIOCGIFFLAGS, request))[0]
    return bool(flags & _IFF_RUNNING)


def interface_sent_bytes() -> int:
    """Return the bytes sent on the host of this thread, headers included."""
    lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()
    counters = next(line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return int(counters[8])


def _batch(tool: Literal["ip", "tc"], commands: Sequence[str], namespace: str) -> None:
    """Run commands of iproute2 in one process, which does not receive the terminal's Ctrl-C."""
    line, text = [shutil.which(tool, path=_PATH) or tool, "-batch", "-"], "\n".join(commands) + "\n"
    with netns(namespace):
        done = subprocess.run(line, input=text, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        failed = re.search(r"Command failed -:(\d+)", done.stderr)
        command = commands[int(failed[1]) - 1] if failed else commands[0]
        raise NetworkError(f"`{tool} {command}` failed: {said[0]}")
