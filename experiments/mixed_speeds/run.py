"""Plans made inside the blocks."""

import json
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any  # of JSON

import blocks

from gnnpar.config.inputs import key_of
from gnnpar.config.study import merged

UNGUIDED = Path(__file__).parents[1] / "planner_search" / "searches.py"  # gnnpar plan with search=mcts
SPEEDS = (1, 1, 0.5, 0.5)
TINY = {"sbm": ["dataset.num_nodes=2000"], "sbm_reddit": ["dataset.scale=0.003", "dataset.avg_degree=12"]}
ABOUT = ("epochs", "eval_every", "seed", "block")
PLAN = ("devices", "strategy", "predicted", "statistics", "setup")


@cache
def machine() -> tempfile.TemporaryDirectory[str]:
    """The cache of this study: the machine is measured once, before its first plan."""
    return tempfile.TemporaryDirectory()


def launch(overrides: Sequence[str], *, failures: bool) -> dict[str, Any]:
    """Train; first search the plan that `plan=searched` asks for, in a process of its own."""
    at = {key_of(override): override for override in overrides}
    model = [each for key, each in at.items() if key.startswith(("model", "dataset"))]
    model = merged(model, TINY[at["dataset"].partition("=")[2]] if "--smoke" in sys.argv else [])
    strategy = [each for key, each in at.items() if key.startswith("strategy")]
    about, gbps = [at[key] for key in ABOUT], float(at["launch.rate_gbps"].partition("=")[2])
    alone = [*model, "threads_per_rank=1", "world_size=1"]  # one machine of full speed, undilated
    cell, speeds = [*model, *blocks.slow_motion(len(SPEEDS), gbps=gbps)], at["launch.speeds"]
    if "plan" not in at:
        chosen = alone if "strategy=single" in strategy else [*cell, speeds]
        return blocks.train([*chosen, *strategy, *about], failures=failures)
    search = [at[key] for key in ("search", "budget") if key in at]
    words = [*cell, *([speeds] if "null" not in speeds else []), *search]
    words += [f"seed={at['block'].partition('=')[2]}"] if search else []
    program = [sys.executable, str(UNGUIDED)] if "search=mcts" in search else [*blocks.GNNPAR, "plan"]
    with tempfile.TemporaryDirectory() as folder:
        blocks.output_of([*program, *words, f"cache_dir={machine().name}", "--out", folder, "--json"])
        plan = json.loads((Path(folder) / "plan.json").read_text(encoding="utf-8"))
        own = [SPEEDS[int(str(device).rpartition("/")[2])] for device in plan["devices"]]  # h0/0 is that of rank 0
        told = f"launch.speeds=[{','.join(f'{speed:g}' for speed in own)}]"
        chosen = [*model, *blocks.slow_motion(len(own), gbps=gbps), told] if len(own) > 1 else alone
        found = blocks.train([*chosen, f"plan={folder}/plan.json", *about], failures=failures)
    return {"plan": {key: plan[key] for key in PLAN}} | found
