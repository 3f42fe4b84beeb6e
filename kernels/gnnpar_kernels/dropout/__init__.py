"""Dropout keyed by (key, global row id, column): the mask of a row does not depend on which rows share its tensor.

Shapes: x [n, ...], ids [n] int64 -> [n, ...]; a mask is [n, width] bool. The hash is defined in `hashing`.
Floor of rows of F entries of b bytes: n (2 F b + 8) bytes; only `keep_mask` writes the mask to memory.
"""

import torch

from gnnpar_kernels.dropout import naive
from gnnpar_kernels.registration import like, operator

dropout = operator(naive.dropout, __name__, fake=like("x"))
keep_mask = operator(
    naive.keep_mask,
    __name__,
    fake=lambda ids, width, **rest: ids.new_empty((ids.shape[0], width), dtype=torch.bool),
)
apply_mask = operator(naive.apply_mask, __name__, fake=like("x"))
