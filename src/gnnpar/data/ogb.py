"""Datasets of the Open Graph Benchmark through its own reader (extra `[ogb]`).

Files already in `data_dir/ogbn_NAME/` (raw/ and split/, as OGB unpacks them) are used and nothing is downloaded; OGB
processes links to them in the cache folder. Small ones are downloaded into the cache if the server answers. OGB asks
before it fetches more than 1 GB, and nobody can answer a training run: those are to be put in place by hand.
"""

import contextlib
import importlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gnnpar.data.array_pickle import load_saved_arrays
from gnnpar.data.dataset import Dataset
from gnnpar.data.files import (
    cached_folder,
    downloading,
    find_folder,
    fingerprint,
    link_files,
    missing_files,
    not_found,
    one_line,
    plain_files,
    quiet,
    reachable,
    require_unpacked,
)
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.raw import RawGraph
from gnnpar.durable import JsonDict
from gnnpar.paths import expanded

_SERVER = "http://snap.stanford.edu/ogb/data/nodeproppred/"
_CSV = ("edge", "num-node-list", "num-edge-list", "node-feat", "node-label")
_SPLIT = {"ogbn_arxiv": "time", "ogbn_products": "sales_ranking", "ogbn_papers100m": "time"}
_OWN_NAME = {"ogbn_arxiv": "ogbn-arxiv", "ogbn_products": "ogbn-products", "ogbn_papers100m": "ogbn-papers100M"}


@dataclass(frozen=True, kw_only=True)
class OGBDataset(Preprocess):
    """A node classification dataset of OGB, by gnnpar's name for it."""

    name: Literal["ogbn_arxiv", "ogbn_products", "ogbn_papers100m"]

    def load(self, data_dir: Path | None, seed: int) -> Dataset:
        data_dir = None if data_dir is None else expanded(data_dir)
        return prepare(_raw_graph(self.name, data_dir), self, seed=seed)


def required_files(name: str) -> tuple[str, ...]:
    """What must lie in the dataset's folder, relative to it."""
    years = ("node_year",) if name == "ogbn_arxiv" else ()
    binary = ("raw/data.npz", "raw/node-label.npz")
    raw = binary if name == "ogbn_papers100m" else tuple(f"raw/{part}.csv.gz" for part in (*_CSV, *years))
    return (*raw, *(f"split/{_SPLIT[name]}/{part}.csv.gz" for part in ("train", "valid", "test")))


def _raw_graph(name: str, data_dir: Path | None) -> RawGraph:
    own = _OWN_NAME[name]
    folder_name = own.replace("-", "_")
    folder, files = find_folder(data_dir, folder_name), required_files(name)
    missing = missing_files(folder, files)
    reader = _reader(name)

    def look_at_files(root: Path) -> None:
        plain_files(root)
        if not (root / folder_name / "processed" / "data_processed").exists():  # OGB reads the raw files then
            for file in files:
                if (root / folder_name / file).exists():
                    require_unpacked(root / folder_name / file)

    def from_files(root: Path) -> None:
        assert folder is not None
        link_files(folder, root / folder_name, files)
        (root / folder_name / "processed").mkdir()
        (root / folder_name / "RELEASE_v1.txt").touch()  # without it OGB asks on the terminal whether to update
        try:
            look_at_files(root)
            with _ogb_speaks():
                reader(own, root=str(root))
        except (Exception, SystemExit) as error:
            raise ValueError(f"dataset {name}: the files in {folder} cannot be read ({one_line(error)}).") from error

    def from_server(root: Path) -> None:
        def failed(why: str) -> ValueError:
            return not_found(name, data_dir=data_dir, folder=folder_name, missing=missing, why=why)

        if not reachable(_SERVER):
            raise failed(f"{_SERVER} cannot be reached")
        try:
            with downloading(name), _ogb_speaks():
                reader(own, root=str(root))
        except EOFError as error:
            raise failed("it is larger than 1 GB, which is not downloaded unasked") from error
        except (Exception, SystemExit) as error:
            raise failed(f"the download failed ({one_line(error)})") from error

    if missing or folder is None:
        root = cached_folder(f"ogb/{name}-downloaded", from_server)
    else:
        root = cached_folder(f"ogb/{name}-{fingerprint(folder, files)}", from_files)
    try:
        look_at_files(root)
        with _ogb_speaks():
            dataset = reader(own, root=str(root))
            (graph, labels), parts = dataset[0], dataset.get_idx_split()
    except Exception as error:  # of a cache that somebody else has filled, or that is damaged
        raise ValueError(
            f"dataset {name}: {root} of the cache cannot be read ({one_line(error)}); remove that folder, or set "
            "GNNPAR_CACHE to one of your own."
        ) from error
    return _to_raw(name, graph, labels, parts, num_classes=int(dataset.num_classes))


def _to_raw(
    name: str, graph: JsonDict, labels: np.ndarray, parts: dict[str, np.ndarray], *, num_classes: int
) -> RawGraph:
    features = np.asarray(graph["node_feat"])
    num_nodes = len(features) if features.ndim else 0
    if graph["num_nodes"] != num_nodes:
        raise ValueError(
            f"dataset {name}: it says {graph['num_nodes']} nodes, but has features of {num_nodes}; "
            "fetch its files again."
        )
    masks = torch.zeros(3, num_nodes, dtype=torch.bool)
    for row, part in enumerate(("train", "valid", "test")):
        masks[row, _nodes_of(name, part, np.asarray(parts[part]), num_nodes)] = True
    return RawGraph(
        name=name,
        x=torch.from_numpy(np.ascontiguousarray(features)),
        y=torch.from_numpy(np.ascontiguousarray(labels)),
        edge_index=torch.from_numpy(np.ascontiguousarray(graph["edge_index"])),
        task="single_label",
        masks=(masks[0], masks[1], masks[2]),
        num_classes=num_classes,
    )


def _nodes_of(name: str, part: str, nodes: np.ndarray, num_nodes: int) -> Tensor:
    """A part of the split, [nodes] int64. ValueError where one is no node; torch counts negative ones from the end."""
    if nodes.dtype.kind not in "iu" or nodes.ndim != 1:
        raise ValueError(f"dataset {name}: the split {part} is no list of node ids; fetch its files again.")
    low, high = (nodes.min(), nodes.max()) if len(nodes) else (0, -1)
    if low < 0 or high >= num_nodes:
        raise ValueError(
            f"dataset {name}: the split {part} names nodes {low} to {high}, but there are 0 to {num_nodes - 1}; "
            "fetch its files again."
        )
    return torch.from_numpy(nodes.astype(np.int64))


def _reader(name: str) -> Any:  # Any: OGB has no types
    try:
        with quiet():
            return importlib.import_module("ogb.nodeproppred").NodePropPredDataset
    except ImportError as error:
        raise ValueError(f'dataset {name} needs the OGB package ({error}); run: pip install "gnnpar[ogb]".') from None


@contextlib.contextmanager
def _ogb_speaks() -> Iterator[None]:
    """No prints, no questions on the terminal, and a torch.load that reads OGB's files, which hold numpy arrays, and
    runs no code of them: OGB itself has no word in how they are read."""
    load, stdin = torch.load, sys.stdin
    torch.load = lambda file, *_, **__: load_saved_arrays(file)
    sys.stdin = io.StringIO("")
    try:
        with quiet():
            yield
    finally:
        torch.load, sys.stdin = load, stdin
