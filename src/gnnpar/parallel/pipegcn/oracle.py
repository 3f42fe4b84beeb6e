"""What PipeGCN computes, on one device: rows of other parts are constants of an earlier epoch, and what the loss of
that epoch gave for them is added to the gradient of this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Rows
from gnnpar.parallel.oracle import PartByPart
from gnnpar.parallel.torch_types import Context, apply_to_rows

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
class StaleWhole(PartByPart):
    """The whole graph, part by part: own rows of this epoch, others of an earlier one."""

    rows: Earlier = field(kw_only=True)
    gradients: Earlier = field(kw_only=True)

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        call = self.layer, self.next_call()
        old = self.rows.late(call, self.run.epoch, src)
        both = apply_to_rows(_Late, self, call, *src, *old)
        fresh, stale = both[: len(src)], both[len(src) :]
        return self.fold_parts(agg, fresh, stale, dst, edge, shared)


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
