"""Dropout keyed by (key, global row id, column): the mask of a row does not depend on which rows share its tensor.

Shapes: x [n, ...], ids [n] int64 -> [n, ...]; a mask is [n, width] bool. The hash is defined in `hashing`.
Floor of rows of F entries of b bytes: n (2 F b + 8) bytes; the mask itself is never in memory unless asked for.
"""

import torch
from torch import Tensor

from gnnpar_kernels.dispatch import body_of
from gnnpar_kernels.hashing import Key
from gnnpar_kernels.registration import DROP, define, flat_key, key_of, public


@define(f"dropout(Tensor x, Tensor ids, {DROP}) -> Tensor", fake=lambda x, ids, p, key, words: x.new_empty(x.shape))
def _dropout(x: Tensor, ids: Tensor, p: float, key: int, words: Tensor | None) -> Tensor:
    return body_of("dropout", x.device)(x, ids, p=p, key=key_of(key, words))


@public
def dropout(x: Tensor, ids: Tensor, *, p: float, key: Key) -> Tensor:
    return _dropout(x, ids, p, *flat_key(key))


@define(
    f"keep_mask(Tensor ids, SymInt width, {DROP}) -> Tensor",
    fake=lambda ids, width, p, key, words: ids.new_empty((ids.shape[0], width), dtype=torch.bool),
)
def _keep_mask(ids: Tensor, width: int, p: float, key: int, words: Tensor | None) -> Tensor:
    return body_of("keep_mask", ids.device)(ids, width, p=p, key=key_of(key, words))


@public
def keep_mask(ids: Tensor, width: int, *, p: float, key: Key) -> Tensor:
    return _keep_mask(ids, width, p, *flat_key(key))


@define("apply_mask(Tensor x, Tensor keep, float p) -> Tensor", fake=lambda x, keep, p: x.new_empty(x.shape))
def _apply_mask(x: Tensor, keep: Tensor, p: float) -> Tensor:
    return body_of("apply_mask", x.device)(x, keep, p=p)


@public
def apply_mask(x: Tensor, keep: Tensor, *, p: float) -> Tensor:
    return _apply_mask(x, keep, p)
