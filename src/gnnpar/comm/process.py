"""Ranks as processes over torch.distributed: NCCL on GPUs, gloo elsewhere.

A gloo pair is half duplex. Traffic to higher ranks and traffic to lower ranks therefore use two process groups with
separate connections, which run concurrently at full rate.

Objects between the ranks of one host carry an HMAC-SHA256 of a key that these ranks share (`sealed`, `opened`).
"""

# torch.distributed declares no types of its collectives
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, cuda
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gnnpar.comm import interfaces
from gnnpar.comm.clock import PhaseClock
from gnnpar.comm.clock import monotonic as now
from gnnpar.comm.communicator import Axis, Communicator, Mesh, MessageTag, Pending, T
from gnnpar.comm.ledger import Ledger, Receipt


class Staging:
    """Copies between a GPU and pinned host memory, on separate streams, for gloo. On a CPU nothing is copied.

    Out: the copies of an exchange wait for the kernels that made the buffers, not for later ones; one event marks the
    end of all. In: a copy does not wait for kernels launched meanwhile, and only its readers wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._out, self._in = (cuda.Stream(device), cuda.Stream(device)) if on_gpu else (None, None)

    def to_host(self, buffers: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Copy buffers to the host, and wait, since gloo reads them at once."""
        if self._out is None or not buffers:
            return dict(buffers)
        self._out.wait_stream(cuda.current_stream())
        on_host: dict[int, Tensor] = {}
        with cuda.stream(self._out):
            for peer, buffer in buffers.items():
                on_host[peer] = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
                on_host[peer].copy_(buffer, non_blocking=True)
                buffer.record_stream(self._out)
            arrived = cuda.Event()
            arrived.record(self._out)
        arrived.synchronize()
        return on_host

    def to_device(self, buffer: Tensor) -> Tensor:
        """Copy a pinned buffer to the device. The host does not wait; the current stream does."""
        if self._in is None:
            return buffer
        with cuda.stream(self._in):
            on_device = buffer.to(self._device, non_blocking=True)
        cuda.current_stream().wait_stream(self._in)
        on_device.record_stream(cuda.current_stream())
        return on_device


_SIZE = hashlib.sha256().digest_size


class NotOfThisRun(ConnectionError):
    """Bytes without the HMAC of this run's key arrived, and were not unpickled."""


def sealed(key: bytes, label: bytes, obj: object) -> bytes:
    """Pickle an object for another rank. label: sender, receiver and call. Without a key (joined ranks), add no HMAC,
    as in torch's own object collectives."""
    data = pickle.dumps(obj, protocol=5)
    return (_hmac(key, label, data) if key else b"") + data


def opened(key: bytes, label: bytes, data: bytes) -> object:
    """Return the object passed to `sealed`. Raise NotOfThisRun before unpickling."""
    if not key:
        return pickle.loads(data)
    if not hmac.compare_digest(data[:_SIZE], _hmac(key, label, data[_SIZE:])):
        raise NotOfThisRun(f"message {label.decode()} has a wrong HMAC: a process of another run is connected")
    return pickle.loads(data[_SIZE:])


def _hmac(key: bytes, label: bytes, data: bytes) -> bytes:
    return hmac.digest(key, len(label).to_bytes(8, "little") + label + data, "sha256")


def connect(
    backend: Literal["gloo", "nccl"],
    *,
    device: torch.device,
    key: bytes = b"",
    timeout_seconds: float = 1800.0,
    init_method: str | None = None,
    store: Store | None = None,
    beat: Callable[[], None] = lambda: None,
) -> ProcessCommunicator:
    """Join the world named by the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Collective. key: for the
    HMAC of objects between ranks of one host. store: the store of joined ranks. beat: called at every exchange."""
    interfaces.choose()
    timeout = timedelta(seconds=timeout_seconds)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl" and os.environ.get("GNNPAR_SHARE_GPU") == "1":
        _share_gpu(rank)
    os.environ.pop("TORCH_GLOO_LAZY_INIT", None)  # two groups with lazy connections deadlock
    if store is not None:
        store.set_timeout(timeout)
    dist.init_process_group(
        backend,
        init_method=init_method,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    control = _new_group(None, "gloo", timeout) if backend == "nccl" else None
    upward = _new_group(None, backend, timeout)
    downward = _new_group(None, backend, timeout) if backend == "gloo" else upward
    assert upward is not None and downward is not None
    if backend == "nccl":
        for group in (None, upward):
            _warm_up(group, device)
    comm = ProcessCommunicator(
        ranks=tuple(range(size)),
        me=rank,
        device=device,
        transport=backend,
        group=None,
        control=control,
        upward=upward,
        downward=downward,
        clock=PhaseClock(device),
        ledger=Ledger(),
        staging=Staging(device),
        outbox=_Outbox(backend),
        beat=beat,
        timeout=timeout,
        key=key,
    )
    comm.ledger.shared_clock = len(set(comm.all_gather(_clock()))) == 1
    return comm


def _share_gpu(rank: int) -> None:
    """Let ranks of NCCL share a GPU, for tests: with separate host ids they use sockets."""
    os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": interfaces.loopback()}
    os.environ |= {"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def _clock() -> str:
    """Return the boot id of the kernel, which identifies the monotonic clock. Two hosts may have the same name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return socket.gethostname()


def backends() -> dict[str, bool]:
    """Return the transports of this build of torch."""
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}


class _Watcher:
    """Wait for messages in order, in a thread that records arrival times. gloo completes a send only in `wait`.

    It never holds the last reference to a buffer, so that the thread that allocated a buffer also releases it, visible
    to a profiler.
    """

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[tuple[dist.Work, _Watched] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="messages", daemon=True)
        self._thread.start()

    def watch(self, work: dist.Work) -> _Watched:
        watched = _Watched()
        self._todo.put((work, watched))
        return watched

    def _loop(self) -> None:
        while (item := self._todo.get()) is not None:
            work, watched = item
            try:
                work.wait()
            except BaseException as error:
                watched.error = error
            watched.arrived = now()
            del work, item
            watched.done.set()

    def close(self) -> None:
        """Wait for all messages, then end the thread."""
        self._todo.put(None)
        self._thread.join()


@dataclass
class _Watched:
    done: threading.Event = field(default_factory=threading.Event)
    arrived: float = 0.0
    error: BaseException | None = None


class _Outbox:
    """Buffers of sends in flight, by exchange. A thread waits for gloo's sends, the CUDA stream for NCCL's."""

    def __init__(self, transport: Literal["gloo", "nccl"]) -> None:
        self._watcher = _Watcher() if transport == "gloo" else None
        self._exchanges: deque[list[tuple[_Watched | None, dist.Work, Tensor]]] = deque()

    def hold(self, sends: list[tuple[dist.Work, Tensor]]) -> None:
        """Add the sends of an exchange; release exchanges of gloo that are sent."""
        while self._exchanges and all(watched and watched.done.is_set() for watched, _, _ in self._exchanges[0]):
            self._exchanges.popleft()
        watched = [self._watcher.watch(work) if self._watcher else None for work, _ in sends]
        self._exchanges.append([(seen, *send) for seen, send in zip(watched, sends, strict=True)])

    def flush(self, keep: int) -> None:
        """Wait for all exchanges but the last `keep`. A failed send of gloo counts as done."""
        while len(self._exchanges) > keep:
            for watched, work, _ in self._exchanges.popleft():
                if watched is None:
                    work.wait()
                else:
                    watched.done.wait()

    def close(self) -> None:
        if self._watcher is not None:
            self.flush(0)
            self._watcher.close()


@dataclass
class _Arrival:
    """A posted receive of gloo."""

    comm: ProcessCommunicator
    peer: int
    buffer: Tensor
    work: dist.Work
    watched: _Watched
    posted: float
    number: int
    tag: MessageTag

    def wait(self) -> Tensor:
        with self.comm.clock("exposed"):
            began = now()
            self.watched.done.wait()
            if self.watched.error is not None:
                where = f"in epoch {self.tag.epoch}, layer {self.tag.layer}, {self.tag.phase}"
                raise ConnectionError(f"rank {self.peer} is gone {where}: {self.watched.error}") from self.watched.error
            arrived, staged = self.watched.arrived, self.tag.phase == "stage"
            receipt = Receipt(self.peer, self.posted, began, arrived, now(), self.number, staged)
            self.comm.ledger.received(receipt)
            return self.comm.staging.to_device(self.buffer)


@dataclass
class _StreamArrival:
    """A posted receive of NCCL: the stream waits, the host does not."""

    comm: ProcessCommunicator
    buffer: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        with self.comm.clock("exposed"):
            self.work.wait()
        return self.buffer


Lanes = Mapping[tuple[int, int], "dist.ProcessGroup"]
"""NCCL between stages: (source, target) -> the group of their messages, which run in the order of posting."""


@dataclass(eq=False)
class ProcessCommunicator(Communicator):
    """A process's communicator of the world, or of a slice of it."""

    group: dist.ProcessGroup | None  # None: the default group
    control: dist.ProcessGroup | None  # gloo group for objects, with NCCL
    upward: dist.ProcessGroup
    downward: dist.ProcessGroup
    staging: Staging
    outbox: _Outbox
    beat: Callable[[], None]
    timeout: timedelta  # of every wait; by default a group waits half an hour
    key: bytes = field(repr=False)
    watcher: _Watcher = field(default_factory=_Watcher)
    stage_watcher: _Watcher = field(default_factory=_Watcher)  # messages of stages are posted ahead
    lanes: Lanes = field(default_factory=dict[tuple[int, int], "dist.ProcessGroup"])
    axis: Axis | None = None  # None: all ranks
    num_objects: int = 0  # collective calls so far, equal on all ranks

    def post(self, sends: dict[int, Tensor], receives: dict[int, int], tag: MessageTag) -> dict[int, Pending[Tensor]]:
        self.beat()
        return self._post_nccl(sends, receives) if self.transport == "nccl" else self._post_gloo(sends, receives, tag)

    def flush(self, *, keep: int) -> None:
        with self.clock("exposed"):
            self.outbox.flush(keep)

    def _post_gloo(
        self, sends: dict[int, Tensor], receives: dict[int, int], tag: MessageTag
    ) -> dict[int, Pending[Tensor]]:
        pending: dict[int, Pending[Tensor]] = {}
        for peer, nbytes in receives.items():
            source = self.ranks[peer]
            buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            work = _started(dist.irecv(buffer, source, group=self._towards(source, self.me)))
            watcher = self.stage_watcher if tag.phase == "stage" else self.watcher
            number = self.ledger.expected(source)
            pending[peer] = _Arrival(self, source, buffer, work, watcher.watch(work), now(), number, tag)
        posted: list[tuple[dist.Work, Tensor]] = []
        for peer, hosted in self.staging.to_host(sends).items():
            target = self.ranks[peer]
            posted.append((_started(dist.isend(hosted, target, group=self._towards(self.me, target))), hosted))
        self.outbox.hold(posted)
        return pending

    def _post_nccl(self, sends: dict[int, Tensor], receives: dict[int, int]) -> dict[int, Pending[Tensor]]:
        """Post one work per peer, so that the first block does not wait for the last.

        All ranks proceed by ring distance, sending to one peer and receiving from another, so waits cannot form a
        cycle. Between stages, where receives are posted ahead of sends, every ordered pair has its own group (`lanes`).
        """
        buffers = {p: torch.empty(n, dtype=torch.uint8, device=self.device) for p, n in receives.items()}
        arriving: dict[int, dist.Work] = {}
        sent: list[tuple[dist.Work, Tensor]] = []
        for distance in range(1, self.size):
            target, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            if self.lanes:
                if target in sends:
                    lane = self.lanes[self.me, self.ranks[target]]
                    sent.append((_started(dist.isend(sends[target], self.ranks[target], group=lane)), sends[target]))
                if source in buffers:
                    lane = self.lanes[self.ranks[source], self.me]
                    arriving[source] = _started(dist.irecv(buffers[source], self.ranks[source], group=lane))
                continue
            operations: list[dist.P2POp] = []
            if target in sends:
                operations.append(dist.P2POp(dist.isend, sends[target], self.ranks[target], group=self.upward))
            if source in buffers:
                operations.append(dist.P2POp(dist.irecv, buffers[source], self.ranks[source], group=self.upward))
            if operations:
                work = dist.batch_isend_irecv(operations)[-1]  # one work for the batch, or one per operation
                if target in sends:
                    sent.append((work, sends[target]))
                if source in buffers:
                    arriving[source] = work
        self.outbox.hold(sent)
        return {p: _StreamArrival(self, b, arriving[p]) for p, b in buffers.items()}

    def _towards(self, source: int, target: int) -> dist.ProcessGroup:
        return self.upward if target > source else self.downward

    def summed(self, tensor: Tensor) -> Tensor:
        self.beat()
        total = tensor.clone()
        if self.size > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def broadcast(self, obj: T | None, src: int = 0) -> T:
        if self.size == 1:
            return cast("T", obj)
        label, group, source = self._label(), self.control or self.group, self.ranks[src]
        mine = _as_tensor(sealed(self.key, label(src), obj)) if self.rank == src else None
        length = torch.tensor([0 if mine is None else len(mine)])
        dist.broadcast(length, source, group=group)
        buffer = torch.empty(int(length), dtype=torch.uint8) if mine is None else mine
        dist.broadcast(buffer, source, group=group)
        return cast("T", obj if mine is not None else opened(self.key, label(src), buffer.numpy().tobytes()))

    def scatter(self, objs: Sequence[object] | None) -> object:
        if self.size == 1:
            assert objs is not None
            return objs[0]
        label = self._label()
        packed = [_as_tensor(sealed(self.key, label(i), each)) for i, each in enumerate(objs)] if objs else None
        sizes = self.broadcast([len(p) for p in packed] if packed else None)
        assert isinstance(sizes, list)
        if self.rank != 0:
            buffer = torch.empty(sizes[self.rank], dtype=torch.uint8)
            dist.recv(buffer, self.ranks[0], group=self.control or self.group)
            return opened(self.key, label(self.rank), buffer.numpy().tobytes())
        assert packed is not None
        assert objs is not None
        for peer in range(1, self.size):
            dist.send(packed[peer], self.ranks[peer], group=self.control or self.group)
        return objs[0]

    def all_gather(self, obj: T) -> list[T]:
        if self.size == 1:
            return [obj]
        label, group = self._label(), self.control or self.group
        mine = _as_tensor(sealed(self.key, label(self.rank), obj))
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        dist.all_gather(lengths, torch.tensor([len(mine)]), group=group)
        longest = max(int(each) for each in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        buffers = [torch.empty(longest, dtype=torch.uint8) for _ in self.ranks]
        dist.all_gather(buffers, padded, group=group)
        data = [buffer[: int(n)].numpy().tobytes() for buffer, n in zip(buffers, lengths, strict=True)]
        return [cast("T", opened(self.key, label(i), each)) for i, each in enumerate(data)]

    def _label(self) -> Callable[[int], bytes]:
        """Return the labels of one collective call: rank -> label of its message."""
        self.num_objects += 1
        call = f"call {self.num_objects} of {self.axis or 'all'}, ranks {self.ranks}"
        return lambda rank: f"{call}, {rank}".encode()

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control or self.group)

    def along(self, mesh: Mesh, axis: Axis) -> ProcessCommunicator:
        mine, group, control = self.ranks, None, None
        for ranks in mesh.groups(axis):  # every rank creates every group, in the same order
            made = _new_group(ranks, self.transport, self.timeout)
            made_control = _new_group(ranks, "gloo", self.timeout) if self.control else None
            if self.me in ranks:
                mine, group, control = ranks, made, made_control
                if self.transport == "nccl":
                    _warm_up(made, self.device)
        lanes: Lanes = self._lanes(mesh) if axis == "stage" and self.transport == "nccl" else {}
        return replace(self, ranks=mine, group=group, control=control, axis=axis, lanes=lanes, num_objects=0)

    def _lanes(self, mesh: Mesh) -> Lanes:
        """Make and connect a group for each ordered pair of neighbours in the ring of stages. Collective."""
        lanes: dict[tuple[int, int], dist.ProcessGroup] = {}
        for ranks in mesh.groups("stage"):
            after = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
            for source, target in sorted({pair for a, b in after if a != b for pair in ((a, b), (b, a))}):
                lane = _new_group(sorted((source, target)), "nccl", self.timeout)
                if lane is not None and self.me in (source, target):
                    lanes[source, target] = lane
                    one = torch.zeros(1, device=self.device)
                    work = dist.isend(one, target, lane) if self.me == source else dist.irecv(one, source, lane)
                    _started(work).wait()
        return lanes

    def close(self) -> None:
        self.outbox.close()
        self.watcher.close()
        self.stage_watcher.close()
        dist.destroy_process_group()


def _new_group(ranks: Sequence[int] | None, backend: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """Make a group of these ranks (None: all). Collective over the world. Return None on ranks outside."""
    made = dist.new_group(ranks and list(ranks), backend=backend, timeout=timeout)
    return made if isinstance(made, dist.ProcessGroup) else None


def _warm_up(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Use a group once: NCCL connects at the first use, which needs all ranks of the group."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def _started(work: dist.Work | None) -> dist.Work:
    """Return the work; torch gives None to ranks outside the group."""
    assert work is not None
    return work


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
