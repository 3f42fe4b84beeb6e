"""conf/topology: machines as users write them (hosts, devices, links, racks), expanded to a Fabric.

    device -- inside -- [host] -- nic -- [rack] -- uplink -- [spine]

`inside`, `nic` and `uplink` name entries of `links`. An inner link is a port of each device (NVSwitch, or memory of a
CPU), or with `shared: true` one medium for all devices of the host (a PCIe root, QPI). Wires join any two points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge

from gnnpar.files import JsonObject
from gnnpar.pricing.fabric import Device, Fabric, Link, Wire, build
from gnnpar.pricing.quantity import parse

T = TypeVar("T")
_MOST = 1024  # devices of a cluster

_DEVICE_KEYS = ("type", "memory", "speed", "memory_rate")
_HOST_KEYS = ("name", "devices", "inside", "nic", "rack", "count")
_LINK_KEYS = ("rate", "latency", "duplex", "shared")
_RACK_KEYS = ("uplink",)
_WIRE_KEYS = ("between", "link")


@dataclass(frozen=True)
class _Medium:
    rate: float
    latency: float
    duplex: bool
    shared: bool


@dataclass(frozen=True, kw_only=True)
class Machines:
    """A cluster, possibly of different devices.

    devices: kind -> {type: cpu | cuda, memory: 16 GiB, speed: 14 Tflop/s, memory_rate: 900 GB/s}; without speeds, as
    measured on this machine. hosts: {name, devices: {kind: number}, inside: link, nic: link, rack, count: copies}.
    links: name -> {rate: 25 Gbit/s, latency: 5 us, duplex: true, shared: false}. racks: name -> {uplink: link}.
    wires: {between: [point, point], link}; points are hosts, racks, `spine`, or devices (host/0).
    """

    cores: Annotated[int, Ge(1)] | Literal["auto"] = "auto"
    devices: JsonObject
    hosts: tuple[Any, ...]  # Any: YAML, checked below
    links: JsonObject = field(default_factory=dict)
    racks: JsonObject = field(default_factory=dict)
    wires: tuple[Any, ...] = ()  # Any: as hosts

    def __post_init__(self) -> None:
        if self.fabric.size == 0:
            raise ValueError("hosts has no device; give a host some")

    @cached_property
    def fabric(self) -> Fabric:
        media = {name: _medium(spec, f"links.{name}") for name, spec in self.links.items()}
        kinds = {name: _kind(spec, f"devices.{name}", name) for name, spec in self.devices.items()}
        devices: list[Device] = []
        wires: list[Wire] = []
        points = {"spine", *self.racks}
        for i, given in enumerate(self.hosts):
            where = f"hosts[{i}]"
            spec = _mapping(given, where, _HOST_KEYS, required=("name", "devices"))
            for copy in range(_count(spec.get("count", 1), f"{where}.count")):
                name = f"{spec['name']}{copy}" if "count" in spec else str(spec["name"])
                points.add(name)
                new = _devices(spec, name, kinds, where)
                devices += new
                _refuse_more(devices)
                wires += _host_wires(spec, name, new, media, self.racks, where)
        for name, given in self.racks.items():
            spec = _mapping(given, f"racks.{name}", _RACK_KEYS)
            if spec.get("uplink") is not None:
                medium = _named(media, spec["uplink"], f"racks.{name}.uplink", "links")
                wires.append(_wire(name, "spine", medium))
        points |= {d.name for d in devices}
        wires += [_free_wire(given, media, points, f"wires[{i}]") for i, given in enumerate(self.wires)]
        return build(devices, wires)


def one_host(
    ranks: int, *, memory_bytes: float, rate: float, latency: float, type: Literal["cpu", "cuda"] = "cpu"
) -> Fabric:
    """Return this machine: ranks that share its memory, each with a port; a message passes both ports."""
    devices = [
        Device(name=f"here/{i}", host="here", kind=type, type=type, memory_bytes=memory_bytes / ranks)
        for i in range(ranks)
    ]
    return build(devices, [_wire(d.name, "here", _Medium(rate, latency / 2, True, False)) for d in devices])


def hosts_of_one_machine(
    host_of: tuple[int, ...],
    *,
    host_rates: tuple[float, ...],
    link_rates: tuple[tuple[float | None, ...], ...] | None,
    memory_bytes: float,
    inside_rate: float,
    latency: float,
    burst: float = 0.0,
) -> Fabric:
    """Return the paced cluster: rank r on host host_of[r]; rates in bytes/s, link_rates[i][j] of the route from i to j.

    `burst`: bytes that an idle link passes at once. link_rates adds a link to the route of a pair.
    """
    devices = [
        Device(name=f"h{h}/{r}", host=f"h{h}", kind="cpu", type="cpu", memory_bytes=memory_bytes / len(host_of))
        for r, h in enumerate(host_of)
    ]
    inside = _Medium(inside_rate, latency / 2, True, False)
    wires = [replace(_wire(d.name, d.host, inside), burst=float("inf")) for d in devices]
    links = [
        replace(_wire(f"h{h}", "switch", _Medium(rate, latency / 2, True, False)), burst=burst)
        for h, rate in enumerate(host_rates)
    ]
    fabric = build(devices, wires + links)
    return fabric if link_rates is None else _slower_pairs(fabric, link_rates, host_of)


def _slower_pairs(fabric: Fabric, link_rates: tuple[tuple[float | None, ...], ...], host_of: tuple[int, ...]) -> Fabric:
    """Return a fabric with an additional link on each route that has an entry in `link_rates`."""
    links, number = list(fabric.links), {}
    for i, row in enumerate(link_rates):
        for j, rate in enumerate(row):
            if rate is not None:
                number[i, j] = len(links)
                links.append(Link(name=f"h{i}=>h{j}", rate=rate, latency=0.0, burst=float("inf")))
    routes = tuple(
        tuple(
            (*path, number[a, b]) if (a, b) in number and path else path for b, path in zip(host_of, row, strict=True)
        )
        for a, row in zip(host_of, fabric.routes, strict=True)
    )
    return Fabric(fabric.devices, tuple(links), routes)


def _mapping(given: object, where: str, keys: tuple[str, ...], *, required: tuple[str, ...] = ()) -> JsonObject:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}={given} must have the keys {', '.join(keys)}")
    for key in given:
        if key not in keys:
            raise ValueError(f"{where}.{key} is unknown; {where} has {', '.join(keys)}")
    for key in required:
        if key not in given:
            raise ValueError(f"{where}.{key} is missing")
    return given


def _named(table: Mapping[str, T], name: object, where: str, group: str) -> T:
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"{where}={name} is not among {group} ({', '.join(map(str, table)) or 'none'}); add it there")
    return table[name]


def _count(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise ValueError(f"{where}={value} must be a whole number from 1 to {_MOST}")
    return value


def _refuse_more(devices: Sequence[Device]) -> None:
    """Raise ValueError for too many devices: every pair has a route."""
    if len(devices) > _MOST:
        raise ValueError(f"hosts has more than {_MOST} devices; give it fewer")


def _medium(given: object, where: str) -> _Medium:
    spec = _mapping(given, where, _LINK_KEYS, required=("rate",))
    flags = {key: spec.get(key, default) for key, default in (("duplex", True), ("shared", False))}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{where}.{key}={value} must be true or false")
    return _Medium(
        parse(spec["rate"], "rate", name=f"{where}.rate"),
        parse(spec.get("latency", "0 us"), "seconds", name=f"{where}.latency", zero=True),
        flags["duplex"],
        flags["shared"],
    )


def _kind(given: object, where: str, kind: str) -> Device:
    """Return a device without name and host."""
    spec = _mapping(given, where, _DEVICE_KEYS, required=("type", "memory"))
    if spec["type"] not in ("cpu", "cuda"):
        raise ValueError(f"{where}.type={spec['type']} must be cpu or cuda")
    speeds = [spec.get("speed"), spec.get("memory_rate")]
    if (speeds[0] is None) != (speeds[1] is None):
        raise ValueError(f"{where} has one of speed and memory_rate; give both, or neither for the machine at hand")
    return Device(
        name="",
        host="",
        kind=kind,
        type=spec["type"],
        memory_bytes=parse(spec["memory"], "bytes", name=f"{where}.memory"),
        speed=None if speeds[0] is None else parse(speeds[0], "speed", name=f"{where}.speed"),
        memory_rate=None if speeds[1] is None else parse(speeds[1], "rate", name=f"{where}.memory_rate"),
    )


def _devices(spec: JsonObject, host: str, kinds: Mapping[str, Device], where: str) -> list[Device]:
    devices: list[Device] = []
    if not isinstance(spec["devices"], Mapping):
        raise ValueError(f"{where}.devices={spec['devices']} must say how many of each kind, such as {{v100: 4}}")
    for kind, count in spec["devices"].items():
        device = _named(kinds, kind, f"{where}.devices.{kind}", "devices")
        for _ in range(_count(count, f"{where}.devices.{kind}")):
            devices.append(replace(device, name=f"{host}/{len(devices)}", host=host))
        _refuse_more(devices)
    return devices


def _wire(a: str, b: str, medium: _Medium, *, shared: str | None = None) -> Wire:
    return Wire(ends=(a, b), rate=medium.rate, latency=medium.latency, duplex=medium.duplex, shared=shared)


def _host_wires(
    spec: JsonObject,
    host: str,
    devices: list[Device],
    media: Mapping[str, _Medium],
    racks: JsonObject,
    where: str,
) -> list[Wire]:
    wires: list[Wire] = []
    if spec.get("inside") is not None:
        inside = _named(media, spec["inside"], f"{where}.inside", "links")
        wires += [_wire(d.name, host, inside, shared=f"{host}.bus" if inside.shared else None) for d in devices]
    elif len(devices) == 1:
        wires.append(_wire(devices[0].name, host, _Medium(float("inf"), 0.0, True, False)))
    if spec.get("nic") is None:
        return wires
    nic = _named(media, spec["nic"], f"{where}.nic", "links")
    if spec.get("rack") is not None:
        _named(racks, spec["rack"], f"{where}.rack", "racks")
    return [*wires, _wire(host, str(spec.get("rack") or "spine"), nic)]


def _free_wire(given: object, media: Mapping[str, _Medium], points: set[str], where: str) -> Wire:
    spec = _mapping(given, where, _WIRE_KEYS, required=_WIRE_KEYS)
    ends = spec["between"]
    if not isinstance(ends, (list, tuple)) or len(ends) != 2:
        raise ValueError(f"{where}.between={ends} must be two points, such as [h0, h1]")
    for end in ends:
        if not isinstance(end, str) or end not in points:
            raise ValueError(f"{where}.between names {end}, but there are {', '.join(sorted(points))}")
    return _wire(ends[0], ends[1], _named(media, spec["link"], f"{where}.link", "links"))
