"""Real datasets through PyG's own classes, imported when a graph is processed or downloaded.

Raw files in `data_dir/NAME/raw/` are used without a download. PyG processes links to them in the cache folder, because
it writes next to its raw files. Missing files are downloaded into the cache.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gnnpar.data.dataset import Dataset, TaskName
from gnnpar.data.files import RawFiles, from_cache, link_files
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.saved import raw_graph

if TYPE_CHECKING:
    from torch_geometric.data import Data

_DRIVE = "https://drive.usercontent.google.com/download?confirm=t&id="
_GRAPH_FILES = ("adj_full.npz", "feats.npy", "class_map.json", "role.json")


@dataclass(frozen=True)
class _Source:
    """One PyG dataset: its class, its folder and its raw files."""

    cls: str
    folder: str  # in data_dir, and in PyG's root if PyG takes a name
    files: tuple[str, ...]
    named: str | None = None  # the name argument; None if the class takes only a root
    task: TaskName = "single_label"

    @property
    def dataset(self) -> type:
        """PyG's class."""
        from torch_geometric import datasets

        return vars(datasets)[self.cls]

    def addresses(self) -> dict[str, str]:
        """Return the URLs in PyG's class, as for `files.fetch`."""
        known = vars(self.dataset)
        if self.files == _GRAPH_FILES:  # on Google Drive
            return {file: _DRIVE + known[f"{Path(file).stem}_id"] for file in self.files}
        url = known["url"].rstrip("/") + ("#" if known["url"].endswith(".zip") else "/")
        return {file: url + file for file in self.files}


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


@dataclass(frozen=True, kw_only=True)
class PyGDataset(Preprocess):
    """A dataset of PyG, by its name in gnnpar."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in _SOURCES:
            raise ValueError(f"name={self.name} must be one of {', '.join(_SOURCES)}")

    def load(self, data_dir: Path | None, seed: int) -> Dataset:
        raw = raw_graph(self.name, as_pyg(self.name, data_dir), _SOURCES[self.name].task)
        return prepare(raw, self, seed=seed)


def as_pyg(name: str, data_dir: Path | None) -> Data:
    """Return PyG's own object of a dataset, unprepared. Raises ValueError."""
    source = _SOURCES[name]

    def make(raw: Path, root: Path) -> None:
        if source.cls == "Planetoid":
            for file in source.files:
                if not file.endswith("test.index"):
                    with (raw / file).open("rb") as content:
                        _Arrays(content, encoding="latin1").load()  # check it before PyG unpickles it
        place = root / "raw" if source.named is None else root / source.folder / "raw"
        if raw.is_relative_to(root):  # a download
            place.parent.mkdir(parents=True, exist_ok=True)
            raw.rename(place)
        else:
            link_files(raw, place, source.files)
        _open(source, root)

    files = RawFiles(name, source.folder, source.files, inside="raw", addresses=source.addresses)
    return from_cache(files, data_dir, "pyg", make=make, read=lambda root: _open(source, root))


def _open(source: _Source, root: Path) -> Data:
    return source.dataset(str(root), *([] if source.named is None else [source.named]))[0]


_OF_ARRAYS = {
    *(("numpy", name) for name in ("ndarray", "dtype")),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *((f"scipy.sparse.{module}", "csr_matrix") for module in ("csr", "_csr")),
    *((module, "list") for module in ("builtins", "__builtin__")),
    ("collections", "defaultdict"),
}


class _Arrays(pickle.Unpickler):
    """Unpickle arrays, sparse matrices, lists and dicts only. UnpicklingError for any other name."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _OF_ARRAYS:
            raise pickle.UnpicklingError(f"it names {module[:80]}.{name[:80]}, which is no array")
        return super().find_class(module, name)
