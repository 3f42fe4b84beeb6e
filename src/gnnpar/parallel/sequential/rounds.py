"""The rows of each round, a pure function of row counts that every rank knows, and blocks cut to its columns.

At ring distance d rank p reads rows of rank p - d while rank p + d reads its own, so no rank serves two peers at a
time. A round is a run of distances, or a piece of one, equal on all ranks: rows of a nearer peer never come after rows
of a farther one, in both directions, for any rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import torch
from annotated_types import Gt
from torch import Tensor

from gnnpar.comm import Communicator
from gnnpar.folds.block import Block
from gnnpar.folds.edge_data import EdgeData
from gnnpar.parallel.edges import exchange_edges
from gnnpar.partition.shard import Shard

Sizing = Annotated[float, Gt(0)] | Literal["part", "peer", "one"]
"""How many rows a round may hold: part = as many as the largest part owns (small peers grouped, big ones cut);
peer = one peer's, as the paper; one = all, one-shot; a number = so many MiB of rows as the fold reads them."""

Counts = tuple[tuple[int, ...], ...]

MIB = 1 << 20


class Slice(NamedTuple):
    """Rows [first, last) of the list that is exchanged with a peer."""

    peer: int
    first: int
    last: int

    @property
    def num_rows(self) -> int:
        return self.last - self.first


class Piece(NamedTuple):
    """Piece `number` of the `pieces` into which the blocks at ring distance `distance` are cut."""

    distance: int
    number: int
    pieces: int

    def cut(self, num_rows: int) -> tuple[int, int]:
        return num_rows * self.number // self.pieces, num_rows * (self.number + 1) // self.pieces


@dataclass(frozen=True)
class Rounds:
    """Rounds of an exchange. counts[p][q]: rows that rank p receives from rank q; steps[r]: the pieces of round r."""

    counts: Counts
    steps: tuple[tuple[Piece, ...], ...]

    def __len__(self) -> int:
        return len(self.steps)

    def incoming(self, rank: int, r: int) -> list[Slice]:
        """Return the rows that `rank` receives in round r, in folding order."""
        peers = ((piece, (rank - piece.distance) % len(self.counts)) for piece in self.steps[r])
        return _filled(Slice(peer, *piece.cut(self.counts[rank][peer])) for piece, peer in peers)

    def outgoing(self, rank: int, r: int) -> list[Slice]:
        """Return the rows that `rank` sends in round r."""
        peers = ((piece, (rank + piece.distance) % len(self.counts)) for piece in self.steps[r])
        return _filled(Slice(peer, *piece.cut(self.counts[peer][rank])) for piece, peer in peers)


def _filled(slices: Iterable[Slice]) -> list[Slice]:
    return [s for s in slices if s.num_rows]


def plan_rounds(counts: Counts, *, limit: int | None, group: bool) -> Rounds:
    """Return rounds of at most `limit` rows on every rank (None: no limit); `group`: several peers may share one."""
    size = len(counts)
    steps: list[tuple[Piece, ...]] = []
    open_step: list[Piece] = []
    load = [0] * size
    for distance in range(1, size):
        rows = [counts[p][(p - distance) % size] for p in range(size)]
        pieces = min(1, max(rows)) if limit is None else -(-max(rows) // limit)
        for piece in (Piece(distance, i, pieces) for i in range(pieces)):
            more = [last - first for first, last in map(piece.cut, rows)]
            full = limit is not None and any(a + b > limit for a, b in zip(load, more, strict=True))
            if open_step and (full or not group or open_step[-1].distance == distance):
                steps.append(tuple(open_step))
                open_step, load = [], [0] * size
            open_step.append(piece)
            load = [a + b for a, b in zip(load, more, strict=True)]
    return Rounds(counts, (*steps, tuple(open_step)) if open_step else tuple(steps))


@dataclass(frozen=True, eq=False)
class RoundSchedule:
    """Rounds of rows pulled by their readers and, in push mode, of rows pushed by destinations to their sources.

    Pulling, p receives the halo rows of q; pushing, p receives the rows of q's destinations that have an in-edge from
    p.
    """

    sizing: Sizing
    most_inner: int
    pulled: Counts
    pushed: Counts
    _planned: dict[tuple[str, int | None], Rounds] = field(default_factory=dict[tuple[str, int | None], Rounds])

    @staticmethod
    def agree(sizing: Sizing, shard: Shard, comm: Communicator) -> RoundSchedule:
        """Exchange the counts of all ranks. Collective."""
        mine = {p: (block.num_src, block.num_listed) for p, block in shard.halo.items()}
        everyone = comm.all_gather((shard.num_inner, mine))

        def matrix(column: int) -> Counts:
            return tuple(tuple(of.get(q, (0, 0))[column] for q in range(comm.size)) for _, of in everyone)

        pushed = tuple(zip(*matrix(1), strict=True))
        return RoundSchedule(sizing, max(rows for rows, _ in everyone), matrix(0), pushed)

    def pulls(self, row_nbytes: int) -> Rounds:
        return self._rounds("pulled", self.pulled, row_nbytes)

    def pushes(self, row_nbytes: int) -> Rounds:
        return self._rounds("pushed", self.pushed, row_nbytes)

    def limit(self, row_nbytes: int) -> int | None:
        """Return the rows that a round may hold. Raises ValueError for a budget below one row."""
        if isinstance(self.sizing, str):
            return self.most_inner if self.sizing == "part" else None
        rows = int(self.sizing * MIB) // max(1, row_nbytes)
        if not rows:
            raise ValueError(
                f"strategy.rounds={self.sizing:g} MiB holds no row of {row_nbytes} bytes: "
                f"set it to at least {row_nbytes / MIB:.2g} (better a thousand times that), or to part."
            )
        return rows

    def _rounds(self, name: str, counts: Counts, row_nbytes: int) -> Rounds:
        at = name, self.limit(row_nbytes)
        if at not in self._planned:
            self._planned[at] = plan_rounds(counts, limit=at[1], group=self.sizing != "peer")
        return self._planned[at]


@dataclass(eq=False)
class Cuts:
    """Blocks cut to ranges of their columns, each range once. Structure only."""

    blocks: Mapping[int, Block]
    _cut: dict[Slice, Block] = field(default_factory=dict[Slice, Block])

    def of(self, s: Slice) -> Block:
        if s not in self._cut:
            self._cut[s] = self.blocks[s.peer].narrow_columns(s.first, s.last)
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
    def exchange(shard: Shard, schedule: RoundSchedule, comm: Communicator) -> Pushes:
        """Send every owner the transposed halo block. Once, in phase setup. Collective."""
        everyone = torch.arange(shard.num_inner, device=shard.node_ids.device)
        lists = {p: everyone if block.rows is None else block.rows for p, block in shard.halo.items()}
        transposed, blocks = {p: block.transposed() for p, block in shard.halo.items()}, dict[int, Block]()
        sent = {p: EdgeData(b.edge_ids).tensors | {"indptr": b.indptr, "to": b.indices} for p, b in transposed.items()}
        for p, edges in exchange_edges(comm, sent).items():
            shape = len(shard.boundary[p]), schedule.pushed[shard.part][p]
            blocks[p] = Block(edges["indptr"], edges["to"], *shape, edges=EdgeData(edges.get("ids")))
        return Pushes(lists, Cuts(blocks))
