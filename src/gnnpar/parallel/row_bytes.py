"""What the rows of an epoch's exchanges take on the wire under a codec, and the bits that time is priced with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gnnpar.codecs.codec import CodecConfig, WirePrice
from gnnpar.pricing.flat import exchanged_folds, halo_copies, ring_bytes, summed_nbytes
from gnnpar.pricing.price import Bound, Traffic
from gnnpar.pricing.work import Work

SENDS_NOTHING = "no price is known of a codec that sends nothing"
_ANY = (64,)  # widths of a row; what is not a number of bytes is the same for all
_FEWEST = 2  # bits whose rate is measured


@dataclass(frozen=True)
class RowBytes:
    """Of a codec that has a price. `number`: bytes of a number of a row in memory."""

    codec: CodecConfig
    number: int = 4

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
        """The bits that time is priced with, and a note where they are not the codec's."""
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
        copies, folds = halo_copies(work), exchanged_folds(work)
        return (
            copies * sum(self.row(f.src) for f in folds),
            copies * sum(self.row(f.src, gradient=True) for f in folds if f.learned),
        )

    def halo_traffic(self, work: Work, *, params: int) -> Traffic:
        """Halo rows forward, gradients of those that have one back, and the sum with the loss in it."""
        forward, backward = self.exchanges(work)
        total = ring_bytes(work.parts.parts, params + 1 + work.ir.summed_moments, self.summed)
        return Traffic(forward=forward, backward=backward, reduce=total, bound=self.bound)
