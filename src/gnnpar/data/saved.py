"""PyG's `Data` or `HeteroData`, as a file or in memory: torch.save(data, "my.pt"), then dataset=pt dataset.path=my.pt;
or the processed/data.pt of an InMemoryDataset. Reads x, edge_index or adj_t, edge_weight, edge_type, edge_attr, y and
the masks. Files are loaded with weights_only, so no code of a file runs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from gnnpar.data.adjacency import EdgeList, edge_list_of
from gnnpar.data.dataset import Dataset
from gnnpar.data.files import find_path, one_line
from gnnpar.data.hetero import flattened, schema_in
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.raw import RawGraph, TaskChoice, as_real, masks_of, refuse_unread, task_of
from gnnpar.files import load_tensors
from gnnpar.folds.edge_data import EDGE_KINDS, EdgeData

ALL_AS_ONE = "all as one, Batch.from_data_list([*graphs])"
_ROWS = ("x", "y", *(f"edge_{kind}" for kind in EDGE_KINDS), "train_mask", "val_mask", "test_mask")


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
    from torch_geometric.data import Batch, Data, HeteroData
    from torch_geometric.data.in_memory_dataset import nested_iter
    from torch_geometric.data.separate import separate

    match found if isinstance(found, tuple) else None:
        case (dict() as fields, slices, cls):
            data = cls.from_dict(fields)
        case (Data() | HeteroData() as data, slices):
            pass
        case _:
            return found
    if slices is None:
        return data
    count = next(len(ends) for _, ends in nested_iter(slices)) - 1
    return Batch.from_data_list(
        [separate(type(data), batch=data, idx=i, slice_dict=slices, decrement=False) for i in range(count)]
    )


def raw_graph(name: str, data: object, task: TaskChoice = "auto") -> RawGraph:
    """Return the raw graph of a `Data` or `HeteroData`. Raises ValueError."""
    fields = _fields(name, data, task)
    refuse_unread(name, fields)
    rows = {key: as_real(name, key, fields[key]) for key in _ROWS if key in fields}
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
    edge_index, edges = _edges(name, fields)
    carried = edges.tensors | {kind: rows[f"edge_{kind}"] for kind in EDGE_KINDS if f"edge_{kind}" in rows}
    y = torch.zeros(len(x), dtype=torch.int64) if task == "link" else rows["y"]
    masks = [key for key in rows if key.endswith("_mask")]
    if masks and "train_mask" not in masks:
        raise ValueError(f"dataset {name}: there is a {masks[0]}, and no train_mask; give it, too.")
    schema = schema_in(name, fields, x.shape[-1])
    return RawGraph(
        name=name,
        x=x,
        y=y,
        edge_index=edge_index,
        edges=EdgeData(**carried),
        task=task_of(y, task),
        masks=masks_of(rows),
        num_edge_types=None if schema is None else len(schema.edges),
        schema=schema,
    )


def _fields(name: str, data: object, task: TaskChoice) -> dict[str, object]:
    """Return the fields of a Data, or of a HeteroData laid out as one."""
    from torch_geometric.data import Data, HeteroData

    if isinstance(data, list | tuple) and data and all(isinstance(each, Data) for each in data):
        raise ValueError(f"dataset {name}: there are {len(data)} graphs; give one Data, or {ALL_AS_ONE}.")
    if not isinstance(data, Data | HeteroData):
        raise ValueError(
            f"dataset {name}: there is a {type(data).__name__}, not a torch_geometric.data.Data; give one."
        )
    try:
        fields = flattened(name, data, task) if isinstance(data, HeteroData) else data.to_dict()
    except ValueError:
        raise
    except Exception as error:  # a damaged file leaves an object without some attributes
        kind = type(data).__name__
        raise ValueError(f"dataset {name}: its {kind} cannot be read ({one_line(error)}); save it again.") from error
    return {str(key): value for key, value in fields.items() if value is not None}


def _edges(name: str, fields: dict[str, object]) -> EdgeList:
    given = [fields[key] for key in ("edge_index", "adj_t") if key in fields]
    if len(given) == 2:
        raise ValueError(f"dataset {name}: the Data has both edge_index and adj_t; leave one of them out.")
    if not given:
        raise ValueError(f"dataset {name}: the Data has neither edge_index nor adj_t; give it one of them.")
    try:
        return edge_list_of(given[0])
    except ValueError as error:
        raise ValueError(f"dataset {name}: {error}.") from None
