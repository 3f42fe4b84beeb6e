"""Leaves of nested arguments and results, intercepted calls, and temporary attributes and context variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

T = TypeVar("T")
Called = Callable[..., object]


def leaves(value: object) -> Iterator[object]:
    """Return the entries of tuples, lists, dictionaries and slices, at any depth."""
    if isinstance(value, tuple | list):
        for each in value:
            yield from leaves(each)
    elif isinstance(value, Mapping):
        yield from leaves(tuple(value.values()))
    elif isinstance(value, slice):
        yield from leaves((value.start, value.stop, value.step))
    else:
        yield value


def mapped(value: object, by: Callable[[object], object]) -> object:
    """Return the value with `by` applied to each leaf. Subclass instances (torch.Size, named tuples) are leaves."""
    if type(value) is tuple:
        return tuple([mapped(each, by) for each in value])
    if type(value) is list:
        return [mapped(each, by) for each in value]
    if type(value) is dict:
        return {key: mapped(each, by) for key, each in value.items()}
    if type(value) is slice:
        return slice(*[mapped(each, by) for each in (value.start, value.stop, value.step)])
    return by(value)


def mapped_call(
    args: tuple[object, ...], kwargs: Mapping[str, object] | None, by: Callable[[object], object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments of a call with `by` applied to each leaf."""
    return tuple([mapped(each, by) for each in args]), {key: mapped(each, by) for key, each in (kwargs or {}).items()}


class Intercepting(TorchFunctionMode):
    """A context in which by(function, args, kwargs) replaces calls of torch's functions."""

    def __init__(self, by: Callable[[Called, tuple, dict[str, object]], object]) -> None:
        super().__init__()
        self.by = by

    def __torch_function__(
        self, func: Called, types: object, args: tuple = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        return self.by(func, args, dict(kwargs or {}))


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Within the context, the variable has this value."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


@contextmanager
def replaced(module: nn.Module, methods: Mapping[str, object]) -> Iterator[None]:
    """Within the context, replace a class's methods and submodules by instance attributes."""
    before = {name: vars(module)[name] for name in methods if name in vars(module)}
    vars(module).update(methods)
    try:
        yield
    finally:
        for name in methods:
            vars(module).pop(name, None)
        vars(module).update(before)


def python_state(net: nn.Module) -> dict[str, object]:
    """Return the numbers and strings that modules keep, by attribute, without their mode. A container or an object of
    a user's class gives a list."""
    found = dict[str, object]()
    for name, module in net.named_modules():
        for key, value in vars(module).items():
            if key not in _OF_TORCH:
                kept = value if isinstance(value, _NUMBERS) else [n for n in _held(value) if isinstance(n, _NUMBERS)]
                if kept != []:
                    found[f"{name}.{key}".removeprefix(".")] = kept
    return found


def kept_tensors(net: nn.Module) -> list[int]:
    """Return the ids of the tensors that modules keep in attributes, containers and objects."""
    values = [value for module in net.modules() for key, value in vars(module).items() if key not in _OF_TORCH]
    return [id(each) for value in values for each in _held(value) if isinstance(each, Tensor)]


_NUMBERS = (int, float, str)
_OF_TORCH = frozenset({"training", "_parameters", "_buffers", "_modules"})


def _held(value: object) -> Iterator[object]:
    """Return the leaves of a value. An object of a user's class gives the leaves of its attributes."""
    for leaf in leaves(value):
        opaque = callable(leaf) or type(leaf).__module__.startswith("torch") or not type(leaf).__dictoffset__
        yield from (leaf,) if opaque else leaves(vars(leaf))
