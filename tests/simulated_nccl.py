"""NCCL without GPUs: rank threads, and a torch.distributed whose messages run as NCCL runs them.

A group's operations run one after the other on each rank, in the order of posting; those of a batch run together. A
send is over when its receive runs at the other end: nothing is buffered. So messages that are posted in orders that do
not fit wait forever here, too, and fail after `patience` seconds. Every group notes its first use.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnpar.comm import process
from gnnpar.comm.process import ProcessCommunicator, connect


class Group:
    def __init__(self, number: int, ranks: Sequence[int]) -> None:
        self.number, self.ranks = number, tuple(ranks)


class Work:
    """`events`: what was waited for, in order."""

    def __init__(self, patience: float) -> None:
        self.done, self._patience, self.error = threading.Event(), patience, ""

    def wait(self) -> bool:
        if not self.done.wait(self._patience):
            raise TimeoutError("a message was posted in an order that does not fit: it waits forever")
        return True


class SimulatedNccl:
    """The part of torch.distributed that `comm/process.py` uses. `log`: (rank, what, group, ...) of every operation."""

    ProcessGroup, Work = Group, Work

    def __init__(self, size: int, *, patience: float = 30.0) -> None:
        self.size, self.patience = size, patience
        self.log: list[tuple] = []
        self._rank = threading.local()
        self._lock = threading.Lock()
        self._groups: dict[int, Group] = {}
        self._made: dict[int, int] = defaultdict(int)
        self._boxes: dict[tuple, queue.Queue] = defaultdict(queue.Queue)
        self._streams: dict[tuple[int, int], queue.Queue] = {}
        self._meetings: dict[tuple, int] = defaultdict(int)
        self._gathered: dict[tuple, dict[int, Any]] = defaultdict(dict)
        self._barriers: dict[tuple, threading.Barrier] = {}

    def run(self, body: Callable[[ProcessCommunicator], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """body(communicator) in every rank's thread."""
        nccl = self

        class Environment(dict[str, str]):
            def __missing__(self, key: str) -> str:
                return {"RANK": str(nccl.me), "WORLD_SIZE": str(nccl.size)}[key]

        monkeypatch.setattr(process, "dist", self)
        asked = {name: value for name, value in os.environ.items() if name == "GNNPAR_SHARE_GPU"}
        monkeypatch.setattr(process, "os", SimpleNamespace(environ=Environment(asked)))
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def rank(number: int) -> None:
            self._rank.number = number
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    results[number] = body(connect("nccl", device=torch.device("cpu"), key=b"test", timeout_seconds=60))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not errors:
                thread.join(0.1)
        if errors:
            raise errors[0]
        return results

    @property
    def me(self) -> int:
        return self._rank.number

    def P2POp(self, op: Callable, tensor: Tensor, peer: int, group: Group) -> tuple:  # torch's name
        return ("send" if op == self.isend else "receive", tensor, peer, group)

    def isend(self, tensor: Tensor, peer: int, group: Group) -> Work:
        return self._post([("send", tensor, peer, group)])

    def irecv(self, tensor: Tensor, peer: int, group: Group) -> Work:
        return self._post([("receive", tensor, peer, group)])

    def batch_isend_irecv(self, operations: list[tuple]) -> list[Work]:
        return [self._post(operations)]

    def _post(self, operations: list[tuple]) -> Work:
        group, work = operations[0][3], Work(self.patience)
        with self._lock:
            self.log.append((self.me, group.number, tuple((kind, peer) for kind, _, peer, _ in operations)))
            stream = self._streams.get((self.me, group.number))
            if stream is None:
                stream = self._streams[self.me, group.number] = queue.Queue()
                threading.Thread(target=self._work_off, args=(self.me, stream), daemon=True).start()
        stream.put((operations, work))
        return work

    def _work_off(self, rank: int, stream: queue.Queue) -> None:
        while True:
            operations, work = stream.get()
            running = [threading.Thread(target=self._move, args=(rank, *op), daemon=True) for op in operations]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()
            work.done.set()

    def _move(self, rank: int, kind: str, tensor: Tensor, peer: int, group: Group) -> None:
        there, back = (rank, peer) if kind == "send" else (peer, rank), "taken"
        if kind == "send":
            self._boxes[group.number, *there].put(tensor)
            self._boxes[group.number, *there, back].get()
        else:
            tensor.copy_(self._boxes[group.number, *there].get())
            self._boxes[group.number, *there, back].put(True)

    def init_process_group(self, backend: str, *, device_id: object, **options: object) -> None:
        self.log.append((self.me, "init", device_id))

    def new_group(self, ranks: Sequence[int] | None, *, backend: str, timeout: timedelta) -> Group | object:
        with self._lock:
            number = self._made[self.me] = self._made[self.me] + 1
            group = self._groups.setdefault(number, Group(number, ranks or range(self.size)))
        return group if self.me in group.ranks else object()

    def _gather(self, obj: Any, group: Group | None) -> dict[int, Any]:
        ranks = tuple(range(self.size)) if group is None else group.ranks
        number = 0 if group is None else group.number
        with self._lock:
            self._meetings[self.me, number] += 1
            key = number, self._meetings[self.me, number]
            barrier = self._barriers.setdefault(key, threading.Barrier(len(ranks), timeout=self.patience))
            self._gathered[key][self.me] = obj
        barrier.wait()
        return self._gathered[key]

    def all_reduce(self, tensor: Tensor, *, group: Group | None) -> None:
        self.log.append((self.me, "reduce" if group is None else group.number, "all"))
        everything = self._gather(tensor.clone(), group)
        tensor.copy_(sum((everything[r] for r in sorted(everything)), torch.zeros_like(tensor)))

    def all_gather(self, into: list[Tensor], tensor: Tensor, *, group: Group | None) -> None:
        everything = self._gather(tensor.clone(), group)
        for place, rank in zip(into, sorted(everything), strict=True):
            place.copy_(everything[rank])

    def broadcast(self, tensor: Tensor, src: int, *, group: Group | None) -> None:
        tensor.copy_(self._gather(tensor.clone(), group)[src])

    def barrier(self, *, group: Group | None) -> None:
        self._gather(None, group)

    def send(self, tensor: Tensor, peer: int, *, group: Group) -> None:
        self._boxes["host", group.number, self.me, peer].put(tensor)

    def recv(self, tensor: Tensor, peer: int, *, group: Group) -> None:
        tensor.copy_(self._boxes["host", group.number, peer, self.me].get(timeout=self.patience))
