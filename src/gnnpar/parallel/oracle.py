"""What an inexact strategy may implement so that `gnnpar check` also tests it where it is not exact.

The oracle is the same mathematics on one device: a view of the whole graph, without messages, halos or codecs.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from gnnpar.parallel.engine import PassGraph
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan


@runtime_checkable
class WithOracle(Protocol):
    """A strategy that knows what it computes, in one piece."""

    def oracle(self, plan: Plan, whole: Shard, *, seed: int) -> PassGraph | None:
        """The training view of one device that holds the whole graph, equal to this strategy under `plan` to rounding.

        Built once for a run: it may keep state from epoch to epoch. None: there is none, as with a lossy codec.
        """
        ...
