"""A small cluster on one machine: each host a network namespace, its link shaped in both directions.

    host 0 [eth0]----[port0]  switch  [port1]----[eth0] host 1      every [end] a token bucket: `tbf` at the host's rate

The host's end shapes outgoing traffic, the switch's end incoming traffic: three senders to one receiver share the
receiver's link. The bridge has a namespace of its own. Per-link rates become classes (`htb`) at the sending end. Needs
root and iproute2 (`missing`).

A namespace is named gnnpar-PID-START-HOST after the process that built it and the start of that process. The next
network removes the namespaces of dead processes, also after kill -9.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gnnpar.comm.world import LATENCY_SECONDS, SWITCH_LATENCY_SECONDS, Links
from gnnpar.files import process_start
from gnnpar.launch.signals import blocked

INTERFACE = "eth0"
CONGESTION_CONTROL = "cubic"  # the kernel's default, so that all machines measure the same
FOLDER = Path("/run/netns")
_NAME = re.compile(r"gnnpar-(\d+)-(\d+)-\w+")
_SWITCH = "switch"
INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)  # a second Ctrl-C waits for the removal
_CLONE_NEWNET, _SIOCGIFFLAGS, _IFF_RUNNING = 0x40000000, 0x8913, 0x40
_PATH = os.pathsep.join([os.environ.get("PATH") or os.defpath, "/usr/sbin", "/sbin"])


class NetworkError(ValueError):
    """The network cannot be built. The message is one line."""


@dataclass(frozen=True, kw_only=True)
class Network(Links):
    """Links between network namespaces with names that begin with `prefix`."""

    prefix: str

    @staticmethod
    def of(links: Links) -> Network:
        """Return a network of this process with these links."""
        return Network(**vars(links), prefix=own_prefix())

    def namespace(self, host: int | Literal["switch"]) -> str:
        return f"{self.prefix}-{host}"

    @contextmanager
    def built(self) -> Iterator[None]:
        """Build the namespaces, and remove them at the end."""
        try:
            remove_stale()
            self._connect()
            self.pace()
            yield
        finally:
            with blocked(INTERRUPTIONS):
                self.remove()

    def enter(self, host: int) -> None:
        """Move this thread, and the threads it starts later, to a host."""
        enter(self.namespace(host))

    def wait_until_up(self, seconds: float) -> None:
        """Wait for the links: gloo needs IFF_RUNNING, which the kernel sets up to a second after a link is up."""
        deadline = time.monotonic() + seconds
        for host in range(self.num_hosts):
            with netns(self.namespace(host)):
                while not _is_running(INTERFACE):
                    if time.monotonic() > deadline:
                        raise NetworkError(f"the link of host {host} is not up after {seconds:g} s")
                    time.sleep(0.01)

    def remove(self) -> None:
        delete([name for name in names() if name.startswith(f"{self.prefix}-")])

    def _connect(self) -> None:
        hosts = range(self.num_hosts)
        switch = self.namespace(_SWITCH)
        links = [
            f"link add {INTERFACE} netns {self.namespace(i)} type veth peer name port{i} netns {switch}" for i in hosts
        ]
        _batch("ip", [f"netns add {self.namespace(i)}" for i in (_SWITCH, *hosts)] + links)
        _batch(
            "ip",
            [
                "link add bridge type bridge",
                "link set bridge up",
                *(f"link set port{i} master bridge addrgenmode none up" for i in hosts),
            ],
            switch,
        )
        for i in hosts:
            _batch(
                "ip",
                [
                    "link set lo up",
                    f"addr add {address(i)}/16 dev {INTERFACE}",
                    f"link set {INTERFACE} addrgenmode none up",
                ],
                self.namespace(i),
            )
            with netns(self.namespace(i)), suppress(OSError):  # a kernel without it keeps its default
                Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(CONGESTION_CONTROL, encoding="ascii")

    def pace(self) -> None:
        """Shape both ends of every link of an existing network."""
        into = [self.bucket(gbps, SWITCH_LATENCY_SECONDS) for gbps in self.host_gbps]
        ports = [f"qdisc replace dev port{i} root {bucket}" for i, bucket in enumerate(into)]
        _batch("tc", ports, self.namespace(_SWITCH))
        for host in range(self.num_hosts):
            _batch("tc", self.shape(host), self.namespace(host))

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


def own_prefix() -> str:
    """Return the prefix of this process's names: its pid and start time."""
    return f"gnnpar-{os.getpid()}-{process_start(os.getpid())}"


def names() -> list[str]:
    """Return all namespaces of gnnpar on this machine."""
    with suppress(OSError):
        return sorted(name for name in os.listdir(FOLDER) if _NAME.fullmatch(name))
    return []


def is_stale(name: str) -> bool:
    """Return True if the process that built it is dead."""
    found = _NAME.fullmatch(name)
    return found is not None and process_start(int(found[1])) != int(found[2])


def remove_stale() -> list[str]:
    """Remove the namespaces of dead processes. Return their names."""
    stale = [name for name in names() if is_stale(name)]
    delete(stale)
    return stale


def delete(gone: Sequence[str]) -> None:
    """Remove namespaces. Ignore namespaces that another process removes concurrently."""
    for name in gone:
        with suppress(NetworkError):
            _batch("ip", [f"netns del {name}"])
    left = [name for name in gone if (FOLDER / name).exists()]
    if left:
        raise NetworkError(f"cannot remove the network namespaces {', '.join(left)}; try `ip netns del`")


def enter(name: str) -> None:
    """Put the calling thread into a network namespace. `os.setns` exists from Python 3.12 on."""
    with (FOLDER / name).open("rb") as file:
        _setns(file.fileno(), name)


def _setns(descriptor: int, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise NetworkError(f"cannot enter the network namespace {name}: {os.strerror(ctypes.get_errno())}")


@contextmanager
def netns(name: str) -> Iterator[None]:
    """Move this thread to a network namespace, and back at the end."""
    with open(f"/proc/self/task/{threading.get_native_id()}/ns/net", "rb") as before:
        enter(name)
        try:
            yield
        finally:
            _setns(before.fileno(), "of this thread")


def _is_running(interface: str) -> bool:
    """Return True if an interface and its peer are up, in the namespace of this thread."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH14x", interface.encode(), 0)
        flags: int = struct.unpack("16xH14x", fcntl.ioctl(probe, _SIOCGIFFLAGS, request))[0]
    return bool(flags & _IFF_RUNNING)


def interface_sent_bytes() -> int:
    """Return the bytes sent on the host of this thread, headers included."""
    lines = Path(f"/proc/self/task/{threading.get_native_id()}/net/dev").read_text(encoding="ascii").splitlines()
    counters = next(line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return int(counters[8])


def _batch(tool: Literal["ip", "tc"], commands: Sequence[str], namespace: str | None = None) -> None:
    """Run commands of iproute2 in one process, which does not receive the terminal's Ctrl-C."""
    inside = [] if namespace is None else ["-n", namespace]
    done = subprocess.run(
        [shutil.which(tool, path=_PATH) or tool, *inside, "-batch", "-"],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        failed = re.search(r"Command failed -:(\d+)", done.stderr)
        command = commands[int(failed[1]) - 1] if failed else commands[0]
        raise NetworkError(f"`{tool} {command}` failed: {said[0]}")
