"""AdaQP beside PipeGCN and SANCUS, in the same blocks: epochs of four machines with links of 1 Gbit/s, in slow motion.

python experiments/adaqp_rivals/run.py            # writes results.jsonl, about 12 minutes; report.py: the tables
python experiments/adaqp_rivals/run.py --smoke    # a minute: does it run? writes smoke.jsonl

Needs root, iproute2 and a cgroup controller of CPU time. A study that was stopped goes on where it was.
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks

RANKS, EPOCHS = 4, 26
MODELS = ("gcn", "sage")
METHODS = {
    "vanilla": ["strategy=graph_parallel", "strategy.overlap=none"],
    "adaqp": ["strategy=adaqp"],
    "pipegcn": ["strategy=pipegcn"],
    "sancus": ["strategy=sancus"],
    "graph_parallel bf16": ["strategy=graph_parallel", "codec=bf16"],
}
GRAPH = ["dataset=sbm", "dataset.num_nodes=40000", "dataset.num_features=128", "model.hidden=128", "model.num_layers=3"]
TINY = ["dataset.num_nodes=2000"]


def jobs(smoke: bool) -> blocks.Jobs:
    about = [*GRAPH, *(TINY if smoke else []), f"epochs={EPOCHS}", f"eval_every={EPOCHS}"]
    return {
        f"{model}; {name}": [*about, f"model={model}", *strategy, *blocks.slow_motion(RANKS, gbps=1)]
        for model in MODELS
        for name, strategy in METHODS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny graphs, one block")
    parser.add_argument("--blocks", type=int, default=3)
    options = parser.parse_args()
    out = HERE / ("smoke.jsonl" if options.smoke else "results.jsonl")
    count = 1 if options.smoke else options.blocks
    blocks.run(jobs(options.smoke), blocks=range(count), common=["seed=0"], out=out, whole=True)


if __name__ == "__main__":
    main()
