"""Random nodes beside full-graph training, and whether messages matter on WordNet.

    python experiments/random_nodes/run.py                    # results.jsonl
    python experiments/random_nodes/run.py --graphs wordnet --models sage
    python experiments/random_nodes/run.py --times            # times.jsonl: seconds an epoch, on a quiet machine
    python experiments/random_nodes/run.py --smoke            # a minute: does it run? writes smoke.jsonl
    python experiments/random_nodes/report.py                 # tables

A run that was stopped goes on with the first cell that is not there.
"""

import argparse
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any  # values of overrides, of JSON

import torch
from torch_geometric.data import Data

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "data"
sys.path.insert(0, str(HERE.parent))

import records

import gnnpar
from gnnpar.config.compose import compose

Overrides = Mapping[str, Any]
BLOCKS, TIMED = 3, {"epochs": 15, "eval_every": 15}
KEPT = ("strategy", "world_size", "seed", "epochs", "epoch_seconds", "metric", "loss", "hashes", "hardware")
KEPT = (*KEPT, "versions", "commit")

ALWAYS: Overrides = {"world_size": 1, "comm": "threads", "threads_per_rank": 1, "eval_every": 5, "checkpoint.keep": 0}
ALWAYS = {**ALWAYS, "tracker": "jsonl", "dataset.split": "public"}
CLASSIC: Overrides = {"optim.lr": 0.01, "optim.weight_decay": 5e-4, "epochs": 200}
LARGE: Overrides = {"optim.lr": 0.03, "epochs": 100}
SETTINGS: Mapping[str, Overrides] = {
    "wordnet": LARGE,
    "cora": CLASSIC,
    "computers": {**CLASSIC, "optim.weight_decay": 0.0},
    "debian": LARGE,
    "citeseer": CLASSIC,
    "cs": {**CLASSIC, "epochs": 100},
}

UNIFORM: Overrides = {"strategy": "minibatch", "strategy.sampler": "uniform", "strategy.clusters_per_batch": 1}
VARIANTS: Mapping[str, Overrides] = {
    "full": {"strategy": "single"},
    "control": {"strategy": "single"},  # on the graph without its edges
    "uniform 4": {**UNIFORM, "strategy.clusters": 4, "strategy.normalize": "subgraph"},
    "uniform 4, graph": {**UNIFORM, "strategy.clusters": 4, "strategy.normalize": "graph"},
    "uniform 16": {**UNIFORM, "strategy.clusters": 16, "strategy.normalize": "subgraph"},
}
CELLS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    name: {"gcn": tuple(VARIANTS)[: 5 if settings is LARGE else 4]} for name, settings in SETTINGS.items()
} | {"wordnet": {"gcn": tuple(VARIANTS), "sage": ("full", "control", "uniform 4")}}
"""Variants of a graph and a model."""


def loaded(name: str, data_dir: Path) -> Data:
    """The graph without types of edges and without self loops, which training adds."""
    data = compose([f"dataset={name}", "dataset.self_loops=false"]).dataset.load(data_dir, 0)
    masks = {key: getattr(data, key) for key in ("train_mask", "val_mask", "test_mask")}
    return Data(x=data.x, y=data.y, edge_index=data.edge_index, **masks)


def trained(data: Data, name: str, model: str, *overrides: Overrides) -> dict[str, Any]:
    given: dict[str, Any] = {"dataset.name": name, **ALWAYS}
    for each in overrides:
        given |= each
    with tempfile.TemporaryDirectory() as folder:
        run = gnnpar.train(model, data, folder=folder, **given)
        history, result = run.history, run.result
    curve = history[["epoch", "metric/val"]].dropna().to_numpy().tolist()
    first = history.to_dict("records")[0]
    drawn = {key: first.get(f"sample/{key}") for key in ("steps", "edges")}  # of epoch 0
    return {"validation": curve, **drawn, "result": {key: result[key] for key in KEPT}}


def time_epochs(graph: str, data_dir: Path) -> None:
    """Write the seconds of GCN's epochs, each variant once a block, in an order of the block's own."""
    data, out = loaded(graph, data_dir), HERE / "times.jsonl"
    done = {(row["graph"], row["variant"], row["block"]) for row in records.read(out)}
    for block in range(BLOCKS):
        for variant in random.Random(block).sample(list(VARIANTS), len(VARIANTS)):
            if variant in CELLS[graph]["gcn"] and variant != "control" and (graph, variant, block) not in done:
                row = trained(data, graph, "gcn", SETTINGS[graph], VARIANTS[variant], TIMED)
                records.append(out, [{"graph": graph, "variant": variant, "block": block, "result": row["result"]}])
                print(graph, variant, block, row["result"]["epoch_seconds"]["median"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="Cora, one seed, few epochs")
    parser.add_argument("--times", action="store_true", help="seconds an epoch, variants in randomised blocks")
    parser.add_argument("--graphs", nargs="+", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--models", nargs="+", default=["gcn", "sage"], choices=["gcn", "sage"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("GNNPAR_DATA", SHARED)))
    options = parser.parse_args()
    out = HERE / f"{'smoke' if options.smoke else 'results'}.jsonl"
    short: Overrides = {"epochs": 10} if options.smoke else {}
    if options.times:
        for graph in options.graphs:
            time_epochs(graph, options.data_dir.resolve())
        return
    done = {(row["graph"], row["model"], row["variant"], row["seed"]) for row in records.read(out)}
    for graph in ["cora"] if options.smoke else options.graphs:
        data = loaded(graph, options.data_dir.resolve())
        alone = Data(**{**data.to_dict(), "edge_index": torch.zeros(2, 0, dtype=torch.int64)})
        seeds = range(1 if options.smoke else options.seeds)
        for model, seed in itertools.product([each for each in options.models if each in CELLS[graph]], seeds):
            for variant in [name for name in CELLS[graph][model] if (graph, model, name, seed) not in done]:
                on = alone if variant == "control" else data
                row = trained(on, graph, model, SETTINGS[graph], VARIANTS[variant], {"seed": seed}, short)
                nodes = int(data.num_nodes or 0)
                size = {"nodes": nodes, "whole": data.num_edges + nodes}
                records.append(out, [{"graph": graph, "model": model, "variant": variant, "seed": seed, **size, **row}])
                print(graph, model, variant, seed, row["result"]["metric"]["test_at_best_val"], flush=True)


if __name__ == "__main__":
    main()
