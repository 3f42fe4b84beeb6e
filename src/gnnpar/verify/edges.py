"""Edge data of a small graph, as the model under test reads it."""

from __future__ import annotations

from collections.abc import Collection

import torch

from gnnpar.data.dataset import Dataset
from gnnpar.folds.edge_data import EdgeData, EdgeKind

TYPES, WIDTH, _SEED = 3, 3, 3


def drawn(num_edges: int, kinds: Collection[EdgeKind], like: EdgeData | None = None) -> EdgeData:
    """Draw weights between 0.5 and 1.5, types, and normal rows of attributes, for the given kinds. like: a user's edge
    data, used instead."""
    if like is not None:
        there = {kind: t for kind, t in like.tensors.items() if kind in kinds and len(t)}
        return EdgeData(**{kind: t[torch.arange(num_edges) % len(t)] for kind, t in there.items()})
    draw = torch.Generator().manual_seed(_SEED)
    weight = torch.rand(num_edges, generator=draw) + 0.5
    return EdgeData(
        weight=weight if "weight" in kinds else None,
        type=torch.randint(0, TYPES, (num_edges,), generator=draw) if "type" in kinds else None,
        attr=torch.randn(num_edges, WIDTH, generator=draw) if "attr" in kinds else None,
    )


def with_edge_data(dataset: Dataset, kinds: Collection[EdgeKind], like: Dataset | None = None) -> Dataset:
    """Return the graph with drawn edge data and nothing else; unchanged without any. like: as for `drawn`."""
    if not kinds:
        return dataset
    return Dataset.of(
        dataset.name,
        x=dataset.x,
        y=dataset.y,
        edge_index=dataset.edge_index,
        edges=drawn(dataset.num_edges, kinds, like and like.edges),
        num_edge_types=(like and like.edge_sizes.types) or None,
        masks=(dataset.train_mask, dataset.val_mask, dataset.test_mask),
        num_classes=dataset.num_classes,
        task=dataset.task,
    )
