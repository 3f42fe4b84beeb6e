"""Moves, dropout and quantization of rows as torch ops."""

import torch
from torch import Tensor

from gnnpar_kernels import wire
from gnnpar_kernels.dispatch import body_of
from gnnpar_kernels.library.register import DROP, define, public, signed_key
from gnnpar_kernels.wire import Codes


@define(
    "gather_rows(Tensor x, Tensor index) -> Tensor",
    fake=lambda x, index: x.new_empty((index.shape[0], *x.shape[1:])),
)
def _gather_rows(x: Tensor, index: Tensor) -> Tensor:
    return body_of("gather_rows", x.device)(x, index)


@define("gather_rows_(Tensor x, Tensor index, Tensor(a!) out) -> ()")
def _gather_rows_(x: Tensor, index: Tensor, out: Tensor) -> None:
    body_of("gather_rows", x.device)(x, index, out=out)


@public
def gather_rows(x: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    if out is None:
        return _gather_rows(x, index)
    _gather_rows_(x, index, out)
    return out


@define("scatter_add_rows_(Tensor(a!) out, Tensor index, Tensor x) -> ()")
def _scatter_add_rows_(out: Tensor, index: Tensor, x: Tensor) -> None:
    body_of("scatter_add_rows_", out.device)(out, index, x)


@public
def scatter_add_rows_(out: Tensor, index: Tensor, x: Tensor) -> Tensor:
    _scatter_add_rows_(out, index, x)
    return out


@define(
    f"dropout(Tensor x, Tensor ids, {DROP}) -> Tensor",
    fake=lambda x, ids, p, key: x.new_empty(x.shape),
)
def _dropout(x: Tensor, ids: Tensor, p: float, key: int) -> Tensor:
    return body_of("dropout", x.device)(x, ids, p=p, key=key)


@public
def dropout(x: Tensor, ids: Tensor, *, p: float, key: int) -> Tensor:
    return _dropout(x, ids, p, signed_key(key))


@define(
    f"keep_mask(Tensor ids, SymInt width, {DROP}) -> Tensor",
    fake=lambda ids, width, p, key: ids.new_empty((ids.shape[0], width), dtype=torch.bool),
)
def _keep_mask(ids: Tensor, width: int, p: float, key: int) -> Tensor:
    return body_of("keep_mask", ids.device)(ids, width, p=p, key=key)


@public
def keep_mask(ids: Tensor, width: int, *, p: float, key: int) -> Tensor:
    return _keep_mask(ids, width, p, signed_key(key))


@define("apply_mask(Tensor x, Tensor keep, float p) -> Tensor", fake=lambda x, keep, p: x.new_empty(x.shape))
def _apply_mask(x: Tensor, keep: Tensor, p: float) -> Tensor:
    return body_of("apply_mask", x.device)(x, keep, p=p)


@public
def apply_mask(x: Tensor, keep: Tensor, *, p: float) -> Tensor:
    return _apply_mask(x, keep, p)


@define(
    "quantize_rows_(Tensor x, Tensor? index, int code, Tensor? bits, Tensor? offsets, Tensor ids, SymInt key, "
    "int block, Tensor(a!) out) -> ()"
)
def _quantize_rows_(
    x: Tensor, index: Tensor | None, code: int, bits: Tensor | None, offsets: Tensor | None, ids: Tensor, key: int,
    block: int, out: Tensor,
) -> None:  # fmt: skip
    codes = code if bits is None else bits
    body_of("quantize_rows", x.device)(x, index, codes, offsets, ids=ids, key=key, block=block, out=out)


@public
def quantize_rows(
    x: Tensor, index: Tensor | None, bits: Codes, offsets: Tensor | None = None, *,
    ids: Tensor, key: int, block: int = 0, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    wire.check_quantize(x, index, bits, offsets, ids, block, out)
    if out is None:
        nbytes = wire.buffer_nbytes(ids.shape[0], x.shape[1], bits, offsets, block)
        out = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
    _quantize_rows_(x, index, *_codes(bits), offsets, ids, signed_key(key), block, out)
    return out


@define(
    "dequantize_rows_(Tensor buffer, int code, Tensor? bits, Tensor? offsets, int width, int block, Tensor? index, "
    "Tensor(a!) out, bool add) -> ()"
)
def _dequantize_rows_(
    buffer: Tensor, code: int, bits: Tensor | None, offsets: Tensor | None, width: int, block: int,
    index: Tensor | None, out: Tensor, add: bool,
) -> None:  # fmt: skip
    codes = code if bits is None else bits
    body_of("dequantize_rows", out.device)(
        buffer, codes, offsets, width=width, block=block, index=index, out=out, add=add
    )  # fmt: skip


@public
def dequantize_rows(
    buffer: Tensor, bits: Codes, offsets: Tensor | None = None, *, width: int, block: int = 0,
    index: Tensor | None = None, out: Tensor | None = None, add: bool = False, dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    num_rows = wire.received_rows(buffer, bits, offsets, width=width, block=block, index=index, out=out, add=add)
    if out is None:
        out = torch.empty((num_rows, width), dtype=dtype, device=buffer.device)
    _dequantize_rows_(buffer, *_codes(bits), offsets, width, block, index, out, add)
    return out


def _codes(bits: Codes) -> tuple[int, Tensor | None]:
    """One code for all rows, or a tensor of codes."""
    return (bits, None) if isinstance(bits, int) else (0, bits)
