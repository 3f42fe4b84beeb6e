"""A rank's part and the rows of all parts, some of them old: Y[N_P, F] = sum_q A[N_P, N_q] X'[N_q, F].

X' are the rows of this epoch if q broadcasts, else its last ones. Gradients go to the owner of q in every epoch, as if
X' were its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Self

from gnnpar.comm import Incoming, Posted, RowLike, Site
from gnnpar.folds.block import Rows
from gnnpar.parallel.broadcast import BroadcastGraph
from gnnpar.parallel.sancus.copies import Copies


@dataclass(eq=False)
class SkippingGraph(BroadcastGraph):
    """A view that skips broadcasts. `copies`: of the parts that do not broadcast; None: all do."""

    copies: Copies | None = field(kw_only=True)
    _broadcasting: frozenset[int] = field(default=frozenset(), init=False)

    def exactly(self) -> Self:
        return self if self.once is None else replace(self, exchange=self.once, copies=None)

    def stages(self, src: Rows, site: Site) -> Iterator[tuple[int, Rows]]:
        if self.copies is None:
            yield from super().stages(src, site)
            return
        self._broadcasting = self.copies.broadcasting(src, site)
        for part, rows in super().stages(src, site):
            if part != self.rank and part in self._broadcasting:
                self.copies.kept[site.layer, site.call].rows[part] = rows
            yield part, rows

    def post_part(self, part: int, src: Rows, site: Site) -> Posted:
        if self.copies is None or part in self._broadcasting:
            return super().post_part(part, src, site)
        like, rows = RowLike.of(src), self.copies.kept[site.layer, site.call].rows
        incoming = {} if part == self.rank else {part: Incoming(self.block(part).num_src)}
        return Posted(site, like, incoming, {}, {q: rows[q] for q in incoming})
