"""Memory of partitioning, loading and training from shards on disk, and of the same training from memory.

    python experiments/shards_memory/run.py [--smoke]      # 5 M nodes, 100 M edges; report.py makes table and figure

Every step is a command of its own, sampled four times a second. The graph (2 GB) and its shards (2 GB) lie in a
temporary folder (--scratch). The step from memory is ended where its processes hold more than --limit-gib together.
"""

import argparse
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import blocks
import records
import sample

RANKS = 2
EPOCHS = 3
MODEL = ["model=gcn", "model.hidden=16", "model.num_layers=2"]
COMMON = [f"epochs={EPOCHS}", f"eval_every={EPOCHS}", "threads_per_rank=1", "tracker=jsonl", "checkpoint.keep=0"]
KEPT = ("loss", "metric", "hashes", "memory_bytes", "cold_start_seconds", "epoch_seconds", "hardware", "versions")
KEPT += ("commit",)


def steps(graph: Path, shards: Path, runs: Path) -> dict[str, list[str]]:
    """Name -> what is run."""
    source = ["dataset=folder", f"dataset.path={graph}", "dataset.symmetrize=true"]
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--master-port", str(free_port())]
    ranks = [*torchrun, "--nproc-per-node", str(RANKS), "-m"]
    train = [*ranks, "gnnpar", "train", *MODEL, *COMMON]  # a rank's number stands in its environment: it can be sampled
    return {
        "partition": [*blocks.GNNPAR, "partition", *source, "partition=ldg", f"world_size={RANKS}", f"out={shards}"],
        "from shards": [*train, f"shards={shards}", f"hydra.run.dir={runs / 'shards'}"],
        "from memory": [*train, *source, "partition=ldg", f"hydra.run.dir={runs / 'memory'}"],
    }


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def trained(folder: Path, began: float) -> dict:
    """What a run says about itself; `trains_after`: seconds until its first epoch began."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    ended = (folder / "metrics.jsonl").stat().st_mtime
    spent = sum(row["time/epoch_seconds"] + row.get("time/evaluate_seconds", 0.0) for row in rows)
    told = {key: result[key] for key in KEPT}
    return told | {"losses": [row["loss/train"] for row in rows], "trains_after": round(ended - began - spent, 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=5_000_000)
    parser.add_argument("--edges", type=int, default=100_000_000)
    parser.add_argument("--limit-gib", type=float, default=12.0)
    parser.add_argument("--scratch", type=Path, help="where graph and shards lie (a temporary folder)")
    parser.add_argument("--out", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--smoke", action="store_true", help="100 k nodes, 2 M edges")
    given = parser.parse_args()
    if given.smoke:
        given.nodes, given.edges = 100_000, 2_000_000
    scratch = Path(tempfile.mkdtemp(dir=given.scratch, prefix="shards-memory-"))
    environment = os.environ | {"GNNPAR_CACHE": str(scratch / "cache"), "PYTHONSAFEPATH": "1"}
    size = ["--nodes", str(given.nodes), "--edges", str(given.edges)]
    all_steps = {"generate": [sys.executable, str(HERE / "generate.py"), str(scratch / "graph"), *size]}
    all_steps |= steps(scratch / "graph", scratch / "shards", scratch)
    began = time.perf_counter()
    try:
        records.replace(given.out, [])
        for name, command in all_steps.items():
            done = sample.run(command, limit_bytes=given.limit_gib * sample.GIB, environment=environment)
            if done["ended"]:
                raise SystemExit(f"{name}: {done['output']}")
            del done["output"]  # it names folders
            row = {"step": name, "nodes": given.nodes, "edges": given.edges, "limit_gib": given.limit_gib} | done
            if name.startswith("from") and done["ended"] == 0:
                row |= trained(scratch / name.removeprefix("from "), done["began"])
            records.append(given.out, [row])
            peaks = ", ".join(f"{role} {values[0] / sample.GIB:.2f} GiB" for role, values in done["peaks"].items())
            print(f"{name}: {done['seconds']} s, {peaks}; {time.perf_counter() - began:.0f} s in all", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
