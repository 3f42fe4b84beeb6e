"""Rounds in flight: started ahead of their use, dropped after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gnnpar.comm import CodedExchange, Posted
from gnnpar.folds.block import Rows
from gnnpar.parallel.engine import Unsaved
from gnnpar.parallel.sequential.rounds import Rounds, Slice


@dataclass(eq=False)
class Residency(Unsaved):
    """Bytes of remote rows here or in flight to this rank: now, and at most so far. A part of an engine."""

    now: int = 0
    most: int = 0

    @property
    def nbytes(self) -> int:
        return self.most

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)


class PrefetchQueue:
    """One exchange in rounds; at most `prefetch` + 1 of them are in flight or here at a time.

    Construction starts the first `prefetch` rounds; every rank must then take all rounds in order.
    """

    def __init__(
        self,
        rounds: Rounds,
        exchange: CodedExchange,
        *,
        prefetch: int,
        post: Callable[[int], Posted],
        residency: Residency,
        row_nbytes: int,
    ) -> None:
        """Start the first rounds. `post(r)`: exchange the rows of round r."""
        self._rounds, self._exchange, self._rank, self._prefetch = rounds, exchange, exchange.comm.rank, prefetch
        self._post, self._residency, self._row_nbytes = post, residency, row_nbytes
        self._posted: deque[Posted] = deque()
        self._started = 0
        self._start_until(prefetch)

    def __len__(self) -> int:
        return len(self._rounds)

    def round(self, r: int) -> Iterator[tuple[Slice, Rows]]:
        """Yield the rows of round r, peer by peer in folding order. Release one before taking the next."""
        self._start_until(r + self._prefetch + 1)
        posted = self._posted.popleft()
        for s in self._rounds.incoming(self._rank, r):
            yield s, self._exchange.take(posted, s.peer)
            self._residency.add(-s.num_rows * self._row_nbytes)

    def _start_until(self, r: int) -> None:
        while self._started < min(r, len(self._rounds)):
            rows = sum(s.num_rows for s in self._rounds.incoming(self._rank, self._started))
            self._residency.add(rows * self._row_nbytes)
            self._posted.append(self._post(self._started))
            self._started += 1
