"""RawGraph: a graph as read from a file, and its checks.

Each check raises one line: the problem, the numbers, the fix. Isolated nodes, self loops and repeated edges are valid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnpar.data.dataset import MATRICES, TaskName
from gnnpar.folds.edge_data import EDGE_KINDS, EdgeData, Schema
from gnnpar.track.console import say

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_WIDE = (torch.float64, torch.int64, torch.int32, torch.uint64, torch.uint32)
_FEWEST_STEPS = 1 << 14  # float32 steps over the range of a column; with fewer, some numbers become equal

MASKS = ("train_mask", "val_mask", "test_mask")
TaskChoice = Literal["auto", "single_label", "binary", "multi_label", "regression", "link"]


@dataclass(frozen=True, eq=False, kw_only=True)
class RawGraph:
    """A graph as read, before preprocessing.

    Shapes: x [N, F]; y [N], [N, 1] or [N, C]; edge_index [2, E], or an adj_t [N, N] (`edge_list_of`); masks None or
    3 x [N] or [N, S] (S numbered splits); edges: weight [E], type [E], attr [E, D], by the columns of edge_index.
    num_edge_types: needed if some types have no edge. schema: of a HeteroData.
    """

    name: str
    x: Tensor
    y: Tensor
    edge_index: Tensor
    task: TaskName
    masks: tuple[Tensor, Tensor, Tensor] | None = None
    pairs: bool = False  # edges are listed once per undirected pair: preprocessing adds the other direction
    num_classes: int | None = None
    edges: EdgeData = field(default_factory=EdgeData)
    num_edge_types: int | None = None
    schema: Schema | None = None

    @staticmethod
    def of(name: str, rows: Mapping[str, Tensor], choice: TaskChoice) -> RawGraph:
        """Return the graph of tensors by name: x, y, edge_index, edge_weight, edge_type, edge_attr and the masks. A
        missing val_mask or test_mask is empty; without a train_mask there are no masks."""
        masks = None
        if (train := rows.get("train_mask")) is not None:
            empty = torch.zeros_like(train, dtype=torch.bool)
            masks = train, rows.get("val_mask", empty), rows.get("test_mask", empty)
        return RawGraph(
            name=name,
            x=rows["x"],
            y=rows["y"],
            edge_index=rows["edge_index"],
            task=task_of(rows["y"], choice),
            masks=masks,
            edges=EdgeData(**{kind: rows[f"edge_{kind}"] for kind in EDGE_KINDS if f"edge_{kind}" in rows}),
        )


class EdgeList(NamedTuple):
    """Edges (sources, destinations) [2, E] and their data."""

    edge_index: Tensor
    data: EdgeData = EdgeData()


def edges_of(data: object) -> EdgeList:
    """Return the edges of a PyG `Data`: edge_index, else adj_t, with edge_weight, edge_type and edge_attr."""
    names = ("edge_index", "adj_t", "edge_weight", "edge_type", "edge_attr")
    edge_index, adj_t, *held = (getattr(data, name, None) for name in names)  # PyG's Data or the like
    edges = edge_list_of(adj_t if edge_index is None else edge_index)
    weight, kind, attr = (value if isinstance(value, Tensor) else None for value in held)
    weight = edges.data.weight if weight is None else _flat(weight)
    return EdgeList(edges.edge_index, EdgeData(weight=weight, type=kind, attr=attr))


def edge_list_of(given: Any) -> EdgeList:  # Any: a tensor, or a SparseTensor, which has no types
    """Return the edges of an edge_index, unchanged, or of an adj_t: PyG's transposed adjacency matrix [N, N], a
    torch_sparse.SparseTensor or a tensor in one of torch's sparse layouts.

    Row i of an adj_t lists the sources of i's in-edges; its values are weights unless all are 1. Raises ValueError.
    """
    if given is None:
        raise ValueError("the Data has neither edge_index nor adj_t; give it one of them")
    if isinstance(given, Tensor) and given.layout == torch.strided:
        return EdgeList(given)
    from torch_geometric.typing import SparseTensor  # pyright: ignore[reportAttributeAccessIssue]
    from torch_geometric.utils import to_edge_index

    if not isinstance(given, Tensor | SparseTensor):
        raise ValueError(f"the graph is a {type(given).__name__}; give an edge_index [2, E], or an adj_t")
    shape = list(given.shape if isinstance(given, Tensor) else given.sizes())
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"adj_t is {shape}; it must be [nodes, nodes]")
    # PyG marks a COO matrix as coalesced, which keeps repeated edges; detach leaves the caller's unchanged
    (rows, columns), values = to_edge_index(given.detach())
    weight = None if bool((values == 1).all()) else _flat(values)
    return EdgeList(torch.stack([columns, rows]), EdgeData(weight=weight))


def _flat(weight: Tensor) -> Tensor:
    return weight[:, 0] if weight.ndim == 2 and weight.shape[1] == 1 else weight


def task_of(y: Tensor, choice: TaskChoice) -> TaskName:
    """Return the task of labels; auto: multi_label if y is [N, C > 1] and not one-hot."""
    if choice != "auto":
        return choice
    return "multi_label" if y.ndim == 2 and y.shape[1] > 1 and not _is_one_hot(y) else "single_label"


def _is_one_hot(y: Tensor) -> bool:
    """Return True if y is [N, C > 1] with one 1 per row. Rows of only nan or only -1 are unlabelled."""
    if y.ndim != 2 or y.shape[1] < 2 or y.is_complex():
        return False
    labelled = y[~((y != y) | (y == -1)).all(1)]
    return bool(len(labelled) and ((labelled == 0) | (labelled == 1)).all() and (labelled.sum(1) == 1).all())


def as_real(name: str, title: str, value: object) -> Tensor:
    """Return a dense tensor of real numbers, detached. Raises ValueError."""
    if not isinstance(value, Tensor):
        raise ValueError(f"dataset {name}: {title} is a {type(value).__name__}; give a tensor.")
    if value.is_complex() or value.is_quantized or value.is_meta:
        kind = "without values" if value.is_meta else value.dtype
        raise ValueError(f"dataset {name}: {title} is {kind}; store a tensor of real numbers.")
    return value.detach().to_dense()


def refuse_unread(name: str, keys: Iterable[str]) -> None:
    """Raise ValueError for keys that models do not read: node types, other edge data, other names of val_mask."""
    keys = list(keys)
    if mask := next((key for key in ("valid_mask", "validation_mask", "dev_mask") if key in keys), None):
        raise ValueError(f"dataset {name}: {mask} is not read; call it val_mask.")
    read = ("edge_index", "edge_weight", "edge_type", "edge_attr")
    if unread := [key for key in keys if (key.startswith("edge_") and key not in read) or key == "node_type"]:
        raise ValueError(
            f"dataset {name}: it holds {', '.join(unread)}, which models do not read (of edges, they read edge_weight, "
            f"edge_type and edge_attr); remove {'it' if len(unread) == 1 else 'them'}, if the graph is meant without."
        )


def is_wide(values: Tensor) -> bool:
    """Return True if float32 may round such numbers."""
    return values.dtype in _WIDE


def merged_in(values: Tensor, stored: Tensor) -> str | None:
    """Describe the first column in which `stored` merges distinct numbers, such as ids and times; None: no column.

    An integer column merges if a number changes. A floating-point column merges if distinct numbers become equal and it
    holds whole numbers or has a narrow range. 0 counts as missing. Shapes: values, stored [n] or [n, columns].
    """
    if not is_wide(values) or values.dtype == stored.dtype or not values.numel():
        return None
    digits = 24 if stored.dtype == torch.float32 else 53
    exact = not values.is_floating_point()
    if exact and max(map(abs, map(int, values.long().aminmax()))) <= 2**digits:
        return None
    for i, column in enumerate(values.reshape(len(values), -1).t()):
        found = column[torch.isfinite(column) & (column != 0)]
        low, high = map(float, found.double().aminmax()) if len(found) else (0.0, 0.0)
        size = max(abs(low), abs(high))
        if exact:
            bad = bool((found.to(stored.dtype).to(found.dtype) != found).any())
        else:
            whole = 2**digits < size < 2**53 and bool((found == found.round()).all())
            few = (high - low) * 2**digits < _FEWEST_STEPS * size
            bad = (whole or few) and len(found.unique()) > len(found.to(stored.dtype).unique())
        if bad:
            place = f" in column {i}" if values.ndim > 1 else ""
            step = 2.0 ** (math.frexp(size)[1] - digits)
            return f"numbers up to {size:.12g}{place}, where {str(stored.dtype)[6:]} has steps of {step:g}"
    return None


def stored_as(name: str, title: str, values: Tensor, *, double: bool) -> Tensor:
    """Return float32, or float64 if `double` and the dtype is wide. Raises ValueError if ids or times would merge."""
    stored = values.double() if double and is_wide(values) else values.float()
    if found := merged_in(values, stored):
        fix = f"set {'dataset.normalize=standard or ' if title == 'x' else ''}precision=fp64, or number them from 0"
        raise ValueError(f"dataset {name}: {title} has {found}, which would make some equal; {fix}.")
    return stored


def checked(raw: RawGraph, *, double: bool = False, normalize: bool = False) -> RawGraph:
    """Return the graph in canonical dtypes. Raises ValueError.

    Wide numbers become float64 if `double` is set (for features: `double` or `normalize`), else float32.
    """
    x = checked_features(raw.name, raw.x, double=double or normalize)
    num_nodes = x.shape[0]
    try:
        edge_index, listed = edge_list_of(raw.edge_index)
    except ValueError as error:
        raise ValueError(f"dataset {raw.name}: {error}.") from None
    edge_index = checked_index(raw.name, edge_index, num_nodes)
    given = raw.edges if raw.edges.weight is not None else replace(raw.edges, weight=listed.weight)
    edges = checked_data(raw.name, given, edge_index.shape[1], num_types=raw.num_edge_types, double=double)
    y, num_classes = _labels(raw, num_nodes, double=double)
    masks = None if raw.masks is None else tuple(_mask(raw, part, num_nodes) for part in range(3))
    return replace(raw, x=x, y=y, edge_index=edge_index, masks=masks, num_classes=num_classes, edges=edges)


def checked_features(name: str, x: Tensor, *, double: bool = False, first: int = 0) -> Tensor:
    """Return [N, F] in the dtype of `stored_as`; F may be 0. Raises ValueError. `first`: id of the first node."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_meta:
        kind = f"one of layout {x.layout} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"dataset {name}: features must be a dense torch tensor, not {kind}")
    if x.ndim != 2 or x.shape[0] == 0:
        raise ValueError(
            f"dataset {name}: features must be [nodes, features] with at least one node, "
            f"got shape {list(x.shape)}; give one row per node."
        )
    _refuse_complex(name, "features are", x)
    x = stored_as(name, "x", x, double=double)
    bad = ~torch.isfinite(x)
    if bool(bad.any()):
        row, column = (int(v) for v in bad.nonzero()[0])
        raise ValueError(
            f"dataset {name}: features hold {int(torch.isnan(x).sum())} NaN and {int(torch.isinf(x).sum())} "
            f"infinite values of {x.numel()} (first at node {first + row}, feature {column}); replace them in the "
            "file, e.g. with numpy.nan_to_num."
        )
    return x.contiguous()


def checked_index(name: str, edges: Tensor, num_nodes: int) -> Tensor:
    """Return [2, E] int64 with ids in 0..num_nodes - 1. Raises ValueError."""
    if edges.ndim != 2 or edges.shape[0] != 2:
        hint = "transpose it" if edges.ndim == 2 and edges.shape[1] == 2 else "row 0 holds sources, row 1 destinations"
        raise ValueError(f"dataset {name}: edge_index must have shape [2, edges], got {list(edges.shape)}; {hint}.")
    if edges.dtype not in INTEGERS:
        raise ValueError(f"dataset {name}: edge_index is {edges.dtype}; node ids must be integers (int64 or int32).")
    edges = edges.to(torch.int64)
    if edges.numel():
        low, high = int(edges.min()), int(edges.max())
        if low < 0 or high >= num_nodes:
            count = int(((edges < 0) | (edges >= num_nodes)).any(0).sum())
            raise ValueError(
                f"dataset {name}: {count} of {edges.shape[1]} edges point outside nodes 0..{num_nodes - 1} "
                f"(ids range from {low} to {high}); number nodes from 0 or give {high + 1} feature rows."
            )
    return edges


def checked_data(
    name: str, edges: EdgeData, num_edges: int, *, num_types: int | None = None, double: bool = False
) -> EdgeData:
    """Return edge data: weight [E] and attr [E, D] float32 or float64 (`double`: see `stored_as`), type [E] int64,
    without weights that are all 1. Raises ValueError."""
    weight, types, attr = edges.weight, edges.type, edges.attr
    if weight is not None:
        weight = _one_per_edge(name, "edge_weight", weight, num_edges)
        _refuse_complex(name, "edge_weight is", weight)
        weight = weight.double() if double and is_wide(weight) else weight.float()
        check_edges(name, "weight", weight.numpy())
        weight = None if bool((weight == 1).all()) else weight.contiguous()
    if types is not None:
        types = _one_per_edge(name, "edge_type", types, num_edges)
        if types.dtype not in INTEGERS:
            raise ValueError(f"dataset {name}: edge_type is {types.dtype}; number the types 0, 1, 2, ... as int64.")
        types = types.to(torch.int64).contiguous()
        check_edges(name, "type", types.numpy(), most=num_types or num_edges)
    if attr is not None:
        if attr.ndim != 2 or len(attr) != num_edges or not attr.shape[1]:
            raise ValueError(
                f"dataset {name}: edge_attr must be [{num_edges}, width], one row an edge, got {list(attr.shape)}; "
                "give it in the order of edge_index (one number an edge is edge_weight, or [:, None])."
            )
        _refuse_complex(name, "edge_attr is", attr)
        attr = stored_as(name, "edge_attr", attr, double=double).contiguous()
        check_edges(name, "attr", attr.numpy())
    return EdgeData(weight=weight, type=types, attr=attr)


def _one_per_edge(name: str, key: str, values: Tensor, num_edges: int) -> Tensor:
    """Return [E] of [E] or [E, 1]."""
    values = _flat(values)
    if values.ndim != 1 or len(values) != num_edges:
        raise ValueError(
            f"dataset {name}: {key} must be [{num_edges}], one number an edge, got {list(values.shape)}; give it in "
            "the order of edge_index."
        )
    return values


def _refuse_complex(name: str, what: str, values: Tensor) -> None:
    if values.is_complex():
        raise ValueError(f"dataset {name}: {what} {values.dtype}; store real numbers.")


def check_edges(name: str, kind: str, values: np.ndarray, *, first: int = 0, most: int = 0) -> None:
    """Raise ValueError if a type of an edge is not in 0..most - 1, or another value is not finite. `first`: id of the
    first edge. Shapes: [n] or [n, D]."""
    bad = np.argwhere((values < 0) | (values >= most) if kind == "type" else ~np.isfinite(values))
    if not len(bad):
        return
    edge, *column = bad[0].tolist()
    found = f"edge_{kind} of edge {first + edge} is {values[edge, *column]}"
    if kind == "type":
        raise ValueError(
            f"dataset {name}: {found}, outside 0..{most - 1} ({len(bad)} such); number the types 0, 1, 2, ... without "
            "gaps."
        )
    place = f" in column {column[0]}" if column else ""
    raise ValueError(f"dataset {name}: {found}{place} ({len(bad)} such); replace it in the file.")


def _labels(raw: RawGraph, num_nodes: int, *, double: bool) -> tuple[Tensor, int]:
    y = raw.y
    if raw.task == "link":  # labels are not read
        return torch.zeros(num_nodes, dtype=torch.int64), 1
    if raw.task == "regression":
        return _targets(raw, y[:, None] if y.ndim == 1 else y, num_nodes, double=double)
    if y.ndim == 2 and y.shape[1] == 1 and raw.task != "multi_label":
        y = y[:, 0]
    if raw.task == "single_label" and _is_one_hot(y):
        say(
            f"dataset {raw.name}: y is one-hot, [{len(y)}, {y.shape[1]}], and one class a node is trained; "
            "dataset.task=multi_label takes its columns as labels of their own"
        )
        raw, y = replace(raw, num_classes=y.shape[1]), y.double().argmax(1).masked_fill((y == 1).sum(1) == 0, -1)
    expected = 2 if raw.task == "multi_label" else 1
    if y.ndim != expected or y.shape[0] != num_nodes:
        want = f"[{num_nodes}, classes] of 0/1" if expected == 2 else f"[{num_nodes}]"
        raise ValueError(
            f"dataset {raw.name}: labels of a {raw.task} task must have shape {want}, got {list(raw.y.shape)} "
            f"for {num_nodes} feature rows; fix y or set dataset.task."
        )
    if raw.task == "multi_label":
        if not y.shape[1]:
            raise ValueError(f"dataset {raw.name}: labels are [{num_nodes}, 0], without a class; fix y.")
        y = y.to(torch.float32)
        if bool((y == -1).any()) and not bool((y == 0).any()):
            raise ValueError(
                f"dataset {raw.name}: multi-label entries are -1 and never 0, and -1 means unknown; store 0 and 1."
            )
        y = y.masked_fill(y == -1, torch.nan)
        wrong = int(((y != 0) & (y != 1) & ~torch.isnan(y)).sum())
        if wrong:
            raise ValueError(
                f"dataset {raw.name}: {wrong} multi-label entries are neither 0 nor 1; set dataset.task=regression, or "
                "store a 0/1 matrix (nan or -1 where unknown)."
            )
        return y.contiguous(), y.shape[1]
    return _class_ids(raw, y)


def _targets(raw: RawGraph, y: Tensor, num_nodes: int, *, double: bool) -> tuple[Tensor, int]:
    """Return [N, T] float32 or float64; nan: no target."""
    if y.ndim != 2 or len(y) != num_nodes or not y.shape[1] or y.is_complex():
        raise ValueError(
            f"dataset {raw.name}: targets of a regression must be real, [{num_nodes}] or [{num_nodes}, targets], got "
            f"{y.dtype} {list(raw.y.shape)}; fix y or set dataset.task."
        )
    y = stored_as(raw.name, "y", y, double=double)
    if wrong := int(torch.isinf(y).sum()):
        raise ValueError(f"dataset {raw.name}: {wrong} targets are infinite or beyond float32; scale y.")
    if bool(torch.isnan(y).all()):
        raise ValueError(f"dataset {raw.name}: no node has a target (all are nan); give y numbers.")
    return y.contiguous(), y.shape[1]


def has_label(y: Tensor, task: TaskName) -> Tensor:
    """Return the nodes that may be in a split, [N] bool."""
    if task in MATRICES:
        return ~torch.isnan(y).all(1)
    return y >= 0


def _class_ids(raw: RawGraph, y: Tensor) -> tuple[Tensor, int]:
    if y.is_floating_point():  # some files store "no label" as NaN
        known = y.nan_to_num(nan=-1.0)
        wrong = int((known != known.round()).sum() + torch.isinf(y).sum())
        wrong += int((known.abs() >= 2.0**62).sum())
        if wrong:
            raise ValueError(
                f"dataset {raw.name}: {wrong} labels are not whole numbers; set dataset.task=regression, or store "
                "class ids 0, 1, 2, ..."
            )
        y = known
    y = y.to(torch.int64)
    low, high = int(y.min()), int(y.max())
    num_classes = raw.num_classes or (2 if raw.task == "binary" else high + 1)
    if num_classes > max(2, len(y)):
        what = f"dataset.num_classes={num_classes}" if raw.num_classes else f"the largest label, {high},"
        raise ValueError(
            f"dataset {raw.name}: {what} gives {num_classes} classes for {len(y)} nodes; "
            "number the classes 0, 1, 2, ... without gaps."
        )
    if low < -1 or high >= num_classes:
        wrong = int(((y < -1) | (y >= num_classes)).sum())
        raise ValueError(
            f"dataset {raw.name}: {wrong} labels lie outside 0..{num_classes - 1} (they range from {low} to {high}; "
            f"-1 means unlabelled); renumber the classes from 0."
        )
    if high < 0:
        raise ValueError(f"dataset {raw.name}: no node has a label (all are -1); give class ids from 0.")
    return y.contiguous(), num_classes


def _mask(raw: RawGraph, part: int, num_nodes: int) -> Tensor:
    assert raw.masks is not None
    mask, title = raw.masks[part], MASKS[part]
    if mask.ndim not in (1, 2) or num_nodes not in mask.shape:
        raise ValueError(
            f"dataset {raw.name}: {title} must be [{num_nodes}] or [{num_nodes}, splits], got {list(mask.shape)}."
        )
    if mask.ndim == 2 and mask.shape[0] != num_nodes:
        mask = mask.t()
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"dataset {raw.name}: {title} is {mask.dtype} with values other than 0 and 1; store booleans.")
    return mask.to(torch.bool).reshape(num_nodes, -1)


def check_split(raw: RawGraph, masks: tuple[Tensor, Tensor, Tensor]) -> None:
    """Raise ValueError for an empty training split, overlapping splits and unlabelled members."""
    counts = [int(mask.sum()) for mask in masks]
    if counts[0] == 0:
        raise ValueError(
            f"dataset {raw.name}: the training split is empty (train/val/test = {counts[0]}/{counts[1]}/{counts[2]}); "
            "fix train_mask or set dataset.split=random."
        )
    titles = ("train", "val", "test")
    for a, b in ((0, 1), (0, 2), (1, 2)):
        both = int((masks[a] & masks[b]).sum())
        if both:
            raise ValueError(
                f"dataset {raw.name}: {both} nodes are in both the {titles[a]} and the {titles[b]} split; "
                "make them disjoint."
            )
    labelled = has_label(raw.y, raw.task)
    if raw.task in MATRICES:  # unknown entries and rows are ignored
        if not bool((masks[0] & labelled).any()):
            raise ValueError(f"dataset {raw.name}: no node of the train split has a label; fix y or train_mask.")
        return
    for title, mask in zip(titles, masks, strict=True):
        missing = int((mask & ~labelled).sum())
        if missing:
            raise ValueError(
                f"dataset {raw.name}: {missing} nodes of the {title} split have no label (-1); "
                f"remove them from {title}_mask."
            )
