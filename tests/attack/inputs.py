"""Small graphs that the fuzzers mutate: arrays, targets, and a HeteroData."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

NODES = {"paper": 24, "author": 6, "venue": 4}
EDGES = (
    ("author", "writes", "paper"),
    ("paper", "of", "author"),
    ("paper", "in", "venue"),
    ("venue", "has", "paper"),
    ("paper", "cites", "paper"),
)
DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int8, torch.int32, torch.bool)


def graph() -> dict[str, Any]:  # Any: as numpy types the arrays of an archive
    """A small graph with labels and masks."""
    rng = np.random.default_rng(0)
    y = np.arange(40) % 3
    masks = {f"{name}_mask": np.arange(40) % 3 == i for i, name in enumerate(("train", "val", "test"))}
    edges = np.stack(np.divmod(rng.permutation(1600)[:120], 40))  # no edge has two weights
    weight = rng.random(120).astype(np.float32)
    return {
        "edge_index": edges,
        "edge_weight": weight,
        "x": rng.standard_normal((40, 5)).astype(np.float32),
        "y": y,
        **masks,
    }


def targets(rng: random.Random, rows: int) -> np.ndarray:
    """Numbers to be explained, some of them missing. Shapes: -> [rows], [rows, 1] or [rows, 3]."""
    y = np.random.default_rng(rng.randrange(1 << 30)).standard_normal((rows, 3)).astype(rng.choice(["f4", "f8"]))
    if rng.random() < 0.5:
        y[np.arange(rows) % 3 == 1, rng.randrange(3)] = np.nan  # of the nodes that graph() has for validation
    return rng.choice((y, y[:, :1].copy(), y[:, 0].copy()))


def hetero(rng: random.Random) -> HeteroData:
    """Papers of width 3 with labels or targets, authors of width 2, venues without features."""
    gen = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["paper"].x = torch.randn(NODES["paper"], 3, generator=gen)
    data["author"].x = torch.randn(NODES["author"], 2, generator=gen)
    data["venue"].num_nodes = NODES["venue"]
    numbers = torch.arange(NODES["paper"])
    of_classes: list[Callable[[], Tensor]] = [
        lambda: numbers % 3,
        lambda: (numbers % 3).to(rng.choice((*DTYPES[2:], torch.float32))),
        lambda: (numbers[:, None] % torch.tensor([2, 3, 4]) == 0).to(rng.choice((*DTYPES, torch.float32))),
        lambda: torch.from_numpy(targets(rng, NODES["paper"])),
    ]
    data["paper"].y = rng.choice(of_classes)()
    if rng.random() < 0.7:
        data["paper"].train_mask, data["paper"].val_mask = numbers % 3 == 0, numbers % 3 == 1
        data["paper"].test_mask = numbers % 3 == 2
    carried = rng.choice(((), (), ("edge_weight",), ("edge_attr",), ("edge_weight", "edge_attr")))
    for source, relation, destination in EDGES:
        count = rng.choice((0, 1, 20, 20, 20))
        ends = [torch.randint(0, NODES[kind], (count,), generator=gen) for kind in (source, destination)]
        data[source, relation, destination].edge_index = torch.stack(ends)
        for key in carried:
            shape = (count,) if key == "edge_weight" else (count, 2)
            data[source, relation, destination][key] = torch.ones(shape)
    return data
