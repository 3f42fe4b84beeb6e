"""An optional protocol by which `gnnpar check` also tests an inexact strategy in its inexact configuration.

An oracle is the same mathematics on one device: a view of the whole graph, without messages, halos or codecs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Rows, chosen
from gnnpar.folds.wrapped import TypeFilteredFold
from gnnpar.parallel.blocks import fold_block
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.engine import Engine, PassGraph
from gnnpar.parallel.view import View
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan


@runtime_checkable
class WithOracle(Protocol):
    """A strategy that can compute its own result on one device."""

    def oracle(self, plan: Plan, whole: Shard, *, seed: int) -> PassGraph:
        """Return the training view of one device that holds the whole graph, equal to this strategy under `plan` to
        rounding, without a codec. Built once for a run: it may keep state between epochs."""
        ...


@dataclass(eq=False)
class PartByPart(View):
    """The whole graph, folded part by part, with a separate table for the rows of other parts. Shapes: part_of [N]."""

    part_of: Tensor = field(kw_only=True)

    @property
    def num_parts(self) -> int:
        return int(self.part_of.max()) + 1

    def fold_parts(
        self, agg: Aggregator, own: Rows, others: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()
    ) -> Tensor:
        """Fold each part with its own rows from `own` and the other parts' rows from `others`, each [N, ...]."""
        total: Tensor | None = None
        whole = self.shard.inner
        for part in range(self.num_parts):
            mine = self.part_of == part
            table = tuple(torch.where(mask_like(mine, a), a, b) for a, b in zip(own, others, strict=True))
            block, place = self._block(mine)
            out = fold_block(agg, block, table, dst, tuple(t[place] for t in edge), shared)
            if agg.whole_neighborhood:  # one row per edge
                every, some = (_ids(agg, each) for each in (whole, block))
                total = out.new_zeros(len(every), *out.shape[1:]) if total is None else total
                total = total.index_copy(0, torch.searchsorted(every, some), out)
                continue
            total = out if total is None else torch.where(mask_like(mine, out), out, total)
        assert total is not None
        return total

    def _block(self, mine: Tensor) -> tuple[Block, Tensor]:
        """Return the in-edges of a part, and their positions among the edge operands."""
        whole = self.shard.inner
        edges = mine[whole.edge_dst]
        ids = chosen(whole.edge_ids, edges)
        place = edges.nonzero().flatten() if ids is None else torch.searchsorted(self.edge_ids, ids)
        return replace(whole.restrict(edges, compress=False), src_ids=self.shard.node_ids), place


def _ids(agg: Aggregator, block: Block) -> Tensor:
    """Return the ids of the edges that a fold reads, ascending."""
    ids = (block.of_type(agg.number)[0] if isinstance(agg, TypeFilteredFold) else block).edge_ids
    assert ids is not None
    return ids.sort().values


def mask_like(mask: Tensor, rows: Tensor) -> Tensor:
    """Return a mask of rows that broadcasts over their elements. Shapes: mask [N], rows [N, ...] -> [N, 1, ...]."""
    return mask.view(-1, *[1] * (rows.dim() - 1))


@runtime_checkable
class WithOracleEngine(Protocol):
    """A strategy with an oracle that needs an engine: its loss is not the mean over the training nodes of one graph."""

    def oracle_engine(self, plan: Plan, context: BuildContext) -> Engine | None:
        """Return an engine of one device that holds the whole graph, equal to this strategy under `plan` to
        rounding."""
        ...
