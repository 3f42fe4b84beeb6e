"""What the rows of an exchange take on the wire under a codec, and the bits that time is priced with.

A codec that chooses its bits in training is priced by its menu's bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import BFloat16, CodecConfig, Drop, Identity
from gnnpar.codecs.quantized import is_wide
from gnnpar.codecs.uniform import Bits, Random, Uniform, code_of
from gnnpar.pricing.flat import exchanged_folds, halo_copies, ring_bytes
from gnnpar.pricing.price import Bound, Traffic
from gnnpar.pricing.work import Work
from gnnpar_kernels.wire import FP8, FP32, has_metadata, row_nbytes

Widths = Sequence[int]
SENDS_NOTHING = "no price is known of a codec that sends nothing"


@dataclass(frozen=True)
class RowBytes:
    """What a row takes on the wire. `number`: bytes of a number that travels as it is."""

    codec: CodecConfig
    number: int = 4

    @property
    def known(self) -> bool:
        return isinstance(self.codec, (Identity, BFloat16, Drop, Uniform, Random, Adaptive))

    @property
    def unknown(self) -> str:
        return f"no price is known of the codec {type(self.codec).__name__}"

    @property
    def sends(self) -> bool:
        return not isinstance(self.codec, Drop)

    @property
    def bound(self) -> Bound:
        return "most" if isinstance(self.codec, Adaptive) else "mean" if isinstance(self.codec, Random) else "exact"

    def row(self, widths: Widths, *, gradient: bool = False) -> float:
        """Bytes of one row of all operands; those after the first are scores."""
        codec = self.codec
        if isinstance(codec, Drop) or not widths:
            return 0.0
        if isinstance(codec, Identity):
            return self.number * sum(widths)
        if isinstance(codec, BFloat16):
            return 2 * sum(widths)
        assert isinstance(codec, (Uniform, Random, Adaptive))
        if isinstance(codec, Uniform):
            firsts = [code_of((codec.gradient_bits or codec.bits) if gradient else codec.bits)]
            scores = FP32 if codec.bits == 32 else code_of(codec.score_bits)
        else:
            firsts = [max(*codec.menu, codec.first_bits)] if isinstance(codec, Adaptive) else list(codec.menu)
            scores = code_of(codec.score_bits)
        rest = sum(self._operand(width, scores) for width in widths[1:])
        return fmean(self._operand(widths[0], code) for code in firsts) + rest

    def _operand(self, width: int, code: int) -> int:
        """A row too narrow for metadata travels as it is."""
        if code == FP32 or (has_metadata(code) and not is_wide(width)):
            return self.number * width
        return row_nbytes(width, code)

    def bits(self) -> tuple[int, tuple[str, ...]]:
        """The bits that time is priced with, and a note where they are not the codec's."""
        codec = self.codec
        if isinstance(codec, Identity):
            return 32, ()
        if isinstance(codec, BFloat16):
            return 16, ()
        if isinstance(codec, Uniform):
            given: list[Bits] = [codec.bits, codec.gradient_bits or codec.bits]
            known = [{FP8: 8, 1: 2}.get(code, code) for code in map(code_of, given)]
            notes = ("time is that of 2 bits, the fewest that are measured",) if 1 in given else ()
            if known[0] != known[1]:
                notes += (f"time is that of {max(known)} bits in both directions",)
            return max(known), notes
        assert isinstance(codec, (Random, Adaptive))
        bits = max([*codec.menu, codec.first_bits] if isinstance(codec, Adaptive) else codec.menu)
        if isinstance(codec, Random):
            return bits, (f"bytes are the mean of the menu {list(codec.menu)}, time is that of {bits} bits",)
        return max(bits, 2), (
            f"bits are chosen from {list(codec.menu)} while it trains: bytes and time are those of {bits} bits, "
            "without what choosing takes",
        )

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
        total = ring_bytes(work.parts.parts, params + 1, self.number)
        return Traffic(forward=forward, backward=backward, reduce=total, bound=self.bound)
