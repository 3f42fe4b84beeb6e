"""PyG's `HeteroData` as one typed graph: nodes of all types in a row, one type of edge for each of its edge types.

Each node type has its own feature columns and a one-hot column: a row is (0, .., x, .., 0 | 0, 1, 0). A dense layer on
such rows, model.encoder=linear, is one encoder per type, with its own matrix and bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnnpar.data.dataset import MATRICES
from gnnpar.data.raw import MASKS, TaskChoice, as_real, checked_data, checked_features, is_wide, refuse_unread, task_of
from gnnpar.files import require_memory
from gnnpar.folds.edge_data import EdgeData, Schema

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

SCHEMA = "gnnpar_schema"
"""The field of a `Data` that holds the text of its `Schema`."""

_Fields = dict[str, object]
_EdgeType = tuple[str, str, str]  # source, relation, destination


def homogeneous(data: HeteroData, *, known: Schema | None = None, double: bool = False) -> Data:
    """Return the typed graph of a HeteroData, without labels, for a module of your own.

    Fields: x [N, F], edge_index [2, E] and edge_type [E] as in `flattened`, edge_weight and edge_attr if present, and
    the text of a `Schema`. Numbers are float32 (`double`: as precision=fp64 keeps them). Raises ValueError for an
    unsupported layout, or for types that differ from the types `known` to a model.
    """
    from torch_geometric.data import Data, HeteroData

    if not isinstance(data, HeteroData):
        raise ValueError(f"there is a {type(data).__name__}, not a torch_geometric.data.HeteroData; give one.")
    fields = flattened("given", data, task=None)
    found, mine = Data.from_dict(fields), _schema("given", data)
    given = {kind: found[f"edge_{kind}"] for kind in ("weight", "attr") if f"edge_{kind}" in fields}
    edges = checked_data("given", EdgeData(**given), found["edge_index"].shape[1], double=double)
    found.x = checked_features("given", found["x"], double=double)
    found.update({f"edge_{key}": value for key, value in edges.tensors.items()})
    if known is not None and (known.nodes, known.edges) != (mine.nodes, mine.edges):
        raise ValueError(
            f"the HeteroData has nodes {dict(mine.nodes)} and edges {list(mine.edges)}, and the model was trained on "
            f"{dict(known.nodes)} and {list(known.edges)}, in this order"
        )
    return found


def flattened(name: str, data: HeteroData, task: TaskChoice | None = "auto") -> _Fields:
    """Return the fields of a `Data` with the same nodes and edges. Raises ValueError.

    Edge types are numbered in the order of data.edge_types. One node type has y and masks; nodes of the other types
    are unlabelled. `task` None: leave out labels and masks.
    """
    nodes = {str(key): dict(data[key].items()) for key in data.node_types}
    edges = {key: dict(data[key].items()) for key in data.edge_types}
    if not nodes or not edges:
        raise ValueError(f"dataset {name}: the HeteroData has {len(nodes)} types of nodes and {len(edges)} of edges.")
    for fields in edges.values():
        refuse_unread(name, (key for key in fields if key != "edge_type"))
    counts: dict[str, int] = {}
    for kind in data.node_types:
        count = data[kind].num_nodes
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"dataset {name}: nothing says how many nodes of type {kind} there are; set x.")
        counts[str(kind)] = count
    labels = {} if task is None else _labels(name, nodes, counts, task)
    found: _Fields = {"x": _features(name, nodes, counts), **labels}
    parts = [_edge_index(name, key, fields, counts) for key, fields in edges.items()]
    found["edge_index"] = torch.cat(parts, dim=1)
    found["edge_type"] = torch.cat([torch.full((part.shape[1],), kind) for kind, part in enumerate(parts)])
    for key in ("edge_weight", "edge_attr"):
        if (values := _of_all(name, key, edges)) is not None:
            found[key] = values
    target = next((key for key in nodes if labels and nodes[key].get("y") is not None), None)
    found[SCHEMA] = _schema(name, data, target).text
    return found


def _schema(name: str, data: HeteroData, target: str | None = None) -> Schema:
    """Return the types of a checked graph, with the widths of their features."""
    rows = {str(key): data[key].get("x") for key in data.node_types}
    nodes = tuple((key, x.shape[1] if isinstance(x, Tensor) else 0) for key, x in rows.items())
    try:
        return Schema(nodes, tuple((str(a), str(relation), str(b)) for a, relation, b in data.edge_types), target)
    except ValueError as error:
        raise ValueError(f"dataset {name}: {error}.") from error


def schema_in(name: str, fields: Mapping[str, object], width: int) -> Schema | None:
    """Return the schema in the field SCHEMA, None without one. ValueError unless it has `width` columns."""
    text = fields.get(SCHEMA)
    if text is None:
        return None
    try:
        found = Schema.of(text if isinstance(text, str) else str(type(text)))
    except ValueError as error:
        raise ValueError(f"dataset {name}: {SCHEMA}: {error}; remove it.") from error
    if found.width != width:
        raise ValueError(f"dataset {name}: {SCHEMA} has {found.width} columns, and x has {width}; remove it.")
    return found


def _features(name: str, nodes: Mapping[str, _Fields], counts: Mapping[str, int]) -> Tensor:
    """Return [N, F]: columns of each node type, then a one-hot column per type if there are several."""
    given: dict[str, Tensor] = {}
    for key, fields in nodes.items():
        x = fields.get("x")
        x = torch.zeros(counts[key], 0) if x is None else as_real(name, f"x of type {key}", x)
        if x.ndim != 2 or len(x) != counts[key]:
            raise ValueError(
                f"dataset {name}: x of type {key} must be [{counts[key]}, width], one row a node, got {list(x.shape)}."
            )
        given[key] = x
    kinds = len(given) if len(given) > 1 else 0
    width, rows = kinds + sum(x.shape[1] for x in given.values()), sum(counts.values())
    dtype = torch.float64 if any(map(is_wide, given.values())) else torch.float32
    nbytes = 4 * dtype.itemsize * rows * width  # about four copies until the end of an epoch
    require_memory(nbytes, f"dataset {name}: {width} columns of {len(given)} types of nodes", "give fewer")
    x = torch.block_diag(*(each.to(dtype) for each in given.values()))
    one_hot = torch.block_diag(*(torch.ones(len(each), 1, dtype=dtype) for each in given.values()))
    return torch.cat([x, one_hot], 1) if kinds else x


def _labels(name: str, nodes: Mapping[str, _Fields], counts: Mapping[str, int], task: TaskChoice) -> dict[str, Tensor]:
    """Return y and the masks of the one labelled node type, for all nodes."""
    labelled = [key for key, fields in nodes.items() if fields.get("y") is not None]
    if len(labelled) != 1:
        raise ValueError(
            f"dataset {name}: {len(labelled)} types of nodes have y{': ' if labelled else ''}{', '.join(labelled)}; "
            "give labels to one type, whose nodes are to be classified."
        )
    (key,) = labelled
    start, total = _start(key, counts), sum(counts.values())
    own = slice(start, start + counts[key])
    found: dict[str, Tensor] = {}
    for field in ("y", *MASKS):
        value = nodes[key].get(field)
        if value is None:
            continue
        rows = as_real(name, f"{field} of type {key}", value)
        if not rows.ndim or len(rows) != counts[key]:
            raise ValueError(f"dataset {name}: {field} of type {key} has {list(rows.shape)} of {counts[key]} nodes.")
        if field in MASKS:
            missing = 0
        elif rows.is_floating_point():
            missing = torch.nan
        elif task_of(rows, task) in MATRICES:
            rows, missing = rows.double(), torch.nan
        else:
            rows, missing = rows.long(), -1  # bool and uint8 have no number for an unlabelled node
        found[field] = rows.new_full((total, *rows.shape[1:]), missing)
        found[field][own] = rows
    return found


def _edge_index(name: str, key: _EdgeType, fields: _Fields, counts: Mapping[str, int]) -> Tensor:
    """Return [2, E] of one edge type, in ids of all nodes."""
    title = ", ".join(key)
    if fields.get("edge_index") is None:
        raise ValueError(f"dataset {name}: edges ({title}) have no edge_index; give it (an adj_t is not read here).")
    ends = as_real(name, f"edge_index of type {title}", fields["edge_index"])
    if ends.is_floating_point() or ends.dtype == torch.bool:
        raise ValueError(f"dataset {name}: edge_index of ({title}) is {ends.dtype}; node ids must be integers.")
    if ends.ndim != 2 or len(ends) != 2:
        raise ValueError(f"dataset {name}: edge_index of ({title}) must be [2, edges], got {list(ends.shape)}.")
    out: list[Tensor] = []
    for kind, row in zip((key[0], key[2]), ends.long(), strict=True):
        if kind not in counts:
            raise ValueError(f"dataset {name}: edges ({title}) join nodes of type {kind}, of which there are none.")
        if bad := int(((row < 0) | (row >= counts[kind])).sum()):
            raise ValueError(
                f"dataset {name}: {bad} of {row.numel()} edges ({title}) name a node of type {kind} outside "
                f"0..{counts[kind] - 1}; number the nodes of each type from 0."
            )
        out.append(row + _start(kind, counts))
    return torch.stack(out)


def _start(kind: str, counts: Mapping[str, int]) -> int:
    """Return the id of the first node of a type."""
    return sum(list(counts.values())[: list(counts).index(kind)])


def _of_all(name: str, key: str, edges: Mapping[_EdgeType, _Fields]) -> Tensor | None:
    """Return the rows of all edge types; None if no type has any. Raises ValueError if only some have."""
    given = {"__".join(kind): fields[key] for kind, fields in edges.items() if fields.get(key) is not None}
    if not given:
        return None
    rows = [as_real(name, f"{key} of type {kind}", value) for kind, value in given.items()]
    if len(given) < len(edges) or len({tuple(each.shape[1:]) for each in rows}) > 1:
        widths = ", ".join(f"{kind}: {list(each.shape)}" for kind, each in zip(given, rows, strict=True))
        raise ValueError(
            f"dataset {name}: {key} must be of every type of edges and of one width ({widths}; {len(edges)} types); "
            "give it to all, or remove it."
        )
    return torch.cat(rows)
