"""What is predicted of a run, by whatever prices it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from gnnpar.planner.memory import Memory


class Prediction(ABC):
    """`phases`: seconds of an epoch, with their sum `seconds`; `memory`: bytes, by rank."""

    phases: Any
    memory: tuple[Memory, ...]

    @property
    @abstractmethod
    def label(self) -> str:
        """What was priced, in words."""

    @property
    def peak_bytes(self) -> float:
        return max(m.total for m in self.memory)

    def as_predicted(self) -> dict[str, Any]:
        """What plan.json and `gnnpar estimate --json` say of it."""
        return {
            "epoch_seconds": self.phases.seconds,
            "phases": dict(vars(self.phases)),
            "peak_bytes": [round(m.total) for m in self.memory],
            "label": self.label,
        }
