"""Graphs of this study as files: without types of edges and without self loops, which training adds."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from records import Files

from gnnpar.config.compose import compose
from gnnpar.config.study import Study

MASKS = ("train_mask", "val_mask", "test_mask")


def prepare(files: Files, studies: Mapping[str, Study]) -> None:
    """Write NAME.npz, and NAME_alone.npz without edges, to the folder RANDOM_NODES."""
    folder = Path(tempfile.gettempdir()) / "random_nodes"
    folder.mkdir(exist_ok=True)
    os.environ["RANDOM_NODES"] = str(folder)
    for name in studies["results"].axes["graph"]:
        if (folder / f"{name}_alone.npz").exists():
            continue
        try:
            settings = compose([f"dataset={name}", "dataset.self_loops=false"])
            data = settings.dataset.load(Path(os.environ["GNNPAR_DATA"]), 0)
        except (OSError, ValueError) as error:
            print(f"{name} skipped: {' '.join(str(error).split())}", flush=True)
            continue
        arrays = {key: getattr(data, key).numpy() for key in ("x", "y", *MASKS)}
        edges = data.edge_index.numpy()
        np.savez(folder / f"{name}.npz", edge_index=edges, **arrays)
        np.savez(folder / f"{name}_alone.npz", edge_index=edges[:, :0], **arrays)
