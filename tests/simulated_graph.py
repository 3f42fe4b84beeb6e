"""A CUDA graph that is not there: work of a thread on the simulated GPU is recorded, and run again on the same tensors.

What a real capture refuses is refused: reading a number, copies between host and device, memory that is pinned. As in a
real one nothing that is captured changes a tensor that was there before, until the first replay; and numbers that
Python hands to an operation are those of the capture for good.

`cuda(gpu)` stands in for torch.cuda in gnnpar.training.captured; its `log` has the order of calls. Messages of
`GraphWorld`'s ranks are part of a graph, as NCCL's are: each replay exchanges them again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gnnpar.comm.communicator import MessageTag, Pending
from gnnpar.comm.ledger import Ledger
from gnnpar.comm.threads import ThreadCommunicator
from simulated_gpu import DeviceTensor, SimulatedGpu, _World

_thread = threading.local()


def _capturing() -> _Recorder | None:
    return getattr(_thread, "recorder", None)


class _Recorder(TorchDispatchMode):
    """Of one capture: what to run again, and how tensors looked that it changed."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], object]] = []
        self._made: set[int] = set()  # storages of the graph's own
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._kept: list[object] = []  # a graph keeps its memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        name = str(func)
        if name == "aten._to_copy.default" and not isinstance(args[0], DeviceTensor) and "device" in kwargs:
            raise RuntimeError("captured: copy from the host")
        if name == "aten._pin_memory.default":
            raise RuntimeError("captured: pinned memory")
        self._note_changes(func, args, kwargs)
        out = func(*args, **kwargs)
        results = [t for t in tree_iter(out) if isinstance(t, DeviceTensor)]
        if results or any(isinstance(t, DeviceTensor) for t in given):
            known = {_storage(t) for t in given if isinstance(t, DeviceTensor)}
            fresh = [i for i, t in enumerate(results) if _storage(t) not in known]
            self._made |= {_storage(results[i]) for i in fresh}
            self._kept.append((args, kwargs, out))
            self.work.append(lambda: _again(func, args, kwargs, results, fresh))
        return out

    def _note_changes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        arguments = func._schema.arguments
        values = [*zip(arguments, args, strict=False), *((a, kwargs.get(a.name)) for a in arguments)]
        for argument, value in values:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for t in tree_iter(value):
                    if isinstance(t, DeviceTensor) and _storage(t) not in self._made | self._before.keys():
                        whole = torch.empty(0, dtype=t.held.dtype).set_(t.held.untyped_storage())
                        self._before[_storage(t)] = whole, whole.clone()

    def undo(self) -> None:
        """Nothing has run yet."""
        for tensor, before in self._before.values():
            tensor.copy_(before)


def _storage(tensor: DeviceTensor) -> int:
    return tensor.held.untyped_storage()._cdata


def _again(func: Any, args: Any, kwargs: Any, results: list[DeviceTensor], fresh: list[int]) -> None:
    new = [t for t in tree_iter(func(*args, **kwargs)) if isinstance(t, DeviceTensor)]
    for i in fresh:
        results[i].held.copy_(new[i].held)


class Cuda:
    """torch.cuda, as far as CapturedEpochs uses it."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu, self.log = gpu, []
        self._current = threading.local()

    def Stream(self, device: object = None) -> Stream:  # torch's name
        return Stream(self, "side")

    def current_stream(self) -> Stream:
        return getattr(self._current, "stream", None) or Stream(self, "default")

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        self.log.append(f"on {stream.name}")
        yield
        self._current.stream = before
        self.log.append(f"on {before.name}")

    def CUDAGraph(self) -> Graph:  # torch's name
        return Graph(self)

    @contextmanager
    def graph(self, graph: Graph, *, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        self.log.append(f"capture on {stream.name}, {capture_error_mode}")
        recorder = _Recorder()
        _thread.recorder = recorder
        try:
            with self.gpu.refusing(), recorder:
                yield
        finally:
            _thread.recorder = None
        recorder.undo()
        graph.work, graph.kept = recorder.work, recorder
        self.log.append("captured")


@dataclass
class Stream:
    cuda: Cuda
    name: str

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class Graph:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.work = cuda, list[Callable[[], object]]()
        self.kept: object = None

    def replay(self) -> None:
        self.cuda.log.append(f"replay on {self.cuda.current_stream().name}")
        with torch.no_grad():
            for each in self.work:
                each()


class GraphCommunicator(ThreadCommunicator):
    """Its messages can be captured."""

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming_nbytes: Mapping[int, int], tag: MessageTag, *, metadata: int = 0
    ) -> Mapping[int, Pending[Tensor]]:
        def post() -> Mapping[int, Pending[Tensor]]:
            return super(GraphCommunicator, self).exchange(outgoing, incoming_nbytes, tag, metadata=metadata)

        if (recorder := _capturing()) is None:
            return post()
        flight = _Flight(post())
        recorder.work.append(lambda: flight.repost(self, post))
        return {peer: _CapturedArrival(recorder, flight, peer) for peer in flight.pending}

    def all_reduce(self, tensor: Tensor, tag: MessageTag | None = None) -> Tensor:
        if (recorder := _capturing()) is None:
            return super().all_reduce(tensor, tag)
        with _unrecorded():
            total = super().all_reduce(tensor, tag)

        def again() -> None:
            with _uncounted(self):
                total.copy_(super(GraphCommunicator, self).all_reduce(tensor, tag))

        recorder.work.append(again)
        return total


@dataclass
class _Flight:
    pending: Mapping[int, Pending[Tensor]]

    def repost(self, comm: GraphCommunicator, post: Callable[[], Mapping[int, Pending[Tensor]]]) -> None:
        with _uncounted(comm):
            self.pending = post()


@dataclass
class _CapturedArrival:
    recorder: _Recorder
    flight: _Flight
    peer: int

    def wait(self) -> Tensor:
        with _unrecorded():
            place = self.flight.pending[self.peer].wait().clone()
        self.recorder.work.append(lambda: place.copy_(self.flight.pending[self.peer].wait()))
        return place


@contextmanager
def _uncounted(comm: ThreadCommunicator) -> Iterator[None]:
    ledger, comm.ledger = comm.ledger, Ledger()
    yield
    comm.ledger = ledger


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Messages are no operations of the graph's recorder: it has them as messages."""
    from torch.utils._python_dispatch import _pop_mode_temporarily

    with _pop_mode_temporarily() if _capturing() is not None else nullcontext():
        yield


class GraphWorld(_World):
    def communicators(self) -> list[ThreadCommunicator]:
        return [GraphCommunicator(**vars(each)) for each in super().communicators()]
