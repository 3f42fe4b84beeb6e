"""Which body an op takes: the fast torch body on a CPU, the specification elsewhere; GNNPAR_KERNELS forces one.

The device of an op's first tensor decides, at every call; bodies of one op share name and signature.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from gnnpar_kernels import cpu, naive

P = ParamSpec("P")
R = TypeVar("R")

VARIABLE = "GNNPAR_KERNELS"
NAMES = ("naive", "cpu", "triton")


class Choice(NamedTuple):
    """The body taken for one op and the reason, for `gnnpar doctor`."""

    body: str
    reason: str


def choose(device: str, *, has_cpu: bool) -> Choice:
    """Body for tensors on a device of this type; raises if the environment forces one that cannot run there."""
    forced = os.environ.get(VARIABLE, "")
    if forced and forced not in NAMES:
        raise ValueError(f"{VARIABLE}={forced} is not one of {', '.join(NAMES)}: unset it to let the device decide")
    if forced == "triton":
        raise ValueError(f"{VARIABLE}=triton, but there are no Triton kernels yet: use naive or cpu, or unset it")
    if forced == "naive":
        return Choice("naive", f"{VARIABLE}=naive")
    if device == "cpu":
        return Choice("cpu", "fast torch body") if has_cpu else Choice("naive", "already the fast one on a CPU")
    if forced == "cpu":
        raise ValueError(f"{VARIABLE}=cpu, but the tensors are on {device}: use naive, or unset it")
    return Choice("naive", f"no Triton kernels yet: plain torch on {device}")


_CHOICES: dict[str, bool] = {}


def _device_type(args: tuple[Any, ...]) -> str:
    for value in args:
        if isinstance(value, Tensor):
            return value.device.type
        if isinstance(value, tuple):
            return _device_type(value)
    return "cpu"


def _op(specification: Callable[P, R], cpu: Callable[P, R] | None = None) -> Callable[P, R]:
    """The public op over its bodies."""
    fast = specification if cpu is None else cpu
    _CHOICES[getattr(specification, "__name__", "?")] = cpu is not None

    @functools.wraps(specification)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        choice = choose(_device_type(args), has_cpu=cpu is not None)
        return (fast if choice.body == "cpu" else specification)(*args, **kwargs)

    return call


def implementations(device: str | None = None) -> dict[str, Choice]:
    """Body taken by each op and why, on this machine's accelerator if it has one."""
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return {name: choose(where, has_cpu=has_cpu) for name, has_cpu in sorted(_CHOICES.items())}


spmm = _op(naive.spmm, cpu.spmm)
attend = _op(naive.attend, cpu.attend)
attend_finish = _op(naive.attend_finish, cpu.attend_finish)
attend_grad_src = _op(naive.attend_grad_src, cpu.attend_grad_src)
attend_grad_dst = _op(naive.attend_grad_dst, cpu.attend_grad_dst)
attend_grad = _op(naive.attend_grad, cpu.attend_grad)
extremum = _op(naive.extremum, cpu.extremum)
extremum_finish = _op(naive.extremum_finish)
extremum_grad = _op(naive.extremum_grad, cpu.extremum_grad)
gather_rows = _op(naive.gather_rows)
scatter_add_rows_ = _op(naive.scatter_add_rows_)
dropout = _op(naive.dropout, cpu.dropout)
keep_mask = _op(naive.keep_mask, cpu.keep_mask)
apply_mask = _op(naive.apply_mask, cpu.apply_mask)
