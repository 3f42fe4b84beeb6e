"""PipeGCN's messages: rows and gradients sent `staleness` epochs ago, or running means of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gnnpar.comm.communicator import Phase
from gnnpar.parallel.stale import RowPolicy


@dataclass(frozen=True)
class Late(RowPolicy):
    """`decays`: phase -> decay, for phases that read running means."""

    staleness: int
    decays: Mapping[Phase, float]

    def age(self, phase: Phase, epoch: int) -> int:
        return self.staleness

    def decay(self, phase: Phase) -> float | None:
        return self.decays.get(phase)
