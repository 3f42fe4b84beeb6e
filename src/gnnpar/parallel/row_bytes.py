"""Wire bytes of the rows of an epoch under a codec, and the bits that price its time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from gnnpar.codecs.codec import CodecConfig, Drop, Identity, WirePrice
from gnnpar.parallel.torch_types import floats
from gnnpar.pricing.ir import Fold
from gnnpar.pricing.price import Bound, Traffic, ring_bytes, summed_nbytes
from gnnpar.pricing.regrouped import Regrouped
from gnnpar.pricing.statistics import as_table
from gnnpar.pricing.steps import Step
from gnnpar.pricing.work import Work

SENDS_NOTHING = "no price is known of a codec that sends nothing"
_ANY = (64,)  # widths of a row, for properties that do not depend on them
_FEWEST = 2  # bits whose rate is measured

Halo = Literal["rows", "cover", "auto"]
"""Messages of a cut edge: the row of its source; that or a partial row of its destination, by the least cover; the
least cover where it saves a tenth of the bytes."""

_WORTH = 0.9  # halo=auto: most bytes of a cover relative to rows; folds at sources add messages


def refuse_nothing(codec: CodecConfig, halo: Halo) -> None:
    """Raise ValueError for partial rows under a codec that sends nothing."""
    if halo == "cover" and isinstance(codec, Drop):
        raise ValueError("strategy.halo=cover: codec=drop sends nothing, rows or partial rows (rows). Set halo=rows.")


@dataclass(frozen=True)
class RowBytes:
    """Of a codec; of uncoded rows if it has no price. `number`: bytes of a number of a row in memory. `halo`: of the
    strategy; `linear`: a cover splits linear folds alone."""

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
        """Bytes of one row of all operands; operands after the first are scores."""
        return self._price(widths, gradient=gradient).nbytes if widths else 0.0

    def _price(self, widths: Sequence[int], *, gradient: bool = False) -> WirePrice:
        price = self.codec.price(1.0, widths, itemsize=self.number, gradient=gradient)
        return price or Identity().price(1.0, widths, itemsize=self.number)

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
        covers, sent = self.covers(work), [0.0, 0.0]
        for fold in work.exchanged_folds:
            counts = covers.get(self.types_of(fold))
            rows, partial = (work.parts.copies, 0.0) if counts is None else floats(counts.sum((1, 2)))[:2]
            for gradient in (False, True):
                row, part = self._of_rows([fold], gradient=gradient)
                sent[gradient] += rows * row + partial * part
        return sent[0], sent[1]

    def types_of(self, fold: Fold) -> int | None:
        """Return the types of the partial rows of a fold that a cover splits, else None."""
        return fold.split[0] if fold.split and (fold.linear or not self.linear) else None

    def weights(self, folds: Sequence[Fold]) -> dict[int, tuple[int, int]]:
        """Return by types the bytes of an epoch, both directions, of a halo row and of a partial row with the
        destination's rows that it needs, of all these folds together."""
        weights: dict[int, tuple[int, int]] = {}
        for types in sorted({types for fold in folds if (types := self.types_of(fold)) is not None}):
            of = [fold for fold in folds if self.types_of(fold) == types]
            (row, part), back = (self._of_rows(of, gradient=gradient) for gradient in (False, True))
            weights[types] = max(1, round(row + back[0])), max(1, round(part + back[1]))
        return weights

    def _of_rows(self, folds: Iterable[Fold], *, gradient: bool) -> tuple[float, float]:
        """Return the bytes in one direction of a halo row and of a partial row."""
        row = partial = 0.0
        for fold in folds:
            row += self.row(fold.src, gradient=gradient) * (fold.learned or not gradient)
            if fold.split and (fold.split[3] or not gradient):
                types, *exact, _ = fold.split
                partial += self.row((fold.out // max(1, types),), gradient=gradient) + exact[gradient] * self.summed
                partial += sum(fold.dst) * (self.summed if gradient else self.number)  # rows of the destination
        return row, partial

    def pays(self, counts: Sequence[float], weights: tuple[int, int]) -> bool:
        """Return True if the strategy takes a cover. counts: all halo rows, halo rows to send, partial rows."""
        halo_rows, rows, partial, *_ = counts
        return self.halo == "cover" or rows * weights[0] + partial * weights[1] <= _WORTH * halo_rows * weights[0]

    def covers(self, work: Work) -> dict[int | None, Tensor]:
        """Return the covers that the engine makes, by types. ValueError without the edges."""
        if self.halo == "rows" or work.parts.parts == 1 or not self.sends:
            return {}
        if (count := work.parts.cover) is None:
            raise ValueError(f"strategy.halo={self.halo} is priced where the graph's edges are at hand. Set halo=rows.")
        covers: dict[int | None, Tensor] = {}
        for types, weights in self.weights(work.ir.every_fold).items():
            counts = count(weights, types)
            if self.pays([work.parts.copies, *floats(counts.sum((1, 2)))], weights):
                covers[types] = counts
        return covers

    def covered(self, work: Work) -> Work:
        """Return the work under a cover, for times: a partial row counts as many rows as it weighs, its edges belong to
        the owner of their sources. Return it unchanged without one cover of all folds, or an estimated partition."""
        if work.parts.cover is None:
            return work
        covers, kinds = self.covers(work), {self.types_of(f) for f in work.exchanged_folds}
        if len(kinds) != 1 or not kinds <= covers.keys():
            return work
        ((row, partial),) = self.weights(work.exchanged_folds).values()
        (rows, partial_rows, folded), parts = covers[kinds.pop()], work.parts
        halo = rows + partial / row * partial_rows
        cut = folded.new_tensor(parts.cut) - folded + partial_rows
        inner = folded.new_tensor(parts.inner) + folded.sum(0)
        tables = {"inner": tuple(floats(inner)), "cut": as_table(cut), "halo": as_table(halo)}
        return replace(work, parts=replace(parts, **tables))

    def traffic(self, step: Step, work: Work, params: int) -> Traffic:
        """Return what a step sends in an epoch: rows, their gradients, and the sum over ranks with the loss in it."""
        groups = step.regrouped(work)
        forward, backward = self.exchanges(step.with_halo(work)) if groups is None else self._regrouped(groups, work)
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
