"""What the edges of a small graph carry where a model under test reads it."""

from __future__ import annotations

from collections.abc import Collection

import torch

from gnnpar.data.dataset import Dataset
from gnnpar.folds.edge_data import EdgeData, EdgeKind

TYPES, WIDTH, _SEED = 3, 3, 3


def drawn(num_edges: int, kinds: Collection[EdgeKind]) -> EdgeData:
    """Weights between 0.5 and 1.5, types, and normal rows of attributes: those of `kinds`."""
    draw = torch.Generator().manual_seed(_SEED)
    weight = torch.rand(num_edges, generator=draw) + 0.5
    return EdgeData(
        weight=weight if "weight" in kinds else None,
        type=torch.randint(0, TYPES, (num_edges,), generator=draw) if "type" in kinds else None,
        attr=torch.randn(num_edges, WIDTH, generator=draw) if "attr" in kinds else None,
    )


def with_edge_data(dataset: Dataset, kinds: Collection[EdgeKind]) -> Dataset:
    """The same graph, whose edges carry what is drawn, and nothing else; as it is where that is nothing."""
    if not kinds:
        return dataset
    return Dataset.of(
        dataset.name,
        x=dataset.x,
        y=dataset.y,
        edge_index=dataset.edge_index,
        edges=drawn(dataset.num_edges, kinds),
        masks=(dataset.train_mask, dataset.val_mask, dataset.test_mask),
        num_classes=dataset.num_classes,
        task=dataset.task,
    )
