"""Epoch time of SAR in four rounds or more beside graph_parallel, in interleaved blocks.

    python experiments/sar_speed/run.py      # writes results.jsonl, about 9 minutes; report.py prints the table

Five ranks make four rounds of one peer each; they share the cores, with graph_parallel on as many. Two ranks make four
rounds by a budget that cuts the one peer's rows, which is the worst case: every piece touches most rows again.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks

MODELS = {
    "gcn": ["model=gcn", "model.hidden=128", "model.num_layers=3"],
    "gat": ["model=gat", "model.heads=4", "model.hidden=128", "model.num_layers=3"],
}
WORLDS = {"5 ranks, peer": ["world_size=5", "strategy.rounds=peer"], "2 ranks, 1.2 MiB": ["strategy.rounds=1.2"]}
COMMON = [
    "dataset=sbm",
    "dataset.num_nodes=20000",
    "dataset.num_features=128",
    "world_size=2",
    "threads_per_rank=1",
    "partition=random",
    "epochs=20",
    "eval_every=20",
    "seed=0",
]


def jobs(world: str) -> blocks.Jobs:
    found = {}
    for model, shape in MODELS.items():
        common = [*shape, *WORLDS[world][:-1]]
        rounds = WORLDS[world][-1:]
        found[f"{model}; {world}; graph_parallel"] = [*common, "strategy=graph_parallel"]
        found[f"{model}; {world}; sar"] = [*common, "strategy=sar", *rounds]
        if model == "gat":  # a linear fold has nothing to push
            found[f"{model}; {world}; sar pull"] = [*common, "strategy=sar", *rounds, "strategy.backward=pull"]
    return found


if __name__ == "__main__":
    for name in WORLDS:
        blocks.run(jobs(name), blocks=range(5), common=COMMON, out=HERE / "results.jsonl")
