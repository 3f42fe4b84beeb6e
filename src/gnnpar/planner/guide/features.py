"""Input of the guide: a heterogeneous graph of op groups, device classes, links and partition sizes, and features of
each choice.

Source: TAG (arXiv 2302.06126). Times and sizes are logarithms of ratios to the seconds that all devices together need
to compute an epoch. Sizes count as the time to move them over the fastest link, as in TAG. Deviations: an op group is a
run of at most ceil(L / 16) layers; partition nodes are numbers of parts (2, 4, ...), since a grid's parts do not exist
yet; there is no feedback from a simulator, so the graph is encoded once per search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnpar.planner.search.points import POWERS, Points
from gnnpar.planner.search.tree import Point
from gnnpar.pricing.candidate import Candidate, Values

WIDTHS = {"op": 8, "device": 5, "link": 3, "part": 5}
RELATIONS = (
    ("op", "next", "op"),
    ("op", "prev", "op"),
    ("op", "on", "device"),
    ("device", "runs", "op"),
    ("device", "uses", "link"),
    ("link", "joins", "device"),
    ("part", "cuts", "op"),
    ("part", "finer", "part"),
)
PRICED = (("op", "on", "device"), ("device", "runs", "op"))  # relations with one feature per edge
NAMES = ("grid", "chunks", "bits", "overlap", "prefetch", "backward", "remat", "layout", "shares", "next")
"""Names of the space that the guide reads. It ignores other knobs."""
CHOICE_WIDTH = len(NAMES) + 5 + 16
_BLOCKS = 16


@dataclass(frozen=True)
class Scene:
    """nodes[type]: [count, WIDTHS[type]]. edges[relation]: [2, count] of (source, target). prices: [count, 1] of PRICED
    relations. kinds: device kind of each device node."""

    nodes: dict[str, Tensor]
    edges: dict[tuple[str, str, str], Tensor]
    prices: dict[tuple[str, str, str], Tensor]
    kinds: tuple[str, ...]


def _log(value: float, scale: float) -> float:
    """Return decades of a ratio over 3, clamped to +-2."""
    return max(-2.0, min(2.0, math.log10(max(value, 1e-30) / scale) / 3))


def scene(points: Points) -> Scene:
    """Return the scene of a request."""
    request, classes = points.request, points.places.classes
    fabric, ir = request.machine.fabric, request.ir
    rates = [request.machine.rates[c[0]] for c in classes]
    alone = [points.seconds_alone(r) for r in rates]
    scale = 1 / sum(len(c) / seconds for c, seconds in zip(classes, alone, strict=True))
    fastest = max((link.rate for link in fabric.links), default=1e9)
    size = max(1, -(-ir.num_layers // _BLOCKS))
    blocks = [range(i, min(i + size, ir.num_layers)) for i in range(0, ir.num_layers, size)]
    even = points.statistics(request.ranks, ()) if request.ranks > 1 else None
    moved = 4.0 * (even.alpha if even else 0.0) * request.graph.nodes
    seconds = [[points.seconds_alone(r, block) for r in rates] for block in blocks]
    nodes = {
        "op": [_op(points, b, s, scale, (moved, fastest)) for b, s in zip(blocks, seconds, strict=True)],
        "device": [_device(points, c, a, scale) for c, a in zip(classes, alone, strict=True)],
        "link": [],
        "part": [],
    }
    total = moved * max(1, sum(sum(f.width for f in ir.folds(i)) for i in range(ir.num_layers)))
    used = _used_links(points)
    for number in used:
        link = fabric.links[number]
        nodes["link"].append([_log(total / link.rate, scale), _log(link.latency, scale), len(used[number]) / 8])
    sizes = _sizes(request.ranks)
    nodes["part"] = [_part(points, parts) for parts in sizes]
    ops, devs = len(blocks), len(classes)
    chain = [(i, i + 1) for i in range(ops - 1)]
    pairs = [(i, j) for i in range(ops) for j in range(devs)]
    uses = [(c, i) for i, number in enumerate(used) for c in used[number]]
    edges = {
        RELATIONS[0]: chain,
        RELATIONS[1]: [(b, a) for a, b in chain],
        RELATIONS[2]: pairs,
        RELATIONS[3]: [(b, a) for a, b in pairs],
        RELATIONS[4]: uses,
        RELATIONS[5]: [(b, a) for a, b in uses],
        RELATIONS[6]: [(i, j) for i in range(len(sizes)) for j in range(ops)],
        RELATIONS[7]: [(i, i + 1) for i in range(len(sizes) - 1)],
    }
    price = torch.tensor([[_log(seconds[i][j], scale)] for i, j in pairs])
    return Scene(
        {name: torch.tensor(rows, dtype=torch.float32).view(len(rows), WIDTHS[name]) for name, rows in nodes.items()},
        {name: torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T for name, pairs in edges.items()},
        dict.fromkeys(PRICED, price),
        tuple(points.places.kind(i) for i in range(devs)),
    )


def _sizes(ranks: int) -> list[int]:
    return sorted({*(1 << i for i in range(1, 11) if 1 << i <= ranks), max(2, ranks)})


def _op(
    points: Points, block: range, seconds: Sequence[float], scale: float, moved: tuple[float, float]
) -> list[float]:
    """Return features of an op group. moved: (bytes per element of each halo row, bytes/s of the fastest link)."""
    ir, graph = points.request.ir, points.request.graph
    folds = [f for i in block for f in ir.folds(i)]
    width = sum(f.width * (1 + f.learned) for f in folds)
    cut = sum(ir.cuts[block.stop - 1]) if block.stop < ir.num_layers else 0
    return [
        _log(sum(seconds) / len(seconds), scale),
        _log(width * moved[0] / moved[1], scale),
        _log(4.0 * cut * graph.nodes / moved[1], scale),
        _log(4.0 * sum(ir.saved_of[i] for i in block) * graph.nodes, 2.0**30),
        float(any(not f.linear for f in folds)),
        float(any(f.pushed for f in folds)),
        len(block) / 8,
        math.log2(ir.num_layers) / 6,
    ]


def _device(points: Points, members: Sequence[int], alone: float, scale: float) -> list[float]:
    fabric = points.request.machine.fabric
    device = fabric.devices[members[0]]
    inside = fabric.rate(members[0], members[1]) if len(members) > 1 else 0.0
    need = 4.0 * points.request.graph.nodes * sum(points.request.ir.saved_of)
    return [
        math.log2(len(members)) / 4,
        _log(alone, scale),
        _log(need, device.memory_bytes),
        _log(inside, 1e9) if inside else -2.0,
        len(members) / fabric.size,
    ]


def _used_links(points: Points) -> dict[int, list[int]]:
    """Return link -> device classes that use it, from their first device to other classes or to its neighbour."""
    fabric, classes = points.request.machine.fabric, points.places.classes
    candidates_of: dict[int, list[int]] = {}
    for c, members in enumerate(classes):
        ends = [other[0] for other in classes if other is not members] + members[1:2]
        for number in sorted({n for end in ends for n in fabric.routes[members[0]][end]}):
            candidates_of.setdefault(number, []).append(c)
    return candidates_of


def _part(points: Points, parts: int) -> list[float]:
    ranks, layers = points.request.ranks, points.request.ir.num_layers
    stats = points.statistics(parts, ())
    edges = max(1.0, sum(stats.edges(p) for p in range(parts)))
    return [
        math.log2(parts) / 6,
        _log(stats.alpha, 1.0),
        sum(map(sum, stats.cut)) / edges,
        _log(layers * stats.alpha, ranks),
        parts / ranks,
    ]


def choice_features(points: Points, prefix: Point, rest: Point) -> tuple[Tensor, list[str]]:
    """Return features [choices, CHOICE_WIDTH] of the name after `prefix`, completed as in `rest`, and the device kind
    that each choice places ('' if none)."""
    names = list(points.space.choices)
    name, at = names[len(prefix)], len(prefix)
    rows, kinds = [], []
    for i, value in enumerate(points.space.choices[name]):
        chosen = points.space.at((*prefix, i, *rest[at + 1 :]))
        rows.append(_row(points, name, chosen, same=i == rest[at]))
        kinds.append(value if name.startswith("next") else "")
    return torch.tensor(rows, dtype=torch.float32), kinds


def _row(points: Points, name: str, chosen: Values, *, same: bool) -> list[float]:
    word, _, number = name.partition(".")
    grid: Candidate = chosen["grid"]
    stages, parts = grid.stages, grid.parts
    ranks, layers = points.request.ranks, points.request.ir.num_layers
    alpha = points.statistics(parts, ()).alpha if parts > 1 else 0.0
    return [
        *(float(word == other) for other in NAMES),
        *_kind(grid),
        math.log2(ranks) / 6,
        math.log2(stages * parts / ranks),
        math.log2(stages) / 6,
        math.log2(parts) / 6,
        math.log2(2 * chosen["chunks"]) / 4 if chosen.get("chunks") else 0.0,
        math.log2(chosen.get("bits", 32)) / 5,
        float(chosen.get("overlap", "edges") == "edges"),
        chosen.get("prefetch", 1) / 2,
        float(chosen.get("backward", "push") == "push"),
        float(chosen.get("remat", True)),
        POWERS[chosen["shares"]],
        float(chosen["layout"] == "parts"),
        _log(layers * alpha, ranks) if alpha else -2.0,
        math.log2(stages / layers) / 6,
        int(number or 0) / 8,
        float(same),
    ]


def _kind(grid: Candidate) -> tuple[float, ...]:
    """Return one-hot features of a grid: one rank; all layers on every rank with the whole halo, or in rounds; stages
    of one part; stages of several parts."""
    alone, flat = grid.ranks == 1, grid.stages == 1 and grid.ranks > 1
    kinds = (
        alone,
        flat and grid.whole_halo,
        flat and not grid.whole_halo,
        grid.stages > 1 and grid.parts == 1,
        grid.stages > 1 and grid.parts > 1,
    )
    return tuple(map(float, kinds))
