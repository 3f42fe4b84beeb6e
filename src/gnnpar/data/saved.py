"""Graphs of PyG, NetworkX, SciPy and NumPy. A file: torch.save(data, "my.pt") of a `Data` or `HeteroData`, then
dataset=pt dataset.path=my.pt; or the processed/data.pt of an InMemoryDataset. Reads x, edge_index or adj_t,
edge_weight, edge_type, edge_attr, y and the masks. Files are loaded with weights_only, so no code of a file runs.

A graph in memory is written as a `Data` in the cache folder, for ranks that are processes. The file is named by its
content, so each graph is written once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from gnnpar.data.columns import tensor_of
from gnnpar.data.dataset import NO_FEATURES, Dataset, content_hash
from gnnpar.data.files import cached_folder, find_path, one_line
from gnnpar.data.hetero import SCHEMA, flattened, schema_in
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.raw import MASKS, RawGraph, TaskChoice, as_real, checked_data, edge_list_of, refuse_unread
from gnnpar.files import load_tensors
from gnnpar.folds.edge_data import EDGE_KINDS
from gnnpar.track.text import counted

if TYPE_CHECKING:
    from torch_geometric.data import Data

_ALL_AS_ONE = "all as one, Batch.from_data_list([*graphs])"
_OF_EDGES = tuple(f"edge_{kind}" for kind in EDGE_KINDS)
_WANTED = "give a torch_geometric Data, a NetworkX graph, or a mapping with edge_index or adjacency (SciPy), x and y"


@dataclass(frozen=True, kw_only=True)
class PT(Preprocess):
    """A `Data` in a file of torch.save; `path` is relative to the working folder or to data_dir."""

    name: str = "pt"
    path: str | None = None
    task: TaskChoice = "auto"  # multi_label if y is [N, C > 1]

    def without_labels(self) -> Self:
        return replace(self, task="link")

    def load(self, data_dir: Path | None, seed: int) -> Dataset:
        file = find_path(self.name, self.path, data_dir, example="dataset=pt dataset.path=my.pt")
        return prepare(raw_graph(self.name, _loaded(self.name, file), self.task), self, seed=seed)


def _loaded(name: str, file: Path) -> object:
    """Load tensors and PyG's own classes only."""
    from torch_geometric.data import Data, HeteroData
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.feature_store import TensorAttr
    from torch_geometric.data.graph_store import EdgeAttr, EdgeLayout
    from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage
    from torch_geometric.typing import EdgeTypeStr

    stores = (BaseStorage, EdgeStorage, GlobalStorage, NodeStorage)
    attributes = (DataEdgeAttr, DataTensorAttr, EdgeAttr, EdgeLayout, EdgeTypeStr, TensorAttr)
    try:
        return _joined(load_tensors(file, known=(Data, HeteroData, *stores, *attributes, dict, list, defaultdict)))
    except Exception as error:  # torch's readers raise errors of all kinds
        cause = one_line(error).split("WeightsUnpickler error: ")[-1][:160]
        raise ValueError(
            f"dataset {name}: {file} cannot be read as a saved Data ({cause}); save it with "
            "torch.save(Data.from_dict(data.to_dict()), path)."
        ) from error


def _joined(found: object) -> object:
    """Return the graph, or the Batch of the graphs, in a tuple of `InMemoryDataset.save`; anything else unchanged."""
    from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset

    match found if isinstance(found, tuple) else None:
        case (dict() as fields, slices, cls):
            data = cls.from_dict(fields)
        case (Data() | HeteroData() as data, slices):
            pass
        case _:
            return found
    if slices is None:
        return data
    graphs = InMemoryDataset()
    graphs.data, graphs.slices = data, slices
    return Batch.from_data_list([*graphs])


def raw_graph(name: str, data: object, task: TaskChoice = "auto") -> RawGraph:
    """Return the raw graph of a `Data` or `HeteroData`. Raises ValueError."""
    from torch_geometric.data import Data, HeteroData

    if isinstance(data, list | tuple) and data and all(isinstance(each, Data) for each in data):
        raise ValueError(f"dataset {name}: there are {len(data)} graphs; give one Data, or {_ALL_AS_ONE}.")
    if not isinstance(data, Data | HeteroData):
        raise ValueError(
            f"dataset {name}: there is a {type(data).__name__}, not a torch_geometric.data.Data; give one."
        )
    try:
        held = flattened(name, data, task) if isinstance(data, HeteroData) else data.to_dict()
    except ValueError:
        raise
    except Exception as error:  # a damaged file leaves an object without some attributes
        kind = type(data).__name__
        raise ValueError(f"dataset {name}: its {kind} cannot be read ({one_line(error)}); save it again.") from error
    fields: dict[str, object] = {str(key): value for key, value in held.items() if value is not None}
    refuse_unread(name, fields)
    rows = {key: as_real(name, key, fields[key]) for key in ("x", "y", *_OF_EDGES, *MASKS) if key in fields}
    nodes = fields.get("num_nodes")
    if "x" not in rows and isinstance(nodes, int) and nodes > 0:
        rows["x"] = torch.zeros(nodes, 0)
    for key in ("x",) if task == "link" else ("x", "y"):
        if key not in rows:
            raise ValueError(
                f"dataset {name}: the Data has no {key} (it holds {', '.join(fields) or 'nothing'}); add it"
                f"{', or num_nodes and features=learned' if key == 'x' else ''}."
            )
    x = rows["x"]
    if x.ndim == 0:
        raise ValueError(f"dataset {name}: x is a number; give a row a node, [nodes, features].")
    if isinstance(nodes, int) and nodes != len(x):
        raise ValueError(f"dataset {name}: num_nodes is {nodes}, and x has {len(x)} rows; give one a node.")
    if "edge_index" in fields and "adj_t" in fields:
        raise ValueError(f"dataset {name}: the Data has both edge_index and adj_t; leave one of them out.")
    try:
        edge_index, edges = edge_list_of(fields.get("edge_index", fields.get("adj_t")))
    except ValueError as error:
        raise ValueError(f"dataset {name}: {error}.") from None
    masks = [key for key in rows if key.endswith("_mask")]
    if masks and "train_mask" not in masks:
        raise ValueError(f"dataset {name}: there is a {masks[0]}, and no train_mask; give it, too.")
    rows = {f"edge_{kind}": values for kind, values in edges.tensors.items()} | rows | {"edge_index": edge_index}
    if task == "link":
        rows["y"] = torch.zeros(len(x), dtype=torch.int64)
    schema = schema_in(name, fields, x.shape[-1])
    num_types = None if schema is None else len(schema.edges)
    return replace(RawGraph.of(name, rows, task), schema=schema, num_edge_types=num_types)


def write_given(given: object, *, labelled: bool = True, featured: bool = True) -> Path:
    """Return the file of a graph, for dataset=pt dataset.path=FILE. Raises ValueError in one line.

    `labelled`: require labels, y. `featured`: require features, x.
    """
    data = as_data(given)
    raw = raw_graph("given", data, "auto" if labelled else "link")
    if raw.edge_index.ndim != 2:
        raise ValueError(f"dataset given: edge_index is {list(raw.edge_index.shape)}; give [2, edges].")
    checked_data("given", raw.edges, raw.edge_index.shape[1], double=True)
    if featured and not raw.x.shape[-1]:
        raise ValueError(f"dataset given: {NO_FEATURES}.")
    x = raw.x.float() if raw.x.dtype == torch.bfloat16 else raw.x  # NumPy has no bfloat16
    tensors = {"x": x, "y": raw.y, "edge_index": raw.edge_index}
    tensors |= {f"edge_{kind}": raw.edges.tensors[kind] for kind in EDGE_KINDS if kind in raw.edges.kinds}
    tensors |= {} if raw.masks is None else dict(zip(MASKS, raw.masks, strict=True))
    label = " ".join(f"{key}:{tensor.dtype}" for key, tensor in tensors.items())
    schema = {} if raw.schema is None else {SCHEMA: raw.schema.text}
    label += "".join(schema.values())

    def build(folder: Path) -> None:
        from torch_geometric.data import Data

        held = {key: tensor.detach().cpu() for key, tensor in tensors.items()}
        torch.save(Data.from_dict({**held, **schema}), folder / "data.pt")

    return cached_folder(f"given/{content_hash(tensors.values(), label=label)[:32]}", build) / "data.pt"


def as_data(given: object) -> object:
    """Return a graph as PyG's Data. HeteroData and lists are returned unchanged, for `raw_graph`. Raises ValueError.

    Shapes: a mapping has edge_index [2, E], or adjacency [N, N] with entry (i, j) the edge i -> j and its weight;
    optional edge_weight, edge_type [E], edge_attr [E, D]; x [N, F], y [N] or [N, C], masks [N]. A NetworkX graph has
    x, y and masks as attributes of its nodes, and weight (or edge_weight), edge_type and edge_attr of its edges; an
    undirected graph gets both directions of every edge.
    """
    from scipy.sparse import issparse
    from torch_geometric import data

    if isinstance(given, data.Dataset):
        if len(given) != 1:
            raise ValueError(f"dataset given: there are {len(given)} graphs; give one Data, or {_ALL_AS_ONE}.")
        return given[0]
    if isinstance(given, Mapping):
        return _of_arrays(given)
    if type(given).__module__.partition(".")[0] == "networkx":
        return _of_networkx(given)
    if issparse(given):
        raise ValueError(
            "dataset given: a SciPy matrix has no x and no y; give {'adjacency': matrix, 'x': ..., 'y': ...}."
        )
    if not isinstance(given, data.Data | data.HeteroData | list | tuple):
        raise ValueError(f"dataset given: there is a {type(given).__name__}; {_WANTED}.")
    return given


def _of_arrays(given: Mapping[str, object]) -> Data:
    from torch_geometric.data import Data

    fields = {str(key): value for key, value in given.items()}
    if "adjacency" in fields:
        if "edge_index" in fields:
            raise ValueError("dataset given: it has both adjacency and edge_index; leave one of them out.")
        if "edge_weight" in fields:
            raise ValueError("dataset given: weights are the values of adjacency; leave edge_weight out.")
        fields |= _edges_of(fields.pop("adjacency"), fields.get("x"))
    if unknown := sorted(fields.keys() - {"x", "y", "edge_index", *_OF_EDGES, *MASKS}):
        plural = len(unknown) > 1
        raise ValueError(
            f"dataset given: {', '.join(unknown)} {'are' if plural else 'is'} not read (x, y, edge_index or adjacency, "
            f"{', '.join((*_OF_EDGES, *MASKS))} are); remove {'them' if plural else 'it'}."
        )
    return Data(**{key: _tensor(key, value) for key, value in fields.items()})


def _tensor(key: str, value: object) -> Tensor:
    return value if isinstance(value, Tensor) else tensor_of(_array(key, value), f"dataset given: {key}")


def _array(key: str, value: object) -> np.ndarray:
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ValueError(f"dataset given: {key} has masked entries; fill them, e.g. by x.filled(0).")
    try:
        return np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"dataset given: {key} has rows of several lengths; give each as many numbers.") from error


def _edges_of(adjacency: object, x: object) -> dict[str, object]:
    from scipy.sparse import coo_array, issparse

    if not issparse(adjacency):
        raise ValueError(f"dataset given: adjacency is a {type(adjacency).__name__}; give a SciPy sparse matrix.")
    entries = coo_array(adjacency)
    shape = list(entries.shape or ())
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"dataset given: adjacency is {shape}; it must be [nodes, nodes].")
    if x is not None and (rows := _tensor("x", x)).ndim and len(rows) != shape[0]:
        raise ValueError(f"dataset given: adjacency is {shape}, and x has {len(rows)} rows; give one a node.")
    edge_index = np.stack([entries.row, entries.col]).astype(np.int64)
    found: dict[str, object] = {"edge_index": edge_index}
    again = len(entries.data) - len(np.unique(edge_index[0] * shape[0] + edge_index[1]))
    if again and entries.data.dtype != np.bool_:
        raise ValueError(
            f"dataset given: adjacency has {counted(again, 'repeated weight')}, which SciPy adds: call its "
            "sum_duplicates()."
        )
    if bool((entries.data != 1).any()):
        found["edge_weight"] = entries.data
    return found


def _of_networkx(graph: object) -> Data:
    import networkx

    assert isinstance(graph, networkx.Graph)
    found = {str(key) for *_, attributes in graph.edges(data=True) for key in attributes}
    if found - {"weight", *_OF_EDGES} or {"weight", "edge_weight"} <= found:
        raise ValueError(
            f"dataset given: edges have {', '.join(sorted(found))}, but models read one weight of an edge, named "
            "weight, and edge_type and edge_attr; remove the others."
        )
    position = {node: i for i, node in enumerate(graph.nodes)}
    ends = [(position[a], position[b]) for a, b in graph.edges()]
    edges = np.array(ends, dtype=np.int64).reshape(-1, 2).T
    if not graph.is_directed():
        edges = np.concatenate([edges, edges[::-1]], 1)
    columns: dict[str, object] = {"edge_index": edges}
    for key, values in _held("edges", [attributes for *_, attributes in graph.edges(data=True)], found):
        rows = _array(key, values if graph.is_directed() else [*values, *values])
        columns["edge_weight" if key == "weight" else key] = rows
    of_nodes = [attributes for _, attributes in graph.nodes(data=True)]
    for key, values in _held("nodes", of_nodes, ("x", "y", *MASKS)):
        columns[key] = _array(key, [_array(key, value) for value in values])
    return _of_arrays(columns)


def _held(
    title: str, attributes: Sequence[Mapping[str, object]], keys: Iterable[str]
) -> Iterator[tuple[str, list[object]]]:
    """Yield the keys that nodes or edges have, with their values. Raises ValueError if only some have a key."""
    for key in keys:
        values = [each[key] for each in attributes if key in each]
        if values and len(values) != len(attributes):
            raise ValueError(
                f"dataset given: {len(values)} of {len(attributes)} {title} have {key}; give it to all or none."
            )
        if values:
            yield key, values
