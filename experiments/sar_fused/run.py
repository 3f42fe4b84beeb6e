"""GAT inside SAR with the fused attention body and with an unfused one, beside graph parallelism, in blocks.

python experiments/sar_fused/run.py            # writes results.jsonl, about 15 minutes; report.py: the tables
python experiments/sar_fused/run.py --smoke    # a minute: does it run? writes smoke.jsonl

The unfused body is the kernels' specification (GNNPAR_KERNELS=naive): it writes every tensor of edges out, as
operations of plain torch do. Needs root, iproute2 and a cgroup controller of CPU time. A study that was stopped goes on
where it was.
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks

BODIES = {"fused": [], "unfused": ["GNNPAR_KERNELS=naive"]}
STRATEGIES = {"graph_parallel": ["strategy=graph_parallel"], "sar": ["strategy=sar"]}
WORLDS = {
    "2 ranks, loopback": ["world_size=2", "threads_per_rank=1"],
    "4 ranks, 1 Gbit/s": blocks.slow_motion(4, gbps=1),
}
EPOCHS = 16
# the graph and the model of sar_memory
COMMON = [
    "model=gat",
    "model.heads=4",
    "model.hidden=128",
    "model.num_layers=3",
    "dataset=sbm",
    "dataset.num_features=128",
    f"epochs={EPOCHS}",
    f"eval_every={EPOCHS}",
    "seed=0",
]


def jobs() -> blocks.Jobs:
    return {
        f"{world}; {strategy}, {body}": [*how, *STRATEGIES[strategy], *variables]
        for world, how in WORLDS.items()
        for strategy in STRATEGIES
        for body, variables in BODIES.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny graph, one block")
    parser.add_argument("--blocks", type=int, default=5)
    options = parser.parse_args()
    out = HERE / ("smoke.jsonl" if options.smoke else "results.jsonl")
    common = [*COMMON, f"dataset.num_nodes={1000 if options.smoke else 20000}"]
    blocks.run(jobs(), blocks=range(1 if options.smoke else options.blocks), common=common, out=out, whole=True)


if __name__ == "__main__":
    main()
