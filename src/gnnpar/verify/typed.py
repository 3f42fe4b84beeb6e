"""A small typed graph, laid out as one, and its dictionaries by type as in a HeteroData."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gnnpar.data.dataset import Dataset
from gnnpar.folds.edge_data import EdgeData, EdgeKind, Schema
from gnnpar.verify.edges import drawn

_NODES, _MORE, _EDGES = 23, 6, 5
CLASSES = 3


def typed_graph(
    schema: Schema,
    kinds: Collection[EdgeKind],
    *,
    labelled: Collection[str] = (),
    loops: bool = False,
    classes: int = CLASSES,
    like: EdgeData | None = None,
    seed: int = 0,
) -> Dataset:
    """Return a typed graph with 23, 29, 35, ... nodes per type and about 5 edges per destination and edge type.

    The first node has no edge. labelled: types with labels. loops: add a few self loops if both ends are of one type.
    like: as for `drawn`.
    """
    draw = torch.Generator().manual_seed(seed)
    counts = [_NODES + _MORE * i for i in range(len(schema.nodes))]
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    total, x = starts[-1], torch.zeros(starts[-1], schema.width)
    for t, (own, count) in enumerate(zip(schema.columns, counts, strict=True)):
        rows = slice(starts[t], starts[t] + count)
        x[rows, own] = torch.randn(count, own.stop - own.start, generator=draw)
        if len(counts) > 1:
            x[rows, schema.width - len(counts) + t] = 1
    found: list[Tensor] = []
    for number, (a, _, b) in enumerate(schema.edges):
        source, destination = schema.names.index(a), schema.names.index(b)
        ends = [
            torch.randint(int(t == 0), counts[t], (_EDGES * counts[destination],), generator=draw) + starts[t]
            for t in (source, destination)
        ]
        if a == b:
            kept = (ends[0] != ends[1]) | (loops & (ends[0] % 2 == 1))
            ends = [each[kept] for each in ends]
        found.append(torch.stack([*ends, torch.full_like(ends[0], number)]))
    edges = torch.cat(found, 1).unique(dim=1)
    edges = edges[:, torch.argsort(edges[1] * total + edges[0], stable=True)]
    known = torch.zeros(total, dtype=torch.bool)
    for t, name in enumerate(schema.names):
        known[starts[t] : starts[t + 1]] = name in labelled
    y = torch.where(known, torch.randint(0, max(2, classes), (total,), generator=draw), -1)
    part = torch.arange(total) % 4
    return Dataset.of(
        "small",
        x=x,
        y=y,
        edge_index=edges[:2],
        edges=replace(drawn(edges.shape[1], kinds, like), type=edges[2]),
        masks=(known & (part < 2), known & (part == 2), known & (part == 3)),
        num_classes=classes,
        task="single_label" if classes > 1 else "binary",
        num_edge_types=len(schema.edges),
        schema=schema,
    )


class Dictionaries(NamedTuple):
    """A typed graph in PyG's form: rows and edges by type, edges numbered within their types, and edge data by kind."""

    x: dict[str, Tensor]
    edge_index: dict[tuple[str, str, str], Tensor]
    carried: dict[EdgeKind, dict[tuple[str, str, str], Tensor]]


def dictionaries(dataset: Dataset, x: Tensor) -> Dictionaries:
    """Return the dictionaries. Nodes are in the order of their types. Shapes: x [N, schema.width]."""
    schema, types = dataset.edge_sizes.schema, dataset.edges.type
    assert schema is not None
    assert types is not None
    kinds = len(schema.nodes)
    counts = x[:, -kinds:].sum(0).long() if kinds > 1 else torch.tensor([len(x)])
    ends = [0, *counts.cumsum(0).tolist()]
    start = dict(zip(schema.names, ends, strict=False))
    rows = {name: x[ends[t] : ends[t + 1], schema.columns[t]] for t, (name, width) in enumerate(schema.nodes) if width}
    edges: dict[tuple[str, str, str], Tensor] = {}
    carried: dict[EdgeKind, dict[tuple[str, str, str], Tensor]] = {}
    for number, key in enumerate(schema.edges):
        of_type = types == number
        edges[key] = dataset.edge_index[:, of_type] - torch.tensor([[start[key[0]]], [start[key[2]]]])
        for kind in dataset.edges.kinds - {"type"}:
            carried.setdefault(kind, {})[key] = dataset.edges.tensors[kind][of_type].to(x.dtype)
    return Dictionaries(rows, edges, carried)
