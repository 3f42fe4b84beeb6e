"""DIGEST's messages: rows of every `period`-th epoch, read until the next refresh."""

from __future__ import annotations

from dataclasses import dataclass

from gnnpar.comm.communicator import Phase
from gnnpar.parallel.stale import RowPolicy


@dataclass(frozen=True)
class Refreshed(RowPolicy):
    """`gradients`: send gradients of halo rows too, in epochs that refresh."""

    period: int
    gradients: bool

    def travels(self, phase: Phase, epoch: int) -> bool:
        return epoch % self.period == 0 and (phase != "backward" or self.gradients)

    def age(self, phase: Phase, epoch: int) -> int | None:
        if phase == "backward":
            return 0 if self.travels(phase, epoch) else None
        return epoch % self.period
