"""Choose the body of an op: Triton on a GPU, fast torch on a CPU, else the specification; GNNPAR_KERNELS forces one.

A kernel is a folder: `naive.py` specifies its ops, the public functions; `cpu.py` and `triton.py` have the same names,
and take signatures and defaults from there (`specified`). If a body, or an op in it, is missing, the specification is
already fast there. The device of an op's first tensor decides.
"""

import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

VARIABLE = "GNNPAR_KERNELS"
NAMES = ("naive", "cpu", "triton")

Body = Callable[..., Any]  # chosen by name when called; signatures are the specification's
P = ParamSpec("P")
R = TypeVar("R")

_packages: dict[str, str] = {}  # public function: the package that holds its bodies


def specified(specification: Callable[P, R]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorate a body of an op with the name, signature and documentation of its specification. It is called with every
    keyword argument of the specification, defaults included."""
    defaults = specification.__kwdefaults__ or {}

    def decorate(body: Callable[..., R]) -> Callable[P, R]:
        @functools.wraps(specification)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return body(*args, **{**defaults, **kwargs})

        return call

    return decorate


def register(op: str, package: str) -> Body:
    """Record the package with the bodies of a public function. Return its specification.

    Import the CPU body now, since at the first call an active mode (inference, fake tensors) would change its
    constants. Triton is imported at its first use, so that a CPU never loads it.
    """
    _packages[op] = package
    _module(package, "cpu")
    return _specification(op)


@functools.cache
def _module(package: str, body: str) -> ModuleType | None:
    name = f"{package}.{body}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


@functools.cache
def _own(op: str, body: str) -> Body | None:
    """Return a body's implementation of a function, or None."""
    module = _module(_packages[op], body)
    return None if module is None else vars(module).get(op)


def _specification(op: str) -> Body:
    specification = _own(op, "naive")
    if specification is None:
        raise ValueError(f"{_packages[op]}.naive does not define {op}: write its specification there")
    return specification


class Choice(NamedTuple):
    """The body of one function and the reason for it, for `gnnpar doctor`."""

    body: str
    reason: str


def choose(device: str, op: str) -> Choice:
    """Return the body of an op for tensors on a device of this type. ValueError if a forced body cannot run there."""
    forced = os.environ.get(VARIABLE, "")
    if forced and forced not in NAMES:
        raise ValueError(f"{VARIABLE}={forced} is not one of {', '.join(NAMES)}: unset it to let the device decide")
    if forced == "naive":
        return Choice("naive", f"{VARIABLE}=naive")
    if forced == "triton":
        return _triton(device, op, forced=True)
    if device == "cpu":
        if _own(op, "cpu") is not None:
            return Choice("cpu", "fast torch body")
        return Choice("naive", "already the fast one on a CPU")
    if forced == "cpu":
        raise ValueError(f"{VARIABLE}=cpu, but the tensors are on {device}: use naive or triton, or unset it")
    return _triton(device, op, forced=False)


def _triton(device: str, op: str, *, forced: bool) -> Choice:
    """Return Triton if it can run, else the specification with the reason. ValueError if it is forced and cannot."""
    missing = ""
    if importlib.util.find_spec("triton") is None:
        missing = "the triton package is not installed"
    elif device != "cuda" and (device != "cpu" or os.environ.get("TRITON_INTERPRET", "0") != "1"):
        missing = f"the tensors are on {device} (TRITON_INTERPRET=1 runs the kernels on a CPU, slowly)"
    if missing and forced:
        raise ValueError(f"{VARIABLE}=triton, but {missing}: use naive or cpu, or unset it")
    if missing:
        return Choice("naive", f"{missing}: plain torch on {device}")
    if _own(op, "triton") is None:
        return Choice("naive", f"already the fast one on {device}")
    return Choice("triton", f"{VARIABLE}=triton" if forced else "compiled for this GPU at the first call")


_interpreter = threading.RLock()  # Triton's interpreter keeps its state in globals: one rank thread at a time


def _one_at_a_time(body: Body, *args: object, **kwargs: object) -> Any:
    with _interpreter:
        return body(*args, **kwargs)


def body_of(op: str, device: torch.device) -> Body:
    """Return the implementation of a function for tensors on this device."""
    return _body_of(op, device.type, os.environ.get(VARIABLE, ""), os.environ.get("TRITON_INTERPRET", "0"))


@functools.cache
def _body_of(op: str, device: str, forced: str, interpreted: str) -> Body:
    """Cache `body_of`, by the two variables that `choose` reads from the environment."""
    name = choose(device, op).body
    body = _own(op, name) or _specification(op)
    return functools.partial(_one_at_a_time, body) if name == "triton" and device == "cpu" else body


def implementations(device: str | None = None) -> dict[str, Choice]:
    """Return the body of each public function and the reason, on this machine's accelerator if it has one."""
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return {op: choose(where, op) for op in sorted(_packages)}


@functools.cache
def functions_of(body: str) -> SimpleNamespace:
    """Return every public function of one body, else of the specification; for tests and benchmarks."""
    return SimpleNamespace(**{op: _own(op, body) or _specification(op) for op in sorted(_packages)})
