"""Accuracy and gradient error of quantized halos, paired by seed with the exact run, the drop control beside it.

Ranks are threads: the numerics and the bytes of processes, no statement on time.

    python experiments/adaqp_accuracy/run.py                          # all datasets that are there; about 20 minutes
    python experiments/adaqp_accuracy/run.py --datasets sbm --ranks 4 --codecs exact uniform_4 adaptive_4 adaptive drop
    python experiments/adaqp_accuracy/run.py --smoke                  # half a minute; writes smoke.jsonl
    python experiments/adaqp_accuracy/report.py                       # the tables of results.jsonl
"""

import argparse
import copy
import datetime
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import Drop, Identity
from gnnpar.codecs.uniform import Random, Uniform
from gnnpar.comm import Communicator, ThreadWorld
from gnnpar.config.compose import compose
from gnnpar.data.tasks import make_task
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.halo.adaqp import AdaQP
from gnnpar.parallel.objective import NodeObjective
from gnnpar.parallel.strategy import Workload
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan, Topology
from gnnpar.settings import Settings
from gnnpar.training.meter import evaluate, fidelity
from gnnpar.training.result.result import commit, processor

SHARED = HERE.parents[2] / "shared" / "data"
PERIOD = 20
CODECS: dict[str, Any] = {
    "exact": Identity(),
    "uniform_8": Uniform(bits=8),
    "uniform_4": Uniform(bits=4),
    "uniform_2": Uniform(bits=2),
    "random": Random(period=PERIOD),
    "adaptive_4": Adaptive(period=PERIOD, budget_bits=4),  # the bytes of uniform_4
    "adaptive": Adaptive(period=PERIOD),
    "paper": Adaptive(period=PERIOD, trace="range", importance="square_of_sum", scope="exchange"),
    "drop": Drop(),
}
SHORT = ("exact", "uniform_4", "adaptive_4", "adaptive", "drop")  # on the larger graphs
LAYERS = ["model.num_layers=3", "model.norm=layer"]
SPLIT = ["dataset.split_seed=null", "optim.weight_decay=5e-4", "optim.decay=first_layer"]
NORM = {"sage": ["model.norm=layer"]}  # without it GraphSAGE does not train on raw counts of words (28 %)
STUDIES: dict[str, tuple[list[str], tuple[str, ...], int]] = {  # overrides, codecs, epochs
    "sbm": (LAYERS, tuple(CODECS), 60),
    "computers": (SPLIT, SHORT, 60),
    "cs": (SPLIT, SHORT, 25),
}


@dataclass(frozen=True)
class Training:
    """One run: what every rank does."""

    settings: Settings
    dataset: Any
    plan: Plan
    codec: Any
    model: Any
    eval_every: int
    probe_every: int

    def __call__(self, comm: Communicator) -> dict[str, Any]:
        settings = self.settings
        task = make_task(self.dataset.task, self.dataset.num_classes)
        shard = Shard.open(self.dataset if comm.rank == 0 else None, self.plan.part_of, comm)
        model = copy.deepcopy(self.model)
        engine = AdaQP(codec=self.codec).build(
            BuildContext(plan=self.plan, shard=shard, model=model, task=task, comm=comm, seed=settings.seed)
        )
        optimizer: Any = settings.optim.build(
            engine.named_parameters(), epochs=settings.epochs, layer_of=model.layer_of
        )
        curve, probes, facts, halo = [], [], {}, 0
        for epoch in range(settings.epochs):
            exact = engine.exact_gradient(epoch) if epoch % self.probe_every == 0 else None
            comm.ledger.drain()
            optimizer.schedule(epoch)
            report = engine.train_epoch(epoch, optimizer, keep_gradient=exact is not None)
            sent = comm.ledger.drain().bytes
            halo += sum(sent.get(phase, 0) for phase in ("forward", "backward", "assign"))
            facts |= report.facts
            if exact is not None and report.gradient is not None:
                probes.append({"epoch": epoch} | fidelity(report.gradient, exact, comm))
            if (epoch + 1) % self.eval_every == 0 or epoch + 1 == settings.epochs:
                values = evaluate(engine, NodeObjective(task, shard, comm))
                curve.append([epoch + 1, values["metric/val"], values["metric/test"], halo])
        return {"curve": curve, "probes": probes, "facts": facts, "halo_bytes": halo}


def run(settings: Settings, dataset: Any, plan: Plan, codec: Any) -> dict[str, Any]:
    """Halo bytes are summed over ranks."""
    task = make_task(dataset.task, dataset.num_classes)
    model = settings.model.build(dataset.num_features, task.out_dim, seed=settings.seed)
    job = Training(settings, dataset, plan, codec, model, eval_every=2, probe_every=10)
    ranks = ThreadWorld(plan.num_ranks).run(job)
    result = ranks[0]
    others = [r["curve"] for r in ranks[1:]]
    curve = [[*row[:3], row[3] + sum(c[i][3] for c in others)] for i, row in enumerate(result["curve"])]
    best = max(curve, key=lambda row: row[1])
    return result | {
        "curve": curve,
        "best_val": best[1],
        "test": best[2],
        "best_epoch": best[0],
        "halo_bytes": sum(r["halo_bytes"] for r in ranks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="sbm, one seed, few epochs")
    parser.add_argument("--datasets", nargs="+", default=list(STUDIES), choices=list(STUDIES))
    parser.add_argument("--models", nargs="+", default=["gcn", "sage"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--codecs", nargs="+", choices=list(CODECS), help="default: those of the dataset")
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("GNNPAR_DATA", SHARED)))
    options = parser.parse_args()
    torch.set_num_threads(1)
    out = HERE / ("smoke.jsonl" if options.smoke else "results.jsonl")
    stamp = {"session": datetime.datetime.now().isoformat(timespec="seconds"), "torch": torch.__version__}
    stamp |= {"processor": processor(), "cores": os.cpu_count(), "commit": commit(), "ranks": options.ranks}
    began = time.perf_counter()
    for name in ["sbm"] if options.smoke else options.datasets:
        overrides, codecs, epochs = STUDIES[name]
        epochs = 24 if options.smoke else epochs
        plan = None
        for model in ["gcn"] if options.smoke else options.models:
            for seed in range(1 if options.smoke else options.seeds):
                chosen = [f"dataset={name}", f"model={model}", f"seed={seed}", f"epochs={epochs}"]
                settings = compose([*chosen, *NORM.get(model, []), *overrides])
                try:
                    dataset = settings.dataset.load(options.data_dir, seed)
                except (OSError, ValueError) as error:
                    print(f"{name} skipped: {' '.join(str(error).split())}", flush=True)
                    break
                plan = plan or AdaQP().plan(Workload(dataset, settings.partition, 3), Topology(options.ranks))
                for codec in options.codecs or codecs:
                    row = {"dataset": name, "model": model, "codec": codec, "seed": seed, "epochs": epochs}
                    row = stamp | row | run(settings, dataset, plan, CODECS[codec])
                    records.append(out, [row])
                minutes = (time.perf_counter() - began) / 60
                print(
                    f"{name} {model} seed {seed}: {len(options.codecs or codecs)} runs, {minutes:.1f} min so far",
                    flush=True,
                )
    print(f"{out.name} written; now report.py", flush=True)


if __name__ == "__main__":
    main()
