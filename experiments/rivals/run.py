"""The rivals' headlines: accuracy and fidelity over seeds, bytes against the cut, memory, and times.

    python experiments/rivals/run.py --stage accuracy     # accuracy.jsonl; no times, so that other work does no harm
    python experiments/rivals/run.py --stage bytes        # bytes.jsonl
    python experiments/rivals/run.py --stage memory       # memory.jsonl
    python experiments/rivals/run.py --stage times        # times.jsonl; about 12 quiet minutes, root, iproute2
    python experiments/rivals/run.py --smoke              # two minutes: does it run? writes smoke*.jsonl
    python experiments/rivals/report.py                   # tables and figure.svg

A stage that was stopped goes on with the first job that is not there.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any  # of JSON

import numpy as np

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "data"
sys.path.insert(0, str(HERE.parent))

import blocks
import records
from jobs import COUNTED, CUTS, GRAPHS, HELD, LARGE, SENDERS, STUDIES, TIMED, VARIANTS

STAGES = ("accuracy", "bytes", "memory", "times")
RATE = 1.0  # Gbit/s of a paced link


def there(folder: str, data_dir: Path, what: str) -> bool:
    if folder and not (data_dir / folder).exists():
        print(f"{what} skipped: no {data_dir / folder}", flush=True)
        return False
    return True


def accuracy(
    studies: Sequence[str], wanted: Sequence[str], seeds: int, data_dir: Path, out: Path, extra: Sequence[str]
) -> None:
    """Every variant of a study that is wanted, `seeds` times."""
    for study in studies:
        folder, all_variants, common = STUDIES[study]
        variants = [name for name in all_variants if name in wanted]
        if there(folder, data_dir, study):
            run = [*common, f"data_dir={data_dir}", f"seed={','.join(map(str, range(seeds)))}", *extra]
            blocks.sweep({f"{study}; {name}": VARIANTS[name] for name in variants}, common=run, out=out)


def count_bytes(graphs: Sequence[str], ranks: Sequence[int], data_dir: Path, out: Path) -> None:
    """Two epochs of every cut, method and number of ranks; a graph is read once."""
    done = {row["graph"] for row in records.read(out)}
    for graph in (graph for graph in graphs if graph not in done):
        folder, overrides = GRAPHS[graph]
        if not there(folder, data_dir, graph):
            continue
        with tempfile.TemporaryDirectory() as runs:
            if graph == "debian":
                untyped(data_dir / "debian" / "debian.npz", Path(runs) / "debian.npz")
            dataset = [override.format(runs=runs) for override in overrides]
            axes = [
                f"partition={','.join(CUTS)}",
                f"strategy={','.join(SENDERS)}",
                f"world_size={','.join(map(str, ranks))}",
            ]
            blocks.call(["-m", *dataset, *COUNTED, *axes, f"data_dir={data_dir}", f"hydra.sweep.dir={runs}"])
            results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(Path(runs).rglob("result.json"))]
            records.append(out, [{"graph": graph, **counted(result)} for result in results])
        print(f"{graph}: {len(results)} runs", flush=True)


def untyped(source: Path, target: Path) -> None:
    """The graph of an .npz without the types of its edges, which plain models do not read."""
    with np.load(source) as arrays:
        np.savez(target, **{name: arrays[name] for name in arrays.files if name != "edge_type"})


def counted(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a line of bytes.jsonl keeps of result.json, which also says where the graph's file lies."""
    cut = result["settings"]["partition"]["_target_"].rpartition(".")[2].lower()
    kept = ("strategy", "world_size", "bytes_per_epoch", "bytes_by_layer", "hashes", "hardware", "versions", "commit")
    return {"cut": cut, **{key: result[key] for key in kept}}


def times(block_count: int, out: Path) -> None:
    """Interleaved blocks over loopback and, where links can be shaped, over one of RATE."""
    links: dict[str, list[str]] = {"loopback": []}
    if os.geteuid() == 0 and shutil.which("tc") and shutil.which("ip"):
        links["paced"] = ["launch=paced", "launch.hosts=2", f"launch.rate_gbps={RATE}"]
    else:
        print("paced links skipped: they need root and iproute2", flush=True)
    every = {f"{link}; {name}": [*job, *link_of] for link, link_of in links.items() for name, job in TIMED.items()}
    common = [*LARGE, "world_size=2", "epochs=25", "eval_every=25"]  # 20 behind the warm-up: whole periods of 4 and 5
    blocks.run(every, blocks=range(block_count), common=common, out=out, whole=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="few epochs, two seeds, one block, small graphs")
    parser.add_argument("--stage", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--studies", nargs="+", default=list(STUDIES), choices=list(STUDIES))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("GNNPAR_DATA", SHARED)))
    options = parser.parse_args()
    data_dir, smoke = options.data_dir.resolve(), options.smoke
    if smoke:
        options.studies, options.seeds, options.blocks = ["sbm gcn"], 2, 1
    files = {stage: HERE / f"{'smoke_' * smoke}{stage}.jsonl" for stage in STAGES}
    if "accuracy" in options.stage:
        extra = ["epochs=25"] if smoke else []  # no period is longer
        accuracy(options.studies, options.variants, options.seeds, data_dir, files["accuracy"], extra)
    if "bytes" in options.stage:
        count_bytes(["sbm"] if smoke else list(GRAPHS), [2] if smoke else [2, 4, 8], data_dir, files["bytes"])
    if "memory" in options.stage:
        common = [*LARGE, "world_size=4", "epochs=6", "eval_every=6"]
        blocks.run(HELD, blocks=[0], common=[*common, *["dataset.num_nodes=2000"] * smoke], out=files["memory"])
    if "times" in options.stage:
        times(options.blocks, files["times"])


if __name__ == "__main__":
    main()
