"""Bytes, memory and time of an epoch against the size of the graph: R-MAT of 2^16 to 2^24 nodes, from shards on disk.

    python experiments/scale/run.py memory                        # bytes and memory: any machine, also a busy one
    python experiments/scale/run.py memory --scales 14 16 18 20   # some sizes
    python experiments/scale/run.py times                         # of one and two ranks over loopback: a quiet machine
    python experiments/scale/run.py dilated                       # of 2, 4 and 8 ranks over 1 Gbit/s: quiet, and root
    python experiments/scale/run.py papers                        # papers100m.jsonl, on paper: seconds
    python experiments/scale/run.py STAGE --list                  # runs done of how many
    python experiments/scale/report.py

What is there is not run again. Shards lie in a temporary folder (--scratch; 2^24 nodes: 12 GB).
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any  # of JSON

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
import papers100m
import records

SCALES = {"memory": list(range(16, 25)), "times": [14, 16, 18, 20], "dilated": [14, 16]}
PAPER = "papers"  # the stage that measures nothing
GRAPH = ["dataset=rmat", "dataset.num_features=32", "partition=ldg"]
MODEL = ["model=gcn", "model.num_layers=2", "model.hidden=32", "threads_per_rank=1", "seed=0", "checkpoint.keep=0"]
STRATEGIES = {
    "graph_parallel": ["strategy=graph_parallel"],
    "graph_parallel bf16": ["strategy=graph_parallel", "codec=bf16"],
    "adaqp": ["strategy=adaqp"],
    "sar": ["strategy=sar", "strategy.prefetch=0"],
}
PIPE = {"gnnpipe": ["strategy=gnnpipe"]}  # reads no shards: the graph is made in memory
RANKS = (2, 4, 8)
BRIEF = ["epochs=4", "eval_every=4"]
CHOSEN = ["strategy.codec.period=2"]  # of AdaQP: bits are chosen within so few epochs
KEPT = ("memory_bytes", "bytes_per_epoch", "loss", "hashes", "cores", "hardware", "versions", "commit")
BLOCKS = 5
TIMED = ["epochs=55", "eval_every=55"]
PACED = ["launch=paced", "launch.rate_gbps=1"]
EDGES = re.compile(r"rmat: \d+ nodes, (\d+) edges")


def file_of(stage: str) -> Path:
    return HERE / f"{stage}.jsonl"


def cells(scales: list[int]) -> list[tuple[int, int, str]]:
    """(scale, ranks, strategy) of the stage `memory`, smallest first."""
    many = [(ranks, name) for ranks in RANKS for name in STRATEGIES]
    return [(scale, *each) for scale in scales for each in [(1, "single"), *many, (2, "gnnpipe")]]


def measure_memory(scales: list[int], scratch: Path | None) -> None:
    out = file_of("memory")
    done = {(row["scale"], row["ranks"], row["strategy"]) for row in records.read(out)}
    todo = [cell for cell in cells(scales) if cell not in done]
    clock = blocks.Clock(len(todo))
    for scale, ranks in dict.fromkeys((scale, ranks) for scale, ranks, _ in todo):
        names = [name for s, r, name in todo if (s, r) == (scale, ranks)]
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            size, shards = f"dataset.scale={scale}", f"{folder}/shards"
            cut = [*GRAPH, size, f"world_size={ranks}", f"out={shards}"]
            said = blocks.output_of([*blocks.GNNPAR, "partition", *cut])
            counted = EDGES.search(said)
            assert counted is not None
            edges = int(counted[1])  # in-edges, self loops included
            for name in names:
                whole = name == "gnnpipe"
                source = [*GRAPH, size, f"world_size={ranks}"] if whole else [f"shards={shards}"]
                asked = (STRATEGIES | PIPE).get(name, ["strategy=single"]) + (CHOSEN if name == "adaqp" else [])
                result = blocks.train([*source, *MODEL, *BRIEF, *asked])["result"]
                told: dict[str, Any] = {key: result[key] for key in KEPT}
                records.append(out, [{"scale": scale, "ranks": ranks, "strategy": name, "edges": edges, **told}])
                peak = max(result["memory_bytes"]["peak"]) / 2**20
                clock.tell(f"2^{scale} {name} on {ranks}: {peak:.0f} MiB")


def jobs(stage: str, scales: list[int]) -> blocks.Jobs:
    """Of the timed stages. Two ranks run undilated on two cores; D of more is such that none is starved."""
    found: dict[str, list[str]] = {}
    for scale in scales:
        size = [*GRAPH, f"dataset.scale={scale}", *MODEL, *TIMED]
        found[f"{scale}; 1; single"] = [*size, "strategy=single"]
        if stage == "times":
            found[f"{scale}; 1; single, all threads"] = [*size, "strategy=single", "threads_per_rank=auto"]
        for ranks in (2,) if stage == "times" else RANKS:
            links = [*PACED, f"launch.hosts={ranks}", f"launch.dilation={ranks // 2}"] if stage == "dilated" else []
            for name, asked in (STRATEGIES | PIPE).items():
                found[f"{scale}; {ranks}; {name}"] = [*size, *asked, f"world_size={ranks}", *links]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=[*SCALES, PAPER])
    parser.add_argument("--scales", nargs="+", type=int, help="log2 of the nodes; default by stage")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--scratch", type=Path, help="folder for shards while they are needed")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    options = parser.parse_args()
    if options.stage == PAPER:
        papers100m.main()
        return
    stage, scales = options.stage, options.scales or SCALES[options.stage]
    if options.list:
        runs = len(cells(scales)) if stage == "memory" else len(jobs(stage, scales)) * options.blocks
        print(f"{stage}: {len(records.read(file_of(stage)))} lines are there, of {runs} for these sizes")
    elif stage == "memory":
        measure_memory(scales, options.scratch)
    else:
        timed = jobs(stage, scales)
        blocks.run(timed, blocks=range(options.blocks), out=file_of(stage))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on from here") from None
