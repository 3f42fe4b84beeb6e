"""A part's in-edges in folding order, the peers at their other ends, and edges that ranks exchange in set-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gnnpar.comm import Communicator, MessageTag
from gnnpar.folds.block import Block
from gnnpar.folds.edge_data import EdgeData
from gnnpar.parallel.view import edge_order
from gnnpar.partition.shard import Shard

Overlap = Literal["none", "edges", "central_marginal"]


class EdgeOrder:
    """Split of inner edges, in both directions: `early` is folded while messages travel, `late` afterwards.

    none: none early (vanilla in the papers). edges: all inner edges early. central_marginal: early only the edges of
    destinations without halo in-neighbours; backward, of sources that no other part reads (AdaQP, section 1.2).
    """

    def __init__(self, shard: Shard, overlap: Overlap) -> None:
        self.shard = shard
        self.overlap: Overlap = overlap

    @cached_property
    def forward(self) -> tuple[list[Block], list[Block]]:
        """Return (early, late) blocks of inner edges."""
        marginal = torch.zeros(self.shard.num_inner, dtype=torch.bool, device=self.shard.node_ids.device)
        for block in self.shard.halo.values():
            marginal[slice(None) if block.rows is None else block.rows] = True
        return self._split(lambda inner: marginal[inner.edge_dst])

    @cached_property
    def backward(self) -> tuple[list[Block], list[Block]]:
        boundary = torch.zeros(self.shard.num_inner, dtype=torch.bool, device=self.shard.node_ids.device)
        for index in self.shard.boundary.values():
            boundary[index] = True
        return self._split(lambda inner: boundary[inner.indices])

    def _split(self, waits: Callable[[Block], Tensor]) -> tuple[list[Block], list[Block]]:
        inner = self.shard.inner
        if self.overlap == "none":
            return [], [inner]
        if self.overlap == "edges":
            return [inner], []
        late = waits(inner)
        return [inner.restrict(~late)], [inner.restrict(late)]

    @cached_property
    def sources(self) -> list[int]:
        """Return the parts that this part reads, the previous one first: parts send to different parts at any time."""
        return sorted(self.shard.halo, key=lambda p: (self.shard.part - p) % self.shard.parts)

    @cached_property
    def readers(self) -> list[int]:
        """Return the parts that read rows of this part, the next one first."""
        return sorted(self.shard.boundary, key=lambda p: (p - self.shard.part) % self.shard.parts)

    @cached_property
    def edge_ids(self) -> Tensor:
        return edge_order(self.shard)

    def edge_positions(self, block: Block) -> Tensor:
        """Return the positions of a block's edges in the order of edge operands."""
        assert block.edge_ids is not None
        return torch.searchsorted(self.edge_ids, block.edge_ids)

    @cached_property
    def combined(self) -> tuple[Block, Tensor]:
        """Return (one block of all in-edges, columns of inner and halo rows by ascending global id; the order that
        sorts [inner rows, halo rows] into these columns). Only first_layer=cached builds it."""
        shard = self.shard
        order = torch.argsort(torch.cat([shard.node_ids, shard.halo_ids]))
        column = torch.empty_like(order)
        column[order] = torch.arange(len(order), device=order.device)
        blocks, start = [shard.inner, *(shard.halo[p] for p in sorted(shard.halo))], 0
        dsts: list[Tensor] = []
        srcs: list[Tensor] = []
        for block in blocks:
            dsts.append(block.edge_dst)
            srcs.append(column[block.indices.long() + start])
            start += block.num_src
        dst, src = torch.cat(dsts), torch.cat(srcs)
        by_row = torch.argsort(dst * len(order) + src, stable=True)  # repeated edges keep the order of their ids
        block = Block.from_edges(
            dst[by_row],
            src[by_row],
            num_dst=shard.num_inner,
            num_src=len(order),
            src_ids=torch.cat([shard.node_ids, shard.halo_ids])[order],
            edges=EdgeData.cat([block.edges for block in blocks]).at(by_row),
        )
        return block, order


class Edges(NamedTuple):
    """Edges between nodes by global ids. Shapes: src [E], dst [E]. `data`: of these edges, in order."""

    src: Tensor
    dst: Tensor
    data: EdgeData

    @staticmethod
    def cat(parts: Sequence[Edges]) -> Edges:
        src, dst, data = zip(*parts, strict=True)
        return Edges(torch.cat(src), torch.cat(dst), EdgeData.cat(data))


def in_edges(shard: Shard, *, ids: bool = False) -> Edges:
    """Return the in-edges of a part's nodes, block by block, on the CPU. `ids`: with edge ids, if the shard has any."""
    pieces: list[Edges] = []
    for block, columns in [(shard.inner, shard.node_ids), *((each, each.src_ids) for each in shard.halo.values())]:
        assert columns is not None
        data = block.edges if ids else replace(block.edges, ids=None)
        pieces.append(Edges(columns[block.indices.long()], shard.node_ids[block.edge_dst], data))
    src, dst, data = Edges.cat(pieces)
    return Edges(src.cpu(), dst.cpu(), data.to(torch.device("cpu")))


def exchange_edges(comm: Communicator, messages: Mapping[int, Mapping[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """Send tensors by name to peers, in phase setup. Return the received ones, by sender in ascending order.
    Collective."""
    # wide numbers first, so that each tensor is aligned in the buffer
    ordered = {q: sorted(named.items(), key=lambda item: -item[1].itemsize) for q, named in messages.items()}
    layouts = comm.all_gather({q: [(name, t.dtype, t.shape) for name, t in each] for q, each in ordered.items()})
    mine = {p: layout[comm.rank] for p, layout in enumerate(layouts) if comm.rank in layout}
    sizes = {p: [prod(shape) * dtype.itemsize for _, dtype, shape in layout] for p, layout in mine.items()}
    buffers = {q: torch.cat([t.reshape(-1).view(torch.uint8) for _, t in each]) for q, each in ordered.items()}
    pending = comm.exchange(buffers, {p: sum(each) for p, each in sizes.items()}, MessageTag(0, -1, 0, "setup"))
    received: dict[int, dict[str, Tensor]] = {}
    for p, layout in mine.items():
        pieces = zip(layout, torch.split(pending[p].wait(), sizes[p]), strict=True)
        received[p] = {name: piece.view(dtype).view(shape) for (name, dtype, shape), piece in pieces}
    comm.flush(keep=0)
    return received
