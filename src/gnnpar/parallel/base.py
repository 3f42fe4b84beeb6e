"""Defaults of strategies with one part per rank and all layers on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from gnnpar.codecs.codec import CodecConfig, Exactness, Identity, check_epochs
from gnnpar.folds.edge_data import ALL_KINDS
from gnnpar.parallel.strategy import Capabilities, LayerFacts, Workload
from gnnpar.placement import Plan, Topology

HALO = Capabilities(
    from_shards=True, edge_data=ALL_KINDS, moments=True, pair_loss=True, row_order=True, learned_features=True
)
"""Capabilities of a strategy that reads halo rows: its ranks hold all rows of a layer at once."""


@dataclass(frozen=True, kw_only=True)
class FlatStrategy:
    """A strategy that runs with any setting, and is its own exact limit. `mode`, `how`: `LayerFacts` of every layer."""

    mode: ClassVar[str] = ""

    @property
    def how(self) -> str:
        return ""

    def exact_limit(self) -> Self:
        return self

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        """Accept every configuration."""

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        return workload.flat_plan(topology)

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        return (LayerFacts(mode=self.mode, how=self.how),) * plan.num_layers


@dataclass(frozen=True, kw_only=True)
class CodedStrategy(FlatStrategy):
    """A strategy that sends rows by `codec` in training. It is exact with the identity codec and these fields.

    `limit`: fields of the exact limit, with their values; `beyond`: the kind of inexactness of other values.
    """

    codec: CodecConfig = Identity()
    limit: ClassVar[Mapping[str, object]] = {}
    beyond: ClassVar[Exactness] = "stale"

    @property
    def at_limit(self) -> bool:
        """Return True if at most the codec makes the strategy inexact."""
        return all(vars(self)[name] == value for name, value in self.limit.items())

    @property
    def exactness(self) -> frozenset[Exactness]:
        kinds = self.codec.exactness
        return kinds if self.at_limit else (kinds - {"exact"}) | frozenset[Exactness]({self.beyond})

    def exact_limit(self) -> Self:
        return replace(self, codec=Identity(), **self.limit)

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        check_epochs(self.codec, epochs)
