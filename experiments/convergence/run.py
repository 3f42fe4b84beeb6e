"""Accuracy at full length: trained until validation has not risen for 200 epochs; seeds draw graph, split and cut.

    python experiments/convergence/run.py --list                      # cells, runs done of how many, hours left
    python experiments/convergence/run.py                             # all of them, in the order of --list
    python experiments/convergence/run.py --cells "squirrel gcn 2" --seeds 5 --methods gnnpipe drop
    python experiments/convergence/report.py

What is there is not run again: stopped with Ctrl-C, the same command goes on. Methods of a seed come together, so that
whatever is there is paired. As many runs as there are cores train at a time: times do not matter.
"""

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "data"
sys.path.insert(0, str(HERE.parent))

import blocks
import numpy as np
import records
from cells import CELLS, COMMON, CORE, FILES, METHODS, SEEDS, UNTYPED, Cell

from gnnpar.comm.world import num_cores

OUT = HERE / "results.jsonl"


def lacks(cell: Cell, data_dir: Path) -> str | None:
    """Why a cell cannot run here."""
    folder = FILES.get(cell.dataset)
    return None if folder is None or (data_dir / folder).exists() else f"no {data_dir / folder}"


def write_untyped(folder: Path) -> None:
    """The debian graph without types, where it is not there yet: models of untyped edges refuse them."""
    if not UNTYPED.exists():
        with np.load(folder / "debian.npz", allow_pickle=False) as arrays:
            np.savez(UNTYPED, **{key: arrays[key] for key in ("edge_index", "x", "y")})


def listed(cells: list[Cell], methods: list[str], seeds: int) -> None:
    """Runs done of how many; hours left of one core, at the seconds that the runs of a cell have taken."""
    rows = records.read(OUT)
    for cell in cells:
        names = {cell.job(method): method for method in methods}
        there = [row for row in rows if row["job"] in names and row["block"] < seeds]
        mine = [row["result"] for row in rows if row["job"].startswith(f"{cell.name};")]
        wall = [
            each["train_wall_seconds"] + sum(each["cold_start_seconds"].values())
            for each in mine
            if each["error"] is None
        ]
        left = len(names) * seeds - len(there)
        hours = f"{left * sum(wall) / len(wall) / 3600:.1f} core hours left" if wall else "no line says how long"
        print(f"{cell.name}: {len(there)} of {len(names) * seeds} runs; {hours}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=[cell.name for cell in CELLS], metavar="CELL")
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=[*METHODS], metavar="METHOD")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"the first so many (of {SEEDS})")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--at-once", type=int, default=num_cores(), help="runs at a time")
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("GNNPAR_DATA", SHARED)))
    options = parser.parse_args()
    known = {cell.name: cell for cell in CELLS}
    if unknown := [name for name in options.cells if name not in known]:
        raise SystemExit(f"there is no cell {', '.join(unknown)}; there are {', '.join(known)}")
    cells = [known[name] for name in options.cells]
    if options.list:
        listed(cells, options.methods, options.seeds)
        return
    for methods in ([m for m in options.methods if m in CORE], [m for m in options.methods if m not in CORE]):
        for cell in cells:
            if (why := lacks(cell, options.data_dir)) is not None:
                print(f"{cell.name} skipped: {why}", flush=True)
                continue
            if cell.dataset == "debian":
                write_untyped(options.data_dir / FILES[cell.dataset])
            print(f"{cell.name}: {', '.join(methods)}", flush=True)
            blocks.seeded(
                {cell.job(method): [*cell.overrides, *METHODS[method]] for method in methods},
                seeds=range(options.seeds),
                common=[*COMMON, f"data_dir={options.data_dir.resolve()}"],
                out=OUT,
                at_once=options.at_once,
            )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on from here") from None
