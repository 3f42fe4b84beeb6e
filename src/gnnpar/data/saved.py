"""PyG's `Data`, or `HeteroData`, as a file or in memory: torch.save(data, "my.pt"), then dataset=pt dataset.path=my.pt;
or the processed/data.pt of an InMemoryDataset.

Read are x, edge_index or adj_t, edge_weight, edge_type, edge_attr, y and the masks. A file is data: it is loaded with
weights_only, so that none of its code runs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from gnnpar.data.adjacency import edge_list_of
from gnnpar.data.dataset import Dataset
from gnnpar.data.files import find_file, one_line
from gnnpar.data.hetero import flattened, schema_in, stores_of
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.raw import INTEGERS, RawGraph, TaskChoice, oddity, refuse_unread, task_of
from gnnpar.files import load_tensors, require_memory
from gnnpar.folds.edge_data import EDGE_KINDS, EdgeData

ALL_AS_ONE = "all as one, Batch.from_data_list([*graphs])"
_ROWS = ("x", "y", *(f"edge_{kind}" for kind in EDGE_KINDS), "train_mask", "val_mask", "test_mask")


@dataclass(frozen=True, kw_only=True)
class PT(Preprocess):
    """A `Data` in a file of torch.save; `path` is relative to the working folder or to data_dir."""

    name: str = "pt"
    path: str | None = None
    task: TaskChoice = "auto"  # auto: multi_label where y is [N, C > 1]

    def without_labels(self) -> Self:
        return replace(self, task="link")

    def load(self, data_dir: Path | None, seed: int) -> Dataset:
        file = find_file(self.name, self.path, data_dir, example="dataset=pt dataset.path=my.pt")
        return prepare(raw_graph(self.name, _loaded(self.name, file), self.task), self, seed=seed)


def _loaded(name: str, file: Path) -> object:
    try:
        return _joined(_without_code(file))
    except Exception as error:  # torch's readers raise errors of all kinds
        raise ValueError(
            f"dataset {name}: {file} cannot be read as a saved Data ({_cause(error)}); save it with "
            "torch.save(Data.from_dict(data.to_dict()), path)."
        ) from error


def _joined(found: object) -> object:
    """The graph of what `InMemoryDataset.save` writes, (Data or its fields, slices, class): of several graphs their
    Batch. Anything else as it is."""
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


def refuse_saved_code(folder: Path) -> None:
    """Raise ValueError where a processed file names code: PyG runs it where torch refuses to.

    Its notes of transforms, which it unpickles, too, are removed: there are none.
    """
    for file in folder.rglob("*.pt"):
        if file.name in ("pre_transform.pt", "pre_filter.pt"):
            file.unlink(missing_ok=True)
            continue
        try:
            _without_code(file)
        except Exception as error:
            raise ValueError(f"{file.name}: {_cause(error)}") from error


def _without_code(file: Path) -> object:
    """Load tensors and PyG's own classes alone."""
    from torch_geometric.data import Data, HeteroData
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.feature_store import TensorAttr
    from torch_geometric.data.graph_store import EdgeAttr, EdgeLayout
    from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage
    from torch_geometric.typing import EdgeTypeStr

    stores = (BaseStorage, EdgeStorage, GlobalStorage, NodeStorage)
    attributes = (DataEdgeAttr, DataTensorAttr, EdgeAttr, EdgeLayout, EdgeTypeStr, TensorAttr)
    known = (Data, HeteroData, *stores, *attributes, dict, list, defaultdict)
    return load_tensors(file, known=known)


def _cause(error: Exception) -> str:
    return one_line(error).split("WeightsUnpickler error: ")[-1][:160]


_COPIES = 4


def raw_graph(name: str, data: object, task: TaskChoice = "auto") -> RawGraph:
    """What is read of a `Data`. ValueError where it is none, or holds what no model reads."""
    fields = _checked(name, data, task)
    refuse_unread(name, fields)
    tensors = {key: value.detach() for key, value in fields.items() if isinstance(value, Tensor)}
    fields |= tensors
    if odd := [(key, why) for key, tensor in tensors.items() if (why := oddity(tensor))]:
        raise ValueError(f"dataset {name}: {odd[0][0]} is {odd[0][1]}; store a tensor of plain numbers.")
    rows = {key: tensor for key, tensor in tensors.items() if key in _ROWS}
    ends = [tensor for key, tensor in tensors.items() if key == "edge_index" and tensor.layout == torch.strided]
    nbytes = sum(t.numel() * t.element_size() for t in rows.values())  # also where a file holds few of them
    nbytes += _COPIES * 8 * sum(t.numel() for t in ends)  # whatever their type, they become int64, and are sorted
    require_memory(nbytes, f"dataset {name}", "store fewer or smaller tensors")
    try:
        fields |= {key: tensor.to_dense() for key, tensor in rows.items()}
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"dataset {name}: a sparse tensor cannot be made dense ({one_line(error)}).") from error
    if "x" not in fields and isinstance(nodes := fields.get("num_nodes"), int) and nodes > 0:
        fields["x"] = torch.zeros(nodes, 0)
    for key in ("x",) if task == "link" else ("x", "y"):
        if not isinstance(fields.get(key), Tensor):
            raise ValueError(
                f"dataset {name}: the Data has no {key} (it holds {', '.join(fields) or 'nothing'}); add it"
                f"{', or num_nodes and features=learned' if key == 'x' else ''}."
            )
    if {"edge_index", "adj_t"} <= fields.keys():
        raise ValueError(f"dataset {name}: the Data has both edge_index and adj_t; leave one of them out.")
    edges = fields.get("edge_index", fields.get("adj_t"))
    if edges is None:
        raise ValueError(f"dataset {name}: the Data has neither edge_index nor adj_t; give it one of them.")
    try:
        edge_index, data_of_edges = edge_list_of(edges)
    except ValueError as error:
        raise ValueError(f"dataset {name}: {error}.") from None
    carried = data_of_edges.tensors
    for kind in EDGE_KINDS:
        value = fields.get(f"edge_{kind}")
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(f"dataset {name}: edge_{kind} is a {type(value).__name__}; give a tensor [edges].")
        carried |= {} if value is None else {kind: value}
    x, y = fields["x"], fields.get("y")
    assert isinstance(x, Tensor)
    if x.ndim == 0:
        raise ValueError(f"dataset {name}: x is a number; give a row a node, [nodes, features].")
    count = fields.get("num_nodes", len(x))
    if isinstance(count, Tensor) and count.numel() == 1 and count.layout == torch.strided:
        count = count.item()
    if isinstance(count, Tensor) or count != len(x):
        raise ValueError(f"dataset {name}: num_nodes is {count!s:.80}, and x has {len(x)} rows; give one a node.")
    y = torch.zeros(len(x), dtype=torch.int64) if task == "link" else y
    assert isinstance(y, Tensor)
    types = carried.get("type")
    if types is not None and types.dtype not in INTEGERS:
        raise ValueError(f"dataset {name}: edge_type is {types.dtype}; give whole numbers, int64.")
    num_types = 0 if types is None or not types.numel() else int(types.max()) + 1
    schema = schema_in(name, fields, x.shape[-1], num_types)
    return RawGraph(
        name=name,
        x=x,
        y=y,
        edge_index=edge_index,
        edges=EdgeData(**carried),
        task=task_of(y, task),
        masks=_masks(name, fields),
        num_edge_types=None if schema is None else len(schema.edges),
        schema=schema,
    )


def _checked(name: str, data: object, task: TaskChoice) -> dict[str, object]:
    """The fields of a Data, or of a HeteroData laid out as one."""
    from torch_geometric.data import Data, HeteroData

    if isinstance(data, list | tuple) and data and all(isinstance(each, Data) for each in data):
        raise ValueError(f"dataset {name}: there are {len(data)} graphs; give one Data, or {ALL_AS_ONE}.")
    if not isinstance(data, Data | HeteroData):
        raise ValueError(
            f"dataset {name}: there is a {type(data).__name__}, not a torch_geometric.data.Data; give one."
        )
    if isinstance(data, HeteroData):
        return flattened(name, stores_of(name, data), task)
    try:
        return {str(key): value for key, value in data.to_dict().items() if value is not None}
    except Exception as error:  # of a file that holds half of one
        raise ValueError(f"dataset {name}: its Data cannot be read ({one_line(error)}); save it again.") from error


def _masks(name: str, fields: dict[str, object]) -> tuple[Tensor, Tensor, Tensor] | None:
    given = {part: mask for part in ("train", "val", "test") if (mask := fields.get(f"{part}_mask")) is not None}
    if "train" not in given:
        if given:
            raise ValueError(f"dataset {name}: there is a {next(iter(given))}_mask, and no train_mask; give it, too.")
        return None
    masks: dict[str, Tensor] = {}
    for part, mask in given.items():
        if not isinstance(mask, Tensor):
            raise ValueError(f"dataset {name}: {part}_mask is a {type(mask).__name__}; give a tensor of booleans.")
        masks[part] = mask
    none = torch.zeros_like(masks["train"], dtype=torch.bool)
    return masks["train"], masks.get("val", none), masks.get("test", none)
