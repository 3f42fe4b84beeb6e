"""Rows times a matrix by oneDNN in fp32, which adds bias and summand while a tile of the output is in cache.

50,000 x 128 x 128, 1 thread of an AMD EPYC (Zen 4): 18 ms; F.linear, MKL's product, 21 to 29, 3 of them for copying the
bias into every row of the output first.
"""

import torch
from torch import Tensor

from gnnpar_kernels.dense import naive

NARROW = 32  # columns of the output: below, MKL is faster (128 x 8: 3.6 against 4.6 ms)


def dense(x: Tensor, weight: Tensor, *, bias: Tensor | None = None, add: Tensor | None = None) -> Tensor:
    """See `naive.dense`."""
    tensors = [t for t in (x, weight, bias, add) if t is not None]
    suits = torch.backends.mkldnn.is_available() and all(t.dtype == torch.float32 for t in tensors)
    if not suits or weight.shape[0] < NARROW or x.numel() == 0:
        return naive.dense(x, weight, bias=bias, add=add)
    pointwise = torch.ops.mkldnn._linear_pointwise  # the op that torch.compile uses for a dense layer on a CPU
    if add is None:
        return pointwise.default(x, weight, bias, "none", [], "")
    return pointwise.binary(x, add, weight, bias, "add")
