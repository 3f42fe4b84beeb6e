"""SANCUS on one device: other parts read the last broadcast rows of a part, with the gradient of this epoch's rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Rows
from gnnpar.parallel.oracle import PartByPart, mask_like
from gnnpar.parallel.sancus.copies import Call, Rule, change_of


@dataclass(eq=False)
class SkippingWhole(PartByPart):
    rule: Rule = field(kw_only=True)
    since: dict[Call, list[int]] = field(default_factory=dict[Call, list[int]])
    last: dict[Call, Rows] = field(default_factory=dict[Call, Rows])  # [N, ...] each part's as it last sent them

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        at, epoch = (self.layer, self.next_call()), self.run.epoch
        now = tuple(t.detach().clone() for t in src)
        if at not in self.last:
            self.last[at], self.since[at] = now, [epoch] * self.num_parts
        for q, since in enumerate(self.since[at]):
            mine = self.part_of == q
            change = change_of(tuple(t[mine] for t in now), tuple(t[mine] for t in self.last[at]))
            if not self.rule.skips(epoch - since, float(change)):
                pairs = zip(now, self.last[at], strict=True)
                self.last[at] = tuple(torch.where(mask_like(mine, a), a, b) for a, b in pairs)
                self.since[at][q] = epoch
        others = tuple(fresh + (copy - fresh).detach() for fresh, copy in zip(src, self.last[at], strict=True))
        return self.fold_parts(agg, src, others, dst, edge, shared)
