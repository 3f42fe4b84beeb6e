"""From settings to the planner's machine: devices, links, and rates of each rank."""

from __future__ import annotations

import os
from collections.abc import Callable

import psutil

from gnnpar.comm.world import num_cores
from gnnpar.launch.emulated.paced import burst_kib, dilation, is_dilated, num_hosts
from gnnpar.launch.emulated.paced import speeds as launch_speeds
from gnnpar.planner.calibrate import Calibration, calibrate
from gnnpar.pricing.fabric import Fabric
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.rates import derived
from gnnpar.pricing.topology import Machines, hosts_of_one_machine, one_host
from gnnpar.settings import Cluster, Measured, Paced, Settings

_PAYLOAD = 0.94  # share of a link's rate that headers leave
_ROUND_TRIP_SECONDS = 2e-4


def setting_of(
    settings: Settings, ranks: int | None, say: Callable[[str], None] = lambda _: None, *, measuring: bool = True
) -> tuple[Machine, int]:
    """Return the machine with the place of each rank, and the number of ranks. ranks=None: one per device of the
    topology, else world_size. measuring=False: nominal rates if nothing is cached."""
    topology = settings.topology
    cores = cores_of(settings)
    if isinstance(topology, Machines):
        return _machines(settings, topology.fabric, ranks, cores, say, measuring)
    count = ranks or settings.world_size
    launch, speeds = settings.launch, (1.0,) * count
    if isinstance(launch, Paced) and count > 1:
        cores = round(cores * dilation(launch, count * threads_of(settings, count), cores))  # the cores that ranks see
        speeds = launch_speeds(launch, count) or speeds
    calibration = _calibration(settings, count, cores, say, measuring)
    fabric = _own_fabric(settings, count, calibration)
    return Machine(fabric, tuple(calibration.rates.at(speed) for speed in speeds)), count


def cores_of(settings: Settings) -> int:
    """Return the cores of this machine."""
    return num_cores() if settings.topology.cores == "auto" else settings.topology.cores


def threads_of(settings: Settings, ranks: int) -> int:
    """Return the threads of each rank on this machine."""
    if settings.threads_per_rank != "auto":
        return settings.threads_per_rank
    return 1 if is_dilated(settings.launch) else max(1, cores_of(settings) // ranks)


def _calibration(
    settings: Settings, ranks: int, cores: int, say: Callable[[str], None], measuring: bool
) -> Calibration:
    """Calibrate at most as many ranks as have separate cores; scale the rates for more ranks, which share cores."""
    threads = threads_of(settings, ranks)
    measured = max(1, min(ranks, cores_of(settings) // threads))
    cache = settings.cache_dir if os.access(settings.cache_dir, os.W_OK) or not settings.cache_dir.exists() else None
    again = isinstance(settings.topology, Measured) and settings.topology.refresh
    found = calibrate(measured, threads=threads, cache=cache, refresh=again, measuring=measuring, say=say)
    return found.shared(ranks, cores)


def _own_fabric(settings: Settings, ranks: int, calibration: Calibration) -> Fabric:
    """Return this machine, or the emulated hosts of launch=paced."""
    available = float(psutil.virtual_memory().available)
    theta, gamma = calibration.link
    launch = settings.launch
    if not isinstance(launch, Paced) or ranks == 1:
        return one_host(ranks, memory_bytes=available, rate=1 / theta, latency=gamma)
    cluster = settings.topology if isinstance(settings.topology, Cluster) else None
    hosts = num_hosts(launch, cluster, ranks, settings.names.get("topology", ""))
    gbps = (cluster and cluster.host_gbps) or (launch.rate_gbps,) * hosts
    links = cluster.link_gbps if cluster else None
    burst = burst_kib(launch.rate_gbps) if launch.burst_kib == "auto" else launch.burst_kib
    return hosts_of_one_machine(
        tuple(rank * hosts // ranks for rank in range(ranks)),
        host_rates=tuple(map(_bytes_per_second, gbps)),
        link_rates=links and tuple(tuple(r and _bytes_per_second(r) for r in row) for row in links),
        memory_bytes=available,
        inside_rate=1 / theta,
        latency=gamma + _ROUND_TRIP_SECONDS,
        burst=1024.0 * burst,
    )


def _bytes_per_second(gbps: float) -> float:
    return _PAYLOAD * gbps * 1e9 / 8


def _machines(
    settings: Settings, fabric: Fabric, ranks: int | None, cores: int, say: Callable[[str], None], measuring: bool
) -> tuple[Machine, int]:
    """Return the machine of a topology file. A device without speeds gets the rates of a core of this machine."""
    count = ranks or fabric.size
    fabric = fabric.first(count)
    here = None
    if any(d.speed is None for d in fabric.devices):
        here = _calibration(settings, min(count, cores), cores, say, measuring).rates
    rates = []
    for device in fabric.devices:
        if device.speed is None or device.memory_rate is None:
            assert here is not None
            rates.append(here)
        else:
            rates.append(derived(device.speed, device.memory_rate, launch=8e-6 if device.type == "cuda" else 2e-6))
    return Machine(fabric, tuple(rates)), count
