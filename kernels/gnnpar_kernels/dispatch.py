"""Which body an op takes: Triton on a GPU, fast torch on a CPU, the specification elsewhere; GNNPAR_KERNELS forces one.

The device of an op's first tensor decides, at every call; bodies of one op share name and signature.
"""

import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from gnnpar_kernels import cpu, naive

VARIABLE = "GNNPAR_KERNELS"
NAMES = ("naive", "cpu", "triton")


class Choice(NamedTuple):
    """The body taken for one op and the reason, for `gnnpar doctor`."""

    body: str
    reason: str


def choose(device: str, op: str) -> Choice:
    """Body of an op for tensors on a device of this type; raises if the environment forces what cannot run there."""
    forced = os.environ.get(VARIABLE, "")
    if forced and forced not in NAMES:
        raise ValueError(f"{VARIABLE}={forced} is not one of {', '.join(NAMES)}: unset it to let the device decide")
    if forced == "naive":
        return Choice("naive", f"{VARIABLE}=naive")
    if forced == "triton":
        return _triton(device, op, forced=True)
    if device == "cpu":
        if _is_own(cpu, op):
            return Choice("cpu", "fast torch body")
        return Choice("naive", "already the fast one on a CPU")
    if forced == "cpu":
        raise ValueError(f"{VARIABLE}=cpu, but the tensors are on {device}: use naive or triton, or unset it")
    return _triton(device, op, forced=False)


def _triton(device: str, op: str, *, forced: bool) -> Choice:
    """Triton where it can run; a reason not to, or one clear error if it is forced."""
    missing = ""
    if importlib.util.find_spec("triton") is None:
        missing = "the triton package is not installed"
    elif device != "cuda" and (device != "cpu" or os.environ.get("TRITON_INTERPRET", "0") != "1"):
        missing = f"the tensors are on {device} (TRITON_INTERPRET=1 runs the kernels on a CPU, slowly)"
    if missing and forced:
        raise ValueError(f"{VARIABLE}=triton, but {missing}: use naive or cpu, or unset it")
    if missing:
        return Choice("naive", f"{missing}: plain torch on {device}")
    if not _is_own(_body("triton"), op):
        return Choice("naive", f"already the fast one on {device}")
    return Choice("triton", f"{VARIABLE}=triton" if forced else "compiled for this GPU at the first call")


def _is_own(body: ModuleType, op: str) -> bool:
    """Whether a body has code of its own for an op."""
    return getattr(body, op) is not getattr(naive, op)


_interpreter = threading.RLock()  # Triton's interpreter keeps its state in globals: rank threads take turns


def _one_at_a_time(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _interpreter:
        return body(*args, **kwargs)


@functools.cache
def _body(name: str) -> ModuleType:
    return {"naive": naive, "cpu": cpu}.get(name) or importlib.import_module("gnnpar_kernels.triton")


def body_of(op: str, device: torch.device) -> Callable[..., Any]:
    """The function that runs an op for tensors on this device."""
    name = choose(device.type, op).body
    body = getattr(_body(name), op)
    return functools.partial(_one_at_a_time, body) if name == "triton" and device.type == "cpu" else body


def implementations(device: str | None = None) -> dict[str, Choice]:
    """Body taken by each op and why, on this machine's accelerator if it has one."""
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return {op: choose(where, op) for op in sorted(naive.__all__)}
