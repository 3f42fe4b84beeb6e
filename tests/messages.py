"""A message between two ranks without a training: n rows that part 0 sends to part 1, and the way back."""

from typing import Any

import torch
from torch import Tensor

from gnnpar.comm import MessageTag, RowLike, ThreadWorld
from gnnpar.partition.shard import Shard, cut
from graphs import dataset_of


def two_shards(num_rows: int) -> list[Shard]:
    """Nodes i of part 0 and n + i of part 1, joined in pairs, both ways."""
    left = torch.arange(num_rows)
    right = left + num_rows
    data = dataset_of(torch.cat([left, right]), torch.cat([right, left]), num_nodes=2 * num_rows)
    return cut(data, (torch.arange(2 * num_rows) >= num_rows).long(), 2)


class Message:
    """Both ends of a codec that needs no talk when it is built."""

    def __init__(self, config: Any, num_rows: int, *, seed: int = 7) -> None:
        comms = ThreadWorld(2).communicators()
        self.shards = two_shards(num_rows)
        self.ends = [config.build(shard.row_lists, comm, seed) for shard, comm in zip(self.shards, comms, strict=True)]
        self.index = torch.arange(num_rows)

    def bytes_of(self, rows: tuple[Tensor, ...], *, epoch: int = 0, **tag: Any) -> Tensor:
        return self.ends[0].encode(rows, self.index, self.tag(epoch, **tag), 1)

    def send(self, rows: tuple[Tensor, ...], *, epoch: int = 0, **tag: Any) -> tuple[Tensor, ...]:
        """What rank 1 reads."""
        at, like = self.tag(epoch, **tag), RowLike.of(rows)
        buffer = self.bytes_of(rows, epoch=epoch, **tag)
        assert len(buffer) == self.ends[1].nbytes(len(self.index), like, at, 0)
        return self.ends[1].decode(buffer, len(self.index), like, at, 0)

    @staticmethod
    def tag(epoch: int = 0, *, layer: int = 0, call: int = 0, phase: Any = "forward", first: int = 0) -> MessageTag:
        return MessageTag(epoch, layer, call, phase, first=first)
