"""Bytes and memory of R-MAT of 2^16 to 2^24 nodes, trained from shards on disk; papers100M on paper.

`study.py run scale memory` measures on any machine, also a busy one (2^24 nodes: 12 GB of TMPDIR), `papers` prices in
seconds; `--of 14 16` names other sizes.
"""

import itertools
import re
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any  # of JSON

import blocks
import records
from planner_scale.paper import Cluster, Paper
from planner_search.instances import law_of
from records import Files

from gnnpar.models.gat import GAT
from gnnpar.models.sage import SAGE
from gnnpar.parallel.declared import DeclaredCandidate
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.planner.extract import record
from gnnpar.pricing.rates import derived
from gnnpar.pricing.statistics import GraphStats

SCALES, SMALL = range(16, 25), (8,)
SOURCE = ["dataset=rmat", "dataset.num_features=32", "partition=ldg"]
TRAINED = ["model=gcn", "model.num_layers=2", "model.hidden=32", "threads_per_rank=1", "seed=0", "checkpoint.keep=0"]
TRAINED += ["epochs=4", "eval_every=4"]
STRATEGIES = {
    "graph_parallel": ["strategy=graph_parallel"],
    "graph_parallel bf16": ["strategy=graph_parallel", "codec=bf16"],
    "adaqp": ["strategy=adaqp", "strategy.codec.period=2"],  # bits are chosen within so few epochs
    "sar": ["strategy=sar", "strategy.prefetch=0"],
}
ALONE = {"single": ["strategy=single"], "gnnpipe": ["strategy=gnnpipe"]}
CELLS = [(1, "single"), *itertools.product((2, 4, 8), STRATEGIES), (2, "gnnpipe")]
KEPT = ("memory_bytes", "bytes_per_epoch", "loss", "hashes", "cores", "hardware", "versions", "commit")
EDGES = re.compile(r"rmat: \d+ nodes, (\d+) edges")


def memory(files: Files, of: Sequence[str]) -> None:
    """Train on every number of ranks from shards, smallest graphs first; gnnpipe reads none."""
    out = files("memory")
    done = {(row["scale"], row["ranks"], row["strategy"]) for row in records.read(out)}
    scales = map(int, of) if of else SMALL if files.smoke else SCALES
    todo = [cell for cell in ((scale, *each) for scale in scales for each in CELLS) if cell not in done]
    clock = blocks.Clock(len(todo))
    for scale, ranks in dict.fromkeys((scale, ranks) for scale, ranks, _ in todo):
        with tempfile.TemporaryDirectory() as folder:
            cut = [*SOURCE, f"dataset.scale={scale}", f"world_size={ranks}"]
            counted = EDGES.search(blocks.output_of([*blocks.GNNPAR, "partition", *cut, f"out={folder}/shards"]))
            assert counted is not None
            edges = int(counted[1])  # in-edges, self loops included
            for name in [name for s, r, name in todo if (s, r) == (scale, ranks)]:
                source = cut if name == "gnnpipe" else [f"shards={folder}/shards"]
                result = blocks.train([*source, *TRAINED, *(STRATEGIES | ALONE)[name]])["result"]
                told: dict[str, Any] = {key: result[key] for key in KEPT}
                records.append(out, [{"scale": scale, "ranks": ranks, "strategy": name, "edges": edges, **told}])
                peak = max(result["memory_bytes"]["peak"]) / 2**20
                clock.tell(f"2^{scale} {name} on {ranks}: {peak:.0f} MiB")


# ogbn-papers100M, 111,059,956 nodes and 3.2e9 edges in both directions, on SAR's cluster (MLSys 2022): machines of two
# 36-core Ice Lake processors of 2.4 GHz with two 512-bit units, 16 channels of DDR4-3200, 200 Gbit/s between any two
SPEED, MEMORY_RATE = 72 * 2.4e9 * 64, 16 * 25.6e9
LINK = (200e9 / 8, 2e-6)  # bytes/s and seconds
GRAPH = GraphStats(111_059_956, 3_200_000_000, 128, 172, 1_207_179)
MODELS = {"sage": SAGE(num_layers=3, hidden=256), "gat": GAT(num_layers=3, hidden=128, heads=4)}
CUTS = {"random": ("random", 1.0), "0.3 of random": ("community", 0.3)}
PRICED = {"vanilla": GraphParallel(overlap="none"), "sar": SAR()}


def papers(files: Files, of: Sequence[str]) -> None:
    """Write the planner's prices, from data sheets and a law of partitions. Nothing is measured."""
    records.replace(files("papers100m"), priced())


def priced() -> Iterator[dict[str, Any]]:
    cluster = Cluster(per_host=1, port=LINK, nic=LINK, rates=derived(SPEED, MEMORY_RATE))
    for (model, config), (cut, (family, quality)) in itertools.product(MODELS.items(), CUTS.items()):
        ir = record(config.build(GRAPH.features, GRAPH.classes, seed=0), GRAPH.features)
        paper = Paper(ir, GRAPH, law_of(GRAPH, family, quality), cluster)
        for ranks, (name, strategy) in itertools.product((32, 64, 128), PRICED.items()):
            candidate = DeclaredCandidate(strategy=strategy, parts=ranks)
            seconds, peak = paper.epoch(candidate).seconds, paper.peak_bytes(candidate)
            row = {"model": model, "cut": cut, "ranks": ranks, "strategy": name}
            yield row | {"seconds": float(f"{seconds:.6g}"), "peak_bytes": round(peak)}


PROGRAMS = {"memory": memory, "papers": papers}
