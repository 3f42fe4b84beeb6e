"""Predicted and measured epoch time and peak memory of the configurations in cells.py.

    python experiments/planner_accuracy/run.py            # about 20 minutes on 2 quiet cores; goes on where it stopped
    python experiments/planner_accuracy/run.py --smoke    # a minute: does it run? writes smoke.jsonl
    python experiments/planner_accuracy/report.py         # tables and figure.svg

The machine is calibrated, every configuration is planned, and what is predicted of it is written to predictions.jsonl,
all before the first measurement. Then each plan is run as it is, in blocks of random order; lines go to results.jsonl.
Needs root and iproute2 for the shaped links.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
import records
from cells import CELLS, SMOKE, Cell
from plans import KEPT, folder_of, predictions


def measure(row: dict[str, Any], cell: Cell, plans: Path) -> dict[str, Any]:
    """What a launch of the plan says."""
    plan = plans / folder_of(row["job"]) / "plan.json"
    links = [o for o in cell.overrides if o.startswith(("launch", "world_size", "threads_per_rank"))]
    epochs = [f"epochs={row['epochs']}", f"eval_every={row['epochs']}", "checkpoint.keep=0"]
    result = blocks.train([f"plan={plan}", *links, *epochs])["result"]
    return {key: result[key] for key in KEPT} | {"peak_bytes": result["memory_bytes"]["peak"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="three small cells")
    parser.add_argument("--blocks", type=int, default=1, help="launches of every configuration")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no launch after so long")
    parser.add_argument("--predict", action="store_true", help="predictions alone")
    options = parser.parse_args()
    stem = "smoke" if options.smoke else "results"
    out, cells = HERE / f"{stem}.jsonl", SMOKE if options.smoke else CELLS
    plans = HERE / f"smoke_{stem}_plans"  # not committed
    began = time.monotonic()
    said = predictions(HERE / ("smoke_" * options.smoke + "predictions.jsonl"), cells, plans)
    if options.predict:
        return
    cell_of = {f"{cell.name}; {label}": cell for cell in cells for label in cell.candidates}
    said = [row for row in said if row["job"] in cell_of]
    done = {(row["block"], row["job"]) for row in records.read(out)}
    count = 1 if options.smoke else options.blocks
    todo = [(b, row) for b in range(count) for row in random.Random(b).sample(said, len(said))]
    for i, (block, row) in enumerate(todo):
        if (block, row["job"]) in done:
            continue
        if time.monotonic() - began > 60 * options.minutes:
            print(f"{len(todo) - i} launches are left")
            return
        result = measure(row, cell_of[row["job"]], plans)
        records.append(out, [{"block": block, "job": row["job"], "result": result}])
        seconds = result["epoch_seconds"]["median"]
        print(
            f"{i + 1}/{len(todo)} {row['job']}: {1e3 * seconds:.1f} ms, predicted {1e3 * row['epoch_seconds']:.1f} "
            f"({row['epoch_seconds'] / seconds - 1:+.0%})",
            flush=True,
        )


if __name__ == "__main__":
    main()
