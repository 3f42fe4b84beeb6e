"""Types that torch does not declare, of autograd functions and of Python values of tensors."""

# only this file calls torch functions without types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx

from gnnpar.folds.block import Rows
from gnnpar.precision import unmixed


class Context(FunctionCtx):
    """Values that an autograd function keeps from forward to backward. A function's own class declares further
    fields."""

    saved_tensors: Rows
    needs_input_grad: tuple[bool, ...]


def apply(function: type[Function], *arguments: object) -> Tensor:
    """Apply an autograd function and return its tensor."""
    with _as_given(arguments):
        out = function.apply(*arguments)
    assert isinstance(out, Tensor)
    return out


def apply_to_rows(function: type[Function], *arguments: object) -> Rows:
    """Apply an autograd function and return its tensors."""
    with _as_given(arguments):
        out = function.apply(*arguments)
    assert isinstance(out, tuple)
    return out


def _as_given(arguments: tuple[object, ...]) -> AbstractContextManager[object]:
    """Leave torch.autocast in forward, as in backward."""
    return unmixed(next((t.device for t in arguments if isinstance(t, Tensor)), torch.device("cpu")))


def integers(x: Tensor) -> list[int]:
    """Return a tensor [n] as integers."""
    return x.tolist()


def floats(x: Tensor) -> list[float]:
    """Return a tensor [n] as floats."""
    return x.tolist()


def unique(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (values in ascending order, the position of every entry among them)."""
    values, inverse = torch.unique(x, return_inverse=True)
    return values, inverse


def or_zeros(gradient: Tensor | None, of: Tensor) -> Tensor:
    """Return zeros for None: torch.autograd.grad returns None with allow_unused and does not declare it."""
    return torch.zeros_like(of) if gradient is None else gradient
