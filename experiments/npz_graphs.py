"""Graphs that study files read from a temporary folder, by variables of the environment."""

import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from gnnpar.config.compose import compose
from gnnpar.data.dataset import Dataset

FOLDER = Path(tempfile.gettempdir())
UNTYPED, DRAWN, ALONE = FOLDER / "debian_untyped.npz", FOLDER / "cora_draw.npz", FOLDER / "random_nodes"
os.environ |= {"DEBIAN_UNTYPED": str(UNTYPED), "CORA_DRAW": str(DRAWN), "RANDOM_NODES": str(ALONE)}
MASKS = ("train_mask", "val_mask", "test_mask")
SEED, PER_CLASS, VALIDATION, TEST = 123, 20, 500, 1000  # of medium/run.sh in github.com/qitianwu/SGFormer


def loaded(*overrides: str) -> Dataset:
    return compose([*overrides, "dataset.self_loops=false"]).dataset.load(Path(os.environ["GNNPAR_DATA"]).resolve(), 0)


def untyped_debian() -> bool:
    """Write debian without types of edges, which plain models refuse. Return False without its raw file."""
    source = Path(os.environ["GNNPAR_DATA"]) / "debian" / "debian.npz"
    if source.exists():
        with np.load(source) as given:
            np.savez(UNTYPED, **{name: given[name] for name in given.files if not name.startswith("edge_type")})
    return source.exists()


def cora_as_drawn() -> None:
    """Write Cora, with 20 nodes a class, 500 and 1,000 others drawn by torch's generator from SGFormer's seed."""
    cora = loaded("dataset=cora", "dataset.normalize=none")
    generator = torch.Generator().manual_seed(SEED)
    chosen, others = [], []
    for each in cora.y.unique():
        nodes = torch.where(cora.y == each)[0]
        nodes = nodes[torch.randperm(len(nodes), generator=generator)]
        chosen, others = [*chosen, nodes[:PER_CLASS]], [*others, nodes[PER_CLASS:]]
    rest = torch.cat(others)
    rest = rest[torch.randperm(len(rest), generator=generator)]
    parts = (torch.cat(chosen), rest[:VALIDATION], rest[VALIDATION : VALIDATION + TEST])
    masks = {name: np.isin(np.arange(cora.num_nodes), part.numpy()) for name, part in zip(MASKS, parts, strict=True)}
    np.savez(DRAWN, edge_index=cora.edge_index.numpy(), x=cora.x.numpy(), y=cora.y.numpy(), **masks)


def with_and_without_edges() -> None:
    """Write NAME.npz, without types of edges and self loops, which training adds, and NAME_alone.npz without edges."""
    ALONE.mkdir(exist_ok=True)
    for name in ("wordnet", "cora", "computers", "debian", "citeseer", "cs"):
        if (ALONE / f"{name}_alone.npz").exists():
            continue
        try:
            data = loaded(f"dataset={name}")
        except (OSError, ValueError) as error:
            print(f"{name} skipped: {' '.join(str(error).split())}", flush=True)
            continue
        arrays = {key: getattr(data, key).numpy() for key in ("x", "y", *MASKS)}
        edges = data.edge_index.numpy()
        np.savez(ALONE / f"{name}.npz", edge_index=edges, **arrays)
        np.savez(ALONE / f"{name}_alone.npz", edge_index=edges[:, :0], **arrays)


WRITTEN = {"DEBIAN_UNTYPED": untyped_debian, "CORA_DRAW": cora_as_drawn, "RANDOM_NODES": with_and_without_edges}
