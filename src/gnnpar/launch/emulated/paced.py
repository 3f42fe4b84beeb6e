"""launch=paced: from settings to shaped links, and the rate that a link reaches. The configured rate includes headers;
the rate reached is the payload of one TCP stream."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from gnnpar.comm.world import Links, RunHooks
from gnnpar.launch.emulated import cpu_shares
from gnnpar.launch.emulated.namespaces import Network, NetworkError, address, missing, netns
from gnnpar.settings import Cluster, Launch, Paced, Settings
from gnnpar.track.console import say
from gnnpar.track.text import counted

_PROBE_SECONDS = 0.25
_PATIENCE_SECONDS = 30.0


def links_of(settings: Settings, *, size: int, joined: bool, threads: int, cores: int) -> Links | None:
    """Return the shaped links between the ranks of this run; None: the machine's own. Raises ValueError."""
    launch = settings.launch
    if not isinstance(launch, Paced) or size == 1:
        return None
    if joined:
        raise ValueError("launch=paced starts its ranks itself and cannot join RANK's world; leave torchrun out")
    if settings.comm.backend != "gloo":
        raise ValueError(f"launch=paced needs comm=gloo: comm={settings.comm.backend} sends nothing over its links")
    if (lack := missing()) is not None:
        raise ValueError(f"launch=paced {lack}, or set launch=local")
    cluster = settings.topology if isinstance(settings.topology, Cluster) else None
    hosts = num_hosts(launch, cluster, size, settings.names.get("topology", ""))
    given = cluster and cluster.host_gbps
    return Links(
        host_gbps=tuple(given or (launch.rate_gbps,) * hosts),
        link_gbps=cluster and cluster.link_gbps,
        host_of=tuple(rank * hosts // size for rank in range(size)),
        burst_kib=burst_kib(launch.rate_gbps) if launch.burst_kib == "auto" else launch.burst_kib,
        dilation=dilation(launch, size * threads, cores),
        speeds=speeds(launch, size),
    )


def is_dilated(launch: Launch) -> bool:
    return isinstance(launch, Paced) and launch.dilation != 1


def dilation(launch: Paced, threads: int, cores: int) -> float:
    """Return the slowdown of `threads` compared with one core each. Raise ValueError if they do not fit."""
    least = max(1.0, threads / cores)
    if launch.dilation == "auto":
        factor = least
    elif launch.dilation == 1 or launch.dilation >= least:
        factor = launch.dilation
    else:
        needed = f"{counted(threads, 'thread')} of ranks need {threads / launch.dilation:g} cores"
        raise ValueError(
            f"launch.dilation={launch.dilation:g}: {needed}, and there are {cores}; set it to {least:g} or more"
        )
    if factor != 1 and (lack := cpu_shares.missing()) is not None:
        raise ValueError(f"launch.dilation={factor:g} {lack}, or set launch.dilation=1")
    return factor


def speeds(launch: Paced, size: int) -> tuple[float, ...]:
    """Return the share of its cores that each rank gets; (): all of them. Raises ValueError."""
    if launch.speeds is None:
        return ()
    listed = "[" + ",".join(f"{speed:g}" for speed in launch.speeds) + "]"
    if len(launch.speeds) != size:
        raise ValueError(f"launch.speeds={listed} is of {len(launch.speeds)}, and there are {counted(size, 'rank')}")
    if (lack := cpu_shares.missing()) is not None:
        raise ValueError(f"launch.speeds={listed} {lack}, or set launch.speeds=null")
    return launch.speeds


def burst_kib(gbps: float) -> int:
    """Return the KiB that pass in 2.1 ms, at least 16: smaller buckets hold too few packets to keep the rate."""
    return max(16, round(256 * gbps))


def num_hosts(launch: Paced, cluster: Cluster | None, size: int, topology: str) -> int:
    """Return the hosts of the topology, else launch.hosts, else one per rank. Raise ValueError for too many hosts."""
    if cluster is not None:
        if launch.hosts not in ("auto", cluster.num_hosts):
            named = f"topology={topology} names {cluster.num_hosts}"
            raise ValueError(f"launch.hosts={launch.hosts}, but {named}; leave launch.hosts out")
        if cluster.num_hosts > size:
            raise ValueError(
                f"topology={topology} names {cluster.num_hosts} hosts for {counted(size, 'rank')}; set world_size"
            )
        return cluster.num_hosts
    hosts = size if launch.hosts == "auto" else launch.hosts
    if hosts > size:
        raise ValueError(
            f"launch.hosts={hosts}, but there are {counted(size, 'rank')}; set launch.hosts={size} or lower"
        )
    return hosts


@contextmanager
def paced(links: Links, threads: int, hooks: RunHooks) -> Iterator[Network]:
    """Build the network of ranks of `threads` threads, and remove it at the end."""
    try:
        with Network.built(links) as network:
            gbps = reached_gbps(network)
            network.wait_until_up(_PATIENCE_SECONDS)
            with cpu_shares.shared(links.cores(threads)) as groups:
                say(f"paced: {links.describe()}; payload reached: {', '.join(f'{r:.2f}' for r in gbps)} Gbit/s")
                for line in shortfalls(network, gbps):
                    say(f"{line}; the results carry both rates")
                hooks.on_links(gbps)
                yield replace(network, groups=groups)
    except NetworkError as error:
        raise ValueError(f"launch=paced: {error}; set launch=local where this cannot be helped") from error


def reached_gbps(network: Network) -> list[float]:
    """Return 10^9 bit/s of payload from each host to the next, times the dilation; a quarter of a second each."""
    hosts = network.num_hosts
    return [network.dilation * reached(network, i, (i + 1) % hosts) for i in range(hosts)]


def shortfalls(network: Network, reached: list[float]) -> list[str]:
    """Return a line for every link that carries less than nine tenths of its rate."""
    lines = []
    for i, got in enumerate(reached):
        target = (i + 1) % network.num_hosts
        if got < 0.9 * network.gbps(i, target):
            lines.append(f"host {i} to {target}: {got:.2f} of {network.gbps(i, target):g} Gbit/s reached")
    return lines


def reached(network: Network, source: int, target: int) -> float:
    """Return 10^9 bit/s of payload of one TCP stream after the burst."""
    with netns(network.namespaces[target]):  # a socket keeps the namespace in which it was made
        server = socket.create_server((address(target), 0))
    with server:
        server.settimeout(_PATIENCE_SECONDS)
        sender = threading.Thread(target=_send, args=(network.namespaces[source], server.getsockname()), daemon=True)
        sender.start()
        try:
            connection, _ = server.accept()
        except TimeoutError as error:
            raise NetworkError(f"host {source} does not reach host {target}") from error
        with connection:
            connection.settimeout(_PATIENCE_SECONDS)
            gbps = _receive(connection, skip=3 * 1024 * network.burst_kib)
        sender.join(_PATIENCE_SECONDS)
    return gbps


def _send(namespace: str, to: tuple[str, int]) -> None:
    block = bytes(256 * 1024)
    with suppress(OSError, NetworkError), netns(namespace), socket.create_connection(to, _PATIENCE_SECONDS) as stream:
        while True:  # until the receiver closes
            stream.sendall(block)


def _receive(stream: socket.socket, *, skip: int) -> float:
    buffer = bytearray(256 * 1024)
    skipped = 0
    while skipped < skip:
        skipped += stream.recv_into(buffer)
    began = now = time.perf_counter()
    counted = 0
    while now - began < _PROBE_SECONDS:
        counted += stream.recv_into(buffer)
        now = time.perf_counter()
    return counted * 8 / (now - began) / 1e9


def trial() -> str:
    """Try a network of two hosts. Return a short text on whether launch=paced works here."""
    if (lack := missing()) is not None:
        return f"no: {lack}"
    try:
        with Network.built(Links(host_gbps=(1.0, 1.0))) as network:
            got = min(reached_gbps(network))
    except NetworkError as error:
        return f"no: {error}"
    return f"yes; at 1 Gbit/s a link carried {got:.2f} Gbit/s of payload"
