"""Epoch time of SAR in at least four rounds beside graph_parallel, two ranks, in interleaved blocks.

python experiments/sar_speed/run.py      # writes results.jsonl, about 8 minutes; report.py prints the table
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks  # noqa: E402

MODELS = {
    "gcn": ["model=gcn", "model.hidden=128", "model.num_layers=3"],
    "gat": ["model=gat", "model.heads=4", "model.hidden=128", "model.num_layers=3"],
}
# MiB a round: 18 k halo rows of 128 numbers and more are four rounds or five
STRATEGIES = {
    "graph_parallel": ["strategy=graph_parallel"],
    "sar": ["strategy=sar", "strategy.rounds=2.4"],
    "sar prefetch 0": ["strategy=sar", "strategy.rounds=2.4", "strategy.prefetch=0"],
    "sar pull": ["strategy=sar", "strategy.rounds=2.4", "strategy.backward=pull"],
}
COMMON = [
    "dataset=sbm", "dataset.num_nodes=40000", "dataset.num_features=128", "world_size=2", "threads_per_rank=1",
    "partition=random", "epochs=26", "eval_every=26", "seed=0",
]  # fmt: skip

if __name__ == "__main__":
    jobs = {
        f"{model} {name}": [*shape, *overrides]
        for model, shape in MODELS.items()
        for name, overrides in STRATEGIES.items()
        if (model, name) != ("gcn", "sar pull")  # a linear fold has nothing to push: it is sar
    }
    blocks.run(jobs, blocks=range(5), common=COMMON, out=HERE / "results.jsonl")
