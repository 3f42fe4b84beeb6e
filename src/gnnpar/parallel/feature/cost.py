"""Bytes of feature parallelism, which follow the shapes of the model's folds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from gnnpar.data.dataset import Dataset
from gnnpar.parallel.feature.slices import slices_of
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes
from gnnpar.parallel.sketch import Use, sketch
from gnnpar.partition.shard import cut
from gnnpar.pricing.price import Traffic
from gnnpar.pricing.work import Work


def sent(traffic: Traffic, work: Work, rows: RowBytes, problem: Problem) -> Traffic:
    """To the byte: a rank receives the rows of all other nodes, and sends home their results."""
    forward, backward = sliced_bytes(rows, uses_of(problem), work)
    return replace(traffic, forward=forward, backward=backward)


def uses_of(problem: Problem) -> list[Use]:
    """Return the model's folds with the shapes of their operands."""
    none = torch.zeros(0, dtype=torch.long)
    mask, y = torch.zeros(1, dtype=torch.bool), problem.workload.dataset.y[:1]
    one = Dataset.of(
        "one",
        x=torch.zeros(1, problem.ir.in_dim),
        y=torch.zeros_like(y) if len(y) else y,
        edge_index=torch.stack([none, none]),
        masks=(mask, mask, mask),
        num_classes=problem.workload.dataset.num_classes,
        task=problem.workload.dataset.task,
    )
    return sketch(problem.model, cut(one, torch.zeros(1, dtype=torch.long), 1, edge_ids=True)[0])


def sliced_bytes(rows: RowBytes, uses: Sequence[Use], work: Work) -> tuple[float, float]:
    """Return (forward, backward)."""
    ranks, sent = work.parts.parts, [0.0, 0.0]
    learned = [f.learned for f in work.ir.every_fold]
    exchanged = len(work.exchanged_folds) if ranks > 1 else 0
    for use, has_gradient in list(zip(uses, learned, strict=True))[len(learned) - exchanged :]:
        slices = slices_of(use.agg, use.src, len(use.dst), ranks, use.layer)
        home = replace(slices, whole=frozenset())
        for q in filter(slices.works, range(ranks)):
            others = sum(work.parts.nodes) - work.parts.nodes[q]
            source = [prod(each.shape) for each in slices.like((*use.src, *use.dst), q)]
            result = [prod(each.shape) for each in home.like(use.out, q)]
            for back in (False, True)[: 1 + has_gradient]:
                sent[back] += others * (rows.row(source, gradient=back) + rows.row(result, gradient=back))
    return sent[0], sent[1]
