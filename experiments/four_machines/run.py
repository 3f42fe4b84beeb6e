"""Epochs of four machines with links of 1 Gbit/s, in slow motion (`launch.dilation`): GCN of 3 and of 32 layers.

python experiments/four_machines/run.py            # writes results.jsonl, about 25 minutes; report.py: the tables
python experiments/four_machines/run.py --smoke    # a minute: does it run? writes smoke.jsonl

Needs root, iproute2 and a cgroup controller of CPU time. A study that was stopped goes on where it was.
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks

RANKS = 4
SHALLOW = {
    "single": ["strategy=single"],
    "vanilla": ["strategy=graph_parallel", "strategy.overlap=none"],
    "graph_parallel": ["strategy=graph_parallel"],
    "graph_parallel bf16": ["strategy=graph_parallel", "codec=bf16"],
    "graph_parallel bf16 cached": ["strategy=graph_parallel", "codec=bf16", "first_layer=cached"],
    "adaqp": ["strategy=adaqp"],
    "sar": ["strategy=sar"],
    "control": ["strategy=graph_parallel", "codec=drop"],
}
DEEP = {
    **{name: SHALLOW[name] for name in ("single", "vanilla", "graph_parallel", "graph_parallel bf16")},
    "gnnpipe one chunk": ["strategy=gnnpipe", "strategy.chunks=one"],
    "gnnpipe": ["strategy=gnnpipe"],
    "hybrid 2x2": ["strategy=hybrid", "strategy.stages=2", "strategy.parts=2"],
    "control": SHALLOW["control"],
}
METHODS = {"3": SHALLOW, "32": DEEP}  # layers -> methods
# the graph of strong_scaling; that of gnnpipe_speed with linear layers in and out, as GNNPipe's paper has them
GRAPHS = {
    "3": ["dataset=sbm", "dataset.num_nodes=40000", "dataset.num_features=128", "model.hidden=128"],
    "32": [
        "dataset=sbm_reddit",
        "dataset.scale=0.025",
        "dataset.avg_degree=80",
        "model.hidden=100",
        "model.encoder=linear",
        "model.decoder=linear",
    ],
}
TINY = {"3": ["dataset.num_nodes=2000"], "32": ["dataset.scale=0.003", "dataset.avg_degree=12"]}
EPOCHS = {"3": 26, "32": 15}


def jobs(smoke: bool) -> blocks.Jobs:
    """`single` has one core, undilated."""
    listed = {}
    for layers, methods in METHODS.items():
        epochs = EPOCHS[layers]
        graph = [*GRAPHS[layers], *(TINY[layers] if smoke else [])]
        about = ["model=gcn", f"model.num_layers={layers}", *graph, f"epochs={epochs}", f"eval_every={epochs}"]
        for name, strategy in methods.items():
            links = ["threads_per_rank=1"] if name == "single" else blocks.slow_motion(RANKS, gbps=1)
            listed[f"{layers}; {name}"] = [*about, *strategy, *links]
    return listed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny graphs, one block")
    parser.add_argument("--blocks", type=int, default=5)
    options = parser.parse_args()
    out = HERE / ("smoke.jsonl" if options.smoke else "results.jsonl")
    count = 1 if options.smoke else options.blocks
    blocks.run(jobs(options.smoke), blocks=range(count), common=["seed=0"], out=out, whole=True)


if __name__ == "__main__":
    main()
