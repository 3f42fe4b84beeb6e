"""Write a graph in memory as a saved `Data` in the cache folder, for ranks that are processes. The file is named by its
content, so each graph is written once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse import coo_array, issparse
from torch import Tensor

from gnnpar.data.columns import tensor_of
from gnnpar.data.dataset import NO_FEATURES, content_hash
from gnnpar.data.files import cached_folder
from gnnpar.data.hetero import SCHEMA
from gnnpar.data.raw import checked_data
from gnnpar.data.saved import ALL_AS_ONE, raw_graph
from gnnpar.folds.edge_data import EDGE_KINDS
from gnnpar.track.text import counted

if TYPE_CHECKING:
    from torch_geometric.data import Data

_MASKS = ("train_mask", "val_mask", "test_mask")
_OF_EDGES = tuple(f"edge_{kind}" for kind in EDGE_KINDS)
_WANTED = "give a torch_geometric Data, a NetworkX graph, or a mapping with edge_index or adjacency (SciPy), x and y"


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
    masks = {} if raw.masks is None else dict(zip(_MASKS, raw.masks, strict=True))
    carried = {f"edge_{kind}": raw.edges.tensors[kind] for kind in EDGE_KINDS if kind in raw.edges.kinds}
    x = raw.x.float() if raw.x.dtype == torch.bfloat16 else raw.x  # NumPy has no bfloat16
    tensors = {"x": x, "y": raw.y, "edge_index": raw.edge_index, **carried, **masks}
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
    from torch_geometric.data import Data, Dataset, HeteroData

    if isinstance(given, Dataset):
        if len(given) != 1:
            raise ValueError(f"dataset given: there are {len(given)} graphs; give one Data, or {ALL_AS_ONE}.")
        return given[0]
    if isinstance(given, Mapping):
        return _of_arrays(given)
    if type(given).__module__.partition(".")[0] == "networkx":
        return _of_networkx(given)
    if issparse(given):
        raise ValueError(
            "dataset given: a SciPy matrix has no x and no y; give {'adjacency': matrix, 'x': ..., 'y': ...}."
        )
    if not isinstance(given, Data | HeteroData | list | tuple):
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
    if unknown := sorted(fields.keys() - {"x", "y", "edge_index", *_OF_EDGES, *_MASKS}):
        plural = len(unknown) > 1
        raise ValueError(
            f"dataset given: {', '.join(unknown)} {'are' if plural else 'is'} not read (x, y, edge_index or adjacency, "
            f"{', '.join((*_OF_EDGES, *_MASKS))} are); remove {'them' if plural else 'it'}."
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
    for key in found:
        values = [attributes[key] for *_, attributes in graph.edges(data=True) if key in attributes]
        if len(values) != len(ends):
            raise ValueError(f"dataset given: {len(values)} of {len(ends)} edges have {key}; give it to all or none.")
        rows = _array(key, values if graph.is_directed() else [*values, *values])
        columns["edge_weight" if key == "weight" else key] = rows
    for key in ("x", "y", *_MASKS):
        values = [attributes[key] for _, attributes in graph.nodes(data=True) if key in attributes]
        if values and len(values) != len(position):
            raise ValueError(
                f"dataset given: {len(values)} of {len(position)} nodes have {key}; give it to all or none."
            )
        if values:
            columns[key] = _array(key, [_array(key, value) for value in values])
    return _of_arrays(columns)
