"""Record a user's module as steps: calls of torch functions, convolutions and modules without convolutions.

Two recordings, with different numbers of rows and different dtypes, are merged. An integer that equals the number of
rows in both stands for the number of rows. A tensor with one row per node in both holds node rows. Python control flow
is not recorded, so a module that reads values of tensors is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from gnnpar.models.pyg.marks import Placeholder
from gnnpar.models.pyg.nested import Called, Intercepting, leaves, mapped, mapped_call
from gnnpar.models.pyg.probe_graph import ProbeGraph

_READS_VALUES = frozenset(
    {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__complex__"}
    | {"is_nonzero", "equal", "allclose", "__array__"}
)
_LEAVES_NO_STEP = frozenset({"register_hook", "register_post_accumulate_grad_hook", "backward", "__set__"})
_SETS_GRADIENTS = frozenset({"_set_grad_enabled", "set_grad_enabled"})


class RankValue(enum.Enum):
    """Placeholders that a rank fills in."""

    ROWS = "number of rows"
    DTYPE = "type of rows"
    DEVICE = "device"


@dataclass(frozen=True)
class Value:
    """A tensor made by a step; `x`: the features."""

    name: str


@dataclass(frozen=True)
class ModuleTensor:
    """A parameter or buffer of the module."""

    name: str


FEATURES = "x"


@dataclass(frozen=True, eq=False)
class Step:
    """One call. called: a module's name, or a function. results: names of output tensors. written: names of tensors
    changed in place. last_tag: tag of the last dropout when it ends."""

    called: str | Called
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    results: tuple[str, ...]
    written: tuple[str, ...]
    last_tag: int

    @property
    def title(self) -> str:
        return self.called if isinstance(self.called, str) else self.called.__name__.strip("_")

    @property
    def values(self) -> list[str]:
        """Names of the tensors that it reads."""
        return [leaf.name for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Value)]

    def parameters(self, net: nn.Module) -> list[nn.Parameter]:
        """Return the parameters among its arguments and of its module."""
        given = [_module_tensor(net, t.name) for t in leaves((self.args, self.kwargs)) if isinstance(t, ModuleTensor)]
        inside = net.get_submodule(self.called).parameters() if isinstance(self.called, str) else ()
        return [each for each in (*given, *inside) if isinstance(each, nn.Parameter)]

    def run(self, net: nn.Module, values: dict[str, Tensor], own: Mapping[RankValue, object]) -> None:
        """Run the step and add its results to `values`."""

        def filled(leaf: object) -> object:
            if isinstance(leaf, Value):
                return values[leaf.name]
            if isinstance(leaf, ModuleTensor):
                return _module_tensor(net, leaf.name)
            return own[leaf] if isinstance(leaf, RankValue) else leaf

        called: Called = net.get_submodule(self.called) if isinstance(self.called, str) else self.called
        args, kwargs = mapped_call(self.args, self.kwargs, filled)
        values.update(zip(self.results, tensors_of(called(*args, **kwargs)), strict=True))


@dataclass(frozen=True, eq=False)
class Tape:
    """Steps of a module. tails: row shapes of values that hold node rows in the dtype of the features. out: name of the
    output."""

    steps: tuple[Step, ...]
    tails: Mapping[str, tuple[int, ...]]
    out: str


def tensors_of(value: object) -> list[Tensor]:
    """Return the tensors in a value, without placeholders for edges."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor) and not isinstance(leaf, Placeholder)]


def _module_tensor(net: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    module = net.get_submodule(owner)
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}[leaf]


class Recording(Intercepting):
    """The steps of one call of `net` on features `x`. The inside of a step is not recorded. forms: shape and dtype of
    each value. out: name of the output."""

    def __init__(self, net: nn.Module, view: ProbeGraph, x: Tensor) -> None:
        super().__init__(self._recorded)
        self.view, self.steps, self.rows, self.dtype = view, list[Step](), len(x), x.dtype
        self.depth, self.out = 0, ""
        self.forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._alive: list[Tensor] = []  # keeps ids unique
        self._given: tuple[tuple[object, ...], Mapping[str, object], list[tuple[Tensor, int]]] = ((), {}, [])
        named = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
        self._known: dict[int, Value | ModuleTensor] = {id(t): ModuleTensor(name) for name, t in reversed(named)}

    def _recorded(self, func: Called, args: tuple, given: dict[str, object]) -> object:
        if self.depth:
            return func(*args, **given)
        name = func.__name__
        if name in _READS_VALUES:
            raise ValueError(f"its forward reads values of tensors ({name.strip('_')}), which no recording follows")
        if name in _LEAVES_NO_STEP:
            called = "sets an attribute of" if name == "__set__" else f"calls {name} of"
            raise ValueError(f"its forward {called} a tensor, which no recording follows")
        if name in _SETS_GRADIENTS:
            raise ValueError("its forward switches gradients off or on; use detach")
        read = [(t, t._version) for t in tensors_of((args, given))]
        out = func(*args, **given)
        changed = [t for t, version in read if t._version != version]
        if tensors_of(out) or changed:
            self._note(func, *self._by_name(args, given, name), out, changed)
        return out

    def begin(self, net: nn.Module, args: tuple[object, ...]) -> None:
        x = args[0] if args else None
        if not isinstance(x, Tensor):
            raise ValueError("its forward takes no tensor of rows first")
        self._name(x, FEATURES)
        self.__enter__()

    def end(self, net: nn.Module, args: tuple[object, ...], out: object) -> None:
        self.__exit__(None, None, None)
        known = self._known.get(id(out))
        self.out = known.name if isinstance(known, Value) else ""

    def enter(self, name: str, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self.depth += 1
        if self.depth == 1:
            read = [(t, t._version) for t in tensors_of((args, kwargs))]
            self._given = *self._by_name(args, kwargs, name), read

    def leave(self, name: str, module: nn.Module, given: tuple[object, ...], out: object) -> None:
        self.depth -= 1
        if not self.depth:
            args, kwargs, read = self._given
            self._note(name, args, kwargs, out, [t for t, version in read if t._version != version])

    def _by_name(
        self, args: tuple[object, ...], kwargs: Mapping[str, object], by: str
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the arguments of a call, with names in place of tensors."""

        def recorded_value(leaf: object) -> object:
            if isinstance(leaf, tuple | list):  # a subclass, such as torch.Size
                return mapped(tuple(leaf) if isinstance(leaf, tuple) else list(leaf), recorded_value)
            if isinstance(leaf, Mapping):
                return mapped(dict(leaf), recorded_value)
            if not isinstance(leaf, Tensor) or isinstance(leaf, Placeholder):
                return leaf
            if id(leaf) not in self._known:
                raise ValueError(
                    f"{by} reads a tensor that is made neither of x nor of parameters and buffers; register_buffer it"
                )
            return self._known[id(leaf)]

        return mapped_call(args, kwargs, recorded_value)

    def _note(
        self,
        called: str | Called,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        out: object,
        changed: Sequence[Tensor],
    ) -> None:
        touched = [each for t in changed for each in (t, t._base) if each is not None]  # and the base of a view
        written = [self._known[id(each)] for each in touched if id(each) in self._known]
        if lasting := [each.name for each in written if isinstance(each, ModuleTensor)]:
            raise ValueError(f"its forward writes into {lasting[0]}")
        results = tuple(self._name(t) for t in tensors_of(out))
        names = tuple(each.name for each in written)
        self.steps.append(Step(called, args, kwargs, results, names, self.view.last_tag))

    def _name(self, tensor: Tensor, name: str = "") -> str:
        known = self._known.get(id(tensor))
        found = known.name if isinstance(known, Value) else name or f"v{len(self._alive)}"
        self._known[id(tensor)] = Value(found)
        self._alive.append(tensor)
        self.forms[found] = tuple(tensor.shape), tensor.dtype
        return found


def recording(model: Callable[[ProbeGraph, Tensor], Tensor], net: nn.Module, view: ProbeGraph, x: Tensor) -> Recording:
    recorder = Recording(net, view, x)
    handles = [
        net.register_forward_pre_hook(recorder.begin),
        net.register_forward_hook(recorder.end, always_call=True),  # stop recording on an error inside
    ]
    for name, module in net.named_modules():
        if name and _is_step(module):
            handles.append(module.register_forward_pre_hook(partial(recorder.enter, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(recorder.leave, name)))
    try:
        with torch.set_grad_enabled(view.training):  # forward may read the mode
            model(view, x)
    finally:
        for handle in handles:
            handle.remove()
    return recorder


def _is_step(module: nn.Module) -> bool:
    inside = (each for each in module.modules() if each is not module)
    return isinstance(module, MessagePassing) or not any(isinstance(each, MessagePassing) for each in inside)


_OTHERWISE = "its forward takes another way, or other numbers, for another number of rows"


def merged(a: Recording, b: Recording) -> Tape:
    """Return the steps for any number of rows and dtype. ValueError if the recordings differ in other ways."""

    def both(x: object, y: object) -> object:
        if isinstance(x, tuple | list) and isinstance(y, tuple | list) and len(x) == len(y):
            pairs = [both(*pair) for pair in zip(x, y, strict=True)]
            return tuple(pairs) if isinstance(x, tuple) else pairs
        if isinstance(x, Mapping) and isinstance(y, Mapping) and list(x) == list(y):
            return {key: both(x[key], y[key]) for key in x}
        if isinstance(x, slice) and isinstance(y, slice):
            return slice(*(both(*ends) for ends in ((x.start, y.start), (x.stop, y.stop), (x.step, y.step))))
        if isinstance(x, Step) and isinstance(y, Step):
            if (x.called, x.results, x.written) == (y.called, y.results, y.written):
                return replace(x, args=both(x.args, y.args), kwargs=both(x.kwargs, y.kwargs))
            raise ValueError(_OTHERWISE)
        if isinstance(x, Placeholder) and type(x) is type(y):
            return x
        if isinstance(x, torch.device):
            return RankValue.DEVICE
        if (x, y) == (a.dtype, b.dtype):
            return RankValue.DTYPE
        if (x, y) == (a.rows, b.rows):
            return RankValue.ROWS
        if x == y:
            return x
        raise ValueError(_OTHERWISE)

    tails = {
        name: shape[1:]
        for name, (shape, dtype) in a.forms.items()
        if shape[:1] == (a.rows,) and dtype == a.dtype and b.forms.get(name) == ((b.rows, *shape[1:]), b.dtype)
    }
    return Tape(cast("tuple[Step, ...]", both(tuple(a.steps), tuple(b.steps))), tails, a.out)
