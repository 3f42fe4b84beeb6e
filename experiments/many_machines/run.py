"""Epochs of 4, 8 and 16 machines with links of 1 Gbit/s, in slow motion (`launch.dilation`): pipelines, and SAR.

python experiments/many_machines/run.py                  # both parts, an hour
python experiments/many_machines/run.py rounds           # of SAR alone: writes rounds.jsonl, 20 minutes
python experiments/many_machines/run.py --smoke          # four minutes: does it run? writes smoke_PART.jsonl

Needs root, iproute2 and a cgroup controller of CPU time. A study that was stopped goes on where it was.
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks

EPOCHS = {"deep": 12, "wide": 16}
# the graphs of four_machines, with linear layers in and out of the deep model, as GNNPipe's paper has them
GRAPHS = {
    "deep": [
        "dataset=sbm_reddit",
        "dataset.scale=0.025",
        "dataset.avg_degree=80",
        "model.hidden=100",
        "model.encoder=linear",
        "model.decoder=linear",
    ],
    "wide": [
        "dataset=sbm",
        "dataset.num_nodes=40000",
        "dataset.num_features=128",
        "model.hidden=128",
        "model.num_layers=3",
    ],
}
TINY = {"deep": ["dataset.scale=0.003", "dataset.avg_degree=12"], "wide": ["dataset.num_nodes=2000"]}
VANILLA = ["strategy=graph_parallel", "strategy.overlap=none"]
BF16 = ["strategy=graph_parallel", "codec=bf16"]
PIPE = ["strategy=gnnpipe"]
SINGLE = ["strategy=single"]
PIPES = {  # (layers, ranks) -> chunks; four a rank are the default, 16 the most that parts of this graph bear on 16
    (8, 4): (16,),
    (32, 4): (16,),
    (128, 4): (16,),
    (32, 8): ("one", 8, 16, 32),
    (32, 16): (16,),
}
ROUNDS = {
    "graph_parallel": ["strategy=graph_parallel"],
    "sar": ["strategy=sar"],
    "sar, rounds of a peer": ["strategy=sar", "strategy.rounds=peer"],
    "sar, rounds of a peer, prefetch 0": ["strategy=sar", "strategy.rounds=peer", "strategy.prefetch=0"],
}


def pipelines() -> dict[str, tuple[int, list[str]]]:
    """Name -> ranks and overrides."""
    found = {"32 layers, 1 rank; single": (1, ["model.num_layers=32", *SINGLE])}
    for (layers, ranks), counts in PIPES.items():
        cell, depth = f"{layers} layers, {ranks} ranks", f"model.num_layers={layers}"
        found[f"{cell}; vanilla"] = (ranks, [depth, *VANILLA])
        if layers == 32:
            found[f"{cell}; graph_parallel bf16"] = (ranks, [depth, *BF16])
        for chunks in counts:
            name = f"{cell}; gnnpipe, {'1 chunk' if chunks == 'one' else f'{chunks} chunks'}"
            found[name] = (ranks, [depth, *PIPE, f"strategy.chunks={chunks}"])
    return found


def rounds() -> dict[str, tuple[int, list[str]]]:
    """Name -> ranks and overrides of three layers."""
    return {f"3 layers, {ranks} ranks; {name}": (ranks, how) for ranks in (8, 16) for name, how in ROUNDS.items()}


PARTS = {"rounds": ("wide", rounds), "pipelines": ("deep", pipelines)}


def jobs(part: str, smoke: bool) -> blocks.Jobs:
    """`single` has one core, undilated."""
    kind, listed = PARTS[part]
    graph = [*GRAPHS[kind], *(TINY[kind] if smoke else [])]
    about = ["model=gcn", *graph, f"epochs={EPOCHS[kind]}", f"eval_every={EPOCHS[kind]}", "seed=0"]
    found = {}
    for name, (ranks, strategy) in listed().items():
        links = ["threads_per_rank=1"] if ranks == 1 else blocks.slow_motion(ranks, gbps=1)
        found[name] = [*about, *strategy, *links]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; or both")
    parser.add_argument("--smoke", action="store_true", help="tiny graphs, one block")
    parser.add_argument("--blocks", type=int, default=3)
    options = parser.parse_args()
    count = 1 if options.smoke else options.blocks
    for part in options.parts or PARTS:
        out = HERE / f"{'smoke_' * options.smoke}{part}.jsonl"
        blocks.run(jobs(part, options.smoke), blocks=range(count), common=[], out=out, whole=True)


if __name__ == "__main__":
    main()
