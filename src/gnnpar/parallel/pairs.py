"""Losses and scores of pairs of nodes on different ranks, without a table of all nodes on any rank.

The owner of a pair is the owner of its source. Rows of destinations are fetched in rounds, about as many as a part has
nodes, and their gradients are returned at once: a rank never holds the rows of all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gnnpar.codecs.codec import Identity
from gnnpar.comm import CodedExchange, Communicator, Incoming, MessageTag, Outgoing, RowLike
from gnnpar.comm.communicator import Phase
from gnnpar.comm.rows import RowLists
from gnnpar.data.links import Link, OwnPairs
from gnnpar.models.pairs import pair_scores, scorer_parameters
from gnnpar.parallel.local import Pass
from gnnpar.parallel.torch_types import Context, apply, integers, or_zeros, unique
from gnnpar.partition.shard import Shard

LEAST_ROWS = 4096
"""Destinations of a round if a part has fewer nodes."""


@dataclass(frozen=True, eq=False)
class Route:
    """The owners of some nodes' rows. Shapes: `own` [a] rows of this rank, `own_at` [a] their positions among the
    nodes; `requested` peer -> positions of its nodes; `served` peer -> rows of this rank that it asks for."""

    num_nodes: int
    own: Tensor
    own_at: Tensor
    requested: Mapping[int, Tensor]
    served: Mapping[int, Tensor]


class RowFetch:
    """Fetch rows of any nodes from their owners, and return gradients. All methods are collective.

    A directory, split by node id, maps nodes to owners: no rank knows the owners of all nodes. Shapes: node_ids [N] of
    this rank, ascending.
    """

    def __init__(self, comm: Communicator, node_ids: Tensor, num_nodes: int) -> None:
        self.comm, self.node_ids = comm, node_ids
        lists = RowLists(comm.rank, comm.size, node_ids, {}, {})
        self.exchange = CodedExchange(comm, Identity().build(lists, comm, 0))
        self.block = -(-num_nodes // comm.size)
        self.owner = torch.zeros(0, dtype=torch.int64, device=node_ids.device)
        if comm.size > 1:
            first = comm.rank * self.block
            self.owner = node_ids.new_zeros(max(0, min(self.block, num_nodes - first)))
            for peer, ids in self._sent(self._by_block(node_ids), MessageTag(0, -1, 0, "setup")).items():
                self.owner[ids - first] = peer

    def route(self, nodes: Tensor, tag: MessageTag) -> Route:
        """Return the route of distinct nodes, ascending global ids [n]."""
        place = torch.searchsorted(self.node_ids, nodes).clamp_max(max(0, len(self.node_ids) - 1))
        here = self.node_ids[place] == nodes if len(self.node_ids) else torch.zeros_like(nodes, dtype=torch.bool)
        own_at, away = here.nonzero().flatten(), (~here).nonzero().flatten()
        requested: dict[int, Tensor] = {}
        served: Mapping[int, Tensor] = {}
        if self.comm.size > 1:
            owner = self._owners(nodes[away], tag)
            requested = {p: away[owner == p] for p in range(self.comm.size) if p != self.comm.rank}
            requested = {p: places for p, places in requested.items() if len(places)}
            wanted = self._sent({p: nodes[places] for p, places in requested.items()}, tag)
            served = {p: torch.searchsorted(self.node_ids, ids) for p, ids in wanted.items() if p != self.comm.rank}
        return Route(len(nodes), place[own_at], own_at, requested, served)

    def rows(self, route: Route, table: Tensor, tag: MessageTag) -> Tensor:
        """Return the rows of a route's nodes. Shapes: table [N, D] of this rank -> [n, D]."""
        out = table.new_empty(route.num_nodes, table.shape[1])
        out[route.own_at] = table[route.own]
        outgoing = {p: Outgoing((table,), rows) for p, rows in route.served.items()}
        incoming = {p: Incoming(len(places)) for p, places in route.requested.items()}
        for peer, (rows,) in self._exchanged(outgoing, incoming, RowLike.of((table,)), tag):
            out[route.requested[peer]] = rows
        return out

    def add_back(self, route: Route, gradient: Tensor, into: Tensor, tag: MessageTag) -> None:
        """Add gradients of fetched rows [n, D] to `into` [N, D], the gradients of their owners' rows."""
        into.index_add_(0, route.own, gradient[route.own_at])
        outgoing = {p: Outgoing((gradient,), places) for p, places in route.requested.items()}
        incoming = {p: Incoming(len(rows)) for p, rows in route.served.items()}
        for peer, (rows,) in self._exchanged(outgoing, incoming, RowLike.of((gradient,)), tag):
            into.index_add_(0, route.served[peer], rows)

    def _owners(self, nodes: Tensor, tag: MessageTag) -> Tensor:
        """Return the owners of distinct nodes, ascending [n] -> [n]."""
        asked = self._by_block(nodes)
        questions = self._sent(asked, tag)
        first, rank = self.comm.rank * self.block, self.comm.rank
        answers = {p: self.owner[ids - first] for p, ids in questions.items()}
        found = {rank: answers[rank]} if rank in answers else {}
        outgoing = {p: Outgoing((rows,)) for p, rows in answers.items() if p != rank}
        incoming = {p: Incoming(len(ids)) for p, ids in asked.items() if p != rank}
        for peer, (rows,) in self._exchanged(outgoing, incoming, _like(nodes), tag):
            found[peer] = rows
        return torch.cat([found[p] for p in sorted(found)]) if found else nodes  # blocks and nodes both ascend

    def _by_block(self, nodes: Tensor) -> dict[int, Tensor]:
        """Split ascending ids by the rank that holds their block of the directory."""
        counts = integers(torch.bincount(nodes // self.block, minlength=self.comm.size))
        return {p: ids for p, ids in enumerate(torch.split(nodes, counts)) if len(ids)}

    def _sent(self, ids: Mapping[int, Tensor], tag: MessageTag) -> dict[int, Tensor]:
        """Exchange ids with every rank, this one included. Ranks sum a table of counts first."""
        rank, size = self.comm.rank, self.comm.size
        mine = [[len(ids.get(p, ())) if r == rank else 0 for p in range(size)] for r in range(size)]
        table = self.comm.all_reduce(torch.tensor(mine, device=self.node_ids.device), tag)
        received = {p: Incoming(count) for p, count in enumerate(integers(table[:, rank])) if count and p != rank}
        outgoing = {p: Outgoing((each,)) for p, each in ids.items() if p != rank}
        found = {rank: ids[rank]} if rank in ids else {}
        for peer, (rows,) in self._exchanged(outgoing, received, _like(self.node_ids), tag):
            found[peer] = rows
        return dict(sorted(found.items()))

    def _exchanged(
        self, sent: Mapping[int, Outgoing], incoming: Mapping[int, Incoming], like: tuple[RowLike, ...], tag: MessageTag
    ) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        posted = self.exchange.post(sent, incoming, like, tag)
        return self.exchange.take_all(posted)


def _like(ids: Tensor) -> tuple[RowLike, ...]:
    return RowLike.of((ids,))


class PairExamples:
    """The pairs of one rank with their negatives. All methods are collective."""

    def __init__(self, task: Link, shard: Shard, model: nn.Module, comm: Communicator, seed: int) -> None:
        assert shard.pairs is not None, "a shard of a dataset that was split for link prediction has pairs"
        self._task, self._pairs, self._model, self._comm, self._seed = task, shard.pairs, model, comm, seed
        self._fetch = RowFetch(comm, shard.node_ids, shard.num_nodes)
        self._limit = max(LEAST_ROWS, -(-shard.num_nodes // comm.size))
        pairs: OwnPairs = shard.pairs
        counts = (len(pairs.number) * (1 + task.negatives), pairs.val[:, 1:].numel(), pairs.test[:, 1:].numel())
        everyone = comm.broadcast(comm.gather(counts))
        self._rounds = [max(1, -(-max(each) // self._limit)) for each in zip(*everyone, strict=True)]

    def loss(self, rows: Tensor, run: Pass) -> Tensor:
        """Return this rank's share of the mean loss over positives and negatives of the epoch. Shapes: rows [N, D]."""
        pairs, task, model = self._pairs, self._task, self._model
        fixed, parameters = rows.detach(), scorer_parameters(model)
        of_rows, total = torch.zeros_like(fixed), fixed.new_zeros(())
        gradients = [torch.zeros_like(p) for p in parameters]
        share = 1.0 / (pairs.total * (1 + task.negatives))
        phase: Phase = "pairs" if run.counted else "evaluate"
        for number, chosen in enumerate(_slices(len(pairs.number), self._rounds[0])):
            tag = MessageTag(run.epoch, -1, number, phase)
            candidates = pairs.candidates(chosen, task.negatives, seed=self._seed, epoch=run.epoch)
            nodes, place = unique(candidates)
            route = self._fetch.route(nodes, tag)
            fetched = self._fetch.rows(route, fixed, tag).requires_grad_()
            sources = fixed[pairs.source[chosen]].requires_grad_()
            scores = pair_scores(model, sources[:, None], fetched[place])
            labels = torch.zeros_like(scores)
            labels[:, 0] = 1.0
            loss = task.loss_sum(scores, labels) * share
            wanted = [sources, fetched, *parameters]
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
            of_sources, of_fetched, *of_parameters = (
                or_zeros(gradient, of) for gradient, of in zip(found, wanted, strict=True)
            )
            of_rows.index_add_(0, pairs.source[chosen], of_sources)
            self._fetch.add_back(route, of_fetched, of_rows, tag)
            for sum_, each in zip(gradients, of_parameters, strict=True):
                sum_ += each
            total += loss.detach()
            self._comm.flush(keep=0)  # buffers of a round end with it
        return apply(_Differentiated, total, (of_rows, *gradients), rows, *parameters)

    @torch.no_grad()
    def statistics(self, rows: Tensor, split: str) -> Tensor:
        """Return the task's statistics of a split's pairs, on the host. Shapes: rows [N, D] -> [rows, 2]."""
        table = self._pairs.val if split == "val" else self._pairs.test
        found: list[Tensor] = []
        for number, chosen in enumerate(_slices(len(table), self._rounds[1 if split == "val" else 2])):
            tag = MessageTag(0, -1, number, "evaluate")
            nodes, place = unique(table[chosen, 1:])
            fetched = self._fetch.rows(self._fetch.route(nodes, tag), rows, tag)
            scores = pair_scores(self._model, rows[table[chosen, 0]][:, None], fetched[place])
            found.append(self._task.statistics(scores, torch.zeros_like(scores)).cpu())
            self._comm.flush(keep=0)
        return torch.cat(found)

    @torch.no_grad()
    def scores(self, rows: Tensor, pairs: Tensor, most: int) -> Tensor:
        """Return the logits of any pairs of global ids. `most`: largest number of pairs of a rank. Shapes: rows [N, D]
        of this rank, pairs [n, 2] -> [n]."""
        found: list[Tensor] = []
        for number, chosen in enumerate(_slices(len(pairs), max(1, -(-2 * most // self._limit)))):
            tag = MessageTag(0, -1, number, "evaluate")
            nodes, place = unique(pairs[chosen])
            fetched = self._fetch.rows(self._fetch.route(nodes, tag), rows, tag)
            found.append(pair_scores(self._model, fetched[place[:, 0]], fetched[place[:, 1]]))
            self._comm.flush(keep=0)
        return torch.cat(found)


def _slices(count: int, rounds: int) -> Iterator[slice]:
    """Return slices of a list, one for each round, with lengths that differ by at most one."""
    for i in range(rounds):
        yield slice(count * i // rounds, count * (i + 1) // rounds)


class _Kept(Context):
    gradients: tuple[Tensor, ...]


class _Differentiated(torch.autograd.Function):
    """A loss with known gradients with respect to `inputs`, in their order."""

    @staticmethod
    def forward(ctx: _Kept, loss: Tensor, gradients: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: _Kept, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        return (None, None, *(scale * each for each in ctx.gradients))
