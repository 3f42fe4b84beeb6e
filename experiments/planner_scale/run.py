"""Which strategy the planner predicts to be fastest, on paper: depth, graph size, ranks up to 1024 and link speed.

Nothing is measured: rates are derived from a data sheet, partitions follow a law, closed forms are added up.
"""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import records
from planner_scale.paper import Candidate, Cluster, Paper
from planner_search.instances import law_of
from records import Files

from gnnpar.models.resgcn import ResGCN
from gnnpar.parallel.declared import DeclaredCandidate
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipeline.cost import PipelineCandidate
from gnnpar.parallel.pipeline.placing import even_cuts
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.planner.extract import record
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.rates import derived
from gnnpar.pricing.statistics import GraphStats

DEVICE = {"speed": 19.5e12, "memory_rate": 2039e9, "memory_bytes": 80 * 2**30}  # an A100's data sheet
PER_HOST, PORT, NIC_LATENCY = 8, (300e9, 5e-6), 8e-6
HIDDEN, DEGREE, FEATURES, CLASSES, QUALITY = 128, 15, 128, 32, 0.3
DEPTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
RANKS = tuple(2**i for i in range(1, 11))
NODES = tuple(10 ** (5 + i / 2) for i in range(8))
RATES = (1, 2, 5, 10, 25, 50, 100, 200, 400)  # Gbit/s of a host
DEEP = {"ranks": RANKS, "layers": DEPTHS}
PANELS: dict[str, tuple[str, dict[str, Sequence[float]], dict[str, float]]] = {  # title, two axes, what is fixed
    "depth, slow links": ("2 Gbit/s a host", DEEP, {"nodes": 1e7, "rate": 2}),
    "depth": ("25 Gbit/s a host", DEEP, {"nodes": 1e7, "rate": 25}),
    "depth, fast links": ("400 Gbit/s a host", DEEP, {"nodes": 1e7, "rate": 400}),
    "nodes": ("32 layers, 25 Gbit/s", {"ranks": RANKS, "nodes": NODES}, {"layers": 32, "rate": 25}),
    "rate": ("32 layers, 10^7 nodes", {"ranks": RANKS, "rate": RATES}, {"layers": 32, "nodes": 1e7}),
    "depth and rate": ("64 ranks, 10^7 nodes", {"rate": RATES, "layers": DEPTHS}, {"ranks": 64, "nodes": 1e7}),
}


@cache
def model(layers: int) -> ModelIR:
    made = ResGCN(num_layers=layers, hidden=HIDDEN, encoder="linear", decoder="linear", norm="layer")
    return record(made.build(FEATURES, CLASSES, seed=0), FEATURES)


def candidates(layers: int, ranks: int) -> list[Candidate]:
    """One a family and knob; grids are powers of two, chunks 0 (one), 1, 2, 4, 8 times the stages."""
    found: list[Candidate] = [
        DeclaredCandidate(strategy=GraphParallel(), parts=ranks),
        DeclaredCandidate(strategy=SAR(), parts=ranks),
        DeclaredCandidate(strategy=GraphParallel(), parts=ranks, bits=4),
    ]
    for stages in (2**i for i in range(1, 11) if 2**i <= min(ranks, layers)):
        for chunks in (1, *(factor * stages for factor in (1, 2, 4, 8))):
            cuts = even_cuts(layers, stages)
            found.append(PipelineCandidate(stages=stages, parts=ranks // stages, chunks=chunks, cuts=cuts))
    return found


@cache
def point(*, layers: int, nodes: float, ranks: int, rate: float) -> dict[str, Any]:
    """Seconds of the best of each family, null where none fits; pipelines with one chunk are a family of their own."""
    graph = GraphStats(int(nodes), int(DEGREE * nodes), FEATURES, CLASSES, int(nodes / 2))
    law = law_of(graph, "community", QUALITY)
    rates = derived(DEVICE["speed"], DEVICE["memory_rate"])
    cluster = Cluster(per_host=PER_HOST, port=PORT, nic=(rate * 1e9 / 8, NIC_LATENCY), rates=rates)
    paper = Paper(model(layers), graph, law, cluster)
    priced = []
    for candidate in candidates(layers, ranks):
        if paper.peak_bytes(candidate) <= 0.92 * DEVICE["memory_bytes"]:
            one = isinstance(candidate, PipelineCandidate) and candidate.chunks == 1
            priced.append((candidate.family + ", one chunk" * one, -paper.epoch(candidate).seconds))
    best = dict(sorted(priced))  # of a family the last
    return {"alpha": round(law(ranks)[0], 6), "seconds": {k: float(f"{-v:.6g}") for k, v in best.items()}}


def run(files: Files) -> None:
    """Price every point of each panel; in a rehearsal, its corners."""
    rows = []
    for panel, (_, axes, fixed) in PANELS.items():
        xs, ys = axes.values()
        if files.smoke:
            xs, ys = (xs[0], xs[-1]), (ys[0], ys[2])
        points = [fixed | dict(zip(axes, at, strict=True)) for at in itertools.product(xs, ys)]
        rows += [{"panel": panel, **at, **point(**dict(sorted(at.items())))} for at in points]
        print(f"{panel}: {len(points)} points", flush=True)
    records.replace(files(), rows)
