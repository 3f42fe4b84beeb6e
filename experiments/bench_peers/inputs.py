"""The graphs and models of bench_peers, and the files by which workers of other environments read them."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from epochs import block_model, models

from gnnpar.data.dataset import Dataset
from gnnpar.data.npz import NPZ
from gnnpar.data.rmat import RMAT
from gnnpar.partition.partition import Metis, partition

DEBIAN = NPZ(  # conf/dataset/debian.yaml
    name="debian",
    path=f"{os.environ.get('GNNPAR_DATA', 'data')}/debian/debian.npz",
    self_loops=False,
    symmetrize=False,
    split="public",
)
GRAPHS: dict[str, Callable[[], Dataset]] = {
    "sbm_tenth": lambda: block_model(5_000),
    "sbm": lambda: block_model(50_000),  # the graph of epoch_speed
    "sbm_four": lambda: block_model(200_000),
    "debian": lambda: DEBIAN.load(None, 0),
    "rmat": lambda: RMAT(scale=15, edge_factor=16, num_features=128, graph_seed=0).load(None, 0),
}


def write(graph: str, folder: Path) -> Dataset:
    """The graph, its cut into two parts, and initial weights of every model by layer and name."""
    dataset = GRAPHS[graph]()
    arrays = {"edges": dataset.edge_index, "x": dataset.x, "y": dataset.y, "train": dataset.train_mask}
    arrays["part_of"] = partition(dataset, 2, by=Metis(), cache=folder, say=lambda _: None)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array.numpy())
    for name, config in models(dropout=0.0).items():
        model = config.build(dataset.num_features, dataset.num_classes, seed=0)
        weights = {key[7:].replace(".conv.", "."): value.numpy() for key, value in model.state_dict().items()}
        np.savez(folder / f"{name}.npz", **weights)  # less "layers."
    return dataset
