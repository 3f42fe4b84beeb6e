"""Accuracy and loss curves of GNNPipe: exact, each technique on and off, and the remedies; seeds are paired.

The numbers of gnnpipe do not depend on the number of stages, so one rank with K chunks trains them all.

    python experiments/gnnpipe_convergence/run.py                            # all studies whose data is there; hours
    python experiments/gnnpipe_convergence/run.py --studies sbm --models gcn gcnii
    python experiments/gnnpipe_convergence/run.py --smoke                    # two minutes; writes smoke.jsonl
    python experiments/gnnpipe_convergence/report.py                         # tables and figure.svg of results.jsonl

A study that was stopped goes on with the first strategy that is not there. As many runs as there are cores are trained
at a time: times do not matter.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "data"
sys.path.insert(0, str(HERE.parent))

import blocks

from gnnpar.comm.world import num_cores

STALE = ["strategy.gradient=mix", "strategy.mixing=1.0"]  # last epoch's gradients, factor 1: technique 3 off
TECHNIQUES = {
    "gnnpipe": [],
    "no shuffle": ["strategy.order=fixed"],  # technique 1 off
    "R = 1": ["strategy.refresh=1"],  # technique 2 off
    "stale gradients": STALE,
    "none": ["strategy.order=fixed", "strategy.refresh=1", *STALE],
    "fresh once": ["strategy.gradient=fresh"],  # dropped, and not doubled
}
REMEDIES = {
    "mix 0.25": ["strategy.gradient=mix", "strategy.mixing=0.25"],
    "mix 0.5": ["strategy.gradient=mix", "strategy.mixing=0.5"],
    "mix 0.75": ["strategy.gradient=mix", "strategy.mixing=0.75"],
    "exact start": ["strategy.history_init=exact"],
    "exact refresh": ["strategy.history_init=exact", "strategy.refresh_exact=true"],
    "mix 0.5, exact refresh": [
        "strategy.gradient=mix",
        "strategy.mixing=0.5",
        "strategy.history_init=exact",
        "strategy.refresh_exact=true",
    ],
    "metis chunks": ["strategy.chunking=metis"],
}
CONTROL = ["strategy=graph_parallel", "codec=drop", "world_size=2", "comm=threads"]
ALL = ("exact", *TECHNIQUES, *REMEDIES, "drop")
MOST = ("exact", *TECHNIQUES, "mix 0.5", "exact refresh", "mix 0.5, exact refresh", "drop")
SOME = ("exact", "gnnpipe", "stale gradients", "mix 0.5, exact refresh", "drop")
FEW = ("exact", "gnnpipe", "mix 0.5, exact refresh", "drop")  # where an epoch takes longest
# layers; the learning rate with which exact training of seed 0 gets furthest on sbm's validation; times the epochs
MODELS = {
    "gcn": (4, 3e-3, 2),  # without a skip path
    "gcn deep": (8, 3e-3, 1),  # without a skip path 16 layers learn nothing of sbm and CS
    "gcnii": (32, 1e-2, 1),
    "resgcn": (32, 3e-3, 1),
}
STUDIES = {  # dataset and split by seed, epochs, variants by model
    "sbm": (["dataset=sbm"], 100, {"gcn": ALL, "gcnii": MOST, "resgcn": MOST}),
    "squirrel": (
        ["dataset=squirrel", "dataset.split_index=${seed}"],
        60,
        {"gcn deep": SOME, "gcnii": SOME, "resgcn": SOME},
    ),
    "cs": (["dataset=cs", "dataset.split_seed=null"], 30, {"gcn deep": FEW, "gcnii": FEW}),
}
FILES = {"squirrel": "Squirrel", "cs": "CS"}  # folders of raw files


def jobs(study: str, model: str, chunks: int, wanted: Sequence[str]) -> blocks.Jobs:
    """Exact training, the control, GNNPipe's variants."""
    pipe = ["strategy=gnnpipe", f"strategy.chunks={chunks}", "world_size=1"]
    variants = {name: [*pipe, *overrides] for name, overrides in (TECHNIQUES | REMEDIES).items()}
    every = {"exact": ["strategy=single"], **variants, "drop": CONTROL}
    return {
        f"{study}; {model}; {name}": [f"model={model.split()[0]}", *overrides]
        for name, overrides in every.items()
        if name in wanted
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="sbm, one model, two seeds, few epochs")
    parser.add_argument("--studies", nargs="+", default=list(STUDIES), choices=list(STUDIES))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--variants", nargs="+", default=ALL, choices=ALL, metavar="VARIANT", help="default: all")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=8, help="K = 4 P of 2 ranks")
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("GNNPAR_DATA", SHARED)))
    options = parser.parse_args()
    out = HERE / ("smoke.jsonl" if options.smoke else "results.jsonl")
    if options.smoke:
        options.studies, options.models, options.seeds, options.chunks = ["sbm"], ["gcn"], 2, 4
    for study in options.studies:
        if study in FILES and not (options.data_dir / FILES[study]).exists():
            print(f"{study} skipped: no {options.data_dir / FILES[study]}", flush=True)
            continue
        dataset, epochs, variants = STUDIES[study]
        for model in (model for model in variants if model in options.models):
            layers, rate, times = MODELS[model]
            length = 6 if options.smoke else epochs * times
            common = [
                *dataset,
                f"data_dir={options.data_dir}",
                f"model.num_layers={layers}",
                f"model.hidden={options.hidden}",
                "model.encoder=linear",
                "model.decoder=linear",
                "model.dropout=0",
                f"optim.lr={rate}",
                f"epochs={length}",
                f"eval_every={max(3, length // 20)}",
                "threads_per_rank=1",
                f"seed={','.join(map(str, range(options.seeds)))}",
            ]
            at_once = 1 if options.smoke else num_cores()
            wanted = [name for name in variants[model] if name in options.variants]
            blocks.sweep(jobs(study, model, options.chunks, wanted), common=common, out=out, at_once=at_once)


if __name__ == "__main__":
    main()
