"""What PipeGCN computes, on one device: rows of other parts are constants of an earlier epoch, and what the loss of
that epoch gave for them is added to the gradient of this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Rows
from gnnpar.parallel.torch_types import Context, apply_to_rows
from gnnpar.parallel.view import View
from gnnpar.parallel.whole import fold_block

Call = tuple[int, int]  # layer, number of the aggregation in it


@dataclass(eq=False)
class Earlier:
    """Of every aggregation what it read, or what came back for it, by epoch; and running means of it."""

    staleness: int
    decay: float | None  # None: not smoothed
    by_epoch: dict[tuple[Call, int], Rows] = field(default_factory=dict[tuple[Call, int], Rows])
    means: dict[Call, Rows] = field(default_factory=dict[Call, Rows])

    def late(self, call: Call, epoch: int, rows: Rows) -> Rows:
        """Those of the epoch `staleness` ago, zeros where there was none; `rows` are of this one."""
        self.by_epoch[call, epoch] = tuple(t.detach().clone() for t in rows)
        old = self.by_epoch.pop((call, epoch - self.staleness), None)
        if old is None:
            return tuple(torch.zeros_like(t) for t in rows)
        if self.decay is not None:
            mean = self.means.get(call, old)
            old = self.means[call] = tuple(
                self.decay * a + (1 - self.decay) * b for a, b in zip(mean, old, strict=True)
            )
        return old


@dataclass(eq=False)
class StaleWhole(View):
    """The whole graph, part by part: own rows of this epoch, others of an earlier one."""

    part_of: Tensor = field(kw_only=True)  # [N]
    rows: Earlier = field(kw_only=True)
    gradients: Earlier = field(kw_only=True)

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        call = self.layer, self.next_call()
        old = self.rows.late(call, self.run.epoch, src)
        both = apply_to_rows(_Late, self, call, *src, *old)
        fresh, stale = both[: len(src)], both[len(src) :]
        total: Tensor | None = None
        for part in range(int(self.part_of.max()) + 1):
            mine = self.part_of == part
            table = tuple(torch.where(_like(mine, a), a, b) for a, b in zip(fresh, stale, strict=True))
            block, place = self._block(mine)
            out = fold_block(agg, block, table, dst, tuple(t[place] for t in edge), shared)
            total = out if total is None else torch.where(_like(mine, out), out, total)
        assert total is not None
        return total

    def _block(self, mine: Tensor) -> tuple[Block, Tensor]:
        """In-edges of a part, and their places among the edge operands."""
        whole = self.shard.inner
        edges = mine[whole.edge_dst]
        ids = None if whole.edge_ids is None else whole.edge_ids[edges]
        place = edges.nonzero().flatten() if ids is None else torch.searchsorted(self.edge_ids, ids)
        block = Block.from_edges(
            whole.edge_dst[edges],
            whole.indices[edges],
            num_dst=whole.num_dst,
            num_src=whole.num_src,
            edge_ids=ids,
            src_ids=self.shard.node_ids,
        )
        return block, place


class _Kept(Context):
    view: StaleWhole
    call: Call


class _Late(torch.autograd.Function):
    """Rows of this epoch and of an earlier one as they are. Backward: the gradient that an earlier epoch gave for its
    stale rows is added to that of the fresh ones; that of this epoch's stale rows is kept.
    """

    @staticmethod
    def forward(ctx: _Kept, view: StaleWhole, call: Call, *rows: Tensor) -> Rows:
        ctx.view, ctx.call = view, call
        return tuple(t.clone() for t in rows)

    @staticmethod
    def backward(ctx: _Kept, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count, view = len(grads) // 2, ctx.view
        learned = [i for i in range(count) if ctx.needs_input_grad[2 + i]]
        late = view.gradients.late(ctx.call, view.run.epoch, tuple(grads[count + i] for i in learned))
        total: list[Tensor | None] = [None] * len(grads)
        for i, earlier in zip(learned, late, strict=True):
            total[i] = grads[i] + earlier
        return (None, None, *total)


def _like(mask: Tensor, rows: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (rows.dim() - 1))
