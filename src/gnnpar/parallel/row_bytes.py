"""Wire bytes of the rows of an epoch under a codec, and the bits that price its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gnnpar.codecs.codec import CodecConfig, WirePrice
from gnnpar.parallel.cover.weights import WORTH, Halo, SplitFold, weights_of
from gnnpar.parallel.priced import Problem
from gnnpar.partition.cover import CoverCounts, count_cover
from gnnpar.pricing.ir import Fold
from gnnpar.pricing.price import Bound, Traffic, ring_bytes, summed_nbytes
from gnnpar.pricing.regrouped import Regrouped
from gnnpar.pricing.steps import Step
from gnnpar.pricing.work import Work

SENDS_NOTHING = "no price is known of a codec that sends nothing"
_ANY = (64,)  # widths of a row; what is not a number of bytes is the same for all
_FEWEST = 2  # bits whose rate is measured


@dataclass(frozen=True)
class RowBytes:
    """Of a codec that has a price. `number`: bytes of a number of a row in memory. `halo`: of the strategy; `linear`: a
    cover splits linear folds alone."""

    codec: CodecConfig
    number: int = 4
    halo: Halo = "rows"
    linear: bool = False

    @property
    def summed(self) -> int:
        """Bytes of a number that ranks add up, and of a statistic."""
        return summed_nbytes(self.number)

    @property
    def known(self) -> bool:
        return self.codec.price(1.0, _ANY, itemsize=self.number) is not None

    @property
    def unknown(self) -> str:
        return f"no price is known of the codec {type(self.codec).__name__}"

    @property
    def sends(self) -> bool:
        return self._price(_ANY).bits is not None

    @property
    def bound(self) -> Bound:
        return self._price(_ANY).bound

    def row(self, widths: Sequence[int], *, gradient: bool = False) -> float:
        """Bytes of one row of all operands; those after the first are scores."""
        return self._price(widths, gradient=gradient).nbytes if widths else 0.0

    def _price(self, widths: Sequence[int], *, gradient: bool = False) -> WirePrice:
        price = self.codec.price(1.0, widths, itemsize=self.number, gradient=gradient)
        assert price is not None, "a codec without a price is refused before"
        return price

    def bits(self) -> tuple[int, tuple[str, ...]]:
        """Return the bits that time is priced with, and a note if they differ from the codec's."""
        forward, backward = self._price(_ANY), self._price(_ANY, gradient=True)
        assert forward.bits is not None
        assert backward.bits is not None
        bits = max(forward.bits, backward.bits, _FEWEST)
        if forward.notes:
            return bits, forward.notes
        notes = ()
        if min(forward.bits, backward.bits) < _FEWEST:
            notes += (f"time is that of {_FEWEST} bits, the fewest that are measured",)
        if max(forward.bits, _FEWEST) != max(backward.bits, _FEWEST):
            notes += (f"time is that of {bits} bits in both directions",)
        return bits, notes

    def exchanges(self, work: Work) -> tuple[float, float]:
        """Bytes of an epoch, (forward, backward): one halo exchange a fold and direction."""
        covers = self.covers(work)
        forward = backward = 0.0
        for fold in work.exchanged_folds:
            rows, partial, split = work.parts.copies, 0.0, None
            if (counts := covers.get(self._types_of(fold))) is not None:
                rows, partial, split = total(counts.rows), total(counts.partial), self._split(fold)
            forward += rows * self.row(fold.src)
            backward += rows * self.row(fold.src, gradient=True) * fold.learned
            if split is not None:
                forward += partial * (self.row((split.values,)) + split.exact[0])
                both = self.row((split.values,), gradient=True) + split.exact[1]
                backward += partial * both * split.partial_travels[1]
        return forward, backward

    def covers(self, work: Work) -> dict[int | None, CoverCounts]:
        """Return the covers that the engine makes, by `Fold.split`'s types. ValueError without the edges."""
        if self.halo == "rows" or work.parts.parts == 1 or not self.sends:
            return {}
        if (edges := work.parts.edges_of) is None:
            raise ValueError(f"strategy.halo={self.halo} is priced where the graph's edges are at hand. Set halo=rows.")
        folds = work.ir.every_fold
        covers: dict[int | None, CoverCounts] = {}
        for types in sorted({t for f in folds if (t := self._types_of(f)) is not None}):
            weights = weights_of([self._split(f) for f in folds if self._types_of(f) == types], self.codec, self.number)
            key = weights, types
            if key not in edges.found:
                edges.found[key] = count_cover(
                    edges.edge_index, edges.part_of, work.parts.parts, weights, edge_type=edges.edge_type, types=types
                )
            counts = edges.found[key]
            assert isinstance(counts, CoverCounts)
            after = total(counts.rows) * weights.row + total(counts.partial) * weights.partial
            if self.halo == "cover" or after <= WORTH * work.parts.copies * weights.row:
                covers[types] = counts
        return covers

    def covered(self, work: Work) -> Work:
        """Return the work under a cover, for times: a partial row counts as many rows as it weighs, its edges belong to
        the owner of their sources. Return it unchanged if a fold is not split, if folds have different covers, or if
        the work is covered already."""
        if work.parts.edges_of is None:  # a partition that is estimated
            return work
        covers, kinds = self.covers(work), {self._types_of(f) for f in work.exchanged_folds}
        if len(kinds) != 1 or not kinds <= covers.keys():
            return work
        (types,), folds, parts = kinds, work.exchanged_folds, work.parts
        counts, weights = covers[types], weights_of([self._split(f) for f in folds], self.codec, self.number)
        share = weights.partial / weights.row
        halo = combined(counts.rows, counts.partial, share)
        cut = combined(combined(parts.cut, counts.folded, -1.0), counts.partial, 1.0)
        inner = tuple(n + sum(row[q] for row in counts.folded) for q, n in enumerate(parts.inner))
        return replace(work, parts=replace(parts, inner=inner, cut=cut, halo=halo, edges_of=None))

    def under_cover(self, problem: Problem) -> Problem:
        """Return the problem with work that is `covered`."""

        def work_of(parts: int) -> Work:
            work = self.covered(problem.work_of(parts))
            return replace(work, parts=replace(work.parts, edges_of=None))  # decided: no other codec decides again

        return replace(problem, work_of=work_of)

    def _types_of(self, fold: Fold) -> int | None:
        return fold.split[0] if fold.split and (fold.linear or not self.linear) else None

    def _split(self, fold: Fold) -> SplitFold:
        types, forward, backward, differentiated = fold.split
        exact, travels = (forward * self.summed, backward * self.summed), (True, bool(differentiated))
        return SplitFold(fold.src, fold.out // max(1, types), exact, (True, fold.learned), travels)

    def traffic(self, step: Step, work: Work, params: int) -> Traffic:
        """Return what a step sends in an epoch: rows, their gradients, and the sum over ranks with the loss in it."""
        groups = step.regrouped(work)
        forward, backward = self.exchanges(step.seen(work)) if groups is None else self._regrouped(groups, work)
        sent = Traffic(
            forward=forward * step.sends[0],
            backward=backward * step.sends[1],
            reduce=ring_bytes(work.parts.parts, params + 1 + work.ir.summed_moments, self.summed),
            bound=self.bound,
        )
        return replace(sent, bound="mean") if forward and sent.bound == "exact" and step.varies else sent

    def _regrouped(self, groups: Regrouped, work: Work) -> tuple[float, float]:
        """Rows to the ranks that fold them, and results home."""
        rows, home = groups.moved(work.parts.nodes)
        forward, backward = (
            [
                rows * self.row(f.src, gradient=back) + home * self.row((f.out,), gradient=back)
                for f in work.exchanged_folds
            ]
            for back in (False, True)
        )
        learned = [f.learned for f in work.exchanged_folds]
        return sum(forward), sum(nbytes for nbytes, has in zip(backward, learned, strict=True) if has)


Table = tuple[tuple[float, ...], ...]


def total(table: Table) -> float:
    return sum(map(sum, table))


def combined(a: Table, b: Table, factor: float) -> Table:
    """Return a + factor * b."""
    return tuple(tuple(x + factor * y for x, y in zip(*rows, strict=True)) for rows in zip(a, b, strict=True))
