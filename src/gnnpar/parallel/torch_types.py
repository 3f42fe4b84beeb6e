"""Types that torch does not declare: of autograd functions, and of what tensors give to Python."""

# this file alone calls what torch leaves without types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx

from gnnpar.folds.block import Rows
from gnnpar.precision import unmixed


class Context(FunctionCtx):
    """What an autograd function keeps from forward to backward. A function's own declares further fields."""

    saved_tensors: Rows
    needs_input_grad: tuple[bool, ...]


def apply(function: type[Function], *arguments: object) -> Tensor:
    """Return the one tensor that a function gives."""
    with _as_given(arguments):
        out = function.apply(*arguments)
    assert isinstance(out, Tensor)
    return out


def apply_to_rows(function: type[Function], *arguments: object) -> Rows:
    """Return the tensors that a function gives."""
    with _as_given(arguments):
        out = function.apply(*arguments)
    assert isinstance(out, tuple)
    return out


def _as_given(arguments: tuple[object, ...]) -> AbstractContextManager[object]:
    """Backward is not cast by torch.autocast, so forward is not either."""
    return unmixed(next((t.device for t in arguments if isinstance(t, Tensor)), torch.device("cpu")))


def integers(x: Tensor) -> list[int]:
    """Of a tensor [n]."""
    return x.tolist()


def floats(x: Tensor) -> list[float]:
    """Of a tensor [n]."""
    return x.tolist()


def unique(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the values in ascending order, the position of every entry among them)."""
    values, inverse = torch.unique(x, return_inverse=True)
    return values, inverse


def or_zeros(gradient: Tensor | None, of: Tensor) -> Tensor:
    """torch declares no None among gradients, but gives it with allow_unused."""
    return torch.zeros_like(of) if gradient is None else gradient
