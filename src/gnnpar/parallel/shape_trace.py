"""The aggregations of a model, recorded by running it on one node with at most a self loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gnnpar.comm import RowLike
from gnnpar.folds.aggregator import Aggregator, Pushable
from gnnpar.folds.block import Block, Operands, Rows, chosen
from gnnpar.graph import Reduction
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.local import Pass
from gnnpar.partition.shard import Shard
from gnnpar.pricing.ir import Fold


class Use(NamedTuple):
    """One aggregation of a model: the fold, its source rows, and the rows that it would push (() if it cannot).

    `dst`: rows of destinations; `out`: rows of the result. `fold`: for prices.
    """

    layer: int
    agg: Aggregator
    fold: Fold
    src: tuple[RowLike, ...]
    pushed: tuple[RowLike, ...] = ()
    dst: tuple[RowLike, ...] = ()
    out: tuple[RowLike, ...] = ()


@dataclass(eq=False)
class _Sketch(WholeGraph):
    uses: list[Use] = field(default_factory=list[Use], kw_only=True)

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        pushed, x = (), Operands(*(tuple(t.detach() for t in rows) for rows in (src, dst, edge, shared)))
        if isinstance(agg, Pushable):
            fold, block = agg.pushing(), self.shard.inner
            out, saved = fold.finish(fold.update(fold.init(block.num_dst, x), block, x))
            pushed = RowLike.of(fold.pushed(x, fold.prepare(saved, out), out))
        result = super().aggregate(agg, src, dst, edge, shared)
        fold = Fold.of(agg, x, result.shape[1:])
        split = (*fold.split, int(result.requires_grad)) if fold.split else ()
        fold = replace(fold, learned=any(t.requires_grad for t in src), split=split)
        self.uses.append(Use(self.layer, agg, fold, RowLike.of(src), pushed, RowLike.of(dst), RowLike.of((result,))))
        return result

    def total(self, part: Tensor, how: Reduction = "sum") -> Tensor:
        return part


def shape_trace(model: Callable[..., Tensor], shard: Shard) -> list[Use]:
    """Return every aggregation of model(graph, x), in order, without communication. Raises ValueError for a fold
    without a gradient.

    Runs a copy of the model: a convolution with `cached=True` keeps the rows that it has seen."""
    with suppress(Exception):  # a user's module that cannot be copied
        model = copy.deepcopy(model)
    first, one_edge = slice(0, 1), slice(0, min(1, shard.inner.num_edges))
    ends = torch.zeros_like(shard.node_ids[one_edge])
    edges = replace(shard.inner.edges.at(one_edge), ids=ends)
    alone = Block.from_edges(ends, ends, num_dst=1, num_src=1, src_ids=shard.node_ids[:1], edges=edges)
    one = replace(
        shard,
        node_ids=shard.node_ids[first],
        x=shard.inputs(first),
        learned=None,
        in_degree=shard.in_degree[first],
        in_weight=chosen(shard.in_weight, first),
        type_degree=chosen(shard.type_degree, first),
        edge_attr=chosen(shard.edge_attr, one_edge),
        inner=alone,
        halo={},
        boundary={},
    )
    view = _Sketch(one, Pass(0))
    with torch.enable_grad():  # to see which operands have a gradient
        model(view, one.x)
    for use in view.uses:
        if not callable(getattr(use.agg, "grad", None)):  # a user's fold enters here
            raise ValueError(
                f"the fold {type(use.agg).__name__} of layer {use.layer} has no gradient rule: give it a method grad "
                "(folds/aggregator.py), or write it as Generic."
            )
    return view.uses
