"""Epochs of a cluster in slow motion beside those of the same cluster at full speed. Needs root, iproute2 and cgroups.

python experiments/dilation/run.py [--blocks 3]      # writes results.jsonl, 6 minutes a block; report.py: tables
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks

DILATIONS = (1, 2, 4)
RATES = (0.3, 1, 3)  # Gbit/s of the undilated cluster
GCN = ["model=gcn", "model.num_layers=3", "model.hidden=128"]
GAT = ["model=gat", "model.num_layers=3", "model.hidden=64", "model.heads=4"]
METHODS = {
    "gcn vanilla": [*GCN, "strategy=graph_parallel", "strategy.overlap=none"],
    "gcn graph_parallel": [*GCN, "strategy=graph_parallel"],
    "gcn adaqp": [*GCN, "strategy=adaqp"],
    "gcn gnnpipe": [*GCN, "strategy=gnnpipe"],
    "gat graph_parallel": [*GAT, "strategy=graph_parallel"],
}
COMMON = [
    "dataset=sbm",
    "dataset.num_nodes=10000",
    "dataset.num_features=128",
    "world_size=2",
    "threads_per_rank=1",
    "launch=paced",
    "launch.hosts=2",
    "seed=0",
    "epochs=20",
    "eval_every=20",
]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=3)
    options = parser.parse_args()
    jobs = {
        f"{rate:g} {dilation} {name}": [*method, f"launch.rate_gbps={rate}", f"launch.dilation={dilation}"]
        for rate in RATES
        for dilation in DILATIONS
        for name, method in METHODS.items()
    }
    blocks.run(jobs, blocks=range(options.blocks), common=COMMON, out=HERE / "results.jsonl", whole=True)
