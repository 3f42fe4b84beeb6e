"""precision=bf16 beside fp32 on one device: accuracy over seeds.

python experiments/bf16/run.py       # results.jsonl, about 20 minutes
python experiments/bf16/report.py    # the table of README.md
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks

CELLS = {  # dataset and model -> overrides; the seed draws the graph of sbm_verdict and the split of Computers
    "computers gcn": ["dataset=computers", "dataset.split_seed=null", "model=gcn", "epochs=150"],
    "sbm_verdict sage": ["dataset=sbm_verdict", "model=sage", "epochs=400"],
    "debian rgcn": ["dataset=debian", "model=rgcn", "model.num_bases=4", "epochs=60"],
    "sbm_verdict gcn": ["dataset=sbm_verdict", "model=gcn", "epochs=400"],
}
SEEDS = {"debian rgcn": 5}
PRECISIONS = ("fp32", "bf16")
COMMON = ["strategy=single", "threads_per_rank=1", "model.num_layers=3", "model.hidden=64", "eval_every=5"]


def main() -> None:
    for cell, overrides in CELLS.items():
        seeds = f"seed={','.join(map(str, range(SEEDS.get(cell, 10))))}"
        jobs = {f"{cell} {name}": [*overrides, f"precision={name}", seeds] for name in PRECISIONS}
        blocks.sweep(jobs, common=COMMON, out=HERE / "results.jsonl", at_once=2)


if __name__ == "__main__":
    main()
