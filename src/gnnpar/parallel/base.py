"""Defaults of strategies with one part per rank and all layers on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from gnnpar.codecs.codec import CodecConfig, Exactness, Identity, check_epochs
from gnnpar.folds.edge_data import ALL_KINDS
from gnnpar.parallel.strategy import Capabilities, Workload
from gnnpar.placement import Plan, Topology

HALO = Capabilities(
    from_shards=True, edge_data=ALL_KINDS, moments=True, pair_loss=True, row_order=True, learned_features=True
)
"""Capabilities of a strategy that reads halo rows: its ranks hold all rows of a layer at once."""


@dataclass(frozen=True, kw_only=True)
class FlatStrategy:
    """A strategy that runs with any setting, and is its own exact limit."""

    def exact_limit(self) -> Self:
        return self

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        """Accept every configuration."""

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        return workload.flat_plan(topology)


@dataclass(frozen=True, kw_only=True)
class CodedStrategy(FlatStrategy):
    """A strategy that sends rows by `codec` in training. It is exact with the identity codec."""

    codec: CodecConfig = Identity()

    @property
    def exactness(self) -> frozenset[Exactness]:
        return self.codec.exactness

    def with_exactness(self, kind: Exactness) -> frozenset[Exactness]:
        """Return the exactness of the codec together with another kind of inexactness."""
        return (self.codec.exactness - {"exact"}) | frozenset[Exactness]({kind})

    def exact_limit(self) -> Self:
        return replace(self, codec=Identity())

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        check_epochs(self.codec, epochs)
