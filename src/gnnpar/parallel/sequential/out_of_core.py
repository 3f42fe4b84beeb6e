"""Many parts on one device, in turn: A[N_p, N_q] X[N_q, F] for one p at a time.

Every part is a rank of SAR in its own thread; one thread runs at a time, and the data of the others (rows, structure,
saved tensors, waiting messages) lies on the host. The device holds the working set of one part, or of two on a GPU,
which loads pages ahead, so memory falls as 1/parts at any graph size. Source: SAR's loop over parts (Mostafa 2022,
algorithms 1 and 2), with the host in place of the other workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from gnnpar.comm import Communicator, allocator
from gnnpar.comm.communicator import T
from gnnpar.comm.threads import Channel, ThreadCommunicator, ThreadWorld
from gnnpar.files import StateDict
from gnnpar.parallel.engine import Engine, EpochReport, FlatEngine, Stepper
from gnnpar.parallel.sequential import paging
from gnnpar.partition.shard import Shard

BuildPart = Callable[[Shard, ThreadCommunicator], FlatEngine]


class OutOfCoreEngine(Engine):
    """FlatEngines of all parts behind one. `shard` is the whole graph, cut into `parts`; `comm` has one rank.

    Time in which the device waits for the host counts as exposed communication; nothing is sent over a link.
    """

    def __init__(
        self, *, build: BuildPart, shard: Shard, parts: Sequence[Shard], comm: Communicator, host_dir: Path
    ) -> None:
        cpu = comm.device.type == "cpu"
        self._pager = paging.Pager(
            paging.HostFile(host_dir) if cpu else paging.HostMemory(comm.device),
            smallest=paging.SMALLEST,
            busy=lambda: comm.clock("exposed"),
        )
        if cpu:
            # Paged-out memory leaves the process; smaller temporaries are reused (60 k nodes, GAT 3 x 256, 8 parts:
            # MiB resident and s an epoch with 64 KiB 672 and 6.3, 4 MiB 663 and 5.0, glibc's default 1040 and 4.1).
            allocator.return_freed(above=4 << 20)
        self._comm, self._shard, self._ids = comm, shard, [part.node_ids for part in parts]
        self._world = RoundRobinWorld(
            len(parts),
            device=comm.device,
            leaves=self._pager.evict_all,
            returns=self._pager.begin,
            posted=self._pager.evict,
        )
        self._ranks = self._world.communicators()
        self._pager.adopt([shard.x, *_tensors_of(shard.inner.forward)])  # ids, labels and masks are read by the runner
        self._pager.adopt(t for part in parts for t in _tensors_of(part))
        self._pager.start("build")
        self._engines = self._world.run(lambda c: self._paged(c.rank, lambda: build(parts[c.rank], c)), self._ranks)
        self._pager.evict_all()

    @property
    def node_ids(self) -> Tensor:
        return self._shard.node_ids

    def train_epoch(self, epoch: int, optimizer: Stepper, *, keep_gradient: bool = False) -> EpochReport:
        optimizer.zero_grad()
        self._pager.most = 0
        bucket = self._everywhere("train", lambda engine: engine.reduced_gradient(epoch))[0]
        return self._engines[0].step(self._pager.release(bucket), optimizer, keep_gradient=keep_gradient)

    def predict(self) -> Tensor:
        logits = [self._pager.release(rows) for rows in self._everywhere("predict", lambda engine: engine.predict())]
        out = logits[0].new_empty(self._shard.num_inner, *logits[0].shape[1:])
        for ids, rows in zip(self._ids, logits, strict=True):
            out[self._pager.release(ids)] = rows
        return out

    def exact_gradient(self, epoch: int) -> dict[str, Tensor]:
        bucket = self._everywhere("probe", lambda engine: engine.exact_bucket(epoch))[0]
        return self._engines[0].gradients_of(self._pager.release(bucket))

    def live_bytes(self) -> dict[str, int]:
        """Return the bytes; between epochs all of them are on the host."""
        return {"features": 0, "structure": 0, "halo": 0, "history": 0, "host": self._pager.nbytes}

    def peak_elsewhere(self) -> int:
        """Return the peak bytes of pages at the end of operations, without the workspace of kernels."""
        return self._pager.most

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._engines[0].named_parameters()

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        return self._engines[0].named_weights()

    def state_dict(self) -> StateDict:
        states = [engine.state_dict() for engine in self._engines]
        models = [state.pop("model") for state in states]
        return {"model": models[0], "parts": [tree_map_only(Tensor, self._copied, state) for state in states]}

    def load_state_dict(self, state: StateDict) -> None:
        for engine, part in zip(self._engines, state["parts"], strict=True):
            engine.load_state_dict({"model": state["model"], **part})
            self._pager.adopt(_tensors_of(part))

    def _copied(self, tensor: Tensor) -> Tensor:
        """Return a copy in memory of its own; the page stays as it was."""
        paged = self._pager.need(tensor) is not None
        copy = tensor.clone()
        if paged:
            self._pager.evict(tensor)
        return copy

    def _everywhere(self, what: str, do: Callable[[FlatEngine], T]) -> list[T]:
        self._pager.start(what)
        with self._comm.clock("compute"):
            results = self._world.run(lambda c: self._paged(c.rank, lambda: do(self._engines[c.rank])), self._ranks)
            self._pager.evict_all()
        return results

    def _paged(self, part: int, body: Callable[[], T]) -> T:
        self._pager.begin(part)
        with paging.Paging(self._pager):
            return body()


class RoundRobinWorld(ThreadWorld):
    """Threads that run one at a time, each until it needs data that is not there.

    `leaves` is called when a thread stops, `returns` with its number when it continues, `posted` with every buffer that
    is put into a mailbox. No rank runs meanwhile.
    """

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | None,
        leaves: Callable[[], None],
        returns: Callable[[int], None],
        posted: Callable[[Tensor], None],
    ) -> None:
        super().__init__(size, device=device)
        self._turn, self._leaves, self._returns, self._posted = threading.Lock(), leaves, returns, posted

    def turn(self) -> AbstractContextManager[object]:
        return self._turn

    def put(self, key: Channel, item: object) -> None:
        match item:
            case (Tensor() as buffer) | (Tensor() as buffer, float()):  # with its post time
                self._posted(buffer)
            case _:
                pass
        super().put(key, item)

    def take(self, key: Channel) -> Any:  # Any: what the other end put
        if not self.box(key).empty():  # no other thread takes from this box
            return super().take(key)
        self._leaves()
        self._turn.release()
        try:
            item = super().take(key)
        finally:
            self._turn.acquire()
        self._returns(key[3])
        return item


def _tensors_of(holder: object) -> Iterator[Tensor]:
    """Return all tensors in a tree of dataclasses, tuples, lists and dicts."""
    for leaf in tree_iter(holder):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):
            for each in fields(leaf):
                yield from _tensors_of(getattr(leaf, each.name))  # by name: any dataclass enters here
