"""Graph parallelism that reduces every dense weight by sufficient factors, also where these are more bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.factors import FactorEngine
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.halo_graph import halo_engine


class EveryFactor(FactorEngine):
    def pays(self, name: str, rows: list[float]) -> bool:
        return self._comm.size > 1 and max(rows) < math.inf


@dataclass(frozen=True, kw_only=True)
class Factors(GraphParallel):
    reduce: Literal["sum", "factors"] = "factors"

    def build(self, context: BuildContext) -> Engine:
        return halo_engine(context, self, overlap=self.overlap, features_exact=False, engine=EveryFactor)
