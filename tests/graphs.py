"""Small odd graphs that every strategy must survive."""

import torch
from torch import Tensor

from gnnpar.data.dataset import Dataset
from gnnpar.folds.edge_data import EdgeData


def dataset_of(
    src: list[int] | Tensor, dst: list[int] | Tensor, *, num_nodes: int, features: int = 5, seed: int = 0
) -> Dataset:
    """A dataset over an edge list, with random features and labels; every node trains or is tested."""
    edges = torch.stack([torch.as_tensor(src, dtype=torch.int64), torch.as_tensor(dst, dtype=torch.int64)])
    edges = edges[:, torch.argsort(edges[1] * num_nodes + edges[0], stable=True)]
    gen = torch.Generator().manual_seed(seed)
    train = torch.arange(num_nodes) % 2 == 0
    return Dataset.of(
        "odd",
        x=torch.randn(num_nodes, features, generator=gen),
        y=torch.randint(0, 3, (num_nodes,), generator=gen),
        edge_index=edges,
        masks=(train, ~train, ~train),
        num_classes=3,
        task="single_label",
    )


def of_edges(data: Dataset, edge_index: Tensor, edges: EdgeData | None = None) -> Dataset:
    """The nodes of a dataset with other edges."""
    nodes = {"x": data.x, "y": data.y, "masks": (data.train_mask, data.val_mask, data.test_mask)}
    return Dataset.of(
        data.name, edge_index=edge_index, edges=edges, num_classes=data.num_classes, task=data.task, **nodes
    )


def with_weights(data: Dataset, *, seed: int = 7) -> Dataset:
    """The same graph with weights of edges between 0.1 and 2, some of them 0."""
    gen = torch.Generator().manual_seed(seed)
    weight = torch.rand(data.num_edges, generator=gen) * 1.9 + 0.1
    weight[torch.rand(data.num_edges, generator=gen) < 0.05] = 0.0
    return of_edges(data, data.edge_index, EdgeData(weight=weight))


def with_edge_data(data: Dataset, *, types: int = 3, width: int = 2, seed: int = 7) -> Dataset:
    """The same graph, in which every edge has a type and a row of attributes, and every third comes again with another
    type. 0: without."""
    gen = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, max(1, types), (data.num_edges,), generator=gen)
    ends, kind = data.edge_index.repeat(1, 2), torch.cat([kind, (kind + 1) % max(1, types)])
    if types:
        keep = torch.cat([torch.ones(data.num_edges).bool(), torch.arange(data.num_edges) % 3 == 0]).nonzero().flatten()
    else:
        keep = torch.arange(data.num_edges)
    keep = keep[torch.argsort((ends[1, keep] * data.num_nodes + ends[0, keep]) * max(1, types) + kind[keep])]
    attr = torch.randn(len(keep), width, generator=gen) if width else None
    return of_edges(data, ends[:, keep], EdgeData(type=kind[keep] if types else None, attr=attr))


def both(pairs: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Undirected pairs as two directed edges each."""
    return [a for a, b in pairs] + [b for a, b in pairs], [b for a, b in pairs] + [a for a, b in pairs]


def _path() -> Dataset:
    return dataset_of(*both([(i, i + 1) for i in range(7)]), num_nodes=8)


def _star() -> Dataset:
    return dataset_of(*both([(0, i) for i in range(1, 12)]), num_nodes=12)


def _power_law() -> Dataset:
    gen = torch.Generator().manual_seed(1)
    draw = (torch.rand(2, 600, generator=gen) ** 3 * 80).long()
    return dataset_of(draw[0], draw[1], num_nodes=80)


ODD = {
    "one_node": lambda: dataset_of([], [], num_nodes=1),
    "one_node_loop": lambda: dataset_of([0], [0], num_nodes=1),
    "no_edges": lambda: dataset_of([], [], num_nodes=9),
    "path": _path,
    "star": _star,
    "isolated_nodes": lambda: dataset_of(*both([(0, 1), (1, 2), (5, 6)]), num_nodes=10),
    "no_boundary": lambda: dataset_of(*both([(0, 2), (2, 4), (1, 3)]), num_nodes=6),  # halves by parity share nothing
    "two_components": lambda: dataset_of(*both([(0, 1), (1, 2), (4, 5), (5, 6), (6, 7)]), num_nodes=8),
    "multi_edges": lambda: dataset_of([0, 0, 0, 1, 1, 2, 3, 3], [1, 1, 1, 2, 2, 0, 0, 0], num_nodes=4),
    "self_loops": lambda: dataset_of([0, 1, 2, 3, 0], [0, 1, 2, 3, 2], num_nodes=4),
    "directed": lambda: dataset_of([0, 1, 2, 3, 4, 0, 0], [1, 2, 3, 4, 5, 5, 3], num_nodes=6),  # node 0 has no in-edge
    "power_law": _power_law,
}
