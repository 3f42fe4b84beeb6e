"""Machines of different speeds: epochs of the planner's placement beside equal parts, and of searches with its guide.

python experiments/mixed_speeds/run.py            # writes results.jsonl, about 25 minutes; report.py: the tables
python experiments/mixed_speeds/run.py --smoke    # two minutes: does it run? writes smoke.jsonl

Four machines, two of full and two of half speed (`launch.speeds`), in slow motion (`launch.dilation`). Needs root,
iproute2 and a cgroup controller of CPU time. A study that was stopped goes on where it was.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any  # of JSON

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
import records

BASELINES = HERE.parent / "planner_search" / "searches.py"  # gnnpar plan with search=mcts

SPEEDS = (1.0, 1.0, 0.5, 0.5)
RANKS = len(SPEEDS)
LAYERS = {"wide": 3, "deep": 16}
# the graph of four_machines, whose links make little of an epoch at 10 Gbit/s; and that of its deep cell
GRAPHS = {
    "wide": ["dataset=sbm", "dataset.num_nodes=40000", "dataset.num_features=128", "model.hidden=128"],
    "deep": ["dataset=sbm_reddit", "dataset.scale=0.025", "dataset.avg_degree=80", "model.hidden=100"],
}
TINY = {"wide": ["dataset.num_nodes=2000"], "deep": ["dataset.scale=0.003", "dataset.avg_degree=12"]}
RATES = {"wide": (10, 1), "deep": (10,)}  # Gbit/s
EPOCHS = {"wide": 26, "deep": 15}
BUDGET = 12  # points that a search may price
FIXED = {
    "vanilla": ["strategy=graph_parallel", "strategy.overlap=none"],
    "graph_parallel": ["strategy=graph_parallel"],
    "gnnpipe one chunk": ["strategy=gnnpipe", "strategy.chunks=one"],  # of the deep model alone
    "single": ["strategy=single"],
}
# name -> (does the planner know the speeds, further words of `gnnpar plan`)
PLANNED = {
    "planned": (True, []),
    "planned, speeds unknown": (False, []),
    "guided": (True, ["search=guided", f"budget={BUDGET}"]),
    "unguided": (True, ["search=mcts", f"budget={BUDGET}"]),
}


def places(smoke: bool) -> dict[str, tuple[list[str], float]]:
    """Cell -> the model and the graph, and what links carry."""
    found = {}
    for graph, rates in RATES.items():
        model = ["model=gcn", f"model.num_layers={LAYERS[graph]}", *GRAPHS[graph], *(TINY[graph] if smoke else [])]
        for rate in rates[:1] if smoke else rates:
            found[f"{graph}, {rate} Gbit/s"] = (model, rate)
    return found


def with_speeds(speeds: Sequence[float]) -> str:
    return "launch.speeds=[" + ",".join(f"{speed:g}" for speed in speeds) + "]"


def planned(cell: Sequence[str], name: str, block: int, folder: Path, cache: Path) -> dict[str, Any]:
    """What `gnnpar plan` says, in a process of its own; plan.json lies in the folder."""
    knows, search = PLANNED[name]
    words = [*cell, *([with_speeds(SPEEDS)] if knows else []), *search]
    words += [f"seed={block}"] if search else []
    words += [f"cache_dir={cache}"]  # this machine is measured once, before its first plan
    plan = [sys.executable, str(BASELINES)] if name == "unguided" else [*blocks.GNNPAR, "plan"]
    command = [*plan, *words, "--out", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    return {"plan": {key: plan[key] for key in ("devices", "strategy", "predicted", "statistics", "setup")}}


def speeds_of(plan: Mapping[str, Any]) -> list[float]:
    """Of the devices in the plan's order: h0/0 is that of rank 0."""
    return [SPEEDS[int(str(device).rpartition("/")[2])] for device in plan["devices"]]


def measured(place: tuple[list[str], float], name: str, block: int, epochs: int, cache: Path) -> dict[str, Any]:
    model, gbps = place
    cell = [*model, *blocks.slow_motion(RANKS, gbps=gbps)]
    alone = [*model, "threads_per_rank=1", "world_size=1"]  # one machine of full speed, undilated
    about = [f"epochs={epochs}", f"eval_every={epochs}", f"block={block}", "seed=0"]
    if name == "single":
        return blocks.train([*alone, *FIXED[name], *about], failures=True)
    if name in FIXED:
        return blocks.train([*cell, with_speeds(SPEEDS), *FIXED[name], *about], failures=True)
    with tempfile.TemporaryDirectory() as folder:
        told = planned(cell, name, block, Path(folder), cache)
        speeds = speeds_of(told["plan"])
        several = [*model, *blocks.slow_motion(len(speeds), gbps=gbps), with_speeds(speeds)]
        chosen = several if len(speeds) > 1 else alone
        return told | blocks.train([*chosen, f"plan={folder}/plan.json", *about], failures=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny graphs, one block")
    parser.add_argument("--blocks", type=int, default=3)
    options = parser.parse_args()
    out = HERE / ("smoke.jsonl" if options.smoke else "results.jsonl")
    cells = places(options.smoke)
    names = [*FIXED, *PLANNED]
    done = {(row["block"], row["job"]) for row in records.read(out)}
    count = 1 if options.smoke else options.blocks
    listed = {f"{cell}; {name}": [cell, name] for cell in cells for name in names}
    listed = {job: of for job, of in listed.items() if of[1] != "gnnpipe one chunk" or of[0].startswith("deep")}
    todo = [(b, job) for b in range(count) for job in blocks.shuffled(listed, b) if (b, job) not in done]
    clock = blocks.Clock(len(todo))
    with tempfile.TemporaryDirectory() as cache:
        for block, job in todo:
            cell, name = listed[job]
            epochs = EPOCHS[cell.partition(",")[0]]
            row = {"block": block, "job": job, **measured(cells[cell], name, block, epochs, Path(cache))}
            records.append(out, [row])
            took = row["result"]["epoch_seconds"]["mean"]
            clock.tell(f"block {block} {job}: " + (f"{took:.4f} s an epoch" if took else str(row["result"]["error"])))


if __name__ == "__main__":
    main()
