"""Requests drawn at random, to train the guide and to compare searches: models x graphs x topologies.

A graph is a law of what its partition costs (`law_of`): `random` cuts of power-law degrees (exponent 2.5), exactly;
`community`, where a partitioner finds clusters and keeps a share of that; `mesh`, where a part of n nodes has about
4 sqrt(n) on its surface. One family of each of the three is held out of training: models gatv2 and resgcn, mesh
graphs, two racks.
"""

import random
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

from gnnpar.models.gat import GAT
from gnnpar.models.gatv2 import GATv2
from gnnpar.models.gcn import GCN
from gnnpar.models.gcnii import GCNII
from gnnpar.models.gin import GIN
from gnnpar.models.gnn import ModelConfig
from gnnpar.models.resgcn import ResGCN
from gnnpar.models.sage import SAGE
from gnnpar.placement import QUALITIES, Quality
from gnnpar.planner.extract import record
from gnnpar.planner.planner import Request
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.rates import derived
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.topology import Machines

FAMILIES = ("random", "community", "mesh")
_QUANTILES = 32
Split = Literal["train", "held_out"]
_MODELS: dict[str, Callable[..., ModelConfig]] = {"gcn": GCN, "sage": SAGE, "gat": GAT, "gin": GIN, "gcnii": GCNII}
_MODELS |= {"gatv2": GATv2, "resgcn": ResGCN}
HELD_OUT = {"models": ("gatv2", "resgcn"), "graphs": ("mesh",), "topologies": ("two_racks",)}
_ALL = {"models": tuple(_MODELS), "graphs": FAMILIES, "topologies": ("switch", "shared", "two_racks")}
_KINDS = {  # flop/s, bytes/s, GiB
    "v100": (14e12, 900e9, 32),
    "p100": (9.3e12, 549e9, 12),
    "a100": (19.5e12, 2039e9, 80),
    "t4": (8.1e12, 320e9, 16),
    "gtx1080ti": (11e12, 484e9, 11),
}
_ETHERNET = ("1 Gbit/s", "10 Gbit/s", "25 Gbit/s", "100 Gbit/s")


class Instance(NamedTuple):
    """name: of model, graph and topology."""

    name: str
    request: Request


def law_of(graph: GraphStats, family: str, quality: float) -> Callable[[int], tuple[float, float]]:
    """Parts -> (alpha, share of the edges that are cut). `quality`: of the partitioner, its cut over a random one's.

    A node of degree d has a copy in each of the P - 1 other parts with probability 1 - (1 - 1/P)^d.
    """
    mean = graph.edges / graph.nodes
    degrees = [(1 - (i + 0.5) / _QUANTILES) ** (-2 / 3) for i in range(_QUANTILES)]
    degrees = [d * mean * _QUANTILES / sum(degrees) for d in degrees]

    def law(parts: int) -> tuple[float, float]:
        others = parts - 1
        alpha = sum(others * (1 - (1 - 1 / parts) ** d) for d in degrees) / _QUANTILES
        share = others / parts
        if family == "community":
            return quality * alpha, quality * share
        if family == "mesh":
            alpha = min(alpha, 20 * quality * (parts / graph.nodes) ** 0.5)
            return alpha, min(share, alpha)
        return alpha, share

    return law


def families(split: Split, group: str) -> tuple[str, ...]:
    """Those of a split; nothing is in both."""
    held = HELD_OUT[group]
    return held if split == "held_out" else tuple(name for name in _ALL[group] if name not in held)


def draw(seed: int, *, split: Split, most: int = 16) -> Instance:
    """One instance of at most `most` devices; the same for the same arguments."""
    rng = random.Random(f"{split} {seed}")
    model, family, wiring = (rng.choice(families(split, group)) for group in ("models", "graphs", "topologies"))
    layers, hidden = rng.choice((2, 3, 4, 8, 16, 32, 64)), rng.choice((16, 32, 64, 128, 256, 512))
    nodes = int(10 ** rng.uniform(4, 6.7))
    degree = 10 ** rng.uniform(0.5, 2)
    graph = GraphStats(nodes, int(nodes * degree), rng.choice((32, 100, 500)), 16, nodes // 2)
    machine = machine_of(_fabric(rng, wiring, most))
    law = law_of(graph, family, rng.uniform(0.05, 0.4))

    def even(parts: int) -> PartStats:
        alpha, share = law(parts)
        return PartStats.even(graph.nodes, graph.edges, parts, alpha=alpha, cut_share=share)

    allowed: frozenset[Quality] = frozenset(QUALITIES) if rng.random() < 0.75 else frozenset({"exact"})
    ir, weights = model_of(model, layers, hidden, graph.features), {"quantized": 1.05, "stale": 1.1}
    how: Any = {"uneven": lambda shares: even(len(shares)).reshaped(shares), "places": True, "fewer": True}
    request = Request(ir, graph, even, machine, machine.fabric.size, allowed, weights, **how)
    lossy = "any quality" if len(allowed) > 1 else "exact"
    name = f"{model} {layers}x{hidden}, {family} {nodes:.0e} nodes of degree {degree:.0f}, {wiring}, {lossy}"
    return Instance(name, request)


@cache
def model_of(name: str, layers: int, hidden: int, features: int) -> ModelIR:
    norm = {"norm": "layer", "encoder": "linear", "decoder": "linear"} if name in ("resgcn", "gcnii") else {}
    return record(_MODELS[name](num_layers=layers, hidden=hidden, **norm).build(features, 16, seed=0), features)


def machine_of(machines: Machines) -> Machine:
    """Return a machine of rates that follow from data sheets."""
    fabric = machines.fabric
    return Machine(fabric, tuple(derived(d.speed or 0, d.memory_rate or 0) for d in fabric.devices))


def device_of(kind: str, factor: float = 1.0) -> dict[str, str]:
    """Return the entry of a device in a topology, times as fast as its data sheet says."""
    speed, memory_rate, gib = (each * scale for each, scale in zip(_KINDS[kind], (factor, factor, 1), strict=True))
    rates = {"speed": f"{speed / 1e12:.3f} Tflop/s", "memory_rate": f"{memory_rate / 1e9:.1f} GB/s"}
    return {"type": "cuda", "memory": f"{gib} GiB", **rates}


def _fabric(rng: random.Random, wiring: str, most: int) -> Machines:
    """Up to 8 hosts of 1 to 8 devices, of 2 or 3 kinds; their speeds vary by a lognormal of 0.3."""
    kinds = rng.sample(sorted(_KINDS), rng.choice((2, 2, 3)))
    devices = {kind: device_of(kind, rng.lognormvariate(0, 0.3)) for kind in kinds}
    hosts, left = [], most
    for i in range(rng.randint(2, 8)):
        count = min(left, rng.choice((1, 2, 4, 4, 8)))
        if count == 0:
            break
        left -= count
        rack = {"rack": rng.choice(("left", "right"))} if wiring == "two_racks" else {}
        hosts.append({"name": f"h{i}", "devices": {rng.choice(kinds): count}, "inside": "bus", "nic": "nic", **rack})
    shared = wiring == "shared" or (wiring == "two_racks" and rng.random() < 0.5)
    bus = {"rate": "12 GB/s" if shared else rng.choice(("12 GB/s", "50 GB/s", "300 GB/s")), "latency": "8 us"}
    links = {
        "bus": bus | {"shared": shared},
        "nic": {"rate": rng.choice(_ETHERNET), "latency": "30 us"},
        "trunk": {"rate": rng.choice(_ETHERNET), "latency": "15 us"},
    }
    racks = {"left": {"uplink": "trunk"}, "right": {"uplink": "trunk"}} if wiring == "two_racks" else {}
    return Machines(devices=devices, hosts=tuple(hosts), links=links, racks=racks)
