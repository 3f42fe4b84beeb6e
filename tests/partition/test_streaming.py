"""LDG and Fennel against their definitions, node by node; what they keep, and what they are worth."""

from collections.abc import Callable
from fractions import Fraction
from math import sqrt

import pytest
import torch

from composing import configured
from gnnpar.data.dataset import Dataset
from gnnpar.data.synthetic import SBM
from gnnpar.partition import streaming
from gnnpar.partition.partition import Random, partition
from gnnpar.partition.shard import partition_statistics
from gnnpar.partition.streaming import LDG, Fennel
from gnnpar.verify.conformance import small_graph
from graphs import ODD

Score = Callable[[int, int], Fraction | float]  # neighbours in a part, its load


def one_by_one(dataset: Dataset, parts: int, by: LDG | Fennel, score: Score, capacity: int) -> list[int]:
    """The papers' greedy: every node looks at all its in-neighbours' parts."""
    num_nodes = dataset.num_nodes
    neighbours: list[list[int]] = [[] for _ in range(num_nodes)]
    for src, dst in dataset.edge_index.T.tolist():
        neighbours[dst] += [src] if src != dst else []
    weight = [
        1 if by.balance == "nodes" else len(n) + 1 + loops for n, loops in zip(neighbours, _loops(dataset), strict=True)
    ]
    part: dict[int, int] = {}
    for _ in range(by.passes):
        for v in range(num_nodes):
            was = part.pop(v, None)
            load = [sum(weight[u] for u, q in part.items() if q == p) for p in range(parts)]
            empty = [p for p in range(parts) if p not in part.values()]
            there = [sum(part.get(u) == p for u in neighbours[v]) for p in range(parts)]
            room = [p for p in range(parts) if load[p] + weight[v] <= capacity]
            if was in empty:
                part[v] = was
            elif num_nodes - v <= len(empty):
                part[v] = empty[0]
            elif room:
                part[v] = min(room, key=lambda p: (-score(there[p], load[p]), load[p], p))
            else:
                part[v] = min(range(parts), key=lambda p: (load[p], p))
    return [part[v] for v in range(num_nodes)]


def _loops(dataset: Dataset) -> list[int]:
    src, dst = dataset.edge_index
    return torch.bincount(dst[src == dst], minlength=dataset.num_nodes).tolist()


def capacity_of(dataset: Dataset, parts: int, by: LDG | Fennel) -> int:
    total = dataset.num_nodes + (dataset.num_edges if by.balance == "edges" else 0)
    share = -(-total // parts)
    return max(share, int(share * (1 + by.slack)))


@pytest.mark.parametrize("block", [1, 7, 4096])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "by", [LDG(), LDG(passes=3), LDG(balance="edges", slack=0.2), Fennel(), Fennel(passes=2, slack=0.0)], ids=repr
)
def test_the_greedy_of_the_papers(monkeypatch: pytest.MonkeyPatch, by, parts: int, block: int) -> None:
    monkeypatch.setattr(streaming, "BLOCK_NODES", block)
    for dataset in (small_graph(), ODD["power_law"](), ODD["multi_edges"](), ODD["directed"]()):
        if parts > dataset.num_nodes:
            continue
        capacity = capacity_of(dataset, parts, by)
        src, dst = dataset.edge_index
        entries, nodes = int((src != dst).sum()), dataset.num_nodes
        total = nodes + (dataset.num_edges if by.balance == "edges" else 0)

        def fennel(count: int, load: int, entries=entries, nodes=nodes, total=total) -> float:
            alpha = sqrt(parts) * (entries / 2) / nodes**1.5
            cost = 1.5 * alpha * sqrt(load * nodes / total)
            return count - int(cost * streaming.UNIT + 1e-6) / streaming.UNIT

        def ldg(count: int, load: int, capacity=capacity) -> Fraction:
            return count * (1 - Fraction(load, capacity))

        want = one_by_one(dataset, parts, by, fennel if isinstance(by, Fennel) else ldg, capacity)
        assert by.part_of(dataset, parts).tolist() == want


@pytest.mark.parametrize("name", ["ldg", "fennel"])
def test_cuts_less_than_random_and_keeps_its_balance(name: str) -> None:
    dataset = SBM(num_nodes=800, num_communities=4).load(None, 0)
    by = configured("partition", name)
    random = partition_statistics(dataset, partition(dataset, 4, by=Random()), 4)["cut_share"]
    once = partition_statistics(dataset, partition(dataset, 4, by=by), 4)
    more = configured("partition", name, "partition.passes=3")
    again = partition_statistics(dataset, partition(dataset, 4, by=more), 4)
    assert once["cut_share"] < 0.9 * random
    assert again["cut_share"] < 0.8 * once["cut_share"]
    for statistics in (once, again):
        assert max(statistics["nodes"]) <= (1 + by.slack) * 200
    assert torch.equal(by.part_of(dataset, 4), by.part_of(dataset, 4))


@pytest.mark.parametrize("by", [LDG(), Fennel(), LDG(passes=2), Fennel(balance="edges")], ids=repr)
def test_no_part_is_empty(by) -> None:
    for make in ODD.values():
        dataset = make()
        for parts in range(1, min(dataset.num_nodes, 6) + 1):
            assert int(torch.bincount(partition(dataset, parts, by=by), minlength=parts).min()) > 0
