"""One part of the graph, its neighbours' rows a round at a time: Y[N_P, F] = sum_r A[N_P, N_r] X[N_r, F].

Source: Mostafa, Sequential Aggregation and Rematerialization, MLSys 2022. Forward: fold the inner block, then the
rows of every round as they come, and let go of them. Backward: a linear fold sends gradients round by round; a fold
that needs its source rows again gets them again (remat); where the destinations' rows say all (ops.Pushable), they are
pushed to the owners of the sources, who do the rest with rows that they hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Incoming, Outgoing, Posted, RowLike, Site
from gnnpar.comm.communicator import T
from gnnpar.comm.rows import row_nbytes
from gnnpar.folds.aggregator import Aggregator, Pushable
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar.graph import Message
from gnnpar.parallel.halo_graph import HaloGraph
from gnnpar.parallel.sequential.cuts import Cuts, Pushes
from gnnpar.parallel.sequential.prefetch import PrefetchQueue, Residency
from gnnpar.parallel.sequential.rounds import Rounds, Schedule, Slice
from gnnpar.parallel.shares import Shares, add_returned
from gnnpar.parallel.torch_types import Context, apply
from gnnpar.parallel.view import View
from gnnpar.parallel.whole import split_operands, wanted_gradients


@dataclass(eq=False)
class SequentialGraph(HaloGraph):
    """A rank's part, with its halo in rounds.

    `prefetch`: rounds started ahead of the fold, and exchanges whose buffers may wait for a slow reader.
    `remat`: pulled source rows are fetched again in backward, not kept.
    `pushes`: folds that can push do, by `push_exchange`; None: all pull.
    With a `cache`, constant results alone are kept, never features of halo nodes.
    """

    schedule: Schedule = field(kw_only=True)
    cuts: Cuts = field(kw_only=True)
    prefetch: int = field(default=1, kw_only=True)
    remat: bool = field(default=True, kw_only=True)
    pushes: Pushes | None = field(default=None, kw_only=True)
    push_exchange: CodedExchange = field(kw_only=True)
    residency: Residency = field(default_factory=Residency, kw_only=True)

    def source(self, message: Message, *rows: Tensor) -> Rows:
        return View.source(self, message, *rows)

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        call = self.next_call()
        if (kept := self.kept_result(call, agg, src)) is not None:
            return kept
        pushing = False
        if isinstance(agg, Pushable) and self.pushes is not None and torch.is_grad_enabled():
            agg, pushing = agg.pushing(), True
        counts = len(src), len(dst), len(edge)
        out = apply(_SequentialFold, self, agg, call, pushing, counts, *src, *dst, *edge, *shared)
        return self.keep_result(call, agg, src, out)

    def pulls(self, like: Sequence[RowLike]) -> Rounds:
        return self.schedule.pulls(row_nbytes(like))

    def fetch(self, src: Rows, like: Sequence[RowLike], site: Site) -> PrefetchQueue:
        """Halo rows, pulled in rounds."""
        return self.prefetch_rounds(self.pulls(like), self.exchange, src, like, self.shard.boundary, site)

    def prefetch_rounds(
        self,
        rounds: Rounds,
        exchange: CodedExchange,
        rows: Rows,
        like: Sequence[RowLike],
        lists: Mapping[int, Tensor],
        site: Site,
    ) -> PrefetchQueue:
        """Everybody's rows[lists[peer]] to each peer, in rounds."""

        def post(r: int) -> Posted:
            mine = rounds.outgoing(self.comm.rank, r)
            outgoing = {s.peer: Outgoing(rows, lists[s.peer][s.first : s.last], s.first) for s in mine}
            return self._post(exchange, outgoing, rounds.incoming(self.comm.rank, r), like, site)

        return PrefetchQueue(
            rounds,
            exchange,
            prefetch=self.prefetch,
            post=post,
            residency=self.residency,
            row_nbytes=row_nbytes(like),
        )

    def send_round_back(
        self, rounds: Rounds, r: int, grads: Mapping[Slice, Rows], like: Sequence[RowLike], site: Site
    ) -> tuple[list[Slice], Posted]:
        """Gradients of round r's rows to their owners; those of my rows will come in, the nearest reader's first."""
        mine = rounds.outgoing(self.comm.rank, r)
        self.residency.add(sum(s.num_rows for s in mine) * row_nbytes(like))
        outgoing = {s.peer: Outgoing(rows, None, s.first) for s, rows in grads.items()}
        return mine, self._post(self.exchange, outgoing, mine, like, site)

    def take_back(self, returned: tuple[list[Slice], Posted], into: Rows, like: Sequence[RowLike]) -> None:
        """Add the gradients of one round to the rows of this rank, as they come."""
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
        site: Site,
    ) -> Posted:
        self.comm.flush(keep=self.prefetch)
        return exchange.post(outgoing, {s.peer: Incoming(s.num_rows, s.first) for s in incoming}, like, site)


class _Kept(Context):
    view: SequentialGraph
    agg: Aggregator
    call: int
    pushing: bool
    counts: tuple[int, int, int]
    ends: tuple[int, int]
    like: tuple[RowLike, ...]


class _SequentialFold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept,
        view: SequentialGraph,
        agg: Aggregator,
        call: int,
        pushing: bool,
        counts: tuple[int, int, int],
        *flat: Tensor,
    ) -> Tensor:
        x = split_operands(counts, flat)
        keeps = agg.needs_src and view.run.training and not (view.remat or pushing)
        state, remote = _fold(view, agg, x, call, keeps=keeps)
        out, saved = agg.finish(state)
        own = flat if agg.needs_src else ()
        ctx.view, ctx.agg, ctx.call, ctx.pushing, ctx.counts = view, agg, call, pushing, counts
        ctx.ends, ctx.like = (len(own), len(own) + len(remote)), RowLike.of(x.src)
        view.held.record(view.layer, call, remote)
        ctx.save_for_backward(*own, *remote, *saved)
        return out

    @staticmethod
    def backward(ctx: _Kept, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grad_outputs
        tensors, (a, b) = ctx.saved_tensors, ctx.ends
        x, remote, saved = split_operands(ctx.counts, tensors[:a]), tensors[a:b], tensors[b:]
        asked = ctx.needs_input_grad[5:]
        gradient = _Backward(ctx.view, ctx.agg, ctx.call, x, saved, grad_out.contiguous(), ctx.like, asked)
        total = gradient.push() if ctx.pushing else gradient.pull(remote)
        return (*(None,) * 5, *wanted_gradients(total, asked))


def _fold(view: SequentialGraph, agg: Aggregator, x: Operands, call: int, *, keeps: bool) -> tuple[Rows, list[Tensor]]:
    """The state; and, where the gradient `keeps` them, the remote rows in the order of folding."""
    edge, inner = view.edges.edge_rows, view.shard.inner
    queue = view.fetch(x.src, RowLike.of(x.src), view.site(call=call, phase="forward"))
    state = agg.update(agg.init(view.shard.num_inner, x), inner, x._replace(edge=edge(inner, x.edge)))
    kept: list[Tensor] = []
    for r in range(len(queue)):
        for s, rows in queue.round(r):
            block = view.cuts.of(s)
            state = agg.update(state, block, x._replace(src=rows, edge=edge(block, x.edge)))
            if keeps:
                kept += rows
            del rows
    return state, kept


class _Backward:
    """The gradient of one sequential aggregation."""

    def __init__(
        self,
        view: SequentialGraph,
        agg: Aggregator,
        call: int,
        x: Operands,
        saved: Rows,
        grad_out: Tensor,
        like: Sequence[RowLike],
        asked: tuple[bool, ...],
    ) -> None:
        self.view, self.agg, self.call, self.x, self.grad_out = view, agg, call, x, grad_out
        self.prepared = agg.prepare(saved, grad_out)
        self.like, self.wanted = like, asked[: len(like)]
        self.shares = Shares(view.edges.slots, x.edge)

    def pull(self, kept: Rows) -> Operands:
        """Source rows come again (or were kept, or are not needed), their gradients go back, round by round."""
        view, shares = self.view, self.shares
        travelling = self._chosen(self.like)
        site = view.site(call=self.call, phase="backward")
        rounds, kept_rows = view.pulls(self.like), iter(_grouped(kept, len(self.like)))
        queue = None
        if self.agg.needs_src and view.remat:
            queue = view.fetch(self.x.src, self.like, view.site(call=self.call, phase="remat"))
        shares.add_inner(self._grad(view.shard.inner, self.x.src), view.shard.inner)
        into = self._chosen(shares.src)
        returning: deque[tuple[list[Slice], Posted]] = deque()
        for r in range(len(rounds)):
            mine = rounds.incoming(view.comm.rank, r)
            arriving = queue.round(r) if queue else ((s, next(kept_rows, ())) for s in mine)
            sent: dict[Slice, Rows] = {}
            for s, rows in arriving:
                block = view.cuts.of(s)
                sent[s] = self._chosen(shares.add_halo(self._grad(block, rows), block))
                del rows
            if travelling:
                returning.append(view.send_round_back(rounds, r, sent, travelling, site))
            del sent
            while len(returning) > view.prefetch:
                view.take_back(returning.popleft(), into, travelling)
        while returning:
            view.take_back(returning.popleft(), into, travelling)
        return shares.finished(self.agg, self.prepared, self.grad_out)

    def push(self) -> Operands:
        """Rows of destinations go to the owners of their sources, who differentiate with what the destinations read."""
        view, agg, src = self.view, self.agg, self.x.src
        assert isinstance(agg, Pushable) and view.pushes is not None
        rows = agg.pushed(self.x, self.prepared, self.grad_out)
        like = RowLike.of(rows)
        site, read_at = (view.site(call=self.call, phase=phase) for phase in ("push", "forward"))
        rounds = view.schedule.pushes(row_nbytes(like))
        queue = view.prefetch_rounds(rounds, view.push_exchange, rows, like, view.pushes.lists, site)
        into = agg.grad_src(view.shard.inner.reverse, src, rows)
        dst = agg.grad_dst(self.prepared, self.grad_out)
        reader, mine = None, ()  # what a peer read of my rows, for as long as its slices come
        for r in range(len(queue)):
            for s, theirs in queue.round(r):
                block, index = view.pushes.cuts.of(s), view.shard.boundary[s.peer]
                key = s if block.rows is not None else s.peer
                index = index if block.rows is None else index[block.rows]
                if key != reader:
                    mine = ()
                    mine, reader = view.exchange.as_received(src, index, read_at, s.peer), key
                add_returned(into, index, agg.grad_src(block.forward._replace(rows=None), mine, theirs))
                del theirs
        return Operands(into, dst)

    def _chosen(self, of: Sequence[T]) -> tuple[T, ...]:
        return tuple(each for each, wanted in zip(of, self.wanted, strict=True) if wanted)

    def _grad(self, block: Block, src: Rows) -> Operands:
        edge = self.view.edges.edge_rows(block, self.x.edge)
        return self.agg.grad(block, self.x._replace(src=src, edge=edge), self.prepared, self.grad_out)


def _grouped(rows: Rows, size: int) -> list[Rows]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]
