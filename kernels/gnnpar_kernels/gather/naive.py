"""Pack rows for a message and add received rows back: the specification, and on a CPU already fast."""

import torch
from torch import Tensor


def gather_rows(x: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x[index], into `out` if given. Shapes: x [N, ...], index [n], out [n, ...] or None -> [n, ...]."""
    if out is None:
        return x.index_select(0, index)
    return torch.index_select(x, 0, index, out=out)


def scatter_add_rows_(out: Tensor, index: Tensor, x: Tensor) -> Tensor:
    """out[index] += x in place, `index` unique. Shapes: out [N, ...], index [n], x [n, ...] -> out."""
    return out.index_add_(0, index, x.to(out.dtype))
