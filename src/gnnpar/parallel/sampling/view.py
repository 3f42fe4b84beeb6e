"""A sampled subgraph: Y[i] = loops of i + d_i / k_i . (k_i of i's d_i other in-edges), for the nodes around some seeds.

A layer's input are the rows within h hops of the seeds, its result is right for those within h - 1, and the others are
cut off before the next layer reads them (PyG calls that trim_to_layer). Self loops are never sampled away, as PyG's
layers add them after sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Rows
from gnnpar.graph import Message
from gnnpar.parallel.local import LocalRows, OwnRows, Pass, to_device
from gnnpar.parallel.sampling.neighbours import Sample
from gnnpar.parallel.sampling.replica import Replica
from gnnpar.parallel.torch_types import integers
from gnnpar.parallel.whole import fold_block

Normalize = Literal["graph", "subgraph"]


class Subgraph(NamedTuple):
    """A sample with its self loops, as CSR by destination, loops first in a row. Plain tensors: workers send them.

    Shapes: node_ids [n]; ends as in Sample, `edges_within` and `loops_within`: how many in-edges, and self loops among
    them, the nodes within so many hops have; indptr [m + 1], indices [e] (int32), edge_ids [e] or None; loops [m];
    in_degree [n]; scale [m]: d_i / k_i (None: nothing was left out, or sums are not scaled).
    """

    node_ids: Tensor
    ends: tuple[int, ...]
    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor | None
    loops: Tensor
    in_degree: Tensor
    scale: Tensor | None
    edges_within: tuple[int, ...]
    loops_within: tuple[int, ...]

    def to(self, device: torch.device) -> Subgraph:
        return self._replace(**{k: to_device(t, device) for k, t in self._asdict().items() if isinstance(t, Tensor)})


def subgraph_of(sample: Sample, graph: Replica, normalize: Normalize) -> Subgraph:
    """Loops, degrees and weights put to a sample.

    `normalize`: graph has the degrees of the whole graph, and sums that make up for what was left out; subgraph the
    degrees within the sample, as PyG's layers count them.
    """
    inside = sample.nodes[: len(sample.counts)]
    loops, counts = graph.loops[inside], sample.counts
    indptr = torch.cat([counts.new_zeros(1), (loops + counts).cumsum(0)])
    rows = torch.arange(len(inside))
    place = torch.arange(len(sample.sources)) + loops.cumsum(0).repeat_interleave(counts)
    of_loop = _ranges(indptr[:-1], loops, int(loops.sum()))
    indices = torch.empty(int(indptr[-1]), dtype=torch.int32)
    indices[place], indices[of_loop] = sample.sources.int(), rows.repeat_interleave(loops).int()
    ids = None
    if graph.edge_ids is not None and graph.loop_ids is not None:
        ids = torch.empty(len(indices), dtype=torch.int64)
        ids[place] = graph.edge_ids[sample.edges]
        ids[of_loop] = graph.loop_ids[_ranges(graph.first_loop[inside], loops, int(loops.sum()))]
    dtype, scale = graph.in_degree.dtype, None
    if normalize == "graph":
        in_degree = graph.in_degree[sample.nodes]
        others = graph.edges.indptr[inside + 1] - graph.edges.indptr[inside]
        if bool((counts < others).any()):
            scale = torch.where(counts > 0, others.to(dtype) / counts.clamp_min(1), 1.0).to(dtype)
    else:
        in_degree = graph.loops[sample.nodes].to(dtype)
        in_degree[: len(inside)] += counts
    ends, before = torch.tensor(sample.ends[:-1], dtype=torch.int64), torch.cat([loops.new_zeros(1), loops.cumsum(0)])
    edges_within, loops_within = tuple(integers(indptr[ends])), tuple(integers(before[ends]))
    parts = sample.nodes, sample.ends, indptr.int(), indices, ids, loops, in_degree, scale
    return Subgraph(*parts, edges_within, loops_within)


def _ranges(first: Tensor, counts: Tensor, total: int) -> Tensor:
    """first[0], first[0] + 1, ..., `counts[0]` of them, then those of first[1]; `total` numbers."""
    ends = counts.cumsum(0)
    before = (ends - counts).repeat_interleave(counts, output_size=total)
    return first.repeat_interleave(counts, output_size=total) + torch.arange(total, device=counts.device) - before


@dataclass(eq=False)
class SampledGraph(OwnRows):
    """The nodes within `hops` of the seeds, in one layer of one pass."""

    sub: Subgraph
    run: Pass
    hops: int
    layer: int = 0
    local: LocalRows = field(init=False)

    def __post_init__(self) -> None:
        owned = slice(self.num_rows)
        self.local = LocalRows(self.sub.node_ids[owned], self.sub.in_degree[owned], run=self.run, layer=self.layer)

    @property
    def num_rows(self) -> int:
        return self.sub.ends[self.hops]

    @property
    def num_whole(self) -> int:
        """Rows whose in-edges were drawn, and whose sums of rows within `hops` are right."""
        return self.sub.ends[self.hops - 1]

    @property
    def edge_ids(self) -> Tensor:
        ids = self.block.edge_ids
        if ids is None:
            raise ValueError("edge operands need edge ids: give the model needs_edge_ids = True.")
        return ids.sort().values

    def at(self, layer: int) -> Self:
        return replace(self, layer=layer)

    def inwards(self, hops: int) -> Self:
        """Nearer to the seeds."""
        return replace(self, hops=self.hops - hops)

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        return self.local.dropout(x, p, tag=tag)

    def source(self, message: Message, *rows: Tensor) -> Rows:
        return message(self, *rows)

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        assert self.hops > 0, "more aggregations than hops were drawn"
        if edge:
            ids = self.block.edge_ids
            assert ids is not None
            place = torch.searchsorted(ids.sort().values, ids)
            edge = tuple(rows[place] for rows in edge)
        out = fold_block(agg, self.block, src, dst, edge, shared)
        if self.sub.scale is None or not agg.summed:
            return out
        loops, kept = self.loops
        certain = fold_block(agg, loops, src, dst, tuple(rows[kept] for rows in edge), shared)
        scale = torch.ones(self.num_rows, dtype=out.dtype, device=out.device)
        scale[: self.num_whole] = self.sub.scale[: self.num_whole]
        scale = scale.view(-1, *[1] * (out.dim() - 1))
        return scale * out + (1 - scale) * certain  # scale (loops + sampled) + (1 - scale) loops

    @cached_property
    def block(self) -> Block:
        """All that was drawn. Columns are places in the sample: that is where ties of a maximum go by."""
        indptr = self.sub.indptr[: self.num_whole + 1]
        last = self.sub.edges_within[self.hops - 1]
        ids = None if self.sub.edge_ids is None else self.sub.edge_ids[:last]
        return self._of(indptr, self.sub.indices[:last], ids)

    @cached_property
    def loops(self) -> tuple[Block, Tensor]:
        """The self loops alone, and their places among all in-edges."""
        counts = self.sub.loops[: self.num_whole]
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        kept = _ranges(self.sub.indptr[: self.num_whole].long(), counts, self.sub.loops_within[self.hops - 1])
        block = self.block
        return self._of(indptr, block.indices[kept], None if block.edge_ids is None else block.edge_ids[kept]), kept

    def _of(self, indptr: Tensor, indices: Tensor, ids: Tensor | None) -> Block:
        size = self.num_rows
        rest = indptr[-1:].expand(size - self.num_whole)  # rows of the last hop: nothing was drawn for them
        places = torch.arange(size, device=indices.device)
        return Block(torch.cat([indptr, rest]), indices, size, size, edge_ids=ids, src_ids=places)
