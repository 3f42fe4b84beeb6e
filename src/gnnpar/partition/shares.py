"""Parts of unequal size, for devices of unequal speed: a wrapper of partitioners that support shares."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gnnpar.data.dataset import Dataset
from gnnpar.partition.partition import Metis, Partitioner, Random, Range


@dataclass(frozen=True, kw_only=True)
class Shares:
    """A partitioner with `shares` of the nodes, by part. kind, balance: part of the cache key."""

    by: Partitioner
    shares: tuple[float, ...]
    kind: str
    balance: str

    @staticmethod
    def wrap(by: Partitioner, shares: tuple[float, ...]) -> Shares:
        total = sum(shares)
        if not shares or min(shares) <= 0:
            raise ValueError(f"shares={shares} must all be above 0: a part without nodes cannot be a rank's")
        normal = tuple(s / total for s in shares)
        balance = by.balance if isinstance(by, Metis) else "nodes"
        return Shares(by=by, shares=normal, kind=type(by).__qualname__, balance=balance)

    @staticmethod
    def supported(by: Partitioner) -> bool:
        return isinstance(by, Metis | Random | Range)

    def part_of(self, dataset: Dataset, parts: int) -> Tensor:
        if parts != len(self.shares):
            raise ValueError(f"{len(self.shares)} shares make no {parts} parts: give one a part")
        if isinstance(self.by, Metis):
            return self.by.part_of(dataset, parts, shares=self.shares)
        count = dataset.num_nodes
        ends = torch.tensor([round(s * count) for s in accumulate(self.shares)][:-1])
        in_order = torch.bucketize(torch.arange(count), ends, right=True)
        if isinstance(self.by, Random):
            return in_order[torch.randperm(count, generator=torch.Generator().manual_seed(self.by.seed))]
        if isinstance(self.by, Range):
            return in_order
        raise ValueError(f"{self.kind} makes equal parts only: use partition=metis, random or range")
