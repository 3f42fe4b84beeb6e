"""How an op becomes torch's, and what every public function does before it calls one.

Ops are registered through torch.library, so that torch.compile and CUDA graphs work over them: 2 us a call on a CPU. An
op that updates a tensor in place is a second schema with a trailing underscore, as outputs must not alias inputs.
"""

import functools
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from gnnpar_kernels.dispatch import register
from gnnpar_kernels.hashing import Key

P = ParamSpec("P")
R = TypeVar("R")

CSR = "Tensor indptr, Tensor indices"
DROP = "float p, SymInt key, Tensor? words"
_LIBRARY = torch.library.Library("gnnpar_kernels", "DEF")


def define(schema: str, *, fake: Callable[..., object] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function for every device; it becomes the op. Ops without `fake` return nothing."""

    def decorate(run: Callable[P, R]) -> Callable[P, R]:
        name = schema.split("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"gnnpar_kernels::{name}", fake or (lambda *args: None), lib=_LIBRARY)
        return getattr(torch.ops.gnnpar_kernels, name).default  # torch makes the attribute from the schema's name

    return decorate


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function of the package of `function`; its `naive.py` gives the signature and docstring.
    Tensors that ask for a gradient are refused."""

    @functools.wraps(register(function.__name__, function.__module__))
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_grad_enabled():
            _refuse_gradients(function.__name__, (*args, *kwargs.values()))
        return function(*args, **kwargs)

    call.__module__ = function.__module__
    return call


def _refuse_gradients(op: str, values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            raise RuntimeError(
                f"gnnpar_kernels.{op} records no gradient: call it inside an autograd.Function, or detach its tensors"
            )
        if isinstance(value, tuple):
            _refuse_gradients(op, value)


def flat_key(key: Key) -> tuple[int, Tensor | None]:
    """Return a key as a schema takes it: a number, or the words of one."""
    return (0, key) if isinstance(key, Tensor) else (signed_key(key), None)


def key_of(key: int, words: Tensor | None) -> Key:
    """Return the key of `flat_key`."""
    return key if words is None else words


def signed_key(key: int) -> int:
    """Return the 64 bits of a key as the int64 a schema can carry; hashing reads bits, so nothing changes."""
    return ((key + 2**63) & (2**64 - 1)) - 2**63
