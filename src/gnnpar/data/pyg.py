"""Real datasets through PyG's own classes.

Raw files already in `data_dir/NAME/raw/` are used and nothing is downloaded; PyG processes links to them in the cache
folder, since it writes beside its raw files. Without raw files they are downloaded into the cache, if the server
answers.
PyG is imported when a graph is processed, never before.
"""

from __future__ import annotations

import importlib
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from gnnpar.data.adjacency import edges_of
from gnnpar.data.dataset import Dataset, TaskName
from gnnpar.data.downloads import fetch, server_of
from gnnpar.data.files import (
    cached_folder,
    find_folder,
    fingerprint,
    link_files,
    missing_files,
    not_found,
    one_line,
    quiet,
    reachable,
    require_unpacked,
)
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.raw import RawGraph
from gnnpar.data.saved import refuse_saved_code
from gnnpar.paths import expanded

if TYPE_CHECKING:
    from torch_geometric.data import Data

_GRAPH_FILES = ("adj_full.npz", "feats.npy", "class_map.json", "role.json")


@dataclass(frozen=True)
class _Source:
    """One PyG dataset: its class, its folder and its raw files."""

    cls: str
    folder: str  # of data_dir, and of PyG's root where PyG takes a name
    files: tuple[str, ...]
    named: str | None = None  # the name argument; None where the class takes only a root
    task: TaskName = "single_label"


def _planetoid(name: str) -> _Source:
    parts = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
    return _Source("Planetoid", name, tuple(f"ind.{name.lower()}.{part}" for part in parts), named=name)


_SOURCES: dict[str, _Source] = {
    "cora": _planetoid("Cora"),
    "citeseer": _planetoid("CiteSeer"),
    "pubmed": _planetoid("PubMed"),
    "computers": _Source("Amazon", "Computers", ("amazon_electronics_computers.npz",), named="Computers"),
    "photo": _Source("Amazon", "Photo", ("amazon_electronics_photo.npz",), named="Photo"),
    "cs": _Source("Coauthor", "CS", ("ms_academic_cs.npz",), named="CS"),
    "physics": _Source("Coauthor", "Physics", ("ms_academic_phy.npz",), named="Physics"),
    "tolokers": _Source("HeterophilousGraphDataset", "tolokers", ("tolokers.npz",), named="Tolokers", task="binary"),
    "flickr": _Source("Flickr", "Flickr", _GRAPH_FILES),
    "reddit": _Source("Reddit", "Reddit", ("reddit_data.npz", "reddit_graph.npz")),
    "yelp": _Source("Yelp", "Yelp", _GRAPH_FILES, task="multi_label"),
    "amazon_products": _Source("AmazonProducts", "AmazonProducts", _GRAPH_FILES, task="multi_label"),
}

Name = Literal[
    "cora",
    "citeseer",
    "pubmed",
    "computers",
    "photo",
    "cs",
    "physics",
    "tolokers",
    "flickr",
    "reddit",
    "yelp",
    "amazon_products",
]


@dataclass(frozen=True, kw_only=True)
class PyGDataset(Preprocess):
    """A dataset that PyG knows, by gnnpar's name for it."""

    name: Name

    def load(self, data_dir: Path | None, seed: int) -> Dataset:
        source = _SOURCES.get(self.name)
        if source is None:
            raise ValueError(f"dataset.name={self.name} is not one of {', '.join(_SOURCES)}.")
        data_dir = None if data_dir is None else expanded(data_dir)
        return prepare(_raw_graph(self.name, source, _read(self.name, source, data_dir)), self, seed=seed)


def as_pyg(name: Name, data_dir: Path | None) -> Data:
    """PyG's own object of a dataset, nothing prepared. ValueError in one line where it cannot be had."""
    return _read(name, _SOURCES[name], data_dir)


def _read(name: str, source: _Source, data_dir: Path | None) -> Data:
    """PyG's Data object, processed in the cache."""
    folder = find_folder(data_dir, source.folder)
    raw = None if folder is None else folder / "raw"
    missing = missing_files(raw, source.files)
    if not missing and raw is not None:
        root = _processed(name, source, raw)
    else:
        root = _downloaded(name, source, data_dir, missing)
    try:
        with quiet():
            return _open(source, root)
    except Exception as error:  # of a cache that somebody else has filled, or that is damaged
        raise ValueError(
            f"dataset {name}: {root} of the cache cannot be read ({one_line(error)}); remove that folder, or set "
            "GNNPAR_CACHE to one of your own."
        ) from error


def _processed(name: str, source: _Source, raw: Path) -> Path:
    def build(root: Path) -> None:
        link_files(raw, _raw_of(source, root), source.files)
        try:
            with quiet():
                _open(source, root)
        except Exception as error:
            raise ValueError(
                f"dataset {name}: the files in {raw} cannot be read ({one_line(error)}); "
                "compare their checksums or fetch them again."
            ) from error

    return cached_folder(f"pyg/{name}-{fingerprint(raw, source.files)}", build)


def _downloaded(name: str, source: _Source, data_dir: Path | None, missing: list[str]) -> Path:
    def build(root: Path) -> None:
        why = f"{server_of(name)} cannot be reached"
        if not reachable(server_of(name)):
            raise not_found(name, data_dir=data_dir, folder=f"{source.folder}/raw", missing=missing, why=why)
        try:
            with quiet():
                fetch(name, source.files, _raw_of(source, root))
                _open(source, root)
        except Exception as error:
            why = f"the download failed ({one_line(error)})"
            raise not_found(name, data_dir=data_dir, folder=f"{source.folder}/raw", missing=missing, why=why) from error

    return cached_folder(f"pyg/{name}-downloaded", build)


def _open(source: _Source, root: Path) -> Data:
    refuse_saved_code(root)
    for file in (_raw_of(source, root) / name for name in source.files):
        if file.suffix == ".npz" and file.exists():
            require_unpacked(file)
        elif source.cls == "Planetoid" and not file.name.endswith("test.index") and file.exists():
            with file.open("rb") as content:
                _Arrays(content, encoding="latin1").load()  # before PyG unpickles it
    cls = getattr(importlib.import_module("torch_geometric.datasets"), source.cls)
    dataset = cls(str(root)) if source.named is None else cls(str(root), source.named)
    return dataset[0]


_OF_ARRAYS = {
    *(("numpy", name) for name in ("ndarray", "dtype")),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *((f"scipy.sparse.{module}", "csr_matrix") for module in ("csr", "_csr")),
    *((module, "list") for module in ("builtins", "__builtin__")),
    ("collections", "defaultdict"),
}


class _Arrays(pickle.Unpickler):
    """Unpickle arrays, sparse matrices, lists and dicts. UnpicklingError for any other name."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _OF_ARRAYS:
            raise pickle.UnpicklingError(f"it names {module[:80]}.{name[:80]}, which is no array")
        return super().find_class(module, name)


def _raw_of(source: _Source, root: Path) -> Path:
    return root / "raw" if source.named is None else root / source.folder / "raw"


Read = Any  # PyG's Data, whose fields are dense, sparse or None


def _raw_graph(name: str, source: _Source, data: Read) -> RawGraph:
    masks: tuple[Tensor, Tensor, Tensor] | None = None
    if getattr(data, "train_mask", None) is not None:
        masks = (data.train_mask, data.val_mask, data.test_mask)
    x = data.x.to_dense() if data.x.is_sparse else data.x
    assert isinstance(x, torch.Tensor)
    edge_index, edges = edges_of(data)
    return RawGraph(name=name, x=x, y=data.y, edge_index=edge_index, edges=edges, task=source.task, masks=masks)
