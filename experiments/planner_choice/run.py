"""The planner's choice against the measured best, cell by cell.

    python experiments/planner_choice/run.py            # seconds: results.jsonl, from what planner_accuracy measured
    python experiments/planner_choice/run.py --pool     # pool*.jsonl: every strategy, and one rank with all threads
    python experiments/planner_choice/run.py --smoke    # a minute: does it run? writes smoke*.jsonl
    python experiments/planner_choice/report.py         # the tables

--pool takes 15 minutes of a quiet machine, root and iproute2 for shaped links, and ../shared/data, GNNPAR_DATA or
--data-dir for debian. One that was stopped goes on with the first cell that is not there.
"""

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
ACCURACY = HERE.parent / "planner_accuracy"
SHARED = HERE.parents[2] / "shared" / "data"
sys.path[:0] = [str(ACCURACY), str(HERE.parent)]

import pool
import records
from choices import choices
from pairs import read


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one small cell, and planner_accuracy's smoke run")
    parser.add_argument("--pool", action="store_true", help="measure the pool of every strategy")
    parser.add_argument("--blocks", type=int, default=2, help="of --pool: launches of every configuration")
    parser.add_argument("--minutes", type=float, default=15, help="of --pool: begin no cell after so long")
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("GNNPAR_DATA", SHARED)))
    options = parser.parse_args()
    if options.pool or options.smoke:
        places = pool.SMOKE if options.smoke else pool.available(options.data_dir.resolve())
        pool.measure(places, count=options.blocks, minutes=options.minutes, smoke=options.smoke)
    if not options.pool:
        prefix = "smoke_" if options.smoke else ""
        file = "smoke.jsonl" if options.smoke else "results.jsonl"
        rows = list(choices(read(ACCURACY / f"{prefix}predictions.jsonl", ACCURACY / file)))
        records.replace(HERE / file, rows)
        print(f"{len(rows)} lines")


if __name__ == "__main__":
    main()
