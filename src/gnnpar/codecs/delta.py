"""Send a row as its quantized difference from the last epoch's row, which both ends hold.

h_e = h_{e-1} + Q(x_e - h_{e-1}), computed at both ends from the same bytes; folds read h_e. The rounding error of h_e
is part of the next difference: error feedback without a separate buffer (EF21: Richtarik, Sokolov, Fatkhullin, EF21: A
New, Simpler, Theoretically Better, and Practically Faster Error Feedback, NeurIPS 2021, arXiv 2106.05203).

Both ends compute a row's bits from the rows decoded in the last two epochs, so the bits are not sent. With r the range
of h_{e-1} and d the range of h_{e-1} - h_{e-2}: the fewest bits b with d / (2^b - 1) <= r / (2^bits - 1), so that steps
are no coarser than with codec=uniform in `bits`. If d >= r, as with new dropout masks in every epoch, the full row
is sent, as by codec=uniform. Rows that SAR pushes are always sent in full.

Deviation from EF21: rounding is stochastic, as everywhere in this project, and bits change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gnnpar.codecs.codec import Codec, CodecConfig, Exactness, WirePrice
from gnnpar.codecs.quantized import Key, QuantizedRows, decode_rows, price_of_codes
from gnnpar.codecs.uniform import Bits, GridBits, bits_of_code, code_of
from gnnpar.comm import Communicator, MessageTag, Outgoing, RowLike, RowLists
from gnnpar.comm.rows import Decoder
from gnnpar.files import StateDict
from gnnpar.folds.block import Rows
from gnnpar_kernels.csr import accumulate_dtype

_GRIDS: tuple[GridBits, ...] = (1, 2, 4, 8)
At = tuple[Key, int, bool]  # exchange, peer, True if rows are sent to it


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Configuration of the differences.

    bits: of rows sent in full, and of all rows in the first two epochs; 32: exact differences. least_bits: lower limit
    of bits; equal to `bits`: bits are fixed, and steps narrow instead. score_bits: of operands other than feature rows,
    which are sent in full.
    """

    bits: Literal[2, 4, 8, 32] = 8
    least_bits: Literal[1, 2, 4, 8] = 2
    score_bits: Bits = 8

    def __post_init__(self) -> None:
        if self.least_bits > self.bits:
            raise ValueError(f"codec.least_bits={self.least_bits} is more than codec.bits={self.bits}; lower it")

    @property
    def exactness(self) -> frozenset[Exactness]:
        return frozenset[Exactness]({"rounded" if self.bits == 32 else "quantized"})

    def build(self, lists: RowLists, comm: Communicator, seed: int) -> Codec:
        return _Delta(lists, seed, self)

    def price(self, num_rows: float, widths: Sequence[int], *, itemsize: int = 4, gradient: bool = False) -> WirePrice:
        scores = code_of(32 if self.bits == 32 else self.score_bits)
        nbytes = price_of_codes(num_rows, widths, [code_of(self.bits)], scores, itemsize=itemsize)
        if self.bits in (32, self.least_bits):
            return WirePrice(*nbytes, bits_of_code(code_of(self.bits)))
        notes = (f"bytes are those of codec.bits={self.bits}; bits fall to {self.least_bits} as differences narrow",)
        return WirePrice(*nbytes, self.bits, "most", notes)


def refuse_delta(codec: CodecConfig, strategy: str, why: str) -> None:
    """Raise ValueError for a strategy that does not send the same rows in every epoch."""
    if isinstance(codec, Delta):
        raise ValueError(
            f"codec=delta sends each row as its difference from the last epoch's, but strategy={strategy} {why}: "
            "use codec=uniform, random, bf16, drop or identity"
        )


class _RowList:
    """The rows of one list, equal at both ends. fresh: rows of this epoch received so far. Shapes: rows, fresh [n, D];
    codes [n] uint8; sent_in_full [n]: True where the full row is sent."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.rows: Tensor | None = None
        self.fresh: Tensor | None = None
        self.codes: Tensor | None = None
        self.sent_in_full: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.rows, self.fresh, self.codes, self.sent_in_full) if t is not None)

    def reference(self, at: slice | Tensor) -> Tensor | None:
        """Return the rows to subtract before sending; None: subtract nothing."""
        if self.rows is None:
            return None
        if self.sent_in_full is None:
            return self.rows[at]
        return self.rows[at].masked_fill(self.sent_in_full[at, None], 0.0)

    def add_differences(self, first: int, decoded: Tensor) -> Tensor:
        """Add decoded differences to the rows from `first` on. Shapes: [m, ...] -> [m, ...]."""
        at = slice(first, first + len(decoded))
        reference = self.reference(at)
        wide = decoded.flatten(1).to(accumulate_dtype(decoded.dtype))
        rows = wide if reference is None else reference + wide
        if self.fresh is None:
            unsent = rows.new_zeros(self._num_rows, rows.shape[1]) if self.rows is None else self.rows.clone()
            self.fresh = unsent  # old rows until new ones arrive
        self.fresh[at] = rows
        return rows.to(decoded.dtype).view_as(decoded)

    def commit(self, bits: int, least_bits: int) -> None:
        """End the epoch: hold its rows, and set the bits of the next epoch."""
        if self.fresh is None:
            return
        if self.rows is not None and bits != 32:
            wide, moved = _range(self.fresh), _range(self.fresh - self.rows)
            wanted = (2**bits - 1) * moved
            self.codes = torch.full_like(wide, bits, dtype=torch.uint8)
            for b in reversed([b for b in _GRIDS if least_bits <= b < bits]):
                self.codes.masked_fill_(wanted <= (2**b - 1) * wide, b)
            self.sent_in_full = (moved >= wide) & (moved > 0)
            self.codes.masked_fill_(self.sent_in_full, bits)
        self.rows, self.fresh = self.fresh, None


def _range(rows: Tensor) -> Tensor:
    """Return the range of each row. Shapes: [n, D] -> [n]; 0 for rows without columns."""
    if not rows.shape[1]:
        return rows.new_zeros(len(rows))
    low, high = rows.aminmax(dim=1)
    return high - low


class _Delta(QuantizedRows):
    """Encoding by differences. Within an epoch a row always encodes equally: held rows change at the next epoch."""

    decodes_late = False

    def __init__(self, lists: RowLists, seed: int, config: Delta) -> None:
        super().__init__(lists, seed=seed, score_bits=code_of(32 if config.bits == 32 else config.score_bits))
        self._config = config
        self._held: dict[At, _RowList] = {}

    @property
    def held_nbytes(self) -> int:
        return sum(held.nbytes for held in self._held.values())

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        self._commit()
        self.forget_packings()

    def codes(self, key: Key, peer: int, *, sending: bool) -> int | Tensor:
        held = self._held.get((key, peer, sending))
        return code_of(self._config.bits) if held is None or held.codes is None else held.codes

    def encode(self, rows: Rows, index: Tensor | None, tag: MessageTag, peer: int) -> Tensor:
        num_rows = len(rows[0]) if index is None else len(index)
        held = self._of(tag, peer, sending=True)
        if held is None:
            return super().encode(rows, index, tag, peer)
        rows = _differences(rows, index, held.reference(slice(tag.first, tag.first + num_rows)))
        like = RowLike.of(rows)
        packings = [self._packing(i, num_rows, each, tag, peer, sending=True) for i, each in enumerate(like)]
        ids = self.ids_of(index, num_rows, tag, peer)
        buffer = self._encode(rows, None, ids, packings, tag, peer)
        held.add_differences(tag.first, decode_rows(buffer, num_rows, like, packings)[0])
        return buffer

    def encode_all(self, outgoing: Mapping[int, Outgoing], tag: MessageTag) -> Mapping[int, Tensor]:
        return Codec.encode_all(self, outgoing, tag)

    def decoder(self, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> Decoder:
        decode, held = super().decoder(num_rows, like, tag, peer), self._of(tag, peer, sending=False)
        if held is None:
            return decode

        def added(buffer: Tensor) -> Rows:
            first, *rest = decode(buffer)
            return (held.add_differences(tag.first, first), *rest)

        return added

    def as_received(self, rows: Rows, index: Tensor, tag: MessageTag, peer: int) -> Rows:
        held = self._of(tag, peer, sending=True)
        if held is None or held.rows is None:
            return super().as_received(rows, index, tag, peer)
        at = torch.searchsorted(self.lists.sent[peer], index)
        reference = held.reference(at)
        assert reference is not None
        spread = tuple(t.new_zeros(self.lists.num_rows, *t.shape[1:]) for t in rows)
        for into, part in zip(spread, _differences(rows, index, reference), strict=True):
            into[index] = part  # keep places, since noise is keyed by node
        first, *rest = super().as_received(spread, index, tag, peer)
        whole = reference + first.flatten(1).to(reference.dtype)
        return (whole.to(first.dtype).view_as(first), *rest)

    def state_dict(self) -> StateDict:
        self._commit()
        return {at: (held.rows, held.codes, held.sent_in_full) for at, held in self._held.items()}

    def load_state_dict(self, state: StateDict) -> None:
        for (key, peer, sending), (rows, codes, sent_in_full) in state.items():
            held = self._held[Key(*key), peer, sending] = _RowList(len(rows))
            held.rows, held.codes, held.sent_in_full = rows, codes, sent_in_full
        self.forget_packings()

    def _commit(self) -> None:
        for held in self._held.values():
            held.commit(self._config.bits, self._config.least_bits)

    def _of(self, tag: MessageTag, peer: int, *, sending: bool) -> _RowList | None:
        """Return the held rows, or None for rows that SAR pushes."""
        key = Key.of(tag)
        if key.direction == "push":
            return None
        at = key, peer, sending
        if at not in self._held:
            whole = self.lists.sent if sending == (key.direction == "forward") else self.lists.read
            self._held[at] = _RowList(len(whole[peer]))
        return self._held[at]


def _differences(rows: Rows, index: Tensor | None, reference: Tensor | None) -> Rows:
    """Return rows[index], the first operand minus held rows. Shapes: reference [n, D]."""
    chosen = rows if index is None else tuple(t.index_select(0, index) for t in rows)
    first = chosen[0].detach()
    if reference is not None:
        first = (first.flatten(1).to(reference.dtype) - reference).to(first.dtype).view_as(first)
    return (first, *chosen[1:])
