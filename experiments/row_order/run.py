"""Epochs with the rows of a part in blocks that read each other, beside rows as they come.

python experiments/row_order/run.py [--blocks 3] [--smoke]    # writes results.jsonl, 90 s a block; report.py: the table
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks

SHAPE = ["model.num_layers=3", "model.hidden=128", "model.dropout=0.5"]
MODELS = {
    "gcn": ["model=gcn", *SHAPE],
    "sage": ["model=sage", *SHAPE],
    "gat": ["model=gat", *SHAPE, "model.heads=4"],
}
PLACES = {
    "single, 2 threads": ["strategy=single", "world_size=1", "threads_per_rank=2"],
    "graph_parallel, 2 ranks": ["strategy=graph_parallel", "world_size=2", "threads_per_rank=1"],
}
ORDERS = ("none", "metis")
COMMON = [  # the graph of epoch_speed
    "dataset=sbm",
    "dataset.avg_degree=20",
    "dataset.homophily=0.8",
    "dataset.num_features=128",
    "dataset.bridge_share=0.05",
    "dataset.lateral_share=0.05",
    "seed=0",
]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a tenth of the graph, one block: does it run?")
    options = parser.parse_args()
    nodes, epochs = (5_000, 8) if options.smoke else (50_000, 15)
    jobs = {
        f"{model} | {place} | {order}": [*settings, *where, f"row_order={order}"]
        for model, settings in MODELS.items()
        for place, where in PLACES.items()
        for order in ORDERS
    }
    common = [*COMMON, f"dataset.num_nodes={nodes}", f"epochs={epochs}", f"eval_every={epochs}"]
    out = HERE / ("smoke.jsonl" if options.smoke else "results.jsonl")
    blocks.run(jobs, blocks=range(1 if options.smoke else options.blocks), common=common, out=out, whole=True)
