"""A GPU that is not there: tensors of a second device, computed on the CPU, and every wait of the host noted.

What torch refuses on a real GPU is refused here: an operation over tensors on two devices, and, where only
deterministic algorithms are asked for, one that has none on a GPU. What would make the host
wait for the device, or copy between them, is an Event: reading a number, shapes that depend on data, copies. Values
are real, so whole epochs run, and give the bits of the CPU.

The tensors wrap a CPU tensor behind torch's dispatcher, as FakeTensor does. Their device is `meta`, so neither a CUDA
build of torch nor a GPU is needed; `is_cuda` is true.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from gnnpar.comm import ThreadWorld

DEVICE = torch.device("meta")
_CPU = torch.device("cpu")
_make = torch.tensor
_ROOT = f"{Path(__file__).parents[1]}/"
_SOURCES = (f"{_ROOT}src/gnnpar", f"{_ROOT}kernels")
_READS = {  # operations whose result the host has to know before it goes on, on a GPU
    "aten._local_scalar_dense.default": "number read",
    "aten.nonzero.default": "nonzero",
    "aten.nonzero_static.default": "nonzero",
    "aten._unique2.default": "unique",
    "aten.unique_dim.default": "unique",
    "aten.unique_consecutive.default": "unique",
    "aten.masked_select.default": "masked select",
    "aten.bincount.default": "bincount",
    "aten.equal.default": "number read",
}
_INDEXING = ("aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default")


class Event(NamedTuple):
    """What made the host wait, the innermost line of ours that asked for it, and the files it was called through."""

    kind: str
    file: str
    function: str
    line: int
    callers: frozenset[str]

    def __str__(self) -> str:
        return f"{self.kind} in {self.function}, {self.file}:{self.line}"


class DeviceTensor(Tensor):
    """On the device. `held`: the CPU tensor with its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> DeviceTensor:
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
            requires_grad=held.requires_grad,
        )
        made.held = held.detach()
        return made

    def as_subclass(self, cls: type) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """On the device, too."""
        made = _also(cls)
        token = _KIND.set(made)
        try:
            return super().as_subclass(made)
        finally:
            _KIND.reset(token)

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # as FakeTensor does
        return True

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """With its counterpart: by these a module that is converted, as by `double()`, takes new parameters."""
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: object, stride: object) -> DeviceTensor:
        return DeviceTensor(inner["held"])

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"on the simulated GPU: {self.held!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, None)


_KIND: ContextVar[type[DeviceTensor]] = ContextVar("kind", default=DeviceTensor)  # of what an operation makes


@cache
def _also(cls: type) -> type[DeviceTensor]:
    """A class of tensors, on the device."""
    return DeviceTensor if issubclass(DeviceTensor, cls) else type(cls.__name__, (cls, DeviceTensor), {})


class _Dispatch(TorchDispatchMode):
    """Notes the waits of one thread, and makes new tensors where they are asked for on the device."""

    def __init__(self, note: Callable[[str], None], cut: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.note, self.cut = note, cut

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self)


def _run(func: Any, args: Any, kwargs: dict[str, Any], mode: _Dispatch | None) -> Any:
    """An operation on what the tensors hold; its results are where the operands are, or where `device` says."""
    name, given = str(func), [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
    ours = [t for t in given if isinstance(t, DeviceTensor)]
    asked = kwargs.get("device")
    if not ours and asked != DEVICE:
        return func(*args, **kwargs)
    if mode is not None:
        _note(name, args, kwargs, ours, given, mode)
    _refuse_two_devices(name, args, given, ours)
    if ours and torch.are_deterministic_algorithms_enabled():
        _refuse_varying_order(name, args, kwargs)
    wrapped = {id(t.held): t for t in ours}
    out = func(
        *tree_map(_held, args),
        **{k: _CPU if k == "device" and v == DEVICE else tree_map(_held, v) for k, v in kwargs.items()},
    )
    if asked == _CPU or (name == "aten.copy_.default" and not isinstance(args[0], DeviceTensor)):
        return out if asked == _CPU else args[0]

    def wrap(t: object) -> object:
        if not isinstance(t, Tensor):
            return t
        return wrapped[id(t)] if id(t) in wrapped else _KIND.get()(t)

    return tree_map(wrap, out)


def _held(value: object) -> object:
    return value.held if isinstance(value, DeviceTensor) else value


class _OnCpu(TorchDispatchMode):
    """Notes the waits of one thread whose tensors are all taken for the device's, though they are the CPU's."""

    def __init__(self, note: Callable[[str], None], cut: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.note, self.cut = note, cut

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        _note_reads(str(func), args, kwargs or {}, given, self)
        return func(*args, **(kwargs or {}))


def _note(name: str, args: Any, kwargs: dict[str, Any], ours: list, given: list, mode: _Dispatch) -> None:
    _note_reads(name, args, kwargs, ours, mode)
    if name in _INDEXING:
        if any(not isinstance(i, DeviceTensor) for i in args[1] if i is not None):
            mode.note("copy from the host")
    elif name == "aten._to_copy.default":
        there, asked = isinstance(args[0], DeviceTensor), kwargs.get("device")
        if there and asked == _CPU:
            mode.note("copy to the host")
        elif not there and asked == DEVICE and args[0].numel() and not kwargs.get("non_blocking"):
            mode.note("copy from the host")
    elif name == "aten.copy_.default" and len(ours) != len(given):
        mode.note("copy from the host" if isinstance(args[0], DeviceTensor) else "copy to the host")


def _note_reads(name: str, args: Any, kwargs: dict[str, Any], ours: list, mode: _Dispatch | _OnCpu) -> None:
    if name in _READS and ours:
        mode.note(_READS[name])
    elif name == "aten.repeat_interleave.Tensor" and kwargs.get("output_size") is None:
        mode.note("number read")
    elif name in _INDEXING:
        indices = [i for i in args[1] if i is not None]
        filled = name != "aten.index.Tensor" and args[2].numel() == 1  # masked_fill
        if any(i.dtype in (torch.bool, torch.uint8) for i in indices) and not filled:
            mode.note("boolean index")
    elif name.startswith("gnnpar_kernels."):
        values = dict(zip((a.name for a in func_arguments(name)), args, strict=False))
        for argument in ("indptr", "back_indptr"):
            if argument in values and values["indices"].numel() and mode.cut(values[argument]):
                mode.note("rows cut into tasks")


def func_arguments(name: str) -> Sequence[Any]:
    """The arguments of an op of gnnpar_kernels, by its schema."""
    return getattr(torch.ops.gnnpar_kernels, name.split(".")[1]).default._schema.arguments


def _refuse_two_devices(name: str, args: Any, given: list, ours: list) -> None:
    """Copies take two devices, indices and numbers without a dimension may come from the host, as in torch."""
    if not ours or name in ("aten.copy_.default", "aten._to_copy.default"):
        return
    allowed = set(map(id, args[1])) if name in _INDEXING else set()
    for t in given:
        if not isinstance(t, DeviceTensor) and t.dim() and id(t) not in allowed:
            raise RuntimeError(f"{name}: tensors on the device and on the CPU, {list(t.shape)} {t.dtype}")


def _refuse_varying_order(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Operations that torch.use_deterministic_algorithms refuses on a GPU, of those that a graph network may use."""
    operation = name.split(".")[1].removesuffix("_")
    weighted = (len(args) > 1 and args[1] is not None) or kwargs.get("weights") is not None
    refused = {
        "bincount": weighted,
        "cumsum": bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point(),
        "scatter_reduce": "prod" in [a for a in args if isinstance(a, str)],
        "median": len(args) > 1,
        **dict.fromkeys(("histc", "put", "nll_loss2d_forward", "_ctc_loss_backward"), True),
    }
    if refused.get(operation):
        raise RuntimeError(f"{name} does not have a deterministic implementation")


class SimulatedGpu:
    """`events`: of all threads, while they are recording."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._thread = threading.local()
        self._cut: dict[int, weakref.ref] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """In this thread, DEVICE has values."""
        with _Dispatch(self._note, self._is_new):
            yield

    @contextmanager
    def taking_cpu(self) -> Iterator[None]:
        """In this thread, tensors of the CPU are taken for the device's: where others cannot run, for torch has no
        autocast of DEVICE, and its tensors own no storage that could be paged out.

        What this cannot see: copies between host and device, and operations over both. Numbers that the host reads of
        tensors of its own look like waits.
        """
        with _OnCpu(self._note, self._is_new):
            yield

    def record(self) -> None:
        """From here on, waits of this thread are events."""
        self._thread.on = True

    def world(self, size: int) -> ThreadWorld:
        """Rank threads that share the GPU."""
        return _World(self, size)

    def cpu_world(self, size: int) -> ThreadWorld:
        """Rank threads whose tensors of the CPU are taken for the device's."""
        return _CpuWorld(self, size)

    def tensor(self, data: Any, *, device: torch.device | None = None, **options: Any) -> Tensor:
        """torch.tensor, on either device."""
        if device != DEVICE:
            return _make(data, device=device, **options)
        self._note("copy from the host")
        return DeviceTensor(_make(data, **options))

    def _is_new(self, indptr: Tensor) -> bool:
        """Is a CSR met for the first time? Then a kernel cuts it into tasks, and waits for their number."""
        known = self._cut.get(id(indptr))
        self._cut[id(indptr)] = weakref.ref(indptr)
        return known is None or known() is not indptr

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Inside, a wait of this thread is an error, as while a CUDA graph is captured."""
        self._thread.refuses = True
        yield
        self._thread.refuses = False

    def _note(self, kind: str) -> None:
        if getattr(self._thread, "refuses", False):
            raise RuntimeError(f"captured: {kind}")
        if getattr(self._thread, "on", False):
            frame, frames = sys._getframe(1), []
            while frame is not None:
                ours = frame.f_code.co_filename.startswith(_SOURCES)
                if ours and frame.f_code.co_name not in _HANDS_ON:
                    file = frame.f_code.co_filename.removeprefix(_ROOT).partition("/")[2]
                    frames.append((file, frame.f_code.co_qualname, frame.f_lineno))
                frame = frame.f_back
            file, function, line = frames[0] if frames else ("a test", "", 0)
            self.events.append(Event(kind, file, function, line, frozenset(each[0] for each in frames)))


_HANDS_ON = ("__torch_function__", "called")
"""Functions that run what another line asks for: of marked tensors, and of the context that keys dropout."""


class _World(ThreadWorld):
    def __init__(self, gpu: SimulatedGpu, size: int) -> None:
        super().__init__(size, device=DEVICE)
        self._gpu = gpu

    def run(self, body: Any, comms: Any = ()) -> list[Any]:
        def on_gpu(comm: Any) -> Any:
            with self._gpu.active():
                return body(comm)

        with mock.patch.object(torch, "tensor", self._gpu.tensor):  # makes a meta tensor without asking the dispatcher
            return super().run(on_gpu, comms)


class _CpuWorld(ThreadWorld):
    def __init__(self, gpu: SimulatedGpu, size: int) -> None:
        super().__init__(size)
        self._gpu = gpu

    def run(self, body: Any, comms: Any = ()) -> list[Any]:
        def noted(comm: Any) -> Any:
            with self._gpu.taking_cpu():
                return body(comm)

        with mock.patch.object(torch.Tensor, "is_cuda", property(lambda _: True)):  # what a GPU does, not what a CPU
            return super().run(noted, comms)


Model = TypeVar("Model", bound=nn.Module)


def held(tensor: Tensor) -> Tensor:
    """The values of a tensor on the device."""
    assert isinstance(tensor, DeviceTensor)
    return tensor.held


def move(model: Model) -> Model:
    """A model's parameters and buffers, on the simulated GPU."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(DeviceTensor(p.detach().clone()), requires_grad=p.requires_grad)
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = DeviceTensor(b.clone())
    return model
