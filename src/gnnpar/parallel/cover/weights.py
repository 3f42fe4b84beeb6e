"""Weights of a halo row and of a partial row in a cover: their bytes on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from gnnpar.codecs.codec import CodecConfig, Drop

Halo = Literal["rows", "cover", "auto"]
"""What travels of a cut edge: the row of its source; that or a partial row of its destination, by the least cover; the
least cover where it saves a tenth of the bytes."""

WORTH = 0.9
"""halo=auto: the most bytes of a cover, as a share of those of rows. Folds at the source add messages and merging."""


class Weights(NamedTuple):
    """Bytes of an epoch, both directions: of a halo row, and of a partial row with the destination's rows it needs."""

    row: int
    partial: int


class SplitFold(NamedTuple):
    """A fold that a cover splits. `src`: numbers of each operand of a row. `values`: of a partial row. `exact`: bytes
    in addition that no codec touches, (forward, backward). `row_travels`, `partial_travels`: in these directions."""

    src: tuple[int, ...]
    values: int
    exact: tuple[int, int]
    row_travels: tuple[bool, bool]
    partial_travels: tuple[bool, bool]


def weights_of(folds: Sequence[SplitFold], codec: CodecConfig, itemsize: int) -> Weights:
    """Return the weights of all of these folds together; of uncoded rows if the codec has no price."""
    row = partial = 0.0
    for fold in folds:
        for gradient in (False, True):
            if fold.row_travels[gradient]:
                row += _on_wire(codec, fold.src, itemsize, gradient=gradient)
            if fold.partial_travels[gradient]:
                partial += _on_wire(codec, (fold.values,), itemsize, gradient=gradient) + fold.exact[gradient]
    return Weights(max(1, round(row)), max(1, round(partial)))


def _on_wire(codec: CodecConfig, widths: Sequence[int], itemsize: int, *, gradient: bool) -> float:
    price = codec.price(1.0, widths, itemsize=itemsize, gradient=gradient)
    return itemsize * sum(widths) if price is None else price.nbytes


def refuse_nothing(codec: CodecConfig, halo: Halo) -> None:
    """Raise ValueError for partial rows under a codec that sends nothing."""
    if halo == "cover" and isinstance(codec, Drop):
        raise ValueError("strategy.halo=cover: codec=drop sends nothing, rows or partial rows (rows). Set halo=rows.")
