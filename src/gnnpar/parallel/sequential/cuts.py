"""Blocks cut to the columns of a round: for the readers and, in push mode, for the owners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnpar.comm import Communicator, Site
from gnnpar.folds.block import Block
from gnnpar.folds.edge_data import EdgeData
from gnnpar.parallel.sequential.rounds import Schedule, Slice
from gnnpar.partition.shard import Shard


@dataclass(eq=False)
class Cuts:
    """Blocks cut to ranges of their columns, each range once. Structure only."""

    blocks: Mapping[int, Block]
    _cut: dict[Slice, Block] = field(default_factory=dict[Slice, Block])

    def of(self, s: Slice) -> Block:
        if s not in self._cut:
            self._cut[s] = self.blocks[s.peer].between(s.first, s.last)
        return self._cut[s]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the pieces; whole blocks are counted by their owner."""
        whole = {id(block) for block in self.blocks.values()}
        return sum(block.nbytes for block in self._cut.values() if id(block) not in whole)


@dataclass(frozen=True, eq=False)
class Pushes:
    """The structure that push mode needs.

    `lists[q]` [t]: this rank's destinations with an in-edge from q, the rows that q receives. `cuts`: p -> the
    out-edges of this rank's boundary rows into p, with columns numbered as the rows that p pushes.
    """

    lists: Mapping[int, Tensor]
    cuts: Cuts

    @property
    def nbytes(self) -> int:
        return self.cuts.nbytes + sum(block.nbytes for block in self.cuts.blocks.values())

    @staticmethod
    def exchange(shard: Shard, schedule: Schedule, comm: Communicator) -> Pushes:
        """Send every owner the transposed halo block. Once, in phase setup. Collective."""
        everyone = torch.arange(shard.num_inner, device=shard.node_ids.device)
        lists = {p: everyone if block.rows is None else block.rows for p, block in shard.halo.items()}
        arriving = {
            p: _Layout(
                num_rows=len(index),
                num_columns=schedule.pushed[shard.part][p],
                num_edges=schedule.edges[p][shard.part],
                edge_ids=shard.inner.edge_ids is not None,
            )
            for p, index in shard.boundary.items()
        }
        outgoing = {p: _pack(block.transposed()) for p, block in shard.halo.items()}
        pending = comm.exchange(outgoing, {p: each.nbytes for p, each in arriving.items()}, Site(-1, -1, 0, "setup"))
        return Pushes(lists, Cuts({p: each.unpack(pending[p].wait()) for p, each in arriving.items()}))


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """A transposed block as bytes: edge ids if any, indptr, indices; every row and every column has an edge."""

    num_rows: int
    num_columns: int
    num_edges: int
    edge_ids: bool

    @property
    def index_type(self) -> torch.dtype:
        return torch.int32 if max(self.num_rows, self.num_columns, self.num_edges) < 2**31 else torch.int64

    @property
    def nbytes(self) -> int:
        return 8 * self.num_edges * self.edge_ids + (self.num_rows + 1 + self.num_edges) * self.index_type.itemsize

    def unpack(self, buffer: Tensor) -> Block:
        ends = 8 * self.num_edges * self.edge_ids
        numbers = buffer[ends:].view(self.index_type)
        indptr, indices = numbers[: self.num_rows + 1], numbers[self.num_rows + 1 :]
        return Block(
            indptr,
            indices,
            self.num_rows,
            self.num_columns,
            edges=EdgeData(ids=buffer[:ends].view(torch.int64) if self.edge_ids else None),
        )


def _pack(block: Block) -> Tensor:
    assert block.rows is None
    parts = [block.indptr, block.indices] if block.edge_ids is None else [block.edge_ids, block.indptr, block.indices]
    return torch.cat([t.contiguous().view(torch.uint8) for t in parts])
