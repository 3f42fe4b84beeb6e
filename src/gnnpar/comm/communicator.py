"""Communication between the ranks of a group, and its byte counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from gnnpar.comm.clock import PhaseClock
from gnnpar.comm.ledger import Ledger

Phase = Literal[
    "forward", "backward", "remat", "push", "stage", "reduce", "assign", "pairs", "global", "evaluate", "setup"
]
Axis = Literal["stage", "part"]
SavedTag = tuple[int, int, int, Phase, int, int]  # a MessageTag as loaded from a checkpoint
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class MessageTag(NamedTuple):
    """Tag of a transfer: the key of accounting, history and bit-widths. first: start of the piece in the peer's list of
    rows, if sent in pieces. `first` is not part of a key: the encoding of a row does not depend on the pieces."""

    epoch: int
    layer: int
    call: int
    phase: Phase
    chunk: int = 0
    first: int = 0


class Pending(Protocol[T_co]):
    def wait(self) -> T_co:
        """Wait for the value and return it. This time is exposed communication."""
        ...


@dataclass(frozen=True)
class Mesh:
    """`ranks[stage][part]`: layers are cut along the stage axis, nodes along the part axis."""

    ranks: tuple[tuple[int, ...], ...]

    @staticmethod
    def grid(world_size: int, *, stages: int = 1, parts: int | None = None) -> Mesh:
        """Return a full grid; parts=None: as many as the world allows. Raise ValueError if it does not fit."""
        if parts is None:
            parts = max(1, world_size // stages)
        if stages * parts != world_size:
            raise ValueError(
                f"{world_size} ranks cannot form stages={stages} x parts={parts} (needs {stages * parts}). "
                f"Set strategy.stages and strategy.parts so that their product is {world_size}, "
                f"or launch {stages * parts} ranks."
            )
        return Mesh(tuple(tuple(range(s * parts, (s + 1) * parts)) for s in range(stages)))

    @property
    def world_size(self) -> int:
        return sum(map(len, self.ranks))

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """Return all groups along an axis; along "stage" the mesh must be a full grid."""
        if axis == "part":
            return list(self.ranks)
        widths = {len(row) for row in self.ranks}
        if len(widths) > 1:
            raise ValueError(f"stages of different widths {sorted(widths)} have no slices along the stage axis")
        return [tuple(column) for column in zip(*self.ranks, strict=True)]


@dataclass(eq=False)
class Communicator(ABC):
    """A group of ranks. Every rank of the group makes the same calls in the same order.

    ranks: global ranks of the group. me: global number of this rank.
    """

    ranks: tuple[int, ...]
    me: int
    device: torch.device
    transport: Literal["gloo", "nccl", "threads", "none"]
    clock: PhaseClock
    ledger: Ledger

    @property
    def rank(self) -> int:
        return self.ranks.index(self.me)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming_nbytes: Mapping[int, int], tag: MessageTag, *, metadata: int = 0
    ) -> Mapping[int, Pending[Tensor]]:
        """Exchange flat uint8 buffers, a sparse all-to-all. Empty buffers are not sent; both ends know every size.
        metadata: number of outgoing bytes that are not payload (scales, zero points)."""
        self.ledger.add_metadata(metadata)
        sends = {peer: buffer for peer, buffer in outgoing.items() if buffer.numel()}
        for peer, buffer in sends.items():
            self.ledger.sent(tag.phase, buffer.numel(), peer=self.ranks[peer], layer=tag.layer)
        nothing = Ready(torch.empty(0, dtype=torch.uint8, device=self.device))
        receives = {peer: nbytes for peer, nbytes in incoming_nbytes.items() if nbytes}
        return {**dict.fromkeys(incoming_nbytes, nothing), **self.post(sends, receives, tag)}

    @abstractmethod
    def post(self, sends: dict[int, Tensor], receives: dict[int, int], tag: MessageTag) -> dict[int, Pending[Tensor]]:
        """Send non-empty buffers, and return the pending receives by peer."""

    @abstractmethod
    def flush(self, *, keep: int) -> None:
        """Wait until the buffers of all but the last `keep` exchanges have left this rank. If every rank does so before
        each exchange, the slowest rank never waits for another one's flush."""

    def all_reduce(self, tensor: Tensor, tag: MessageTag | None = None) -> Tensor:
        """Return the sum over ranks, a new tensor. Without a tag it is not part of training and not counted."""
        if tag is not None:
            nbytes = ring_reduce_nbytes(tensor.numel() * tensor.element_size(), rank=self.rank, size=self.size)
            self.ledger.counted(tag.phase, nbytes)
        with self.clock("reduce"):
            return self.summed(tensor)

    @abstractmethod
    def summed(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, a new tensor."""

    @abstractmethod
    def broadcast(self, obj: T | None, src: int = 0) -> T:
        """Return the object of `src` on every rank; other ranks' objects are ignored."""

    @abstractmethod
    def scatter(self, objs: Sequence[object] | None) -> object:
        """Return this rank's object from the list on rank 0, one per rank."""

    @abstractmethod
    def all_gather(self, obj: T) -> list[T]:
        """Return the objects of all ranks, on all ranks."""

    def gather(self, obj: T) -> list[T] | None:
        """Return the objects of all ranks in rank order, on rank 0; None elsewhere."""
        everything = self.all_gather(obj)
        return everything if self.rank == 0 else None

    @abstractmethod
    def barrier(self) -> None: ...
    @abstractmethod
    def along(self, mesh: Mesh, axis: Axis) -> Self:
        """Return this rank's slice of the grid, with the same ledger and clock. Collective over all ranks."""

    def settle_accounts(self) -> None:
        """Add the senders' post times to the ledger, to split exposed time into wire and skew. Untimed, collective."""
        for peer, posts in enumerate(self.all_gather(dict(self.ledger.posts))):
            self.ledger.learn_posts(self.ranks[peer], posts.get(self.me, {}))

    @abstractmethod
    def close(self) -> None: ...


@dataclass(frozen=True)
class Ready:
    """A value that is available already."""

    value: Tensor

    def wait(self) -> Tensor:
        return self.value


def ring_reduce_nbytes(nbytes: int, *, rank: int, size: int) -> int:
    """Return the bytes one rank sends in a ring all-reduce: 2 (P - 1) / P of the tensor; the sum is exact."""
    total = 2 * (size - 1) * nbytes
    return total // size + (rank < total % size)
