"""Memory of partitioning, loading and training from shards on disk, and of the same training from memory.

Every step is a command of its own, sampled four times a second. The graph (2 GB) and its shards (2 GB) lie in a
temporary folder. The step from memory is ended where its processes hold more than --limit-gib together.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import blocks
import records
from records import Files
from shards_memory import sample
from shards_memory.generate import generate

RANKS = 2
EPOCHS = 3
MODEL = ["model=gcn", "model.hidden=16", "model.num_layers=2"]
COMMON = [f"epochs={EPOCHS}", f"eval_every={EPOCHS}", "threads_per_rank=1", "tracker=jsonl", "checkpoint.keep=0"]
KEPT = ("loss", "metric", "hashes", "memory_bytes", "cold_start_seconds", "epoch_seconds", "hardware", "versions")
KEPT += ("commit",)


def steps(scratch: Path) -> dict[str, list[str]]:
    """Name -> what is run."""
    source = ["dataset=folder", f"dataset.path={scratch}/graph", "dataset.symmetrize=true", "partition=ldg"]
    ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "-m"]
    train = [sys.executable, "-P", "-m", *ranks, "gnnpar", "train", *MODEL, *COMMON]  # a rank is seen by its RANK
    shards = f"{scratch}/shards.cut"
    return {
        "partition": [*blocks.GNNPAR, "partition", *source, f"world_size={RANKS}", f"out={shards}"],
        "from shards": [*train, f"shards={shards}", f"hydra.run.dir={scratch}/shards"],
        "from memory": [*train, *source, f"hydra.run.dir={scratch}/memory"],
    }


def trained(folder: Path, began: float) -> dict:
    """What a run says about itself; `trains_after`: seconds until its first epoch began."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    ended = (folder / "metrics.jsonl").stat().st_mtime
    spent = sum(row["time/epoch_seconds"] + row.get("time/evaluate_seconds", 0.0) for row in rows)
    told = {key: result[key] for key in KEPT}
    return told | {"losses": [row["loss/train"] for row in rows], "trains_after": round(ended - began - spent, 1)}


def run(files: Files, *, nodes: int = 5_000_000, edges: int = 100_000_000, limit_gib: float = 12.0) -> None:
    """Run every step; in a rehearsal on 100 k nodes and 2 M edges."""
    nodes, edges = (100_000, 2_000_000) if files.smoke else (nodes, edges)
    records.replace(files(), [])
    with tempfile.TemporaryDirectory(prefix="shards-memory-") as folder:
        scratch = Path(folder)
        generate(scratch / "graph", nodes=nodes, edges=edges)
        environment = os.environ | {"GNNPAR_CACHE": f"{scratch}/cache", "PYTHONSAFEPATH": "1"}
        for name, command in steps(scratch).items():
            done = sample.run(command, limit_bytes=limit_gib * sample.GIB, environment=environment)
            output = done.pop("output")  # it names folders
            if done["ended"]:
                raise SystemExit(f"{name}: {output}")
            row = {"step": name, "nodes": nodes, "edges": edges, "limit_gib": limit_gib} | done
            if name.startswith("from") and done["ended"] == 0:
                row |= trained(scratch / name.removeprefix("from "), done["began"])
            records.append(files(), [row])
            peaks = ", ".join(f"{role} {values[0] / sample.GIB:.2f} GiB" for role, values in done["peaks"].items())
            print(f"{name}: {done['seconds']} s, {peaks}", flush=True)
