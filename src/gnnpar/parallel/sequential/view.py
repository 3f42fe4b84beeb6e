"""One part of the graph, its neighbours' rows a round at a time: Y[N_P, F] = sum_r A[N_P, N_r] X[N_r, F].

Source: Mostafa, Sequential Aggregation and Rematerialization, MLSys 2022. Forward: fold the inner block, then the rows
of each round as they arrive, and drop them. Backward: a linear fold sends gradients round by round; a fold that reads
its source rows fetches them again (remat). A Pushable fold instead pushes the destinations' rows to the owners of the
sources, which differentiate with their own rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Incoming, MessageTag, Outgoing, Posted, RowLike
from gnnpar.comm.rows import row_nbytes
from gnnpar.folds.aggregator import Aggregator, Pushable
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar.graph import Message
from gnnpar.parallel.blocks import Gradient, add_returned, walk
from gnnpar.parallel.engine import Stateful
from gnnpar.parallel.halo_graph import HaloGraph
from gnnpar.parallel.sequential.rounds import Cuts, Pushes, Rounds, RoundSchedule, Slice
from gnnpar.parallel.view import View

Round = Iterator[tuple[Slice, Rows]]
"""Rows that arrive in a round, peer by peer in folding order."""


@dataclass(eq=False)
class Residency(Stateful):
    """Bytes of remote rows here or in flight to this rank: now, and at most so far. A part of an engine."""

    now: int = 0
    most: int = 0

    @property
    def nbytes(self) -> int:
        return self.most

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)


@dataclass(eq=False)
class SequentialGraph(HaloGraph):
    """A rank's part, with its halo in rounds.

    `prefetch`: rounds started ahead of the fold, and exchanges whose buffers may wait for a slow reader. `remat`:
    pulled source rows are fetched again in backward, not kept. `pushes`: folds that can push do so by `push_exchange`;
    None: all folds pull. With a `cache`, only constant results are kept, never features of halo nodes.
    """

    schedule: RoundSchedule = field(kw_only=True)
    cuts: Cuts = field(kw_only=True)
    prefetch: int = field(default=1, kw_only=True)
    remat: bool = field(default=True, kw_only=True)
    pushes: Pushes | None = field(default=None, kw_only=True)
    push_exchange: CodedExchange = field(kw_only=True)
    residency: Residency = field(default_factory=Residency, kw_only=True)

    def source(self, message: Message, *rows: Tensor) -> Rows:
        return View.source(self, message, *rows)

    def fold(self, agg: Aggregator, call: int, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        if isinstance(agg, Pushable) and self.pushes is not None and torch.is_grad_enabled():
            agg = agg.pushing()
        return walk(self, agg, call, src, dst, edge, shared)

    def blocks(self, agg: Aggregator, x: Operands, call: int) -> Iterator[tuple[Block, Rows | None]]:
        queue = self.fetch(x.src, RowLike.of(x.src), self.message_tag(call, "forward"))
        yield self.shard.inner, None
        for arriving in queue:
            for s, rows in arriving:
                yield self.cuts.of(s), rows
                del rows

    def keeps(self, agg: Aggregator) -> bool:
        return agg.needs_src and self.run.training and not (self.remat or self._pushing(agg))

    def _pushing(self, agg: Aggregator) -> bool:
        return isinstance(agg, Pushable) and self.pushes is not None

    def differentiate(self, gradient: Gradient) -> Operands:
        return self._push(gradient) if self._pushing(gradient.agg) else self._pull(gradient)

    def _pull(self, gradient: Gradient) -> Operands:
        """Fetch source rows again (or take kept ones, or none for a linear fold); send gradients back by rounds."""
        like, travelling = gradient.like, gradient.chosen(gradient.like)
        tag, rounds, queue = self.message_tag(gradient.call, "backward"), self.pulls(like), None
        if gradient.agg.needs_src and self.remat:
            queue = self.fetch(gradient.x.src, like, self.message_tag(gradient.call, "remat"))
        gradient.add_own(self.shard.inner)
        returning: deque[tuple[list[Slice], Posted]] = deque()
        for r in range(len(rounds)):
            arriving = next(queue) if queue else ((s, ()) for s in rounds.incoming(self.comm.rank, r))
            sent: dict[Slice, Rows] = {}
            for s, rows in arriving:
                sent[s] = gradient.of_block(self.cuts.of(s), rows if queue else gradient.next_rows())
                del rows
            if travelling:
                returning.append(self.send_round_back(rounds, r, sent, travelling, tag))
            del sent
            while len(returning) > self.prefetch:
                self.take_back(returning.popleft(), gradient.local_sums, travelling)
        while returning:
            self.take_back(returning.popleft(), gradient.local_sums, travelling)
        return gradient.total()

    def _push(self, gradient: Gradient) -> Operands:
        """Send rows of destinations to the owners of their sources, which differentiate with the rows that destinations
        read."""
        agg, src = gradient.agg, gradient.x.src
        assert isinstance(agg, Pushable) and self.pushes is not None
        rows = agg.pushed(gradient.x, gradient.prepared, gradient.grad_out)
        like = RowLike.of(rows)
        tag, read_at = (self.message_tag(gradient.call, phase) for phase in ("push", "forward"))
        rounds = self.schedule.pushes(row_nbytes(like))
        queue = self.in_rounds(rounds, self.push_exchange, rows, like, self.pushes.lists, tag)
        into = agg.grad_src(self.shard.inner.reverse, src, rows)
        dst = agg.grad_dst(gradient.prepared, gradient.grad_out)
        reader, mine = None, ()  # rows that a peer has read, while its slices come
        for arriving in queue:
            for s, theirs in arriving:
                block, index = self.pushes.cuts.of(s), self.shard.boundary[s.peer]
                key = s if block.rows is not None else s.peer
                index = index if block.rows is None else index[block.rows]
                if key != reader:
                    mine = ()
                    mine, reader = self.exchange.as_received(src, index, read_at, s.peer), key
                add_returned(into, index, agg.grad_src(block.forward._replace(rows=None), mine, theirs))
                del theirs
        return Operands(into, dst)

    def pulls(self, like: Sequence[RowLike]) -> Rounds:
        return self.schedule.pulls(row_nbytes(like))

    def fetch(self, src: Rows, like: Sequence[RowLike], tag: MessageTag) -> Iterator[Round]:
        """Return the halo rows, pulled in rounds."""
        return self.in_rounds(self.pulls(like), self.exchange, src, like, self.shard.boundary, tag)

    def in_rounds(
        self,
        rounds: Rounds,
        exchange: CodedExchange,
        rows: Rows,
        like: Sequence[RowLike],
        lists: Mapping[int, Tensor],
        tag: MessageTag,
    ) -> Iterator[Round]:
        """Send rows[lists[peer]] to each peer in rounds; yield the received rows, round by round.

        At most `prefetch` + 1 rounds are in flight or here at a time; the first `prefetch` start at once. Every rank
        must take all rounds in order, and release a row before it takes the next.
        """
        posted, rank, row = deque[Posted](), self.comm.rank, row_nbytes(like)

        def start(r: int) -> None:
            self.residency.add(sum(s.num_rows for s in rounds.incoming(rank, r)) * row)
            mine = rounds.outgoing(rank, r)
            outgoing = {s.peer: Outgoing(rows, lists[s.peer][s.first : s.last], s.first) for s in mine}
            posted.append(self._post(exchange, outgoing, rounds.incoming(rank, r), like, tag))

        def take(r: int) -> Round:
            here = posted.popleft()
            for s in rounds.incoming(rank, r):
                yield s, exchange.take(here, s.peer)
                self.residency.add(-s.num_rows * row)

        def each() -> Iterator[Round]:
            for r in range(len(rounds)):
                if r + self.prefetch < len(rounds):
                    start(r + self.prefetch)
                yield take(r)

        for r in range(min(self.prefetch, len(rounds))):
            start(r)
        return each()

    def send_round_back(
        self, rounds: Rounds, r: int, grads: Mapping[Slice, Rows], like: Sequence[RowLike], tag: MessageTag
    ) -> tuple[list[Slice], Posted]:
        """Send gradients of round r's rows to their owners; gradients of this rank's rows arrive, the nearest reader's
        first."""
        mine = rounds.outgoing(self.comm.rank, r)
        self.residency.add(sum(s.num_rows for s in mine) * row_nbytes(like))
        outgoing = {s.peer: Outgoing(rows, None, s.first) for s, rows in grads.items()}
        return mine, self._post(self.exchange, outgoing, mine, like, tag)

    def take_back(self, returned: tuple[list[Slice], Posted], into: Rows, like: Sequence[RowLike]) -> None:
        """Add the gradients of one round to the rows of this rank as they arrive."""
        mine, posted = returned
        for s in mine:
            rows = self.exchange.take(posted, s.peer)
            add_returned(into, self.shard.boundary[s.peer][s.first : s.last], rows)
            del rows
            self.residency.add(-s.num_rows * row_nbytes(like))

    def _post(
        self,
        exchange: CodedExchange,
        outgoing: Mapping[int, Outgoing],
        incoming: Sequence[Slice],
        like: Sequence[RowLike],
        tag: MessageTag,
    ) -> Posted:
        self.comm.flush(keep=self.prefetch)
        return exchange.post(outgoing, {s.peer: Incoming(s.num_rows, s.first) for s in incoming}, like, tag)
