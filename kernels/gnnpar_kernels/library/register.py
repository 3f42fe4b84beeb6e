"""How an op is registered with torch, and what every public function does before it calls one."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from gnnpar_kernels import naive

P = ParamSpec("P")
R = TypeVar("R")
Drop = tuple[float, int]

CSR = "Tensor indptr, Tensor indices"
DROP = "float p, SymInt key"
_LIBRARY = torch.library.Library("gnnpar_kernels", "DEF")


def define(schema: str, *, fake: Callable[..., Any] | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated function for every device; it becomes the op. Ops without `fake` return nothing."""

    def register(run: Callable[..., Any]) -> Any:
        name = schema.split("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"gnnpar_kernels::{name}", fake or (lambda *args: None), lib=_LIBRARY)
        return getattr(torch.ops.gnnpar_kernels, name).default

    return register


def public(host: Callable[P, R]) -> Callable[P, R]:
    """Signature and words of the specification; tensors that ask for a gradient are refused."""
    specification = getattr(naive, host.__name__)

    @functools.wraps(specification)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_grad_enabled():
            _refuse_gradients(host.__name__, (*args, *kwargs.values()))
        return host(*args, **kwargs)

    call.__signature__ = inspect.signature(specification)  # type: ignore[attr-defined]
    return call


def _refuse_gradients(op: str, values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            raise RuntimeError(
                f"gnnpar_kernels.{op} records no gradient: call it inside an autograd.Function, or detach its tensors"
            )
        if isinstance(value, tuple):
            _refuse_gradients(op, value)


def flat_drop(drop: Drop | None) -> tuple[float, int]:
    return (0.0, 0) if drop is None else (drop[0], signed_key(drop[1]))


def signed_key(key: int) -> int:
    """The 64 bits of a key as the int64 a schema can carry; hashing reads bits, so nothing changes."""
    return ((key + 2**63) & (2**64 - 1)) - 2**63
