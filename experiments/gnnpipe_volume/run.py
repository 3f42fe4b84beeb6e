"""Bytes of an epoch of graph_parallel, gnnpipe and hybrid on sbm, from result.json, and alpha from plan.json.

    python experiments/gnnpipe_volume/run.py            # appends to results.jsonl, about 8 minutes
    python experiments/gnnpipe_volume/run.py --smoke    # two cells; writes smoke.jsonl
    python experiments/gnnpipe_volume/report.py         # the paper's volumes by formula, and these

Ranks are threads: the bytes of processes, no statement on time.
"""

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
import records

RANKS = 4
STRATEGIES = {
    "graph_parallel": ("strategy=graph_parallel",),
    "gnnpipe": ("strategy=gnnpipe",),
    "hybrid": ("strategy=hybrid", "strategy.stages=2", "strategy.parts=2"),
}
MODELS = ("gcn", "sage", "gcnii", "resgcn")
DEPTHS = (8, 32)
# linear layers in and out: every aggregation is of `hidden` numbers a row, as in the formulas
COMMON = ("dataset=sbm", "dataset.num_nodes=1000", "model.hidden=32", "model.encoder=linear", "model.decoder=linear")
COMMON += ("epochs=2", "eval_every=2", "comm=threads", "threads_per_rank=1", f"world_size={RANKS}")


def cell(model: str, depth: int, strategy: str) -> dict[str, Any]:
    """One run: what it sent, and what the formulas need."""
    with tempfile.TemporaryDirectory() as folder:
        asked = [*COMMON, f"model={model}", f"model.num_layers={depth}", *STRATEGIES[strategy]]
        blocks.call([*asked, f"hydra.run.dir={folder}"])
        result = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
        plan = json.loads((Path(folder) / "plan.json").read_text(encoding="utf-8"))
    mesh = plan["mesh"]
    row: dict[str, Any] = {"model": model, "layers": depth, "strategy": strategy, "hidden": 32, "nodes": 1000}
    row |= {"stages": len(mesh), "ways": len(mesh[0]), "alpha": plan["statistics"]["alpha"]}
    return row | {key: result[key] for key in ("bytes_per_epoch", "commit", "versions", "hardware")} | {"argv": asked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two cells")
    smoke = parser.parse_args().smoke
    cells = list(itertools.product(MODELS, DEPTHS, STRATEGIES))
    cells = [cells[0], cells[1]] if smoke else cells
    out = HERE / ("smoke.jsonl" if smoke else "results.jsonl")
    records.replace(out, [])
    for number, (model, depth, strategy) in enumerate(cells, 1):
        row = cell(model, depth, strategy)
        records.append(out, [row])
        print(f"{number}/{len(cells)} {model} {depth} layers {strategy}: {row['bytes_per_epoch']['total']}")


if __name__ == "__main__":
    main()
