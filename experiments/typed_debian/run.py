"""R-GCN on the typed Debian graph: the same losses on any number of ranks, and what inexact strategies cost.

    python experiments/typed_debian/run.py                    # losses.jsonl, accuracy.jsonl
    python experiments/typed_debian/run.py --stage losses
    python experiments/typed_debian/run.py --smoke            # a minute: does it run? writes smoke_*.jsonl
    python experiments/typed_debian/report.py                 # tables

One process; ranks are threads. A run that was stopped goes on with the first cell that is not there.
"""

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any  # of JSON

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "data"
sys.path.insert(0, str(HERE.parent))

import records
from jobs import COMMON, CUTS, REFUSED, SAME, SAME_ON, TRAINED, VARIANTS, Overrides

import gnnpar
from gnnpar.api import TrainingFailed

LINE = "rank 0: ValueError: "
STAGES = ("losses", "accuracy")
KEPT = ("strategy", "world_size", "seed", "epochs", "metric", "loss", "fidelity", "bytes_per_epoch")
FACTS = ("hashes", "hardware", "versions", "commit")


def trained(data_dir: Path, *overrides: Overrides) -> dict[str, Any]:
    """What a line keeps of a run, or the line with which it is refused."""
    given: dict[str, Any] = {"data_dir": data_dir}
    for each in overrides:
        given |= each
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = gnnpar.train("rgcn", "debian", folder=folder, **given)
        except ValueError as error:
            return {"refused": str(error)}
        except TrainingFailed as error:  # what a dataset has is known when a rank has read it
            if LINE not in str(error):
                raise
            return {"refused": str(error).partition(LINE)[2]}
        history, result = run.history, run.result
    curve = history[["epoch", "metric/val"]].dropna().to_numpy().tolist()
    kept = {key: result[key] for key in (*KEPT, *FACTS)}
    return {"losses": history["loss/train"].tolist(), "validation": curve, "result": kept}


def losses(data_dir: Path, out: Path, extra: Overrides) -> None:
    done = {(row["strategy"], row["ranks"]) for row in records.read(out)}
    cells = [(strategy, ranks) for strategy, counts in SAME_ON.items() for ranks in counts]
    for strategy, ranks in [cell for cell in cells if cell not in done]:
        row = trained(data_dir, SAME, {"strategy": strategy, "world_size": ranks}, extra)
        records.append(out, [{"strategy": strategy, "ranks": ranks, **row}])
        print(f"losses {strategy} {ranks}: {row['losses'][-1]!r}", flush=True)
    for strategy in [name for name in REFUSED if (name, 2) not in done]:
        row = trained(data_dir, COMMON, {"strategy": strategy, "world_size": 2, "epochs": 1})
        records.append(out, [{"strategy": strategy, "ranks": 2, **row}])
        print(f"losses {strategy}: {row.get('refused', 'not refused')}", flush=True)


def accuracy(data_dir: Path, out: Path, seeds: int, extra: Overrides) -> None:
    done = {key_of(row) for row in records.read(out)}
    cells = [(cut, name, seed) for cut, names in CUTS.items() for seed, name in itertools.product(range(seeds), names)]
    for cut, name, seed in [cell for cell in cells if cell not in done]:
        row = trained(data_dir, TRAINED, VARIANTS[name], {"partition": cut, "seed": seed}, extra)
        records.append(out, [{"cut": cut, "variant": name, "seed": seed, **row}])
        shown = row["result"]["metric"]["test_at_best_val"] if "result" in row else row["refused"]
        print(f"accuracy {cut} {name} {seed}: {shown}", flush=True)


def key_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["cut"], row["variant"], row["seed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one seed, few epochs")
    parser.add_argument("--stage", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("GNNPAR_DATA", SHARED)))
    options = parser.parse_args()
    data_dir, smoke = options.data_dir.resolve(), options.smoke
    files = {stage: HERE / f"{'smoke_' * smoke}{stage}.jsonl" for stage in STAGES}
    if "losses" in options.stage:
        losses(data_dir, files["losses"], {"epochs": 1, "eval_every": 1} if smoke else {})
    if "accuracy" in options.stage:
        short = {"epochs": 25, "fidelity_every": 0} if smoke else {}
        accuracy(data_dir, files["accuracy"], 1 if smoke else options.seeds, short)


if __name__ == "__main__":
    main()
