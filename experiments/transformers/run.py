"""Cora as SGFormer's authors split it."""

import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from gnnpar.config.compose import compose

SEED, PER_CLASS, VALIDATION, TEST = 123, 20, 500, 1000  # of medium/run.sh in github.com/qitianwu/SGFormer


def prepare(*_: object) -> None:
    os.environ["CORA_DRAW"] = str(cora_as_drawn())


def cora_as_drawn() -> Path:
    """Cora, with 20 nodes a class, 500 and 1,000 others drawn by torch's generator from the authors' seed."""
    data = compose(["dataset=cora", "dataset.normalize=none", "dataset.self_loops=false"])
    cora = data.dataset.load(Path(os.environ["GNNPAR_DATA"]).resolve(), 0)
    generator = torch.Generator().manual_seed(SEED)
    chosen, others = [], []
    for each in cora.y.unique():
        nodes = torch.where(cora.y == each)[0]
        nodes = nodes[torch.randperm(len(nodes), generator=generator)]
        chosen, others = [*chosen, nodes[:PER_CLASS]], [*others, nodes[PER_CLASS:]]
    rest = torch.cat(others)
    rest = rest[torch.randperm(len(rest), generator=generator)]
    parts = {"train": torch.cat(chosen), "val": rest[:VALIDATION], "test": rest[VALIDATION : VALIDATION + TEST]}
    arrays = {f"{name}_mask": np.isin(np.arange(cora.num_nodes), nodes.numpy()) for name, nodes in parts.items()}
    arrays |= {"edge_index": cora.edge_index.numpy(), "x": cora.x.numpy(), "y": cora.y.numpy()}
    path = Path(tempfile.gettempdir()) / "cora_draw.npz"
    np.savez(path, **arrays)
    return path
