"""Partial rows of one aggregation: folded where the sources are, merged where the destinations are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Incoming, Outgoing, Posted, RowLike, Site
from gnnpar.folds.block import Operands, Rows
from gnnpar.folds.mergeable import Mergeable
from gnnpar.parallel.cover.cover import Cover

PARTIAL = 64
"""Added to the number of an aggregation in the sites of partial rows: their bits and noise are their own."""


@dataclass(eq=False)
class SourceFold:
    """One aggregation under a cover. `exchange`: of partial rows and their gradients; `exact`: of destinations' rows.

    Forward: `ask`, `send`, `merge`. Backward: `send_back`, `differentiate`, `add_returned`. Every rank calls all of
    them, in this order. Autograd keeps the rows that backward reads: `merge` returns them, backward takes them as
    `saved`.
    """

    cover: Cover
    agg: Mergeable
    exchange: CodedExchange
    exact: CodedExchange
    _posted: Posted | None = None
    _folded: Rows = ()  # from send to merge: destinations' rows, and what `finish` saved
    _num_dst: int = 0
    _num_folded: int = 0
    _like: tuple[RowLike, ...] = ()

    def ask(self, dst: Rows, site: Site) -> Posted | None:
        """Send the destinations' rows to the ranks that fold them, if the fold reads any."""
        if not dst:
            return None
        outgoing = {q: Outgoing(dst, at) for q, at in self.cover.into.items()}
        incoming = {p: Incoming(len(rows)) for p, rows in self.cover.sent.items()}
        return self.exact.post(outgoing, incoming, RowLike.of(dst), site)

    def send(self, x: Operands, asked: Posted | None, site: Site) -> None:
        """Fold for other ranks and send the results."""
        cover, agg = self.cover, self.agg
        dst = () if asked is None else self._table(asked, self.exact)
        there, fold = x._replace(dst=dst), agg.at_source()
        result, saved = fold.finish(fold.update(fold.init(cover.block.num_dst, there), cover.block, there))
        rows = agg.partial(result, saved, x.src[0].dtype)
        self._folded, self._num_dst, self._num_folded = (*dst, *saved), len(dst), len(dst) + len(saved)
        self._like = RowLike.of(rows)
        outgoing = {p: Outgoing(rows, at) for p, at in cover.sent.items()}
        incoming = {q: Incoming(len(at)) for q, at in cover.into.items()}
        self._posted = self.exchange.post(outgoing, incoming, self._like, _of_partial(site))

    def merge(self, state: Rows) -> tuple[Rows, Rows]:
        """Merge all partial rows. Return (the state, the rows that backward reads)."""
        posted, exact = self._posted, list[Tensor]()
        assert posted is not None
        for q in sorted(self.cover.into):
            rows = self.exchange.take(posted, q)
            state = self.agg.merge(state, self.cover.into[q], rows)
            exact += rows[1:]
        kept, self._folded, self._posted = (*self._folded, *exact), (), None
        return state, kept

    def send_back(self, saved: Rows, prepared: Rows, grad_out: Tensor, site: Site) -> Posted:
        """Send the gradients of the received partial rows to the ranks that folded them."""
        into, agg = self.cover.into, self.agg
        exact, each = saved[self._num_folded :], len(self._like) - 1
        rows_of = {q: exact[i * each : (i + 1) * each] for i, q in enumerate(sorted(into))}
        back = {q: agg.grad_partial(rows_of[q], at, prepared, grad_out) for q, at in into.items()}
        nothing = tuple(like.empty(0) for like in self._like[1:])
        none = torch.zeros(0, dtype=torch.int64, device=grad_out.device)
        like = RowLike.of(agg.grad_partial(nothing, none, prepared, grad_out))
        like = (like[0]._replace(dtype=self._like[0].dtype), *like[1:])
        outgoing = {q: Outgoing(rows) for q, rows in back.items()}
        incoming = {p: Incoming(len(rows)) for p, rows in self.cover.sent.items()}
        return self.exchange.post(outgoing, incoming, like, _of_partial(site))

    def differentiate(self, saved: Rows, x: Operands, posted: Posted, site: Site) -> tuple[Operands, Posted | None]:
        """Differentiate the partial rows folded here. Return (gradients except those of destinations, these as
        posted)."""
        agg, cover = self.agg, self.cover
        dst, mine = saved[: self._num_dst], saved[self._num_dst : self._num_folded]
        prepared, grad_out = agg.prepare_partial(mine, self._table(posted, self.exchange))
        fold = agg.at_source()
        grads = fold.grad(cover.block, x._replace(dst=dst), prepared, grad_out)
        if not dst:
            return grads, None
        rows = grads.dst or fold.grad_dst(prepared, grad_out)
        like = tuple(each._replace(dtype=grad.dtype) for each, grad in zip(RowLike.of(dst), rows, strict=True))
        outgoing = {p: Outgoing(rows, at) for p, at in cover.sent.items()}
        incoming = {q: Incoming(len(at)) for q, at in cover.into.items()}
        return grads._replace(dst=()), self.exact.post(outgoing, incoming, like, site)

    def add_returned(self, dst: Rows, returned: Posted) -> None:
        """Add the gradients of destinations that other ranks have computed."""
        for q in sorted(self.cover.into):
            for total, rows in zip(dst, self.exact.take(returned, q), strict=True):
                total.index_add_(0, self.cover.into[q], rows.to(total.dtype))

    def _table(self, posted: Posted, exchange: CodedExchange) -> Rows:
        """Return the rows of all readers in the order of `cover.block`, zeros for missing ones."""
        parts = [exchange.take(posted, p) if p in posted.incoming else None for p in self.cover.sent]
        sizes = [len(at) for at in self.cover.sent.values()]
        if not parts:
            return tuple(each.empty(1).zero_() for each in posted.like)
        columns: list[Tensor] = []
        for i, each in enumerate(posted.like):
            found = [each.empty(n).zero_() if rows is None else rows[i] for rows, n in zip(parts, sizes, strict=True)]
            columns.append(torch.cat(found))
        return tuple(columns)


def _of_partial(site: Site) -> Site:
    return site._replace(call=site.call + PARTIAL)
