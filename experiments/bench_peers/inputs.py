"""The graphs and models of bench_peers, and the files by which workers of other environments read them."""

import os
from pathlib import Path

import numpy as np
from epochs import block_model, models

from gnnpar.data.dataset import Dataset
from gnnpar.data.npz import NPZ
from gnnpar.data.rmat import RMAT
from gnnpar.partition.partition import Metis, partition

NODES = {"sbm_tenth": 5_000, "sbm": 50_000, "sbm_four": 200_000}  # sbm: the graph of epoch_speed

DEBIAN = NPZ(  # conf/dataset/debian.yaml
    name="debian",
    path=f"{os.environ.get('GNNPAR_DATA', 'data')}/debian/debian.npz",
    self_loops=False,
    symmetrize=False,
    split="public",
)


R_MAT = RMAT(scale=15, edge_factor=16, num_features=128, graph_seed=0)


def dataset_of(graph: str) -> Dataset:
    if graph == "debian":
        return DEBIAN.load(None, 0)
    if graph == "rmat":
        return R_MAT.load(None, 0)
    return block_model(NODES[graph])


def write(graph: str, folder: Path) -> Dataset:
    """The graph, its cut into two parts, and initial weights of every model by layer and name."""
    dataset = dataset_of(graph)
    arrays = {"edges": dataset.edge_index, "x": dataset.x, "y": dataset.y, "train": dataset.train_mask}
    arrays["part_of"] = partition(dataset, 2, by=Metis(), cache=folder, say=lambda _: None)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array.numpy())
    for name, config in models(dropout=0.0).items():
        model = config.build(dataset.num_features, dataset.num_classes, seed=0)
        weights = {key[7:].replace(".conv.", "."): value.numpy() for key, value in model.state_dict().items()}
        np.savez(folder / f"{name}.npz", **weights)  # less "layers."
    return dataset
