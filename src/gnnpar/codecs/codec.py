"""Protocols of a codec, and the three codecs without statistics: identity, bf16 and drop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from gnnpar.comm import Communicator, MessageTag, RowLike, RowLists, Wire
from gnnpar.files import JsonDict, StateDict
from gnnpar.folds.block import Rows
from gnnpar_kernels import gather_rows

Bound = Literal["exact", "mean", "most"]
Exactness = Literal["exact", "rounded", "quantized", "stale", "sampled"]


class SavedProfile(Protocol):
    """A measurement that affects results: saved with a run, and hashed."""

    @property
    def hash(self) -> str: ...
    def as_json(self) -> JsonDict: ...


class Codec(Wire, Protocol):
    """The runtime object of one rank; it may hold state. Defaults: no measurement, no state between epochs.

    Random numbers are keyed by (seed, epoch, layer, call, operand, global row id) and never by the phase: a row that is
    sent again for rematerialisation must decode to the same values.
    """

    decodes_late: bool = False
    """Whether a message may be decoded after later epochs have begun, without changing the codec. If not, messages in
    flight are drained before `begin_epoch`."""

    @property
    def profile(self) -> SavedProfile | None:
        """The measurement that decides its bits, or None."""
        return None

    @property
    def held_nbytes(self) -> int:
        """Return bytes of rows kept between epochs."""
        return 0

    def begin_epoch(self, epoch: int) -> None:
        """Prepare for an epoch."""

    def facts(self) -> JsonDict:
        """Return metrics of the current epoch by their names in track.keys, once; on rank 0."""
        return {}

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        assert not state


@dataclass(frozen=True)
class WirePrice:
    """Bytes of rows on the wire: payload, and metadata (scales, zero points).

    bound: whether the bytes are exact, a mean (of random bits), or a maximum (of bits chosen in training). bits: of the
    widest encoded element, for the time of encoding: 1 to 8 are quantized, 16 rounded, 32 copied; None: nothing is
    sent. notes: costs that the figures omit.
    """

    payload: float
    metadata: float
    bits: int | None
    bound: Bound = "exact"
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> float:
        return self.payload + self.metadata


class CodecConfig(Protocol):
    """Configuration of a codec. A frozen dataclass; fields are YAML keys."""

    @property
    def exactness(self) -> frozenset[Exactness]: ...
    def build(self, lists: RowLists, comm: Communicator, seed: int) -> Codec: ...
    def price(
        self, num_rows: float, widths: Sequence[int], *, itemsize: int = 4, gradient: bool = False
    ) -> WirePrice | None:
        """Return the bytes of `num_rows` rows in one direction, as counted by `nbytes` of the runtime object; None:
        unknown. An upper bound if bits are chosen in training. widths: elements of each operand in a row, features
        first, then scores. itemsize: bytes per element in memory. gradient: of gradient rows on their way back."""
        ...


@runtime_checkable
class Periodic(Protocol):
    """A configuration that chooses again after a number of epochs."""

    def check_run(self, epochs: int) -> None:
        """Raise ValueError for a run with too few epochs."""
        ...


def check_epochs(config: CodecConfig, epochs: int) -> None:
    """Raise ValueError for a codec that cannot run for so few epochs."""
    if isinstance(config, Periodic):
        config.check_run(epochs)


class ConfigDefaults:
    """Defaults of a CodecConfig: no price."""

    def price(
        self, num_rows: float, widths: Sequence[int], *, itemsize: int = 4, gradient: bool = False
    ) -> WirePrice | None:
        return None


class _Cast(Codec):
    """Rows in a fixed floating-point type; None keeps their own."""

    decodes_late = True

    def __init__(self, wire: torch.dtype | None) -> None:
        self.wire = wire

    def _on_wire(self, like: RowLike) -> RowLike:
        return like._replace(dtype=self.wire or like.dtype)

    def nbytes(self, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> int:
        return sum(self._on_wire(each).nbytes(num_rows) for each in like)

    def encode(self, rows: Rows, index: Tensor | None, tag: MessageTag, peer: int) -> Tensor:
        like = RowLike.of(rows)
        num_rows = len(rows[0]) if index is None else len(index)
        buffer = torch.empty(self.nbytes(num_rows, like, tag, peer), dtype=torch.uint8, device=rows[0].device)
        start = 0
        for i in self._order(like):
            tensor, wire = rows[i], self._on_wire(like[i])
            end = start + wire.nbytes(num_rows)
            target = buffer[start:end].view(wire.dtype).view(num_rows, *wire.shape)
            if index is None:
                target.copy_(tensor)
            elif wire.dtype == tensor.dtype:
                gather_rows(tensor, index, out=target)
            else:
                target.copy_(gather_rows(tensor, index))
            start = end
        return buffer

    def decode(self, buffer: Tensor, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> Rows:
        rows: dict[int, Tensor] = {}
        start = 0
        for i in self._order(like):
            wire = self._on_wire(like[i])
            end = start + wire.nbytes(num_rows)
            rows[i] = buffer[start:end].view(wire.dtype).view(num_rows, *wire.shape).to(like[i].dtype)
            start = end
        return tuple(rows[i] for i in range(len(like)))

    def _order(self, like: Sequence[RowLike]) -> list[int]:
        """Return operands in the order of a buffer: wider elements first, so that all are aligned."""
        return sorted(range(len(like)), key=lambda i: -self._on_wire(like[i]).dtype.itemsize)


class _Nothing(Codec):
    """Send no bytes; the receiver reads zeros."""

    decodes_late = True

    def nbytes(self, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> int:
        return 0

    def encode(self, rows: Rows, index: Tensor | None, tag: MessageTag, peer: int) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=rows[0].device)

    def decode(self, buffer: Tensor, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> Rows:
        return tuple(each.empty(num_rows).zero_() for each in like)


@dataclass(frozen=True)
class FirstAndRest(Wire):
    """One codec for the first operand, another for the rest: gradients may be rounded, softmax statistics may not."""

    first: Wire
    rest: Wire

    def nbytes(self, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> int:
        return self.first.nbytes(num_rows, like[:1], tag, peer) + self.rest.nbytes(num_rows, like[1:], tag, peer)

    def metadata_nbytes(self, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> int:
        first = self.first.metadata_nbytes(num_rows, like[:1], tag, peer)
        return first + self.rest.metadata_nbytes(num_rows, like[1:], tag, peer)

    def encode(self, rows: Rows, index: Tensor | None, tag: MessageTag, peer: int) -> Tensor:
        """Encode all operands. The rest comes first in the buffer: it has the wider type, so both parts are aligned."""
        if len(rows) == 1:
            return self.first.encode(rows, index, tag, peer)
        rest, first = self.rest.encode(rows[1:], index, tag, peer), self.first.encode(rows[:1], index, tag, peer)
        return torch.cat([rest, first])

    def decode(self, buffer: Tensor, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> Rows:
        at = self.rest.nbytes(num_rows, like[1:], tag, peer)
        rest = self.rest.decode(buffer[:at], num_rows, like[1:], tag, peer)
        return (*self.first.decode(buffer[at:], num_rows, like[:1], tag, peer), *rest)

    def as_received(self, rows: Rows, index: Tensor, tag: MessageTag, peer: int) -> Rows:
        first = self.first.as_received(rows[:1], index, tag, peer)
        return (*first, *self.rest.as_received(rows[1:], index, tag, peer))


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Rows without change."""

    exactness = frozenset[Exactness]({"exact"})

    def build(self, lists: RowLists, comm: Communicator, seed: int) -> Codec:
        return _Cast(None)

    def price(self, num_rows: float, widths: Sequence[int], *, itemsize: int = 4, gradient: bool = False) -> WirePrice:
        return WirePrice(num_rows * itemsize * sum(widths), 0.0, 32)


@dataclass(frozen=True, kw_only=True)
class BFloat16:
    """Rows rounded to bfloat16 on the wire: half the bytes of fp32, the baseline for quantization."""

    exactness = frozenset[Exactness]({"rounded"})

    def build(self, lists: RowLists, comm: Communicator, seed: int) -> Codec:
        return _Cast(torch.bfloat16)

    def price(self, num_rows: float, widths: Sequence[int], *, itemsize: int = 4, gradient: bool = False) -> WirePrice:
        return WirePrice(num_rows * 2 * sum(widths), 0.0, 16)


def is_constant(config: CodecConfig) -> bool:
    """Return True if the encoding depends only on a row's values: no epochs, keys, statistics or work on the host."""
    return isinstance(config, (Identity, BFloat16))


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Halo rows and their gradients become zeros: the negative control of every accuracy claim."""

    exactness = frozenset[Exactness]({"sampled"})

    def build(self, lists: RowLists, comm: Communicator, seed: int) -> Codec:
        return _Nothing()

    def price(self, num_rows: float, widths: Sequence[int], *, itemsize: int = 4, gradient: bool = False) -> WirePrice:
        return WirePrice(0.0, 0.0, None)
