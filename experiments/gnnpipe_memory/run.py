"""Peak memory of a rank against its layers: all nodes at once, and gnnpipe with chunks kept and computed again.

    python experiments/gnnpipe_memory/run.py      # writes results.jsonl, about 5 minutes; then report.py

Every figure is of one training epoch, from the allocator's events (protocol, rule 10).
"""

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

MODELS = ("gcn", "resgcn", "gat")
DEPTHS = (8, 16, 32)
SWEEPS = (
    ("strategy=single",),
    ("strategy=gnnpipe", "strategy.chunks=8", "strategy.remat=none,layer,chunk"),
)
COMMON = (
    "dataset=sbm",
    "dataset.num_nodes=2000",
    "model.hidden=64",
    "model.encoder=linear",
    "model.decoder=linear",
    "epochs=3",
    "eval_every=3",
    "threads_per_rank=1",
    "world_size=1",
    "seed=0",
    "checkpoint.keep=0",
    f"model={','.join(MODELS)}",
    f"model.num_layers={','.join(map(str, DEPTHS))}",
)
KEPT = ("model", "strategy", "memory_bytes", "loss", "commit", "versions", "hardware")


def sweep(asked: tuple[str, ...]) -> list[dict[str, Any]]:
    """A row a job."""
    with tempfile.TemporaryDirectory() as folder:
        blocks.call(["-m", *asked, *COMMON, f"hydra.sweep.dir={folder}"])
        results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(Path(folder).rglob("result.json"))]
    rows = []
    for result in results:
        settings = result["settings"]
        row = {"layers": settings["model"]["num_layers"], "remat": settings["strategy"].get("remat")}
        rows.append(row | {key: result[key] for key in KEPT})
    return rows


def main() -> None:
    rows = {(r["model"], r["layers"], r["strategy"], r["remat"]): r for asked in SWEEPS for r in sweep(asked)}
    variants = (("single", None), *(("gnnpipe", remat) for remat in ("none", "layer", "chunk")))
    listed = itertools.product(MODELS, variants, DEPTHS)
    records.replace(HERE / "results.jsonl", [rows[model, depth, *variant] for model, variant, depth in listed])


if __name__ == "__main__":
    main()
