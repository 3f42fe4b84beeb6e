"""PipeGCN's and BNS-GCN's public code beside ours: the same graph, parts, weights and rate, and so the same losses?

Its Python has torch and DGL 1.1.3 (`pip install --no-deps dgl==1.1.3` beside torch, numpy, scipy, networkx, requests,
tqdm and psutil); the code is that of github.com/GATECH-EIC/PipeGCN and .../BNS-GCN. What is not there is skipped with a
line.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any  # of JSON

import blocks
import records
import torch
from records import Files

from gnnpar.config.compose import compose
from gnnpar.data.tasks import make_task
from gnnpar.partition.partition import partition
from gnnpar.placement import array_hash

LAYERS, HIDDEN, EPOCHS = 3, 32, 60
COMMON = ["dataset=sbm", "dataset.num_nodes=1500", "model=sage", f"model.num_layers={LAYERS}", f"model.hidden={HIDDEN}"]
COMMON += ["model.norm=layer", "model.dropout=0", "world_size=2", "comm=threads", "threads_per_rank=1"]
COMMON += ["model.order=aggregate_first"]  # as in the public code: rows travel before the matrix
COMMON += [f"epochs={EPOCHS}", "eval_every=1"]
THEIRS = [f"--n-epochs={EPOCHS}", f"--n-layers={LAYERS}", f"--n-hidden={HIDDEN}", "--dropout=0", "--lr=0.01"]
THEIRS += ["--norm=layer", "--no-eval", "--fix-seed"]
BOTH = ["strategy=pipegcn", "strategy.smooth_features=true", "strategy.smooth_gradients=true"]
CORRECTED = ["--enable-pipeline", "--feat-corr", "--grad-corr", "--corr-momentum=0.95"]
# name -> seeds, ours, theirs
CASES: dict[str, tuple[int, list[str], list[str]]] = {
    "vanilla": (1, ["strategy=graph_parallel"], []),
    "pipegcn": (1, ["strategy=pipegcn"], ["--enable-pipeline"]),
    "pipegcn both": (1, BOTH, CORRECTED),
    "pipegcn both from first rows": (1, BOTH, [*CORRECTED, "--first-rows"]),
}
for rate, seeds in (("1", 1), ("0.5", 3), ("0.1", 3)):
    cached = ["strategy=bns", f"strategy.rate={rate}", "first_layer=cached"]
    CASES[f"bns {rate}"] = (seeds, cached, ["--use-pp", f"--sampling-rate={rate}"])


def run(files: Files, *, python: str = "none", pipegcn: str = "none", bns: str = "none") -> None:
    """Train every case by both. python: of the environment with DGL. pipegcn, bns: folders of their code."""
    code = {"pipegcn": Path(pipegcn), "bns": Path(bns)}
    if not Path(python).exists():
        raise SystemExit(f"skipped: no Python with DGL at {python}; --python names one")
    done = {(row["case"], row["seed"]) for row in files.read()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case, (seeds, ours, theirs) in CASES.items():
            method = "bns" if case.startswith("bns") else "pipegcn"
            if not (code[method] / "train.py").exists():
                print(f"{case} skipped: no code of {method} in {code[method]}", flush=True)
                continue
            for seed in (seed for seed in range(seeds) if (case, seed) not in done):
                partition_hash = export(folder / "inputs.pt", seed)
                row: dict[str, Any] = {"case": case, "seed": seed, "partition": partition_hash}
                row["theirs"] = original(python, code[method], method, folder, [*theirs, f"--seed={seed}"])
                row["ours"] = our_losses(ours, seed, partition_hash)
                records.append(files(), [row])
                print(f"{case}, seed {seed}: {row['ours'][-1]:.4f}, theirs {row['theirs'][-1]:.4f}", flush=True)


def export(file: Path, seed: int) -> str:
    """Graph, parts and initial weights for the public code; the partition's hash."""
    settings = compose([*COMMON, f"seed={seed}"])
    dataset = settings.dataset.load(settings.data_dir, settings.seed)
    part_of = partition(dataset, 2, by=settings.partition)
    model = settings.build_model(dataset.num_features, make_task(dataset.task, dataset.num_classes).out_dim)
    weights, names = model.state_dict(), {"own": "own.weight", "bias": "own.bias", "neighbours": "neighbours"}
    tensors = {f"{own}.{i}": weights[f"layers.{i}.conv.{name}"] for i in range(LAYERS) for own, name in names.items()}
    masks = ("train_mask", "val_mask", "test_mask")
    tensors |= {name: vars(dataset)[name] for name in ("edge_index", "x", "y", *masks)}
    torch.save({**tensors, "part_of": part_of}, file)
    return array_hash(part_of)


def original(python: str, code: Path, method: str, folder: Path, arguments: list[str]) -> list[float]:
    """Losses of the public code."""
    out = folder / "losses.json"
    command = [python, str(Path(__file__).with_name("original.py")), f"--method={method}", f"--code={code}"]
    command += [f"--inputs={folder / 'inputs.pt'}", f"--out={out}", *THEIRS, *arguments]
    blocks.output_of(command, env={**os.environ, "DGLBACKEND": "pytorch", "PYTHONPATH": ""})
    return json.loads(out.read_text(encoding="utf-8"))


def our_losses(overrides: list[str], seed: int, partition_hash: str) -> list[float]:
    """Of the weights that `export` has written for this seed, and of draws of our own."""
    found = blocks.train([*COMMON, *overrides, f"seed={seed}"])
    if found["result"]["hashes"]["partition"] != partition_hash:
        raise SystemExit("our run has other parts than the public code was given")
    return [point["loss/train"] for point in found["curve"]]
