"""Datasets of the Open Graph Benchmark (Hu et al. 2020), read from its unpacked files.

Files in `data_dir/ogbn_NAME/` (raw/ and split/) are read once, into arrays in the cache folder. A missing ogbn-arxiv
(81 MB) is downloaded; the others (1.4 and 57 GB) must be copied there by hand.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from gnnpar.data.columns import load_npy
from gnnpar.data.dataset import Dataset
from gnnpar.data.files import RawFiles, from_cache
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.raw import RawGraph

_Arrays = dict[str, np.ndarray]
_PARTS = ("train", "valid", "test")
_ARXIV = "https://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip#arxiv/"


@dataclass(frozen=True)
class _Source:
    """One dataset. split: its name in OGB. pairs: edges are listed once, for both directions. binary: .npz files."""

    folder: str
    num_classes: int
    split: str
    pairs: bool = False
    binary: bool = False

    @property
    def files(self) -> tuple[str, ...]:
        """Paths relative to the dataset's folder."""
        lists = ("edge", "num-node-list", "num-edge-list", "node-feat", "node-label")
        raw = ("data.npz", "node-label.npz") if self.binary else tuple(f"{name}.csv.gz" for name in lists)
        parts = (f"split/{self.split}/{part}.csv.gz" for part in _PARTS)
        return (*(f"raw/{name}" for name in raw), *parts)


_SOURCES = {
    "ogbn_arxiv": _Source("ogbn_arxiv", 40, "time"),
    "ogbn_products": _Source("ogbn_products", 47, "sales_ranking", pairs=True),
    "ogbn_papers100m": _Source("ogbn_papers100M", 172, "time", binary=True),
}


@dataclass(frozen=True, kw_only=True)
class OGBDataset(Preprocess):
    """A node classification dataset of OGB, by its name in gnnpar."""

    name: Literal["ogbn_arxiv", "ogbn_products", "ogbn_papers100m"]

    def load(self, data_dir: Path | None, seed: int) -> Dataset:
        return prepare(_raw_graph(self.name, data_dir), self, seed=seed)


def _raw_graph(name: str, data_dir: Path | None) -> RawGraph:
    source = _SOURCES[name]

    def make(raw: Path, root: Path) -> None:
        for key, array in _read(source, raw).items():
            np.save(root / f"{key}.npy", array)

    def read(root: Path) -> _Arrays:
        return {key: load_npy(root / f"{key}.npy", mapped=True) for key in ("x", "y", "edge_index", *_PARTS)}

    addresses = {file: _ARXIV + file for file in source.files} if name == "ogbn_arxiv" else {}
    files = RawFiles(name, source.folder, source.files, addresses=lambda: addresses)
    arrays = from_cache(files, data_dir, "ogb_arrays", make=make, read=read)
    x, y, edges = (torch.from_numpy(np.array(arrays[key])) for key in ("x", "y", "edge_index"))
    masks = torch.zeros(3, len(x), dtype=torch.bool)
    for mask, part in zip(masks, _PARTS, strict=True):
        nodes = arrays[part]
        if nodes.dtype.kind not in "iu" or nodes.ndim != 1:
            raise ValueError(f"dataset {name}: the split {part} is no list of node ids; fetch its files again.")
        low, high = (nodes.min(), nodes.max()) if len(nodes) else (0, -1)
        if low < 0 or high >= len(x):
            raise ValueError(
                f"dataset {name}: the split {part} names nodes {low} to {high}, but there are 0 to {len(x) - 1}; "
                "fetch its files again."
            )
        mask[torch.from_numpy(nodes.astype(np.int64))] = True
    return RawGraph(
        name=name,
        x=x,
        y=y,
        edge_index=edges,
        task="single_label",
        masks=(masks[0], masks[1], masks[2]),
        pairs=source.pairs,
        num_classes=source.num_classes,
    )


def _read(source: _Source, folder: Path) -> _Arrays:
    """Return the arrays of OGB's files. Raises ValueError if they disagree, or hold no numbers."""
    raw, split = folder / "raw", folder / "split" / source.split
    if source.binary:
        with np.load(raw / "data.npz", allow_pickle=False) as data, np.load(raw / "node-label.npz") as labels:
            x, edges, y = data["node_feat"], data["edge_index"], labels["node_label"]
            nodes, listed = int(data["num_nodes_list"].sum()), int(data["num_edges_list"].sum())
    else:
        x, y = _table(raw / "node-feat.csv.gz", np.float32), _table(raw / "node-label.csv.gz", np.int64)
        edges = _table(raw / "edge.csv.gz", np.int64).T
        nodes, listed = (int(_table(raw / f"num-{each}-list.csv.gz", np.int64).sum()) for each in ("node", "edge"))
    if (nodes, listed) != (len(x), edges.shape[-1]):
        raise ValueError(
            f"they say {nodes} nodes and {listed} edges, and have features of {len(x)} and {edges.shape[-1]} edges"
        )
    parts = {part: _table(split / f"{part}.csv.gz", np.int64)[:, 0] for part in _PARTS}
    return {"x": x, "y": y, "edge_index": edges, **parts}


def _table(file: Path, dtype: type[np.generic]) -> np.ndarray:
    """Return [rows, columns] of a packed .csv without a header."""
    import pandas as pd

    return pd.read_csv(file, compression="gzip", header=None, dtype=dtype).to_numpy()
