"""Hybrid: a pipeline whose stages are graph parallel: stages x parts ranks, the parts of a stage side by side.

Chen, Chen and Qian, GNNPipe (arXiv 2308.10087), section on hybrid parallelism. The P parts of a stage hold the same
layers and different nodes; slot i of every part runs at the same time, and the rows that other parts read of its chunk
travel before each aggregation. One stage with one chunk a part is graph parallelism, one part is the pipeline.

Deviations: nodes are cut into parts first and into chunks inside each, so that the parts are a good partition; a rank
holds its own rows and the rows that it reads of others, not N; `codec` encodes these rows on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from gnnpar.parallel.pipeline.strategy import GNNPipe


@dataclass(frozen=True, kw_only=True)
class Hybrid(GNNPipe):
    """Fields as in GNNPipe. `parts` null: the smallest number above one that divides the ranks."""

    hybrid: ClassVar[bool] = True
    parts: Annotated[int, Ge(1), Le(4096)] | None = None
