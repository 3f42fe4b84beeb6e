"""Rows times a matrix, y_i = W x_i + b + a_i: the specification, and fast on a GPU and in fp64."""

import torch
import torch.nn.functional as F
from torch import Tensor


def dense(x: Tensor, weight: Tensor, *, bias: Tensor | None = None, add: Tensor | None = None) -> Tensor:
    """x weight^T + bias + add. Shapes: x [N, F], weight [O, F], bias [O] or None, add [N, O] or None -> [N, O]."""
    if add is None:
        return F.linear(x, weight, bias)
    return torch.addmm(add if bias is None else add + bias, x, weight.T)
