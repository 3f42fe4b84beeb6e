"""Every strategy on sbm: epoch time in blocks over loopback and over paced links, accuracy over ten seeds.

python experiments/compare_all/run.py              # all three; results land beside this file, about 25 minutes
python experiments/compare_all/run.py accuracy     # one of speed, paced (needs root), accuracy
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks

BASELINES = {
    "single": ["strategy=single"],
    "vanilla": ["strategy=graph_parallel", "strategy.overlap=none"],
    "graph_parallel": ["strategy=graph_parallel"],
    "graph_parallel bf16": ["strategy=graph_parallel", "codec=bf16"],
    "minibatch": ["strategy=minibatch"],
    "minibatch subgraph": ["strategy=minibatch", "strategy.normalize=subgraph"],
    "control": ["strategy=graph_parallel", "codec=drop"],
}
STRATEGIES = BASELINES | {
    "sar": ["strategy=sar"],
    "sar pull": ["strategy=sar", "strategy.backward=pull"],
    "adaqp_q": ["strategy=adaqp_q"],
    "adaqp_p": ["strategy=adaqp_p"],
    "adaqp": ["strategy=adaqp"],
}
SHAPE = ["model.num_layers=3", "model.hidden=128"]
DATASET = ["dataset=sbm", "dataset.num_features=128"]
LARGE = [*DATASET, "dataset.num_nodes=20000", *SHAPE, "world_size=2", "seed=0", "epochs=26", "eval_every=26"]
SMALL = ["dataset=sbm", "model.num_layers=3", "model.hidden=64", "world_size=2", "comm=threads", "threads_per_rank=1"]
PACED = ["launch=paced", "launch.hosts=2", "launch.rate_gbps=1", "threads_per_rank=1"]


def speed(name: str, more: list[str], models: tuple[str, ...]) -> None:
    jobs = {
        f"{model} {job}": [f"model={model}", *overrides, "threads_per_rank=1"]
        for model in models
        for job, overrides in STRATEGIES.items()
        if not (job == "single" and more)  # it has no link
    }
    if not more:
        jobs |= {f"{model} single, 2 threads": [f"model={model}", "strategy=single"] for model in models}
    blocks.run(jobs, blocks=range(5), common=[*LARGE, *more], out=HERE / f"{name}.jsonl")


def accuracy() -> None:
    seeds = ",".join(map(str, range(10)))
    jobs = {job: [*overrides, "model=gcn,sage,gat", f"seed={seeds}"] for job, overrides in STRATEGIES.items()}
    curve = ["epochs=60", "eval_every=5", "fidelity_every=20"]
    blocks.sweep(jobs, common=[*SMALL, *curve], out=HERE / "accuracy.jsonl")


if __name__ == "__main__":
    asked = sys.argv[1:] or ["speed", "paced", "accuracy"]
    if "speed" in asked:
        speed("speed", [], ("gcn",))
    if "paced" in asked:
        speed("paced", PACED, ("gcn",))
    if "accuracy" in asked:
        accuracy()
