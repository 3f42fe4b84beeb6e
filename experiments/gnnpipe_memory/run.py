"""Peak memory of a rank against depth: graph_parallel, and gnnpipe with chunks kept and computed again.

    python experiments/gnnpipe_memory/run.py           # writes results.jsonl, about 8 minutes; then report.py
    python experiments/gnnpipe_memory/run.py --smoke   # two cells; writes smoke.jsonl

Every figure is of one training epoch, from the allocator's events (protocol, rule 10), the largest of all ranks.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STRATEGIES = {
    "graph_parallel": ("strategy=graph_parallel",),
    "gnnpipe, none": ("strategy=gnnpipe", "strategy.remat=none"),
    "gnnpipe, layer": ("strategy=gnnpipe", "strategy.remat=layer"),
    "gnnpipe, chunk": ("strategy=gnnpipe", "strategy.remat=chunk"),
}
MODELS = ("gcn", "resgcn", "gat")
DEPTHS = (8, 16, 32)
COMMON = (
    "dataset=sbm", "dataset.num_nodes=4000", "model.hidden=64", "model.encoder=linear", "model.decoder=linear",
    "epochs=4", "eval_every=4", "threads_per_rank=1", "world_size=2", "tracker=jsonl", "seed=0", "checkpoint.keep=0",
)  # fmt: skip


def cell(model: str, depth: int, strategy: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        asked = [*COMMON, f"model={model}", f"model.num_layers={depth}", *STRATEGIES[strategy]]
        command = [sys.executable, "-m", "gnnpar", "train", *asked, f"hydra.run.dir={folder}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        result = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    row: dict[str, Any] = {"model": model, "layers": depth, "variant": strategy, "hidden": 64, "nodes": 4000}
    kept = ("memory_bytes", "loss", "bytes_per_epoch", "commit", "versions", "hardware")
    return row | {key: result[key] for key in kept} | {"argv": asked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two cells")
    smoke = parser.parse_args().smoke
    cells = list(itertools.product(MODELS, DEPTHS, STRATEGIES))
    cells = cells[1:4:2] if smoke else cells
    with (HERE / ("smoke.jsonl" if smoke else "results.jsonl")).open("w", encoding="utf-8") as file:
        for number, (model, depth, strategy) in enumerate(cells, 1):
            row = cell(model, depth, strategy)
            file.write(json.dumps(row) + "\n")
            file.flush()
            peak = max(row["memory_bytes"]["peak"]) / 2**20
            print(f"{number}/{len(cells)} {model} {depth} layers {strategy}: {peak:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
