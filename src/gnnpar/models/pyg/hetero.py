"""Heterogeneous models (HeteroConv, HGTConv, to_hetero) on a typed graph laid out as one graph.

`x_dict` holds the rows of a rank by type. An entry of `edge_index_dict` holds the number of a relation. When a
convolution calls `propagate` on it, the fold runs on the edges of that relation: it reads rows of the source type,
scattered to their places among all rows, and returns rows of the destination type.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn import HeteroConv, MessagePassing

from gnnpar.folds.aggregator import Aggregator, EdgeDropout
from gnnpar.folds.block import Rows, chosen
from gnnpar.folds.edge_data import Schema
from gnnpar.folds.generic import Generic
from gnnpar.folds.sum import Sum
from gnnpar.folds.wrapped import TypeFilteredFold
from gnnpar.graph import Graph, InEdges, unchanged
from gnnpar.models import hgt
from gnnpar.models.pyg.marks import Bipartite, Edges, LocalEdges, Refused
from gnnpar.models.pyg.nested import mapped_call, replaced
from gnnpar.models.pyg.propagate import Forward, Lowering, is_plain, is_untouched
from gnnpar.models.pyg.rows import Layout, NodeRows, plain_rows

_BY_KEY = "__"  # joins the names of an edge type in the output of to_hetero, and in PyG's ModuleDict


class RelationEdges(Edges):
    """Placeholder for an entry of edge_index_dict."""

    name = "an entry of edge_index_dict"

    @property
    def number(self) -> int:
        """Number of the edge type."""
        assert isinstance(self.local.g, RelationGraph)
        return self.local.g.number


class NeedsSchema(nn.Module):
    """Placeholder for a model class that cannot be built without the types of a dataset."""

    def __init__(self, factory: Callable[..., object]) -> None:
        super().__init__()
        if isinstance(factory, type) and issubclass(factory, nn.Module):
            self.forward = partial(factory.forward, self)

    def forward(self, x_dict: object, edge_index_dict: object) -> None:
        """Take the arguments of a heterogeneous model."""


def reads_dictionaries(net: nn.Module) -> bool:
    """Return True for a heterogeneous model. The output of to_hetero has submodules a__to__b."""
    first = next(iter(inspect.signature(net.forward).parameters), "")
    kinds = HeteroConv | pyg.HANConv | pyg.HGTConv | NeedsSchema
    if first.endswith("_dict") or any(isinstance(each, kinds) for each in net.modules()):
        return True
    return any(_BY_KEY in key for each in net.modules() if isinstance(each, nn.ModuleDict) for key in each)


ANY_SCHEMA = Schema((("a", 3), ("b", 5)), (("a", "to", "b"), ("b", "of", "a"), ("a", "by", "a")), "a")
"""Schema for checks of a model that accepts any metadata."""


def schema_for(net: nn.Module) -> Schema:
    """Return a schema with the types that a model's modules name; ANY_SCHEMA if they name none. It has no labels, and a
    different width per type, which lazy modules accept."""
    edges: dict[tuple[str, str, str], None] = {}
    for each in net.modules():
        if isinstance(each, HeteroConv):
            keys = list(each.convs.keys())
        elif isinstance(each, pyg.HANConv | pyg.HGTConv):
            keys = each.metadata[1] if isinstance(each, pyg.HANConv) else each.edge_types
        else:
            continue
        edges |= dict.fromkeys((str(a), str(r), str(b)) for a, r, b in keys)
    names = dict.fromkeys(name for a, _, b in edges for name in (a, b))
    nodes = tuple((name, 3 + 2 * i) for i, name in enumerate(names))
    return Schema(nodes, tuple(edges)) if edges else ANY_SCHEMA


def one_of_each(schema: Schema) -> tuple[Tensor, Tensor, Tensor]:
    """Return one edge per edge type, with one node per node type: source, destination, type, each [R]."""
    ends = [(schema.names.index(a), schema.names.index(b)) for a, _, b in schema.edges]
    source, destination = torch.tensor(ends).t()
    order = destination.argsort(stable=True)
    return source[order], destination[order], order


def hetero_lowering(conv: MessagePassing) -> Lowering | None:
    """Return the aggregation path of a convolution that takes dictionaries (HGTConv), else None. ValueError for one
    with its own methods or hooks."""
    if not isinstance(conv, pyg.HGTConv):
        return None
    if type(conv) is not pyg.HGTConv or not all((is_plain(conv), is_untouched(conv.k_rel), is_untouched(conv.v_rel))):
        raise ValueError("is a HGTConv with methods or hooks of its own, which is not carried")
    return TypedAttention("mapped to attention by types of nodes and edges")


def by_type(of: Callable[[LocalEdges], Tensor], g: Graph, layout: Layout) -> dict[tuple[str, str, str], Tensor]:
    """Return the data of the in-edges of own rows by edge type, as the dictionaries that forward takes."""
    return {key: of(LocalEdges(RelationGraph(g, layout, i))) for i, key in enumerate(layout.schema.edges)}


def typed_forward(lowering: Lowering, conv: MessagePassing, g: Graph, layout: Layout, forward: Forward) -> Forward:
    """Return `lowering.forward` on the relation of the edges passed to the convolution."""
    if isinstance(lowering, TypedAttention):
        return lowering.attention(conv, g, layout)

    def run(*args: object, **kwargs: object) -> object:
        edges = next((each for each in (*args, *kwargs.values()) if isinstance(each, RelationEdges)), None)
        if edges is None and isinstance(conv, pyg.HANConv):  # takes all edge types, calls propagate per type
            with replaced(conv, {"propagate": typed_forward(lowering, conv, g, layout, conv.propagate)}):
                return forward(*args, **kwargs)
        if edges is None:
            return forward(*args, **kwargs)
        relation = RelationGraph(g, layout, edges.number)
        for each in (*args, *kwargs.values()):
            relation.check(each)
        args, kwargs = mapped_call(args, kwargs, plain_rows)
        out = lowering.forward(conv, relation, forward)(*args, **kwargs)
        if isinstance(out, Tensor) and out.ndim and len(out) == len(layout.rows[relation.kind]):
            return NodeRows.of(relation.kind, out)
        return out

    return run


class RelationGraph(Bipartite):
    """The edges of one relation, as a graph from nodes of one type to nodes of one type.

    Source rows are of the source type, all other rows, ids and degrees of the destination type. A convolution that
    reads degrees of its sources (GCN's norm) takes one type only.
    """

    edge_type = None  # all edges are of one type

    def __init__(self, g: Graph, layout: Layout, number: int) -> None:
        source, _, destination = self.key = layout.schema.edges[number]
        self.g, self.layout, self.number = g, layout, number
        self.source_kind, self.kind = self.layout.number(source), self.layout.number(destination)
        self.num_sources, self.one_kind = len(self.layout.rows[self.source_kind]), self.source_kind == self.kind
        self.num_nodes = self.g.num_nodes

    def check(self, given: object) -> None:
        """Raise ValueError if an argument holds rows of another node type."""
        rows_of = given if isinstance(given, tuple) else (given,)
        for place, rows in enumerate(rows_of):
            wanted = (self.source_kind, self.kind)[place : place + 1 if len(rows_of) == 2 else None]
            if isinstance(rows, NodeRows) and rows.kind not in wanted:
                raise Refused(
                    f"is given rows of type {self.layout.schema.names[rows.kind]} for the edge type "
                    f"({', '.join(self.key)}) of other types"
                )

    @cached_property
    def places(self) -> Tensor:
        """Places of the relation's edges among the edge operands, [e] int64."""
        assert self.g.edge_type is not None
        return (self.g.edge_type == self.number).nonzero().flatten()

    def _own(self, table: Tensor) -> Tensor:
        return self.layout.pick(self.kind, table).as_subclass(Tensor)

    @property
    def node_ids(self) -> Tensor:
        return self._own(self.g.node_ids)

    @property
    def in_degree(self) -> Tensor:
        """In-degree by this relation."""
        return self._own(self.g.type_degree(len(self.layout.schema.edges)))[:, self.number]

    @property
    def in_weight(self) -> Tensor | None:
        """Sum of in-edge weights by this relation, computed here because shards hold sums over all relations."""
        if self.g.in_weight is None:
            return None
        ones = torch.ones_like(self.g.in_weight)[:, None]
        total = self.g.aggregate(TypeFilteredFold(Sum(weighted=True), self.number), self.g.source(unchanged, ones))
        return self._own(total)[:, 0].to(self.g.in_weight.dtype)

    @property
    def edge_ids(self) -> Tensor:
        return self.g.edge_ids[self.places]

    @property
    def edge_attr(self) -> Tensor | None:
        return None if self.g.edge_attr is None else self.g.edge_attr[self.places]

    @property
    def in_edges(self) -> InEdges:
        """In-edges, numbered by the rows of the two types."""
        edges, places = self.g.in_edges, self.places
        source, row = edges.source[places], edges.row[places]
        source_place, place = (self.layout.places(kind) for kind in (self.source_kind, self.kind))
        own = torch.where(source < 0, -1, source_place[source.clamp_min(0)])
        return InEdges(own, place[row], chosen(edges.weight, places))

    def type_degree(self, types: int) -> Tensor:
        return F.pad(self.in_degree[:, None], (0, types - 1))

    def at(self, layer: int) -> Self:
        return type(self)(self.g.at(layer), self.layout, self.number)

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        return self.layout.dropout(self.g, x, p, tag=tag)

    def edge_dropout(self, p: float, *, tag: int = 0) -> EdgeDropout | None:
        return self.g.edge_dropout(p, tag=tag)

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        placed = self.g.source(unchanged, *(self.layout.place(self.source_kind, rows) for rows in src))
        near = tuple(self.layout.place(self.kind, rows) for rows in dst)
        rows_of_edges = ()
        if edge:
            num_edges = len(self.g.edge_ids)
            rows_of_edges = tuple(t.new_zeros(num_edges, *t.shape[1:]).index_copy(0, self.places, t) for t in edge)
        out = self.g.aggregate(TypeFilteredFold(agg, self.number), placed, near, rows_of_edges, shared)
        return out if agg.whole_neighborhood else self._own(out)


class TypedAttention(Lowering):
    """HGTConv: keys and values are sent once for all relations; destinations apply the matrices of relations."""

    def forward(self, conv: MessagePassing, g: Graph, forward: Forward) -> Forward:
        raise ValueError("is a HGTConv outside of a model of dictionaries by type, which is not carried")

    def attention(self, conv: MessagePassing, g: Graph, layout: Layout) -> Callable[..., dict[str, Tensor]]:
        """Return the convolution's forward on the rows of a rank."""
        assert isinstance(conv, pyg.HGTConv)

        def forward(x_dict: Mapping[str, Tensor], edge_index_dict: Mapping[object, object]) -> dict[str, Tensor]:
            numbers = {key: each.number for key, each in edge_index_dict.items() if isinstance(each, RelationEdges)}
            for number, key in enumerate(layout.schema.edges):
                if numbers.get(key) != number or key not in conv.edge_types_map:
                    raise ValueError(
                        f"a HGTConv attends over the in-edges of all edge types at once, and ({', '.join(key)}) of the "
                        "dataset is not among those it is made with or given; hand it metadata and edge_index_dict "
                        "whole"
                    )
            heads = conv.heads
            parts: dict[str, tuple[Tensor, ...]] = {
                name: tuple(rows.unflatten(1, (heads, -1)) for rows in out.tensor_split(3, dim=1))
                for name, out in conv.kqv_lin(x_dict).items()
            }
            keys, queries, values = (
                torch.stack([layout.place(layout.number(name), part[i]) for name, part in parts.items()]).sum(0)
                for i in range(3)
            )
            at = torch.tensor([conv.edge_types_map[key] for key in layout.schema.edges], device=keys.device)
            matrices = tuple(
                each.weight.view(heads, len(conv.edge_types), *each.weight.shape[1:])[:, at]
                for each in (conv.k_rel, conv.v_rel)
            )
            prior = torch.cat([conv.p_rel[_BY_KEY.join(key)] for key in layout.schema.edges]).t()
            fold = Generic(value=hgt.value, score=hgt.score, types=len(layout.schema.edges), by_heads=True)
            out = g.aggregate(fold, g.source(unchanged, keys, values), (queries,), (), (*matrices, prior)).flatten(1)
            rows = {n: layout.pick(layout.number(n), out) for n in parts if n in conv.dst_node_types}
            found = dict(conv.out_lin({name: F.gelu(each) for name, each in rows.items()}))
            for name, result in found.items():
                own = x_dict[name]
                if result.shape[-1] == own.shape[-1]:
                    share = conv.skip[name].sigmoid()
                    found[name] = share * result + (1 - share) * own
            return found

        return forward
