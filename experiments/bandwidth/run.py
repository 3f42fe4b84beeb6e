"""Epoch time against the rate of the link, per strategy, two hosts with one core each. Needs root and iproute2.

python experiments/bandwidth/run.py      # writes results.jsonl, about 20 minutes; report.py draws the lines
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks

RATES = (0.1, 0.3, 1, 3)  # Gbit/s
STRATEGIES = {
    "vanilla": ["strategy=graph_parallel", "strategy.overlap=none"],
    "graph_parallel": ["strategy=graph_parallel"],
    "graph_parallel bf16": ["strategy=graph_parallel", "codec=bf16"],
    "sar": ["strategy=sar"],
    "adaqp": ["strategy=adaqp"],
}
COMMON = [
    "dataset=sbm",
    "dataset.num_nodes=20000",
    "dataset.num_features=128",
    "model=gcn",
    "model.num_layers=3",
    "model.hidden=128",
    "world_size=2",
    "threads_per_rank=1",
    "launch=paced",
    "launch.hosts=2",
    "seed=0",
    "epochs=20",
    "eval_every=20",
]

if __name__ == "__main__":
    jobs = {
        f"{rate} {name}": [*overrides, f"launch.rate_gbps={rate}"]
        for rate in RATES
        for name, overrides in STRATEGIES.items()
    }
    blocks.run(jobs, blocks=range(5), common=COMMON, out=HERE / "results.jsonl")
