"""Fold at the source: rows, bytes, memory and epochs of halo=cover beside halo=rows.

python experiments/cover/run.py --rows   # counts of rows, to rows.csv: about 20 minutes, no root
python experiments/cover/run.py          # epochs over loopback and shaped links, to results.jsonl: about an hour
python experiments/cover/run.py --smoke  # a minute: does it run? writes smoke.jsonl

Needs the raw files of the graphs (GNNPAR_DATA); epochs need root, iproute2 and a quiet machine. What was stopped
goes on where it was.
"""

import argparse
import csv
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent.resolve()
SHARED = HERE.parents[2] / "shared" / "data"
sys.path.insert(0, str(HERE.parent))

import blocks
import numpy as np

GRAPHS = ("debian", "tolokers", "computers", "physics", "cs", "blogcatalog", "squirrel", "cora", "citeseer", "rmat")
EPOCHS = 12
WAYS = {"fp32": ["strategy=graph_parallel"], "bf16": ["codec=bf16", "strategy=graph_parallel"]}
QUANTIZED = {"adaqp": ["strategy=adaqp", "strategy.codec.period=5"]}  # of GCN over links
CELLS = {  # (model, ranks, Gbit/s): None is loopback; four ranks have half a core each, in slow motion
    "gcn, 4 ranks, 1 Gbit/s": ("gcn", 4, 1),
    "gcn, 2 ranks, loopback": ("gcn", 2, None),
    "gcn, 2 ranks, 1 Gbit/s": ("gcn", 2, 1),
    "sage, 2 ranks, 1 Gbit/s": ("sage", 2, 1),
    "gat, 2 ranks, 1 Gbit/s": ("gat", 2, 1),
    "gcn, 2 ranks, 0.1 Gbit/s": ("gcn", 2, 0.1),
}


def untyped(data_dir: Path) -> Path:
    """Write `debian` without the types of its edges, which GCN, GraphSAGE and GAT do not read."""
    path = Path(tempfile.gettempdir()) / "debian_untyped.npz"
    with np.load(data_dir / "debian" / "debian.npz") as given:
        np.savez(path, **{name: given[name] for name in given.files if not name.startswith("edge_type")})
    return path


def timed(smoke: bool, data_dir: Path) -> blocks.Jobs:
    """Return the overrides of each job, by 'cell; codec, halo'."""
    about = ["dataset=npz", "dataset.name=debian", f"dataset.path={untyped(data_dir)}", "model.num_layers=3"]
    found = {}
    for cell, (model, ranks, rate) in list(CELLS.items())[: 1 if smoke else None]:
        job = [*about, f"model={model}", "model.hidden=128", f"world_size={ranks}", "threads_per_rank=1"]
        if rate is not None:
            job += ["launch=paced", f"launch.rate_gbps={rate}", f"launch.hosts={ranks}"]
            job += ["launch.dilation=2"] if ranks == 4 else []
        ways = WAYS | (QUANTIZED if model == "gcn" and rate is not None else {})
        for way, overrides in ways.items():
            for halo in ("rows", "cover"):
                found[f"{cell}; {way}, {halo}"] = [*job, *overrides, f"strategy.halo={halo}"]
    return found


def count_rows(data_dir: Path, out: Path) -> None:
    from rows import PARTITIONERS, PARTS, count

    from gnnpar.config.compose import compose

    done = set()
    if out.exists():
        with out.open(encoding="utf-8") as file:
            done = {(line["graph"], line["partition"], int(line["parts"])) for line in csv.DictReader(file)}
    for graph in GRAPHS:
        scale = ["dataset.scale=14"] if graph == "rmat" else []
        settings = compose([f"dataset={graph}", f"data_dir={data_dir}", "dataset.self_loops=keep", *scale])
        dataset = settings.load_dataset()
        for kind in PARTITIONERS:
            for parts in PARTS:
                if (dataset.name, kind, parts) not in done:
                    line = count(dataset, kind, parts)
                    new = not out.exists()
                    with out.open("a", encoding="utf-8") as file:
                        writer = csv.DictWriter(file, line, lineterminator="\n")
                        writer.writerows([dict(zip(line, line, strict=True)), line] if new else [line])
                    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="count rows, train nothing")
    parser.add_argument("--smoke", action="store_true", help="one link and model, one block")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("GNNPAR_DATA", SHARED)))
    options = parser.parse_args()
    if options.rows:
        return count_rows(options.data_dir.resolve(), HERE / "rows.csv")
    out = HERE / ("smoke.jsonl" if options.smoke else "results.jsonl")
    listed = timed(options.smoke, options.data_dir.resolve())
    common = [f"epochs={EPOCHS}", f"eval_every={EPOCHS}", "seed=0"]
    return blocks.run(listed, blocks=range(1 if options.smoke else options.blocks), common=common, out=out, whole=True)


if __name__ == "__main__":
    main()
