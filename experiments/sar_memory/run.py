"""Peak memory of a rank against the number of ranks: SAR and graph_parallel on a METIS cut and on a random one.

    python experiments/sar_memory/run.py      # writes results.jsonl, about 15 minutes; report.py makes table and figure

Every figure is of one training epoch, from the allocator's events (protocol, rule 10), the largest of all ranks.
"""

import itertools
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
import records

RANKS = (1, 2, 4, 8)
STRATEGIES = {
    "graph_parallel": ["strategy=graph_parallel"],
    "sar, prefetch 0": ["strategy=sar", "strategy.prefetch=0"],
    "sar, prefetch 1": ["strategy=sar", "strategy.prefetch=1"],
    "sar, prefetch 0, pull": ["strategy=sar", "strategy.prefetch=0", "strategy.backward=pull"],
}
MODELS = {
    "gat": ["model=gat", "model.heads=4", "model.hidden=128", "model.num_layers=3"],
    "sage": ["model=sage", "model.hidden=128", "model.num_layers=3"],
}
DATASET = ["dataset=sbm", "dataset.num_nodes=20000", "dataset.num_features=128"]
COMMON = ["epochs=4", "eval_every=4", "threads_per_rank=1", "seed=0"]


def main() -> None:
    cases = [
        (model, cut, name, ranks)
        for model, cut, name, ranks in itertools.product(MODELS, ("metis", "random"), STRATEGIES, RANKS)
        if not (model == "sage" and name.endswith("pull"))  # a linear fold has nothing to push
    ]
    began = time.perf_counter()
    out = HERE / "results.jsonl"
    records.replace(out, [])
    for i, (model, cut, name, ranks) in enumerate(cases):
        overrides = [*MODELS[model], *STRATEGIES[name], *DATASET, *COMMON, f"partition={cut}", f"world_size={ranks}"]
        result = blocks.train(overrides)["result"]
        row = {"model": model, "cut": cut, "variant": name, "ranks": ranks}
        kept = ("memory_bytes", "bytes_per_epoch", "loss", "hashes", "hardware", "versions", "commit")
        row |= {key: result[key] for key in kept}
        records.append(out, [row])
        peak = max(result["memory_bytes"]["peak"]) / 2**20
        left = (time.perf_counter() - began) / (i + 1) * (len(cases) - i - 1)
        print(
            f"{i + 1}/{len(cases)} {model} {cut} {name} {ranks} ranks: {peak:.1f} MiB, {left:.0f} s left",
            flush=True,
        )


if __name__ == "__main__":
    main()
