"""Encode rows as bytes and decode them: 1, 2, 4 or 8 bits, FP8, BF16 or FP32 per column, unbiased stochastic rounding.

Shapes: x [N, D], index [n] -> [total] uint8 in the format of `wire`, and back to [n, D]. Rounding is keyed by
(key, global row id, column), so every body gives the same bytes. The arithmetic is defined in `quantize/naive.py`.
Floor: n (D b + row_nbytes) bytes each way, and 8 n for the ids; one launch serves all peers and codes on a GPU.
"""

from typing import Unpack

from torch import Tensor

from gnnpar_kernels import wire
from gnnpar_kernels.dispatch import body_of
from gnnpar_kernels.quantize import naive
from gnnpar_kernels.registration import define, public, signed_key
from gnnpar_kernels.wire import Codes, Decoding, Encoding


@define(
    "quantize_rows_(Tensor x, Tensor? index, int code, Tensor? bits, Tensor? offsets, Tensor ids, SymInt key, "
    "int block, Tensor(a!) out) -> ()"
)
def _quantize_rows_(x, index, code, bits, offsets, ids, key, block, out) -> None:
    codes = code if bits is None else bits
    body_of("quantize_rows", x.device)(x, index, codes, offsets, ids=ids, key=key, block=block, out=out)


@public(naive.quantize_rows, __name__)
def quantize_rows(
    x: Tensor, index: Tensor | None, bits: Codes, offsets: Tensor | None = None, *, key: int, **how: Unpack[Encoding]
) -> Tensor:
    out = wire.encoded(x, index, bits, offsets, **how)
    _quantize_rows_(x, index, *_code_or_codes(bits), offsets, how["ids"], signed_key(key), how["block"], out)
    return out


@define(
    "dequantize_rows_(Tensor buffer, int code, Tensor? bits, Tensor? offsets, int width, int block, Tensor? index, "
    "Tensor(a!) out, bool add) -> ()"
)
def _dequantize_rows_(buffer, code, bits, offsets, width, block, index, out, add) -> None:
    codes = code if bits is None else bits
    body = body_of("dequantize_rows", out.device)
    body(buffer, codes, offsets, width=width, block=block, index=index, out=out, add=add)


@public(naive.dequantize_rows, __name__)
def dequantize_rows(buffer: Tensor, bits: Codes, offsets: Tensor | None = None, **how: Unpack[Decoding]) -> Tensor:
    _, out = wire.decoded(buffer, bits, offsets, **how)
    place = (how["width"], how["block"], how["index"])
    _dequantize_rows_(buffer, *_code_or_codes(bits), offsets, *place, out, how["add"])
    return out


def _code_or_codes(bits: Codes) -> tuple[int, Tensor | None]:
    """Return (code of all rows, None) or (0, codes), since a schema has no union type."""
    return (bits, None) if isinstance(bits, int) else (0, bits)
