"""One problem on more ranks: speed on 1 and 2 (as many as there are cores), bytes and memory on 4 and 8 too.

python experiments/strong_scaling/run.py      # writes results.jsonl, about 10 minutes; report.py prints the table
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks

STRATEGIES = {
    "graph_parallel": ["strategy=graph_parallel"],
    "graph_parallel bf16": ["strategy=graph_parallel", "codec=bf16"],
    "sar": ["strategy=sar"],
    "adaqp": ["strategy=adaqp"],
}
COMMON = [
    "dataset=sbm",
    "dataset.num_nodes=40000",
    "dataset.num_features=128",
    "model=gcn",
    "model.num_layers=3",
    "model.hidden=128",
    "threads_per_rank=1",
    "seed=0",
    "epochs=20",
    "eval_every=20",
]

if __name__ == "__main__":
    out = HERE / "results.jsonl"
    timed = {"1 single": ["strategy=single"]} | {f"2 {k}": [*v, "world_size=2"] for k, v in STRATEGIES.items()}
    blocks.run(timed, blocks=range(5), common=COMMON, out=out)
    large = {f"{n} {k}": [*v, f"world_size={n}"] for n in (4, 8) for k, v in STRATEGIES.items()}
    blocks.run(large, blocks=range(1), common=COMMON, out=out)
