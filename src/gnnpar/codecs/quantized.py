"""Base of all quantizing codecs: rows in few bits, with a step and a zero point per row and operand.

`gnnpar_kernels.wire` defines format and rounding. Rounding is unbiased, since it uses the metadata that are sent; codes
are clamped. Each peer gets one buffer. One launch encodes rows of different bits.

Random numbers are keyed by (seed, epoch, layer, call, direction, operand, sender) and by (receiver, node) of each row:
independent between ranks and between peers, equal between runs and between forward and rematerialisation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gnnpar.codecs.codec import Codec
from gnnpar.comm import MessageTag, Outgoing, RowLike, RowLists
from gnnpar.comm.rows import Decoder
from gnnpar.folds.block import Rows
from gnnpar_kernels import dequantize_rows, fold_key, gather_rows, quantize_rows
from gnnpar_kernels.wire import FP32, NAN, has_metadata, metadata_nbytes, row_nbytes, row_offsets

Direction = Literal["forward", "backward", "push"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "push")
NO_RANGE = NAN << 16 | NAN  # the metadata of a non-finite row
RAW = FP32  # rows in their own type


class Key(NamedTuple):
    """Unit of the assignment of bits: one exchange in one direction, in all epochs and for all slices of its rows."""

    layer: int
    call: int
    direction: Direction

    @staticmethod
    def of(tag: MessageTag) -> Key:
        direction = tag.phase if tag.phase in ("backward", "push") else "forward"
        return Key(tag.layer, tag.call, direction)

    @property
    def name(self) -> str:
        """Return 'forward0', or 'forward0.1' for a layer's second aggregation. Calls of partial rows begin at 64."""
        return f"{self.direction}{self.layer}" + (f".{self.call}" if self.call else "")


class Packing(NamedTuple):
    """Layout of n rows of one operand in a buffer: one code, or a code per row with offsets, and the bytes."""

    code: int | Tensor
    offsets: Tensor | None
    nbytes: int
    metadata: int


class QuantizedRows(Codec):
    """Encoding and decoding. `codes` returns the bits of the first operand of an exchange. Other operands (attention
    scores) use `score_bits`, or their own type if metadata would make a narrow row larger than fp32."""

    decodes_late = True  # bits are looked up when a message is posted

    def __init__(self, lists: RowLists, *, seed: int, score_bits: int) -> None:
        self.lists, self.seed, self.score_bits = lists, seed, score_bits
        self._packings: dict[tuple[object, ...], Packing] = {}  # by all arguments of `_pack`
        self._joined: dict[tuple[object, ...], tuple[Tensor, Tensor, Packing]] = {}  # of all peers: index, ids, packing
        self._suspects: list[tuple[Tensor, str]] = []

    def codes(self, key: Key, peer: int, *, sending: bool) -> int | Tensor:
        """Return one code, or one per row of the peer's whole list, [n] uint8."""
        raise NotImplementedError

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch. On a GPU, report non-finite rows here, one epoch late, so that encoding does not wait."""
        suspects, self._suspects = self._suspects, []
        if suspects:  # read together: the host waits once per epoch
            lost = torch.stack([each for each, _ in suspects]).cpu()
            for each, (_, where) in zip(lost, suspects, strict=True):
                if bool(each):
                    raise ValueError(where)

    def nbytes(self, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> int:
        return sum(self._packing(i, num_rows, e, tag, peer, sending=False).nbytes for i, e in enumerate(like))

    def metadata_nbytes(self, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> int:
        return sum(self._packing(i, num_rows, e, tag, peer, sending=True).metadata for i, e in enumerate(like))

    def encode(self, rows: Rows, index: Tensor | None, tag: MessageTag, peer: int) -> Tensor:
        num_rows = len(rows[0]) if index is None else len(index)
        packings = [
            self._packing(i, num_rows, like, tag, peer, sending=True) for i, like in enumerate(RowLike.of(rows))
        ]
        return self._encode(rows, index, self.ids_of(index, num_rows, tag, peer), packings, tag, peer)

    def encode_all(self, outgoing: Mapping[int, Outgoing], tag: MessageTag) -> Mapping[int, Tensor]:
        """Encode messages to all peers: one launch for whole lists of one operand, else one per peer and operand."""
        rows: Rows = next((out.rows for out in outgoing.values()), ())
        if len(outgoing) < 2 or len(rows) != 1 or not all(self._is_list(p, out, rows) for p, out in outgoing.items()):
            return super().encode_all(outgoing, tag)
        x, lists = rows[0], {p: self.lists.sent[p] for p in outgoing}
        like = RowLike.of(rows)[0]
        packings = {p: self._packing(0, len(i), like, tag, p, sending=True) for p, i in lists.items()}
        kinds = {isinstance(how.code, int) for how in packings.values()}
        if len(kinds) != 1 or any(map(_is_raw, packings.values())):
            return super().encode_all(outgoing, tag)
        at = Key.of(tag), x.shape[1:], tuple(lists)
        if at not in self._joined:
            ids = torch.cat([self.ids_of(index, len(index), tag, p) for p, index in lists.items()])
            self._joined[at] = torch.cat(list(lists.values())), ids, _join(packings.values())
        index, ids, how = self._joined[at]
        key = self.noise_key(tag, 0, self.lists.part)
        buffer = torch.empty(how.nbytes, dtype=torch.uint8, device=ids.device)
        quantize_rows(x.detach().flatten(1), index, how.code, how.offsets, ids=ids, key=key, out=buffer)
        self._look_for_lost_rows(buffer, how, tag, f"ranks {', '.join(map(str, lists))}")
        parts = torch.split(buffer, [each.nbytes for each in packings.values()])
        return dict(zip(lists, parts, strict=True))

    def decode(self, buffer: Tensor, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> Rows:
        return self.decoder(num_rows, like, tag, peer)(buffer)

    def decoder(self, num_rows: int, like: Sequence[RowLike], tag: MessageTag, peer: int) -> Decoder:
        packings = [self._packing(i, num_rows, each, tag, peer, sending=False) for i, each in enumerate(like)]
        return partial(decode_rows, num_rows=num_rows, like=like, packings=packings)

    def as_received(self, rows: Rows, index: Tensor, tag: MessageTag, peer: int) -> Rows:
        like = RowLike.of(rows)
        codes = self.codes(Key.of(tag), peer, sending=True)
        if isinstance(codes, Tensor):  # any rows of the list, so look up their positions in it
            codes = codes[torch.searchsorted(self.lists.sent[peer], index)]
        packings = [_pack(self._code(i, each, codes), len(index), each) for i, each in enumerate(like)]
        ids = self.ids_of(index, len(index), tag, peer)
        return decode_rows(self._encode(rows, index, ids, packings, tag, peer), len(index), like, packings)

    def _is_list(self, peer: int, out: Outgoing, rows: Rows) -> bool:
        """Return True if the message sends the peer's whole list, indexed from `rows`."""
        return out.rows is rows and out.index is not None and out.index is self.lists.sent.get(peer)

    def forget_packings(self) -> None:
        """Drop cached packings after codes have changed."""
        self._packings.clear()
        self._joined.clear()

    def ids_of(self, index: Tensor | None, num_rows: int, tag: MessageTag, peer: int) -> Tensor:
        """Return the noise key of each outgoing row: its node and its reader."""
        if index is not None:
            return self.lists.node_ids[index] + (peer << 48)
        ids = self.lists.read[peer]
        return ids[tag.first : tag.first + num_rows] + (peer << 48)

    def noise_key(self, tag: MessageTag, operand: int, sender: int) -> int:
        direction = DIRECTIONS.index(Key.of(tag).direction)
        return fold_key(self.seed, tag.epoch, tag.layer, tag.call, direction, operand, sender)

    def _packing(
        self, operand: int, num_rows: int, like: RowLike, tag: MessageTag, peer: int, *, sending: bool
    ) -> Packing:
        key = Key.of(tag)
        at = key, operand, peer, sending, tag.first, num_rows, like.shape, like.dtype
        if (packing := self._packings.get(at)) is None:
            codes = self.codes(key, peer, sending=sending)
            if isinstance(codes, Tensor):
                codes = codes[tag.first : tag.first + num_rows]
            packing = self._packings[at] = _pack(self._code(operand, like, codes), num_rows, like)
        return packing

    def _code(self, operand: int, like: RowLike, codes: int | Tensor) -> int | Tensor:
        code = codes if operand == 0 else self.score_bits
        if isinstance(code, int) and not has_metadata(code):
            return code
        return code if is_wide(like.width, like.dtype.itemsize) else RAW

    def _encode(
        self, rows: Rows, index: Tensor | None, ids: Tensor, packings: Sequence[Packing], tag: MessageTag, peer: int
    ) -> Tensor:
        buffer = torch.empty(sum(p.nbytes for p in packings), dtype=torch.uint8, device=rows[0].device)
        for operand, (tensor, how, place) in enumerate(zip(rows, packings, _places(packings), strict=True)):
            part = buffer[place]
            if _is_raw(how):
                target = part.view(tensor.dtype).view(len(ids), *tensor.shape[1:])
                target.copy_(tensor) if index is None else gather_rows(tensor, index, out=target)
                continue
            key = self.noise_key(tag, operand, self.lists.part)
            quantize_rows(tensor.detach().flatten(1), index, how.code, how.offsets, ids=ids, key=key, out=part)
            self._look_for_lost_rows(part, how, tag, f"rank {peer}")
        return buffer

    def _look_for_lost_rows(self, part: Tensor, how: Packing, tag: MessageTag, readers: str) -> None:
        if not how.metadata:
            return
        words = part.view(torch.int32)
        if how.offsets is None:
            num_rows = how.metadata // 4
            lost = words[:: len(words) // num_rows] == NO_RANGE
        else:
            lost = words[how.offsets[:-1] // 4] == NO_RANGE
        where = (
            f"epoch {tag.epoch}, layer {tag.layer}, {Key.of(tag).direction}: a row for {readers} holds Inf or NaN "
            "(or its range is beyond 2^119), which no step covers; lower optim.lr, set optim.clip, or use "
            "codec=identity"
        )
        if part.is_cuda:
            self._suspects.append((lost.any(), where))
        elif bool(lost.any()):
            raise ValueError(where)


def is_wide(width: int, itemsize: int) -> bool:
    """Return True if the elements of a row (at most 4 bytes each) are longer than its metadata and a word."""
    return min(itemsize, 4) * width > metadata_nbytes(width, 8) + 4


def price_of_codes(
    num_rows: float, widths: Sequence[int], firsts: Sequence[int], scores: int, *, itemsize: int
) -> tuple[float, float]:
    """Return bytes of (payload, metadata) of rows with the first operand in each of the codes `firsts` equally often,
    and all others in the code `scores`."""
    payload = metadata = 0.0
    for operand, width in enumerate(widths):
        codes = firsts if operand == 0 else (scores,)
        for code in codes:
            if code == RAW or (has_metadata(code) and not is_wide(width, itemsize)):
                payload += num_rows * itemsize * width / len(codes)
                continue
            extra = metadata_nbytes(width, code)
            payload += num_rows * (row_nbytes(width, code) - extra) / len(codes)
            metadata += num_rows * extra / len(codes)
    return payload, metadata


def _pack(code: int | Tensor, num_rows: int, like: RowLike) -> Packing:
    if isinstance(code, Tensor):
        offsets = row_offsets(code, like.width)
        return Packing(code, offsets, int(offsets[-1]), num_rows * metadata_nbytes(like.width, 8))
    if code == RAW:
        return Packing(RAW, None, like.nbytes(num_rows), 0)
    return Packing(code, None, num_rows * row_nbytes(like.width, code), num_rows * metadata_nbytes(like.width, code))


def _is_raw(how: Packing) -> bool:
    return isinstance(how.code, int) and how.code == RAW


def _join(packings: Collection[Packing]) -> Packing:
    """Join packings that all have one code, or all a code per row."""
    nbytes, metadata = sum(p.nbytes for p in packings), sum(p.metadata for p in packings)
    first = next(iter(packings)).code
    if isinstance(first, int):
        return Packing(first, None, nbytes, metadata)
    codes: list[Tensor] = []
    offsets, start = [torch.zeros(1, dtype=torch.int64, device=first.device)], 0
    for how in packings:
        assert isinstance(how.code, Tensor)
        assert how.offsets is not None
        codes.append(how.code)
        offsets.append(how.offsets[1:] + start)
        start += how.nbytes
    return Packing(torch.cat(codes), torch.cat(offsets), nbytes, metadata)


def _places(packings: Sequence[Packing]) -> list[slice]:
    """Return the place of each operand. Raw rows come first, so that 8-byte elements are aligned; raw rows that do not
    fill words come last, so that the words of codes are aligned."""
    first = [_is_raw(how) and how.nbytes % 4 == 0 for how in packings]
    last = [_is_raw(how) and how.nbytes % 4 != 0 for how in packings]
    places, start = [slice(0)] * len(packings), 0
    for operand in sorted(range(len(packings)), key=lambda i: (last[i], not first[i])):
        places[operand] = slice(start, start + packings[operand].nbytes)
        start += packings[operand].nbytes
    return places


def decode_rows(buffer: Tensor, num_rows: int, like: Sequence[RowLike], packings: Sequence[Packing]) -> Rows:
    """Return all operands of a buffer with these packings."""
    rows: list[Tensor] = []
    for each, how, place in zip(like, packings, _places(packings), strict=True):
        part = buffer[place]
        if _is_raw(how):
            rows.append(part.view(each.dtype).view(num_rows, *each.shape))
            continue
        out = dequantize_rows(part, how.code, how.offsets, width=each.width, dtype=each.dtype)
        rows.append(out.view(num_rows, *each.shape))
    return tuple(rows)
