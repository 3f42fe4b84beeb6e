"""The parts that broadcast in an epoch, and the copies of those that do not.

Every rank knows the decision of all: ages follow from earlier decisions, and changes are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gnnpar.comm import Communicator, Site
from gnnpar.folds.block import Rows
from gnnpar.parallel.torch_types import floats

Call = tuple[int, int]  # layer, number of the aggregation in it


class Rule(NamedTuple):
    """A part broadcasts if its copies are `period` epochs old, or its rows have changed by more than `bound`."""

    period: int | None
    bound: float | None

    def due(self, age: int) -> bool:
        return self.period is not None and age >= self.period

    def skips(self, age: int, change: float) -> bool:
        """Return True if the change is small; NaN never skips."""
        return not self.due(age) and (self.bound is None or change <= self.bound)


def change_of(rows: Rows, before: Rows) -> Tensor:
    """Return |X - X'| / |X'| over all operands, Frobenius norms; infinite if X' is zero and X is not. Shape: []."""
    moved = sum((a - b).square().sum(dtype=torch.float64) for a, b in zip(rows, before, strict=True))
    size = sum(b.square().sum(dtype=torch.float64) for b in before)
    assert isinstance(moved, Tensor)
    assert isinstance(size, Tensor)
    return torch.where(moved > 0, (moved / size).sqrt(), moved).float()


@dataclass(eq=False)
class Kept:
    """Copies of one aggregation. `sent`: this rank's rows as last sent, from which their change is measured;
    `since[q]`: the epoch of part q's last broadcast; `rows[q]`: the rows received then."""

    since: list[int]
    sent: Rows = ()
    rows: dict[int, Rows] = field(default_factory=dict[int, Rows])

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.sent, *(t for rows in self.rows.values() for t in rows)]


class Copies:
    """Copies of all aggregations. A part of an engine."""

    def __init__(self, comm: Communicator, rule: Rule) -> None:
        self._comm, self._rule = comm, rule
        self.kept: dict[Call, Kept] = {}

    def broadcasting(self, rows: Rows, site: Site) -> frozenset[int]:
        """Return the parts that broadcast at this site. Collective."""
        at, rank, size = (site.layer, site.call), self._comm.rank, self._comm.size
        every = range(size)
        if at not in self.kept:
            self.kept[at], chosen = Kept([site.epoch] * size), frozenset(every)
        else:
            ages = [site.epoch - since for since in self.kept[at].since]
            changes = self._changes(rows, ages, site)
            chosen = frozenset(q for q in every if not self._rule.skips(ages[q], changes[q]))
        kept = self.kept[at]
        for q in chosen:
            kept.since[q] = site.epoch
        if rank in chosen and self._rule.bound is not None:
            kept.sent = tuple(t.detach().clone() for t in rows)
        return chosen

    def _changes(self, rows: Rows, ages: Sequence[int], site: Site) -> list[float]:
        """Return the change of every part; without a message if all are due or no bound is set."""
        if self._rule.bound is None or all(self._rule.due(age) for age in ages):
            return [0.0] * len(ages)
        mine = torch.zeros(len(ages), device=rows[0].device)
        mine[self._comm.rank] = change_of(rows, self.kept[site.layer, site.call].sent)
        return floats(self._comm.all_reduce(mine, site._replace(phase="assign")))

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for kept in self.kept.values() for t in kept.tensors)

    def drain(self) -> None:
        """Do nothing: nothing is in flight."""

    def state_dict(self) -> dict[Hashable, tuple[Call, list[int], Rows, dict[int, Rows]]]:
        return {at: (at, list(kept.since), kept.sent, dict(kept.rows)) for at, kept in self.kept.items()}

    def load_state_dict(self, state: Mapping[Hashable, tuple[Call, Sequence[int], Rows, Mapping[int, Rows]]]) -> None:
        for (layer, call), since, sent, rows in state.values():
            self.kept[layer, call] = Kept(list(since), sent, dict(rows))
