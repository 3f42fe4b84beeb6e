"""Ranks as threads of one process, for tests and for many ranks on one device. Bytes are exact, times are not."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from gnnpar.comm.clock import PhaseClock
from gnnpar.comm.clock import monotonic as now
from gnnpar.comm.communicator import Axis, Communicator, Mesh, MessageTag, Pending, T
from gnnpar.comm.ledger import Ledger, Receipt

Lane = tuple[str, str, int, int]  # kind, group, from, to
Channel = tuple[str, str, int, int, int]  # a lane and the number of the message
_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 3.0  # for ranks to finish a short epoch after Ctrl-C


class ThreadWorld:
    """Mailboxes and barriers shared by `size` threads. A failure in one thread ends all waits."""

    def __init__(self, size: int, *, device: torch.device | None = None) -> None:
        self.size, self.device = size, device or torch.device("cpu")
        self.failed = threading.Event()
        self._lock = threading.Lock()
        self._boxes: dict[Channel, queue.SimpleQueue[object]] = {}

    def box(self, key: Channel) -> queue.SimpleQueue[object]:
        with self._lock:  # two threads may create a box at once
            return self._boxes.setdefault(key, queue.SimpleQueue())

    def put(self, key: Channel, item: object) -> None:
        self.box(key).put(item)

    def take(self, key: Channel) -> Any:  # Any: the sender's object
        """Wait for the one item of this box, and remove the box."""
        box = self.box(key)
        while True:
            try:
                item = box.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self.failed.is_set():
                    raise RuntimeError("another rank failed") from None
            else:
                with self._lock:
                    del self._boxes[key]
                return item

    def communicators(self) -> list[ThreadCommunicator]:
        everyone = tuple(range(self.size))
        how, device = "threads" if self.size > 1 else "none", self.device
        return [ThreadCommunicator(everyone, r, device, how, PhaseClock(device), Ledger(), self) for r in everyone]

    def turn(self) -> AbstractContextManager[object]:
        """Return the context that a rank's thread runs in."""
        return nullcontext()

    def run(self, body: Callable[[ThreadCommunicator], T], comms: Sequence[ThreadCommunicator] = ()) -> list[T]:
        """Call body(communicator) in every rank's thread. Return the results in rank order, or raise the first failure.
        comms: communicators of an earlier run, to continue; new ones by default."""
        results: dict[int, T] = {}
        failures: list[tuple[int, BaseException]] = []

        def guarded(comm: ThreadCommunicator) -> None:
            try:
                # CUDA backward would otherwise run on shared device threads, where one rank's wait blocks all
                with self.turn(), torch.autograd.set_multithreading_enabled(False):
                    results[comm.rank] = body(comm)
            except BaseException as error:
                if not self.failed.is_set():
                    failures.append((comm.rank, error))
                self.failed.set()

        comms = comms or self.communicators()
        threads = [threading.Thread(target=guarded, args=(c,), name=f"rank{c.rank}", daemon=True) for c in comms]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():  # a bounded join allows Ctrl-C
                    thread.join(_POLL_SECONDS)
        except KeyboardInterrupt:
            self.failed.set()
            end = now() + _PATIENCE_SECONDS
            for thread in threads:
                thread.join(max(0.0, end - now()))
            raise
        if failures:
            rank, error = failures[0]
            setattr(error, "gnnpar_rank", rank)  # noqa: B010  # exceptions declare no such attribute
            raise error
        return [results[rank] for rank in range(self.size)]


@dataclass
class _Arrival:
    """A message that will arrive in a mailbox."""

    comm: ThreadCommunicator
    key: Channel
    peer: int
    posted: float
    number: int
    staged: bool = False

    def wait(self) -> Tensor:
        with self.comm.clock("exposed"):
            began = now()
            buffer, arrived = self.comm.world.take(self.key)
            receipt = Receipt(self.peer, self.posted, began, arrived, now(), self.number, self.staged)
            self.comm.ledger.received(receipt)
        return buffer


@dataclass(eq=False)
class ThreadCommunicator(Communicator):
    """One thread's end of a ThreadWorld, or of a slice of it. Buffers are handed over, not copied."""

    world: ThreadWorld
    group: str = ""
    _numbers: dict[tuple[Lane, bool], int] = field(default_factory=lambda: defaultdict[tuple[Lane, bool], int](int))

    def post(self, sends: dict[int, Tensor], receives: dict[int, int], tag: MessageTag) -> dict[int, Pending[Tensor]]:
        for peer, buffer in sends.items():
            self.world.put(self._channel("x", self.me, self.ranks[peer]), (buffer, now()))
        pending: dict[int, Pending[Tensor]] = {}
        for source, peer in ((self.ranks[peer], peer) for peer in receives):
            number, staged = self.ledger.expected(source), tag.phase == "stage"
            pending[peer] = _Arrival(self, self._channel("x", source, self.me), source, now(), number, staged)
        return pending

    def flush(self, *, keep: int) -> None:
        """Do nothing: buffers are passed by reference."""

    def summed(self, tensor: Tensor) -> Tensor:
        parts = self.all_gather(tensor)
        total = parts[0].clone()
        for part in parts[1:]:  # in rank order: every rank adds the same numbers in the same order
            total += part
        self.barrier()  # do not change a tensor that others still read
        return total

    def broadcast(self, obj: T | None, src: int = 0) -> T:
        return self.all_gather(cast("T", obj if self.rank == src else None))[src]  # other ranks' objects are ignored

    def scatter(self, objs: Sequence[object] | None) -> object:
        given = self.all_gather(objs)[0]
        assert given is not None
        return given[self.rank]

    def barrier(self) -> None:
        self.all_gather(None)

    def along(self, mesh: Mesh, axis: Axis) -> ThreadCommunicator:
        mine = next(group for group in mesh.groups(axis) if self.me in group)
        return replace(self, ranks=mine, group=f"{self.group}/{axis}", _numbers=defaultdict(int))

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def all_gather(self, obj: T) -> list[T]:
        for peer in self.ranks:
            if peer != self.me:
                self.world.put(self._channel("g", self.me, peer), obj)
        return [obj if peer == self.me else self.world.take(self._channel("g", peer, self.me)) for peer in self.ranks]

    def _channel(self, kind: str, src: int, dst: int) -> Channel:
        """Return the box of the next message from src to dst. Both ends count messages."""
        lane = kind, self.group, src, dst
        self._numbers[lane, src == self.me] += 1
        return *lane, self._numbers[lane, src == self.me]
