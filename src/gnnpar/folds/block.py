"""A block of in-edges: some rows (destinations) times some columns (sources) of the adjacency matrix, as CSR."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gnnpar.folds.edge_data import EdgeData
from gnnpar_kernels import Csr
from gnnpar_kernels.csr import accumulate_dtype

P = ParamSpec("P")
R = TypeVar("R")
Rows = tuple[Tensor, ...]  # row-aligned tensors, each [N, ...]: the unit of a message


class Operands(NamedTuple):
    """Operands of an aggregation. Gradients have the same structure."""

    src: Rows  # rows of sources: sent, cost bytes
    dst: Rows = ()  # rows of destinations: local
    edge: Rows = ()  # one row per in-edge of this block, on the destination's rank: never sent
    shared: Rows = ()  # replicated tensors (learned matrices)


class ByType(NamedTuple):
    """Edges by pair, destination * types + type: their order [E], CSR pointers, and the pairs of the CSR's rows (None:
    all). Blocks that differ only in their columns may share it."""

    order: Tensor
    indptr: Tensor
    pairs: Tensor | None


K = TypeVar("K")


def per_argument(method: Callable[Concatenate[K, P], R]) -> Callable[Concatenate[K, P], R]:
    """Cache a method's results on its object, by arguments."""

    @wraps(method)
    def found(self: K, *args: P.args, **named: P.kwargs) -> R:
        results, key = vars(self).setdefault("_per_argument", {}), (method.__name__, *args)
        if key not in results:
            results[key] = method(self, *args, **named)
        return cast("R", results[key])

    return found


def cached_results(of: object) -> list[object]:
    """Return the results that `per_argument` holds for an object."""
    return list(vars(of).get("_per_argument", {}).values())


@dataclass(frozen=True, eq=False)
class Block:
    """In-edges of `num_dst` destinations from `num_src` sources, CSR by destination.

    Shapes: indptr [R + 1], indices [E] (columns), both int32 while E < 2^31; rows [R] (destinations of the R CSR rows,
    ascending; None: all of them); src_ids [num_src] global ids of the columns, ascending unless `ascends` is false.
    edges: ids, weights and types of the E edges in order, if any. by_type: cache, number of types -> edges sorted by
    type.
    """

    indptr: Tensor
    indices: Tensor
    num_dst: int
    num_src: int
    rows: Tensor | None = None
    src_ids: Tensor | None = None
    edges: EdgeData = field(default_factory=EdgeData)
    by_type: dict[int, ByType] = field(default_factory=dict[int, ByType])
    ascends: bool = True

    @property
    def edge_ids(self) -> Tensor | None:
        """[E] int64 global ids."""
        return self.edges.ids

    @property
    def weights(self) -> Tensor | None:
        """[E]; None: all are 1."""
        return self.edges.weight

    @property
    def types(self) -> Tensor | None:
        """[E] int64; None: edges have no types."""
        return self.edges.type

    @property
    def num_edges(self) -> int:
        return self.indices.numel()

    @property
    def num_listed(self) -> int:
        """Number of CSR rows: destinations in `rows`, or all if it is None."""
        return len(self.indptr) - 1

    @property
    def forward(self) -> Csr:
        """CSR by destination."""
        return Csr(self.indptr, self.indices, self.rows, self.edge_ids, self.weights, self.types)

    @cached_property
    def edge_dst(self) -> Tensor:
        """Destination of every edge, int64 [E]."""
        return self._listed if self.rows is None else self.rows[self._listed]

    @property
    def _listed(self) -> Tensor:
        """CSR row of every edge, int64 [E]."""
        degrees = self.indptr.long().diff()
        rows = torch.arange(len(degrees), device=degrees.device)
        return rows.repeat_interleave(degrees, output_size=self.num_edges)

    @cached_property
    def destinations(self) -> Tensor | None:
        """The destinations with an edge in this block, ascending; None: all destinations."""
        used = self.indptr.diff() > 0
        if self.rows is not None:
            return self.rows[used]
        return None if bool(used.all()) else used.nonzero().flatten()

    @cached_property
    def columns(self) -> Tensor | None:
        """The sources with an edge in this block, ascending; None: all sources."""
        used = torch.bincount(self.indices, minlength=self.num_src) > 0
        return None if bool(used.all()) else used.nonzero().flatten()

    @cached_property
    def reverse(self) -> Csr:
        """The transposed CSR (row = source, index = destination), built at the first gradient and cached."""
        kept, rows = self.__dict__.get("reverse_order"), None
        order = torch.argsort(self.indices, stable=True) if kept is None else kept
        if self.indices.is_cuda:  # no wait for the device: each sampled mini-batch has a new block
            places = torch.arange(self.num_src + 1, dtype=self.indices.dtype, device=self.indices.device)
            indptr = torch.searchsorted(self.indices[order], places, out_int32=self.indptr.dtype == torch.int32)
        else:
            counts = torch.bincount(self.indices, minlength=self.num_src)
            if 2 * int((counts > 0).sum()) < self.num_src:
                rows = counts.nonzero().flatten()
                counts = counts[rows]
            indptr = _indptr(counts, self.indptr.dtype)
        destinations = self.edge_dst[order].to(self.indices.dtype)
        edges = self.edges.at(order)
        return Csr(indptr, destinations, rows, edges.ids, edges.weight, edges.type)

    @cached_property
    def reverse_order(self) -> Tensor:
        """Place in `forward` of every edge of `reverse`: [E] of the indices' dtype, cached for folds that read it."""
        return torch.argsort(self.indices, stable=True).to(self.indices.dtype)

    def scaled(self, dst: Tensor, src: Tensor) -> Block:
        """Return the edges with weights dst_i w_ij src_j. Shapes: dst [num_dst], src [num_src]."""
        weight = dst[self.edge_dst] * src[self.indices]
        weight = weight if self.weights is None else weight * self.weights
        block = replace(self, edges=replace(self.edges, weight=weight), by_type={})
        block.__dict__["edge_dst"] = self.edge_dst
        return block

    @per_argument
    def forward_by_type(self, types: int) -> Csr:
        """Return the CSR by pair, row = destination * types + type; cached. Edges without types have type 0."""
        order, indptr, rows = self.sorted_by_type(types)
        return Csr(indptr, self.indices[order], rows, weights=chosen(self.weights, order))

    @per_argument
    def pairs(self, types: int) -> Block:
        """Return the edges in the order of `sorted_by_type`, destinations = destination * types + type; cached."""
        order, indptr, rows = self.sorted_by_type(types)
        return Block(indptr, self.indices[order], self.num_dst * types, self.num_src, rows, edges=self.edges.at(order))

    def sorted_by_type(self, types: int) -> ByType:
        """Return the edges by pair; cached."""
        if types not in self.by_type:
            self.by_type[types] = self._sorted_by_type(types)
        return self.by_type[types]

    def _sorted_by_type(self, types: int) -> ByType:
        if not self.num_edges:  # counting would wait for the device
            return ByType(self.indices.long(), self.indptr.new_zeros(self.num_dst * types + 1), None)
        pair = self.edge_dst * types
        if self.types is not None:
            pair += self.types
        order = torch.argsort(pair, stable=True)
        pair = pair[order]
        first = _run_starts(pair)
        if 2 * len(first) < self.num_dst * types:
            indptr = torch.cat([first, first.new_full((1,), self.num_edges)]).to(self.indptr.dtype)
            return ByType(order, indptr, pair[first])
        return ByType(order, _indptr(torch.bincount(pair, minlength=self.num_dst * types), self.indptr.dtype), None)

    @per_argument
    def spans(self, num_edges: int) -> list[tuple[slice, Tensor]]:
        """Return runs of whole CSR rows with at most about `num_edges` edges (more if one row has more), and the
        destinations of each run. Cached, since the host has to read the pointers."""
        found = list[tuple[slice, Tensor]]()
        if not self.num_edges:
            return found
        ends = self.indptr.long().cpu()
        start_row, last = 0, len(ends) - 1
        while start_row < last:
            limit = int(ends[start_row]) + num_edges
            end_row = max(start_row + 1, int(torch.searchsorted(ends, limit, right=True)) - 1)
            span = slice(int(ends[start_row]), int(ends[end_row]))
            start_row = end_row
            if span.stop > span.start:
                dst = self.edge_dst[span]
                found.append((span, dst[_run_starts(dst)]))
        return found

    @per_argument
    def types_of(self, first: int, last: int) -> Tensor:
        """Return types of the edges [first, last), 0 without types, [e] int64; cached, one tensor per span, since
        `sorted_by_kind` caches by tensor."""
        if self.types is not None:
            return self.types[first:last]
        return self.indptr.new_zeros(1, dtype=torch.int64).expand(last - first)

    @cached_property
    def edge_places(self) -> Tensor | None:
        """Place of each edge's row among edge rows by ascending id, [E] int64; None: the edge's own place."""
        ids = self.edge_ids
        return None if ids is None or bool((ids.diff() > 0).all()) else ids.argsort().argsort()

    @cached_property
    def by_id(self) -> tuple[Block, Tensor]:
        """Return the block with columns by ascending id, and the current columns in that order, [num_src]."""
        assert self.src_ids is not None
        order = self.src_ids.argsort()
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        indices = place[self.indices.long()].to(self.indices.dtype)
        return replace(self, indices=indices, src_ids=self.src_ids[order], by_type={}, ascends=True), order

    @per_argument
    def of_type(self, number: int) -> tuple[Block, Tensor]:
        """Return the sub-block of the edges of one type, and their places in this block, [e] int64; cached. Edges
        without types have type 0."""
        types = self.indices.new_zeros(1).expand(self.num_edges) if self.types is None else self.types
        places = (types == number).nonzero().flatten()
        return self.restrict(places), places

    def restrict(self, keep: Tensor, *, compress: bool = True) -> Block:
        """Return the sub-block of the edges where `keep` [E] is true, or at ascending places. `compress`: without empty
        rows."""
        return self._cut(self.edge_dst[keep], keep, 0, self.num_src, compress=compress)

    def narrow_columns(self, first: int, last: int) -> Block:
        """Return the sub-block of the columns [first, last), renumbered from 0, without empty rows."""
        if (first, last) == (0, self.num_src):
            return self
        keep = ((self.indices >= first) & (self.indices < last)).nonzero().flatten()
        dst = self._listed[keep] if self.rows is None else self.rows[self._listed[keep]]
        return self._cut(dst, keep, first, last)

    def _cut(self, dst: Tensor, keep: Tensor, first: int, last: int, *, compress: bool = True) -> Block:
        """Return selected edges with their destinations `dst`, between the columns [first, last)."""
        cut = Block.from_edges(
            dst,
            self.indices[keep] - first,
            num_dst=self.num_dst,
            num_src=last - first,
            src_ids=chosen(self.src_ids, slice(first, last)),
            edges=self.edges.at(keep),
            compress=compress,
        )
        return replace(cut, ascends=self.ascends)

    def compacted(self) -> tuple[Block, Tensor]:
        """Return the block with the columns of its edges alone, renumbered, and their old numbers, ascending."""
        used = torch.zeros(self.num_src, dtype=torch.bool, device=self.indices.device)
        used[self.indices] = True
        columns, number = used.nonzero().flatten(), (used.cumsum(0) - 1).to(self.indices.dtype)
        ids = chosen(self.src_ids, columns)
        return replace(self, indices=number[self.indices], num_src=len(columns), src_ids=ids, by_type={}), columns

    def transposed(self) -> Block:
        """Return the transposed block: its rows are this block's columns, its columns this block's CSR rows."""
        order = torch.argsort(self.indices, stable=True)
        return Block.from_edges(
            self.indices[order].long(),
            self._listed[order],
            num_dst=self.num_src,
            num_src=self.num_listed,
            edges=self.edges.at(order),
            compress=True,
        )

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Block:
        """Return the block on a device, weights in `dtype`."""
        structure = {name: t.to(device) for name, t in self._structure.items()}
        return replace(self, **structure, edges=self.edges.to(device, dtype), by_type={})

    @property
    def _structure(self) -> dict[str, Tensor]:
        named = {"indptr": self.indptr, "indices": self.indices, "rows": self.rows, "src_ids": self.src_ids}
        return {name: t for name, t in named.items() if t is not None}

    @property
    def nbytes(self) -> int:
        """Return bytes of structure held, including the transposed CSR and cached edge lists once built."""
        held: list[object] = [*self._structure.values(), *self.edges.tensors.values()]
        held += (each.order for each in self.by_type.values())
        held += map(self.__dict__.get, ("edge_dst", "columns", "reverse_order", "edge_places", "reverse"))
        if "by_id" in self.__dict__:
            block, order = self.by_id
            held += [block.indices, block.src_ids, order]
        held += [_kinds.get(each, (None,))[0] if isinstance(each, Tensor) else each for each in cached_results(self)]
        return held_nbytes(held)

    @staticmethod
    def from_edges(
        dst: Tensor,
        src: Tensor,
        *,
        num_dst: int,
        num_src: int,
        src_ids: Tensor | None = None,
        edges: EdgeData | None = None,
        compress: bool = False,
    ) -> Block:
        """Build from an edge list sorted by destination. compress: keep only destinations with an edge."""
        index_type = index_dtype(dst.numel(), num_dst, num_src)
        indptr, rows = layout(torch.bincount(dst, minlength=num_dst), index_type, compress=compress)
        return Block(indptr, src.to(index_type), num_dst, num_src, rows, src_ids, edges or EdgeData())


def _run_starts(values: Tensor) -> Tensor:
    """Return the place of the first of each run of equal values, [r] int64."""
    starts = torch.ones_like(values, dtype=torch.bool)
    starts[1:] = values[1:] != values[:-1]
    return starts.nonzero().flatten()


def held_nbytes(held: object) -> int:
    """Return the bytes of a tensor or block, or of all in a tuple or list."""
    if isinstance(held, tuple | list):
        return sum(map(held_nbytes, cast("Iterable[object]", held)))
    return held.nbytes if isinstance(held, Tensor | Block) else 0


_kinds: MutableMapping[Tensor, tuple[Tensor, list[int]]] = WeakTensorKeyDictionary()


def sorted_by_kind(types: Tensor, num: int) -> tuple[Tensor, list[int]]:
    """Return the order of the edges by type, [e] int64, and the number of edges of each of `num` types. Cached per
    tensor, since the host has to read the sizes. ValueError for more types."""
    found = _kinds.get(types)
    if found is None or len(found[1]) != num:
        sizes = torch.bincount(types, minlength=num).cpu()
        if len(sizes) > num:
            raise ValueError(
                f"the graph has {len(sizes)} types of edges, and the model reads {num} relations; give it as many"
            )
        found = torch.argsort(types, stable=True), [int(size) for size in sizes]
        _kinds[types] = found
    return found


def refuse_short(block: Block, rows: Rows) -> None:
    """Raise ValueError if there are fewer rows than columns, since kernels do not check bounds.

    Shapes: rows [num_src, ...] each."""
    for each in rows:
        if len(each) < block.num_src:
            raise ValueError(
                f"there are {len(each)} rows for {block.num_src} columns: if this run was resumed, its checkpoint is "
                "of another graph; leave resume out"
            )


def chosen(values: Tensor | None, rows: Tensor | slice) -> Tensor | None:
    """Return values[rows], or None without values."""
    return None if values is None else values[rows]


def widened(x: Tensor) -> Tensor:
    """Return x in the type of its sums: fp32 for 16 bits, else unchanged."""
    return x.to(accumulate_dtype(x.dtype))


def index_dtype(num_edges: int, num_dst: int, num_src: int) -> torch.dtype:
    """Return int32 if everything fits, else int64."""
    return torch.int32 if max(num_edges, num_dst, num_src) < 2**31 else torch.int64


def layout(counts: Tensor, dtype: torch.dtype, *, compress: bool) -> tuple[Tensor, Tensor | None]:
    """Return (indptr, rows) of a block from the edges per destination. compress: list only destinations with edges."""
    rows = None
    if compress and bool((counts == 0).any()):
        rows = counts.nonzero().flatten()
        counts = counts[rows]
    return _indptr(counts, dtype), rows


def _indptr(counts: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(dtype)
