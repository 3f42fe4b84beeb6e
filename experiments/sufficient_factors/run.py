"""Gradients of weights by sufficient factors beside their sum over ranks, in blocks on shaped links.

python experiments/sufficient_factors/run.py            # writes results.jsonl, about 10 minutes; report.py: the table
python experiments/sufficient_factors/run.py --smoke    # a minute: does it run? writes smoke.jsonl

Needs root, iproute2 and the raw files of Cora (GNNPAR_DATA). A study that was stopped goes on where it was.
"""

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent.resolve()
SHARED = HERE.parents[2] / "shared" / "data"
sys.path.insert(0, str(HERE.parent))

import blocks

METHODS = {
    "sum over ranks": ["strategy=graph_parallel"],
    "factors where fewer bytes": ["strategy=graph_parallel", "strategy.reduce=factors"],
    "factors of all weights": ["strategy=factors"],
}
EPOCHS = 14
# few labels and wide layers, for which the planner says factors; and what full-graph training usually is
MODELS = {"cora, 3 x 2048": ["dataset=cora", "model.hidden=2048"], "sbm, 3 x 128": ["dataset=sbm", "model.hidden=128"]}
SBM = ["dataset.num_features=128"]
RATES = {"cora, 3 x 2048": (1, 0.1), "sbm, 3 x 128": (1,)}  # Gbit/s


def jobs(smoke: bool, data_dir: Path) -> blocks.Jobs:
    found = {}
    for model, rates in RATES.items():
        about = ["model=gcn", "model.num_layers=3", *MODELS[model]]
        if model.startswith("sbm"):
            about += [*SBM, f"dataset.num_nodes={1000 if smoke else 20000}"]
        else:
            about += [f"data_dir={data_dir}", *(["model.hidden=64"] if smoke else [])]
        for rate in rates:
            links = ["world_size=2", "threads_per_rank=1", "launch=paced", "launch.hosts=2", f"launch.rate_gbps={rate}"]
            for name, strategy in METHODS.items():
                found[f"{model}, {rate} Gbit/s; {name}"] = [*about, *links, *strategy]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny graphs and layers, one block")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("GNNPAR_DATA", SHARED)))
    options = parser.parse_args()
    out = HERE / ("smoke.jsonl" if options.smoke else "results.jsonl")
    listed = jobs(options.smoke, options.data_dir.resolve())
    os.chdir(HERE)  # where gnnpar finds strategy/factors.yaml
    common = [f"epochs={EPOCHS}", f"eval_every={EPOCHS}", "seed=0"]
    blocks.run(
        listed, blocks=range(1 if options.smoke else options.blocks), common=common, out=out.resolve(), whole=True
    )


if __name__ == "__main__":
    main()
