"""A sampled subgraph: Y[i] = loops of i + d_i / k_i . (k_i of i's d_i other in-edges), for the nodes around some seeds.

The factor d_i / k_i is a weight of each edge, so that a sum stays one walk over its edges.

A layer reads the rows within h hops of the seeds and returns the rows within h - 1 hops to the next layer. A layer that
does not call `destinations` returns rows within h hops, correct within h - 1; the others are cut off (PyG:
trim_to_layer). Self loops are always kept, as PyG's layers add them after sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Rows
from gnnpar.folds.edge_data import EdgeData
from gnnpar.folds.generic import Generic
from gnnpar.folds.sum import Sum
from gnnpar.graph import InEdges, Message
from gnnpar.parallel.blocks import fold_block
from gnnpar.parallel.local import OwnRows, Pass, as_messages, by_type, to_device
from gnnpar.parallel.sampling.neighbours import Replica, Sample
from gnnpar.parallel.torch_types import integers
from gnnpar.partition.shard import edges_by_id

Normalize = Literal["graph", "subgraph"]


class Subgraph(NamedTuple):
    """A sample with its self loops, as CSR by destination, loops first in a row. Plain tensors: workers send them.

    Shapes: node_ids [n]; ends as in Sample, `edges_within`: numbers of in-edges of the nodes within 0, 1, ... hops;
    indptr [m + 1], indices [e] (int32), edge_ids [e] or None; in_degree [n]; weights [e] of in-edges in sums,
    loss_weight [seeds] of a seed's loss (None: 1).
    """

    node_ids: Tensor
    ends: tuple[int, ...]
    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor | None
    in_degree: Tensor
    edges_within: tuple[int, ...]
    weights: Tensor | None = None
    loss_weight: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: t for name, t in self._asdict().items() if isinstance(t, Tensor)}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def pinned(self) -> Subgraph:
        """Return it in pinned memory, from which a GPU copies while the host continues."""
        return self._replace(**{name: t.pin_memory() for name, t in self.tensors.items()})

    def to(self, device: torch.device) -> Subgraph:
        return self._replace(**{name: to_device(t, device) for name, t in self.tensors.items()})


def subgraph_of(sample: Sample, graph: Replica, normalize: Normalize, *, weights: Tensor | None = None) -> Subgraph:
    """Add loops, degrees and weights to a sample.

    `normalize`: graph takes the degrees of the whole graph, and weights sums for edges left out, by `weights` [e] of
    the sampled edges or by d_i / k_i; subgraph takes the degrees within the sample, as PyG's layers do.
    """
    inside = sample.nodes[: len(sample.counts)]
    loops, counts = graph.loops[inside], sample.counts
    indptr = torch.cat([counts.new_zeros(1), (loops + counts).cumsum(0)])
    place = torch.arange(len(sample.sources)) + loops.cumsum(0).repeat_interleave(counts)
    of_loop = ranges(indptr[:-1], loops)
    indices = torch.empty(int(indptr[-1]), dtype=torch.int32)
    indices[place] = sample.sources.int()
    indices[of_loop] = torch.arange(len(inside), dtype=torch.int32).repeat_interleave(loops)
    ids = None
    if graph.edge_ids is not None and graph.loop_ids is not None:
        ids = torch.empty(len(indices), dtype=torch.int64)
        ids[place] = graph.edge_ids[sample.edges]
        ids[of_loop] = graph.loop_ids[ranges(graph.first_loop[inside], loops)]
    dtype = graph.in_degree.dtype
    if normalize == "graph":
        in_degree = graph.in_degree[sample.nodes]
        others = graph.edges.indptr[inside + 1] - graph.edges.indptr[inside]
        if weights is None and bool((counts < others).any()):
            weights = (others.to(dtype) / counts).to(dtype).repeat_interleave(counts)
    else:
        in_degree = graph.loops[sample.nodes].to(dtype)
        in_degree[: len(inside)] += counts
    of_edge = None
    if weights is not None:
        of_edge = torch.ones(len(indices), dtype=dtype)
        of_edge[place] = weights
    edges_within = tuple(integers(indptr[torch.tensor(sample.ends[:-1], dtype=torch.int64)]))
    return Subgraph(sample.nodes, sample.ends, indptr.int(), indices, ids, in_degree, edges_within, of_edge)


def ranges(first: Tensor, counts: Tensor) -> Tensor:
    """Return first[0], first[0] + 1, ..., `counts[0]` numbers, then `counts[1]` from first[1], and so on."""
    before = counts.cumsum(0) - counts
    return (first - before).repeat_interleave(counts) + torch.arange(int(counts.sum()))


@dataclass(eq=False)
class SampledGraph(OwnRows):
    """The nodes within `hops` of the seeds, in one layer of one pass.

    `outer`: the view that returned this one as `destinations`; the next aggregation reads its rows.
    """

    sub: Subgraph
    run: Pass
    hops: int
    layer: int = 0
    outer: SampledGraph | None = None
    edge_attr = edge_type = None  # samples carry neither

    def __post_init__(self) -> None:
        owned = slice(self.num_rows)
        self.node_ids, self.in_degree, self.in_weight = self.sub.node_ids[owned], self.sub.in_degree[owned], None

    @property
    def num_rows(self) -> int:
        return self.sub.ends[self.hops]

    @property
    def num_read(self) -> int:
        """Return the number of rows within `hops` - 1, which have their in-edges in the sample."""
        return self.sub.ends[self.hops - 1]

    @property
    def edge_ids(self) -> Tensor:
        ids = (self.outer or self).block.edge_ids
        if ids is None:
            raise ValueError("edge operands need edge ids: give the model needs_edge_ids = True.")
        return ids.sort().values

    @property
    def in_edges(self) -> InEdges:
        block = (self.outer or self).block
        return edges_by_id(block.edges, block.indices.long(), block.edge_dst)

    def type_degree(self, types: int) -> Tensor:
        """Raise ValueError: a graph with edge types is not sampled."""
        return by_type(None, self.in_degree, types)

    def at(self, layer: int) -> Self:
        return replace(self, layer=layer)

    def inner_view(self, hops: int) -> Self:
        """Return the view `hops` hops nearer to the seeds."""
        return replace(self, hops=self.hops - hops)

    def destinations(self, *rows: Tensor) -> tuple[Self, Rows]:
        inner = replace(self, hops=self.hops - 1, outer=self)
        return inner, tuple(first_rows(each, inner.num_rows) for each in rows)

    def source(self, message: Message, *rows: Tensor) -> Rows:
        return as_messages(message(self, *rows), rows[0].dtype)

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        if self.outer is not None and len(src[0]) == self.outer.num_rows:
            return self.outer.fold(agg, src, dst, edge, shared)
        out = self.fold(agg, src, tuple(first_rows(rows, self.num_read) for rows in dst), edge, shared)
        if self.num_read == self.num_rows or agg.whole_neighborhood:
            return out
        return torch.cat([out, out.new_zeros(self.num_rows - self.num_read, *out.shape[1:])])

    def fold(self, agg: Aggregator, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        """Fold the drawn in-edges. Shapes: src [num_rows, ...], dst [num_read, ...], edge [E, ...] by ascending id ->
        [num_read, ...]."""
        assert self.hops > 0, "more aggregations than hops were drawn"
        if edge:
            ids = self.block.edge_ids
            assert ids is not None
            place = torch.searchsorted(ids.sort().values, ids)
            edge = tuple(rows[place] for rows in edge)
        if self.sub.weights is not None and agg.summed:
            return _fold_weighted(agg, self.counted, src, dst, edge, shared)
        return fold_block(agg, self.block, src, dst, edge, shared)

    @cached_property
    def block(self) -> Block:
        """Return all drawn edges and loops. Columns are positions in the sample; of equal maxima the first counts."""
        indptr = self.sub.indptr[: self.num_read + 1]
        last = self.sub.edges_within[self.hops - 1]
        ids = None if self.sub.edge_ids is None else self.sub.edge_ids[:last]
        places = torch.arange(self.num_rows, device=indptr.device)
        edges = EdgeData(ids=ids)
        return Block(indptr, self.sub.indices[:last], self.num_read, self.num_rows, src_ids=places, edges=edges)

    @cached_property
    def counted(self) -> Block:
        """Return the block with the weights of edges in sums."""
        assert self.sub.weights is not None
        weights = self.sub.weights[: self.block.num_edges]
        return replace(self.block, edges=replace(self.block.edges, weight=weights))


def first_rows(rows: Tensor, count: int) -> Tensor:
    """Return `rows` [N, ...] cut to [count, ...]; `rows` itself if count is N, since autograd pads slices."""
    return rows if len(rows) == count else rows[:count]


def _fold_weighted(agg: Aggregator, block: Block, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """Fold in-edges with the weights of the block: out_i = sum_j weight_ij x_j.

    `agg` is `summed`. Shapes: src [N, ...], dst [n, ...], edge [E, ...] -> [n, ...]. Raises ValueError for a fold that
    is neither Sum nor Generic.
    """
    if isinstance(agg, Sum):  # the engine carries no weights of the graph
        return fold_block(replace(agg, weighted=True), block, src, dst, edge, shared)
    if not isinstance(agg, Generic):
        raise ValueError(
            f"the fold {type(agg).__name__} cannot count an edge more than once, which makes up for edges that were "
            "not drawn: set strategy.normalize=subgraph, or use Sum or Generic"
        )
    value, weights = agg.value, block.weights
    assert weights is not None
    plain = replace(block, edges=replace(block.edges, weight=None))

    def weighted(s: Rows, d: Rows, e: Rows, t: Rows) -> Tensor:
        found = value(s, d, e[:-1], t)
        return found * e[-1].view(-1, *[1] * (found.dim() - 1))

    return fold_block(replace(agg, value=weighted), plain, src, dst, (*edge, weights), shared)
