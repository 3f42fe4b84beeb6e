"""ogbn-papers100M on paper: what the planner's prices say of SAR's cluster, beside what SAR published of it.

    python experiments/scale/run.py papers     # writes papers100m.jsonl, seconds

Nothing is measured: rates are derived from a data sheet, the partition follows a law. Graph: 111,059,956 nodes, 3.2e9
edges in both directions; machines of two 36-core Ice Lake processors, 200 Gbit/s between any two (SAR, MLSys 2022).
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / name) for name in ("planner_scale", "planner_search", "")]

import records
from instances import law_of
from paper import Cluster, Paper

from gnnpar.models.gat import GAT
from gnnpar.models.sage import SAGE
from gnnpar.parallel.declared import DeclaredCandidate
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.planner.extract import record
from gnnpar.pricing.rates import derived
from gnnpar.pricing.statistics import GraphStats

# 72 cores of 2.4 GHz with two 512-bit units; 16 channels of DDR4-3200
SPEED, MEMORY_RATE = 72 * 2.4e9 * 64, 16 * 25.6e9
LINK = (200e9 / 8, 2e-6)  # bytes/s and seconds
GRAPH = GraphStats(111_059_956, 3_200_000_000, 128, 172, 1_207_179)
MODELS = {"sage": SAGE(num_layers=3, hidden=256), "gat": GAT(num_layers=3, hidden=128, heads=4)}
CUTS = {"random": ("random", 1.0), "0.3 of random": ("community", 0.3)}
RANKS = (32, 64, 128)


def main() -> None:
    cluster = Cluster(per_host=1, port=LINK, nic=LINK, rates=derived(SPEED, MEMORY_RATE))
    rows = []
    for name, config in MODELS.items():
        ir = record(config.build(GRAPH.features, GRAPH.classes, seed=0), GRAPH.features)
        for cut, (family, quality) in CUTS.items():
            paper = Paper(ir, GRAPH, law_of(GRAPH, family, quality), cluster)
            for ranks in RANKS:
                priced = {
                    "vanilla": DeclaredCandidate(strategy=GraphParallel(overlap="none"), parts=ranks),
                    "sar": DeclaredCandidate(strategy=SAR(), parts=ranks),
                }
                for strategy, candidate in priced.items():
                    row = {"model": name, "cut": cut, "ranks": ranks, "strategy": strategy}
                    seconds, peak = paper.epoch(candidate).seconds, paper.peak_bytes(candidate)
                    rows.append(row | {"seconds": float(f"{seconds:.6g}"), "peak_bytes": round(peak)})
    records.replace(HERE / "papers100m.jsonl", rows)
