"""Register ops with torch, and make the public functions that check their arguments.

Ops are registered through torch.library, so that torch.compile and CUDA graphs support them; a call costs 2 us on a
CPU. An op that updates a tensor in place is a second schema with a trailing underscore, since outputs must not alias
inputs.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from gnnpar_kernels.csr import Csr
from gnnpar_kernels.dispatch import body_of, register, specified
from gnnpar_kernels.hashing import Key

P = ParamSpec("P")
R = TypeVar("R")
Flat = tuple[object, ...]
Tensors = Sequence[Tensor]

_LIBRARY = torch.library.Library("gnnpar_kernels", "DEF")


def define(schema: str, *, fake: Callable[..., object] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function for every device and replace it by the op. Ops without `fake` return nothing."""

    def decorate(run: Callable[P, R]) -> Callable[P, R]:
        name = schema.split("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"gnnpar_kernels::{name}", fake or (lambda *args: None), lib=_LIBRARY)
        return getattr(torch.ops.gnnpar_kernels, name).default  # torch makes the attribute from the schema's name

    return decorate


def public(specification: Callable[P, R], package: str) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorate the public function of a package, which calls its op: with signature and documentation of the
    specification (`specified`). It refuses tensors that require a gradient."""
    name = specification.__name__
    register(name, package)

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        def checked(*args: object, **kwargs: object) -> R:
            if torch.is_grad_enabled():
                _refuse_gradients(name, (*args, *kwargs.values()))
            return function(*args, **kwargs)

        call = specified(specification)(checked)
        call.__module__ = package
        return call

    return decorate


def _refuse_gradients(op: str, values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            raise RuntimeError(
                f"gnnpar_kernels.{op} records no gradient: call it inside an autograd.Function, or detach its tensors"
            )
        if isinstance(value, tuple):
            _refuse_gradients(op, value)


def flat_key(key: Key) -> tuple[int, Tensor | None]:
    """Return a key as two arguments of a schema: (number, None) or (0, words)."""
    return (0, key) if isinstance(key, Tensor) else (signed_key(key), None)


def key_of(key: int, words: Tensor | None) -> Key:
    """Return the key of `flat_key`."""
    return key if words is None else words


def signed_key(key: int) -> int:
    """Return the int64 with the 64 bits of a key, for a schema. Hashing reads only the bits."""
    return ((key + 2**63) & (2**64 - 1)) - 2**63


class _Kind(NamedTuple):
    """Schema arguments for a parameter of one annotation.

    `names`: of the arguments, with {} for the parameter; `flat`: parameter -> values of the arguments; `whole`: the
    inverse; None: both are equal.
    """

    names: tuple[str, ...]
    flat: Callable[..., Flat] | None = None
    whole: Callable[..., object] | None = None


_KINDS: dict[object, _Kind] = {
    each: _Kind((f"{kind} {{}}",))
    for each, kind in (
        (Tensor, "Tensor"),
        (Tensor | None, "Tensor?"),
        (int, "SymInt"),
        (float, "float"),
        (bool, "bool"),
        (torch.dtype, "ScalarType"),
    )
}
_KINDS |= {
    Key: _Kind(("SymInt {}", "Tensor? {}_words"), flat_key, key_of),
    tuple[float, Key] | None: _Kind(
        ("float {}_p", "SymInt {}_key", "Tensor? {}_words"),
        lambda drop: (0.0, 0, None) if drop is None else (drop[0], *flat_key(drop[1])),
        lambda p, key, words: (p, key_of(key, words)),
    ),
    Csr: _Kind(
        ("Tensor {}_indptr", "Tensor {}_indices", "Tensor? {}_rows", "Tensor? {}_edge_ids"), lambda csr: csr[:4], Csr
    ),
    tuple[Tensor, Tensor]: _Kind(("Tensor[] {}",), lambda pair: (list(pair),), tuple),
}
_RETURNS = {Tensor: "Tensor", tuple[Tensor, ...]: "Tensor[]"}
_RETURNS |= {tuple[(Tensor,) * n]: f"({', '.join(['Tensor'] * n)})" for n in (2, 3)}


def like(*parameters: str) -> Callable[..., Tensor | Tensors]:
    """Return the fake of an op with results of the shapes and types of these parameters."""

    def fake(**given: Tensor) -> Tensor | Tensors:
        found = [given[name].new_empty(given[name].shape) for name in parameters]
        return tuple(found) if len(found) > 1 else found[0]

    return fake


def operator(
    specification: Callable[P, R], package: str, *, fake: Callable[..., Tensor | Tensors], updates: str = ""
) -> Callable[P, R]:
    """Register the op that a function of a package's `naive.py` specifies; return the public function.

    The annotations determine the schema. `fake`: arguments by name -> uninitialised results, for tracing. `updates`: a
    parameter with default None. If given, a second op with a trailing underscore updates it in place, and it is the
    result.
    """
    name, signature = specification.__name__, inspect.signature(specification, eval_str=True)
    parameters = [each for each in signature.parameters.values() if each.name != updates]
    kinds, result = [_KINDS[each.annotation] for each in parameters], _RETURNS[signature.return_annotation]
    positional = sum(each.kind is not inspect.Parameter.KEYWORD_ONLY for each in signature.parameters.values())
    keywords = set(list(signature.parameters)[positional:])
    schema = [each.format(p.name) for kind, p in zip(kinds, parameters, strict=True) for each in kind.names]

    def made(found: object) -> object:
        return list(cast(Tensors, found)) if result == "Tensor[]" else found

    names, plain = [each.name for each in parameters], all(kind.flat is None for kind in kinds)
    ends = list(itertools.accumulate(len(kind.names) for kind in kinds))
    slices = [(end - len(kind.names), end, kind.whole) for kind, end in zip(kinds, ends, strict=True)]

    def whole(flat: Flat) -> Flat:
        return flat if plain else tuple(flat[i] if join is None else join(*flat[i:end]) for i, end, join in slices)

    def run(flat: Flat, **more: object) -> object:
        values = whole(flat)
        first = flat[0] if isinstance(flat[0], Tensor) else cast(Tensors, flat[0])[0]
        by_name = dict(zip(names[positional:], values[positional:], strict=True))
        return body_of(name, first.device)(*values[:positional], **by_name, **more)

    def faked(*flat: object) -> object:
        return made(fake(**dict(zip(names, whole(flat), strict=True))))

    @define(f"{name}({', '.join(schema)}) -> {result}", fake=faked)
    def fresh(*flat: object) -> object:
        return made(run(flat))

    changed = changed_in_place(name, schema, signature.parameters[updates], run) if updates else fresh

    @public(specification, package)
    def call(*args: object, **given: object) -> R:
        if len(args) != positional or given.keys() != keywords:
            bound = signature.bind(*args, **given)  # raises, or some positional arguments came by name
            bound.apply_defaults()
            args, given = bound.args, bound.kwargs
        into = given.pop(updates, None)
        flat: list[object] = [*args, *(given[each] for each in names[positional:])]
        if not plain:
            flat = [
                each
                for kind, value in zip(kinds, flat, strict=True)
                for each in ((value,) if kind.flat is None else kind.flat(value))
            ]
        if into is None:
            found = fresh(*flat)
            return cast(R, tuple(cast(Tensors, found)) if result == "Tensor[]" else found)
        changed(*flat, into if isinstance(into, Tensor) else list(cast(Tensors, into)))
        return cast(R, into)

    return call


def changed_in_place(
    name: str, schema: list[str], updates: inspect.Parameter, run: Callable[..., object]
) -> Callable[..., None]:
    """Register the op that updates the tensor or tensors `updates` in place and returns nothing."""
    alone = updates.annotation == Tensor | None
    kind = f"Tensor(a!){'' if alone else '[]'} {updates.name}"

    @define(f"{name}_({', '.join([*schema, kind])}) -> ()")
    def changed(*flat: object) -> None:
        before = flat[-1] if alone else tuple(cast(Tensors, flat[-1]))
        after = run(flat[:-1], **{updates.name: before})
        for old, new in [(before, after)] if alone else zip(cast(Tensors, before), cast(Tensors, after), strict=True):
            if new is not old:
                cast(Tensor, old).copy_(cast(Tensor, new))

    return changed
