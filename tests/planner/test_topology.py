"""Topology files: units, presets, routes, and one clear line for what is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gnnpar.config.compose import compose
from gnnpar.pricing.fabric import Device, Wire, build
from gnnpar.pricing.quantity import bytes_text, parse, rate_text, seconds_text
from gnnpar.pricing.topology import Machines, hosts_of_one_machine, one_host
from gnnpar.settings import ConfigError
from outcomes import refused

GPU = {"type": "cuda", "memory": "16 GiB", "speed": "10 Tflop/s", "memory_rate": "500 GB/s"}
LINKS = {"nvlink": {"rate": "20 GB/s", "latency": "5 us"}, "nic": {"rate": "25 Gbit/s", "latency": "30 us"}}
HOSTS = ({"name": "h", "devices": {"gpu": 2}, "inside": "nvlink", "nic": "nic", "count": 2},)


def machines(**changes: Any) -> Machines:
    return Machines(**({"devices": {"gpu": GPU}, "hosts": HOSTS, "links": LINKS} | changes))


def test_units() -> None:
    assert parse("25 Gbit/s", "rate", name="x") == 25e9 / 8
    assert parse("16 GiB", "bytes", name="x") == 16 * 2**30
    assert parse("5us", "seconds", name="x") == pytest.approx(5e-6)
    assert parse("1.5e3 Gflop/s", "speed", name="x") == 1.5e12
    assert (rate_text(25e9 / 8), bytes_text(16 * 2**30), seconds_text(0.0123)) == ("25 Gbit/s", "16 GiB", "12.3 ms")


@pytest.mark.parametrize(
    ("text", "dimension", "said"),
    [
        ("fast", "speed", "x=fast must be a number and a unit, such as 14 Tflop/s"),
        ("3 GiB", "seconds", "x=3 GiB has the unknown unit GiB; write it as in 5 us"),
    ],
)
def test_quantity_of_another_dimension_is_refused(text: Any, dimension: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        parse(text, dimension, name="x")


def test_routes_pass_ports_and_nics() -> None:
    fabric = machines().fabric
    assert [d.name for d in fabric.devices] == ["h0/0", "h0/1", "h1/0", "h1/1"]
    assert [link.name for link in fabric.path(0, 1)] == ["h0/0->h0", "h0->h0/1"]
    assert [link.name for link in fabric.path(0, 3)] == ["h0/0->h0", "h0->spine", "spine->h1", "h1->h1/1"]
    assert fabric.routes[2][2] == ()
    assert fabric.rate(0, 3) == 25e9 / 8
    assert fabric.latency(0, 3) == pytest.approx(70e-6)
    assert fabric.classes() == [[0, 1], [2, 3]]
    assert fabric.topology(4).hosts == (2, 2)
    assert fabric.first(2).topology(2).hosts == ()
    machines(hosts=(HOSTS[0] | {"count": 1}, HOSTS[0] | {"name": "h0", "count": 1}))  # names that differ by their copy


def test_a_shared_medium_is_one_link_each_way() -> None:
    shared = LINKS | {"nvlink": LINKS["nvlink"] | {"shared": True}}
    fabric = machines(links=shared).fabric
    assert [link.name for link in fabric.path(0, 1)] == ["h0.bus.up", "h0.bus.down"]
    assert fabric.path(1, 0) == fabric.path(0, 1)
    half = LINKS | {"nvlink": LINKS["nvlink"] | {"shared": True, "duplex": False}}
    assert [link.name for link in machines(links=half).fabric.path(0, 1)] == ["h0.bus"]


def test_racks_and_wires() -> None:
    hosts = tuple({"name": n, "devices": {"gpu": 1}, "nic": "nic", "rack": r} for n, r in (("a", "x"), ("b", "y")))
    racks = {"x": {"uplink": "nic"}, "y": {"uplink": "nic"}}
    fabric = machines(hosts=hosts, racks=racks).fabric
    assert [link.name for link in fabric.path(0, 1)] == ["a/0->a", "a->x", "x->spine", "spine->y", "y->b", "b->b/0"]
    wired = machines(hosts=hosts, racks=racks, wires=({"between": ["a", "b"], "link": "nvlink"},)).fabric
    assert [link.name for link in wired.path(0, 1)] == ["a/0->a", "a->b", "b->b/0"]


def test_devices_forward_nothing() -> None:
    devices = [Device(name=n, host=n, kind="k", type="cpu", memory_bytes=1) for n in "abc"]
    wires = [Wire(ends=("a", "b"), rate=1, latency=0), Wire(ends=("b", "c"), rate=1, latency=0)]
    with pytest.raises(ValueError, match="device c cannot be reached from a"):
        build(devices, wires)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"hosts": ({"name": "h", "devices": {"gpu": 2}, "inside": "nvlink", "count": 2},)},
            "device h1/0 cannot be reached from h0/0",
        ),
        ({"hosts": ({"name": "h", "devices": {"gpu": 2}},)}, "device h/1 cannot be reached from h/0"),
        ({"hosts": ({"name": "h", "devices": {"cpu": 2}, "inside": "nvlink"},)}, "is not among devices (gpu)"),
        ({"hosts": ({"name": "h", "devices": {"gpu": 0}, "inside": "nvlink"},)}, "hosts[0].devices.gpu=0 must be"),
        ({"hosts": ({"name": "h", "devices": {"gpu": 2}, "inside": "pcie"},)}, "inside=pcie is not among links"),
        ({"hosts": ({"name": "h", "device": {"gpu": 2}},)}, "hosts[0].device is unknown"),
        ({"hosts": ({"name": "h", "devices": {"gpu": 1}, "nic": "nic", "rack": "r"},)}, "rack=r is not among racks"),
        ({"hosts": ()}, "hosts has no device"),
        ({"links": {"nvlink": {"rate": "-3 GB/s"}, "nic": LINKS["nic"]}}, "links.nvlink.rate=-3 GB/s must be above 0"),
        ({"links": {"nvlink": {"rate": "0 GB/s"}}}, "links.nvlink.rate=0 GB/s must be above 0"),
        ({"links": {"nvlink": {"rate": "3 GB"}, "nic": LINKS["nic"]}}, "links.nvlink.rate=3 GB has the unknown unit"),
        ({"links": {"nvlink": {"rate": "25 gbit/s"}}}, "did you mean Gbit/s?"),
        ({"links": {"nvlink": {"rate": 25}}}, "rate=25 must be a number and a unit, such as 25 Gbit/s"),
        ({"links": {"nvlink": {"latency": "3 us"}, "nic": {"rate": "1 GB/s"}}}, "links.nvlink.rate is missing"),
        ({"devices": {"gpu": GPU | {"memory": "lots"}}}, "devices.gpu.memory=lots must be a number and a unit"),
        ({"devices": {"gpu": {"type": "tpu", "memory": "1 GiB"}}}, "devices.gpu.type=tpu must be cpu or cuda"),
        ({"devices": {"gpu": {k: v for k, v in GPU.items() if k != "speed"}}}, "one of speed and memory_rate"),
        ({"hosts": ({"name": "h", "devices": {"gpu": 1}, "nic": "nic"},) * 2}, "device names stand twice"),
        ({"wires": ({"between": ["h0", "h9"], "link": "nic"},)}, "wires[0].between names h9"),
        (
            {"hosts": ({"name": "h", "devices": {"gpu": 10**9}},)},
            "gpu=1000000000 must be a whole number from 1 to 1024",
        ),
        ({"hosts": ({**HOSTS[0], "count": 10**9},)}, "count=1000000000 must be a whole number from 1 to 1024"),
        (
            {"hosts": ({**HOSTS[0], "devices": {"gpu": 1000}, "count": 1000},)},
            "hosts has more than 1024 devices; give it",
        ),
        ({"hosts": ({"name": "h", "devices": {"gpu": 2}, "inside": {"x": 1}},)}, "inside={'x': 1} is not among links"),
    ],
)
def test_what_is_wrong_is_one_line(changes: dict[str, Any], said: str) -> None:
    with refused(re.escape(said)):
        machines(**changes)


def test_presets_compose() -> None:
    sizes = {"two_nodes": 4, "dgx_v100": 8, "two_dgx_a100": 16, "pcie_server": 4, "racks": 32, "mixed_gpus": 16}
    for name, size in sizes.items():
        topology = compose([f"topology={name}"]).topology
        assert isinstance(topology, Machines)
        assert topology.fabric.size == size, name
    assert len(compose(["topology=mixed_gpus"]).topology.fabric.classes()) == 7  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"topology: links\.memory.rate=1 Gbps has the unknown unit Gbps"):
        compose(["topology=two_nodes", "topology.links.memory.rate=1 Gbps"])


def test_this_machine_and_the_paced_cluster() -> None:
    here = one_host(2, memory_bytes=8e9, rate=1e9, latency=2e-5)
    assert (here.rate(0, 1), here.latency(0, 1)) == (1e9, 2e-5)
    assert here.devices[0].memory_bytes == 4e9
    paced = hosts_of_one_machine(
        (0, 0, 1, 1),
        host_rates=(1e8, 2e8),
        link_rates=((None, 5e7), (None, None)),
        memory_bytes=8e9,
        inside_rate=1e9,
        latency=1e-4,
    )
    assert [paced.rate(a, b) for a, b in ((0, 1), (0, 2), (2, 0), (1, 3))] == [1e9, 5e7, 1e8, 5e7]
    with pytest.raises(ValueError, match="5 ranks do not fit on the topology's 4 devices: set world_size=4"):
        paced.first(5)
