"""What tests of checkpoints share: small runs in threads of this process, and what they left."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composing import configured, settings_of
from gnnpar.cli.train import run_training
from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.comm.world import Outcome
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.training.checkpoint import files as checkpoint
from gnnpar.training.checkpoint.files import plain

SMALL = (
    "comm=threads",
    "dataset.num_nodes=200",
    "dataset.avg_degree=6",
    "dataset.num_features=12",
    "model.hidden=8",
    "tracker=jsonl",
    "threads_per_rank=1",
    "eval_every=2",
)
ADAPTIVE = ("strategy.codec.period=2", "strategy.codec.warmup=1", "strategy.codec.trace_epochs=2")
WALL = ("time/", "memory/", "comm/wire", "system/")  # what no two runs share


def strategy_of(name: str) -> tuple[str, ...]:
    """A strategy's overrides such that short runs choose bits, trace, and plan without measuring the machine."""
    if name == "tag":
        return ("strategy=tag", "strategy.rates=nominal")
    strategy = configured("strategy", name)
    adaptive = isinstance(strategy, GraphParallel) and isinstance(strategy.codec, Adaptive)
    return (f"strategy={name}", *(ADAPTIVE if adaptive else ()))


def train(folder: Path, *overrides: str) -> Outcome:
    folder.mkdir(exist_ok=True)
    return run_training(settings_of(*SMALL, *overrides), folder)


def rows(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl less the times."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(WALL)} for row in found]


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def last(folder: Path) -> checkpoint.Checkpoint:
    lines: list[str] = []
    found = checkpoint.latest(folder, lines.append)
    assert found is not None
    assert not lines
    return found


def hashes(folder: Path) -> dict[str, str]:
    """Hash parameters, optimizer and engine state of all ranks in the last checkpoint."""
    return hashes_of(last(folder))


def tree_hash(tree: object) -> str:
    """Return the sha256 over structure, types, shapes and bytes, on any device."""
    digest = hashlib.sha256()
    for piece in _pieces(plain(tree)):
        digest.update(struct.pack("<q", len(piece)))
        digest.update(piece)
    return digest.hexdigest()


def _pieces(tree: object) -> Iterator[bytes | memoryview]:
    if isinstance(tree, Tensor):
        yield f"tensor {tree.dtype} {tuple(tree.shape)}".encode()
        flat = tree.cpu().contiguous().view(-1)
        yield flat.view(torch.uint8).numpy().data if flat.numel() else b""
    elif isinstance(tree, dict):
        yield f"dict {len(tree)}".encode()
        for key in sorted(tree, key=repr):
            yield repr(key).encode()
            yield from _pieces(tree[key])
    elif isinstance(tree, (list, tuple)):
        yield f"{type(tree).__name__} {len(tree)}".encode()
        for each in tree:
            yield from _pieces(each)
    else:
        yield f"{type(tree).__name__} {tree!r}".encode()


def hashes_of(found: checkpoint.Checkpoint) -> dict[str, str]:
    trees = [found.rank(rank, torch.device("cpu")) for rank in range(len(found.manifest["files"]))]
    return {name: tree_hash([tree[name] for tree in trees]) for name in ("model", "optimizer", "engine")}


def damage(file: Path, at: float = 0.5) -> None:
    """Flip a byte."""
    data = bytearray(file.read_bytes())
    data[int(len(data) * at)] ^= 0xFF
    file.write_bytes(bytes(data))
