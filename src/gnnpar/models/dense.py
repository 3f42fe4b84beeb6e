"""A dense layer: the fast body of `gnnpar_kernels.dense` where it applies, else F.linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

import gnnpar_kernels as kernels


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None, add: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias + add. Shapes: x [N, F], weight [O, F], bias [O], add [N, O] -> [N, O]."""
    if has_fast_body(x, weight):
        return _Dense.apply(x, weight, bias, add)
    if add is None:
        return F.linear(x, weight, bias)
    return torch.addmm(add if bias is None else add + bias, x, weight.T)


def has_fast_body(x: Tensor, weight: Tensor) -> bool:
    """Return True for fp32 on a CPU, outside torch.compile and autocast."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    return x.ndim == 2 and x.dtype == weight.dtype == torch.float32


class _Saved(FunctionCtx):
    """Declare the attributes that `forward` saves on its context."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Saved, x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return kernels.dense(x, weight, bias=bias, add=add)

    @staticmethod
    def backward(ctx: _Saved, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, of_add = ctx.needs_input_grad
        grad = grad_outputs[0].contiguous()
        return (
            kernels.dense(grad, weight.T) if of_x else None,
            grad.T @ x if of_weight else None,
            grad.sum(0) if of_bias else None,
            grad if of_add else None,
        )
