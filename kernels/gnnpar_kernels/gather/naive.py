"""Pack rows for a message and add received rows back: the specification, already fast on a CPU."""

import torch
from torch import Tensor


def gather_rows(x: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x[index], written to `out` if given. Shapes: x [N, ...], index [n], out [n, ...] or None -> [n, ...]."""
    if out is None:
        return x.index_select(0, index)
    return torch.index_select(x, 0, index, out=out)


def scatter_add_rows_(out: Tensor, index: Tensor, x: Tensor) -> Tensor:
    """Add x to out[index] in place, with unique `index`. Shapes: out [N, ...], index [n], x [n, ...] -> out."""
    return out.index_add_(0, index, x.to(out.dtype))
