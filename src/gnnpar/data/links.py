"""Link prediction: the task, the split of edges without leakage, and keyed negatives.

A pair is two different nodes with an edge in either direction. Both directions and all repetitions of its edges are in
one split. Aggregations read only training edges, in validation and test too. Self loops are not pairs, and are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Le, Lt
from torch import Tensor

from gnnpar.data.dataset import Dataset, TaskName, content_hash
from gnnpar.data.tasks import Task
from gnnpar.files import require_memory
from gnnpar_kernels import fold_key
from gnnpar_kernels.hashing import entry_hash

_TRAIN, _EVALUATION = 1, 2  # purposes of a key of negatives
_MAX_NODES = 1 << 31  # a 32-bit number chooses among them


@dataclass(frozen=True, kw_only=True)
class Link:
    """Scores of pairs: binary cross entropy over positives and negatives; MRR and Hits@K as in OGB's evaluators.

    Shapes: logits [n, 1 + k], scores of pairs with the same source, the positive first, then its negatives; y the same,
    of 1 and 0; statistics [rows, 2], stacked over ranks: (reciprocal rank, score) of each positive, then (nan, score)
    of the best `hits` negatives.
    """

    width: Annotated[int, Ge(1)] = 64
    decoder: Literal["dot", "mlp"] = "dot"
    metric: Literal["mrr", "hits"] = "mrr"
    hits: Annotated[int, Ge(1)] = 20
    val_fraction: Annotated[float, Ge(0), Lt(1)] = 0.05
    test_fraction: Annotated[float, Ge(0), Lt(1)] = 0.1
    negatives: Annotated[int, Ge(1), Le(1000)] = 1
    eval_negatives: Annotated[int, Ge(1), Le(100_000)] = 100
    split_seed: Annotated[int, Ge(0)] | None = 0
    name: ClassVar[TaskName] = "link"
    reduction: ClassVar[Literal["sum", "concat"]] = "concat"

    def __post_init__(self) -> None:
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"task.val_fraction={self.val_fraction:g} and task.test_fraction={self.test_fraction:g} leave no "
                "training edges; lower one"
            )

    @property
    def out_dim(self) -> int:
        return self.width

    @property
    def metric_name(self) -> str:
        return "mrr" if self.metric == "mrr" else f"hits@{self.hits}"

    def prepare(self, dataset: Dataset, seed: int) -> Dataset:
        """Return the dataset with pairs, without edges of validation and test. `seed`: the run's seed."""
        return split(dataset, self, seed if self.split_seed is None else self.split_seed)

    def of(self, name: TaskName, num_classes: int) -> Task:
        return self

    def loss_sum(self, logits: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, y, weight=weight, reduction="sum")

    def statistics(self, logits: Tensor, y: Tensor) -> Tensor:
        scores = logits.double()
        positive, negatives = scores[:, 0], scores[:, 1:]
        above = (negatives > positive[:, None]).sum(1).double()
        ties = (negatives == positive[:, None]).sum(1).double()
        ranked = torch.stack([1.0 / (1.0 + above + ties / 2), positive], 1)
        best = negatives.flatten().topk(min(self.hits, negatives.numel())).values
        return torch.cat([ranked, torch.stack([torch.full_like(best, torch.nan), best], 1)])

    def value(self, statistics: Tensor) -> float:
        return self.values(statistics)[self.metric_name]

    def values(self, statistics: Tensor) -> Mapping[str, float]:
        """Return both metrics. With fewer negatives than K, hits@K is 1, as in OGB."""
        of_negatives = statistics[:, 0].isnan()
        positives, negatives = statistics[~of_negatives], statistics[of_negatives, 1]
        hits = 1.0 if len(positives) else torch.nan
        if len(positives) and len(negatives) >= self.hits:
            hits = float((positives[:, 1] > negatives.topk(self.hits).values[-1]).double().mean())
        return {"mrr": float(positives[:, 0].mean()), f"hits@{self.hits}": hits}  # the mean of no rows is nan


@dataclass(frozen=True, eq=False)
class ExcludedNodes:
    """Nodes that are excluded as negatives of each source: its partners and the source itself.

    Shapes: start [S + 1]; gaps [M] ascending: s * (num_nodes + 1) + node - i for the i-th excluded node of source s.
    """

    start: Tensor
    gaps: Tensor
    num_nodes: int

    @staticmethod
    def of(pairs: Tensor, num_nodes: int) -> ExcludedNodes:
        """Exclude for every node its partners in `pairs` [2, n], which holds a pair once."""
        low, high = pairs
        loops = torch.arange(num_nodes) * (num_nodes + 1)
        keys = torch.cat([low * num_nodes + high, high * num_nodes + low, loops]).numpy()
        source, node = np.divmod(np.sort(keys), num_nodes)
        start = np.searchsorted(source, np.arange(num_nodes + 1))
        gaps = source * (num_nodes + 1) + node - (np.arange(len(keys)) - start[source])
        return ExcludedNodes(torch.from_numpy(start), torch.from_numpy(gaps), num_nodes)

    @property
    def nbytes(self) -> int:
        return self.start.nbytes + self.gaps.nbytes

    def at(self, sources: Tensor) -> ExcludedNodes:
        """Select sources [s], renumbered from 0 in this order."""
        count = self.taken(sources)
        start = torch.cat([count.new_zeros(1), count.cumsum(0)])
        moved = torch.arange(len(sources)) - sources
        place = torch.arange(int(start[-1])) + (self.start[sources] - start[:-1]).repeat_interleave(count)
        gaps = self.gaps[place] + (moved * (self.num_nodes + 1)).repeat_interleave(count)
        return ExcludedNodes(start, gaps, self.num_nodes)

    def to(self, device: torch.device) -> ExcludedNodes:
        return replace(self, start=self.start.to(device), gaps=self.gaps.to(device))

    def taken(self, sources: Tensor) -> Tensor:
        """Return the number of excluded nodes of each source. [n] -> [n]."""
        return self.start[sources + 1] - self.start[sources]

    def draw(self, sources: Tensor, numbers: Tensor, count: int, key: int) -> Tensor:
        """Draw nodes uniformly, without excluded ones; a draw depends only on (key, number, column).

        Shapes: sources [n] of this table, numbers [n] of the pairs -> [n, count].
        """
        left = self.num_nodes - self.taken(sources)
        index = (entry_hash(numbers, count, key=key) * left[:, None]) >> 32
        wanted = sources[:, None] * (self.num_nodes + 1) + index
        before = torch.searchsorted(self.gaps, wanted.contiguous(), right=True)
        return index + before - self.start[sources][:, None]


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs of a whole graph. Shapes: train [2, n], sources in row 0; val, test [n, 2 + k]: source, destination,
    negatives. `taken`: partners of every node in training."""

    train: Tensor
    val: Tensor
    test: Tensor
    taken: ExcludedNodes

    def share(self, ids: Tensor, local_of: Tensor) -> OwnPairs:
        """Return the pairs with a source in `ids`, which ascend. `local_of` [N]: row of each of these nodes."""
        mine = torch.zeros_like(local_of, dtype=torch.bool)
        mine[ids] = True
        numbers = mine[self.train[0]].nonzero().flatten()
        sources, place = torch.unique(self.train[0, numbers], return_inverse=True)
        val, test = (table[mine[table[:, 0]]] for table in (self.val, self.test))
        return OwnPairs(
            number=numbers,
            source=local_of[self.train[0, numbers]],
            destination=self.train[1, numbers],
            taken=self.taken.at(sources),
            taken_of=place,
            val=torch.cat([local_of[val[:, :1]], val[:, 1:]], 1),
            test=torch.cat([local_of[test[:, :1]], test[:, 1:]], 1),
            total=self.train.shape[1],
        )


@dataclass(frozen=True, eq=False)
class OwnPairs:
    """The pairs with a source in one part.

    Shapes: number [n] among all training pairs; source [n] rows of the part, destination [n] global ids; taken_of [n]
    rows of `taken`; val, test as in Pairs, sources as rows of the part. total: training pairs of the whole graph.
    """

    number: Tensor
    source: Tensor
    destination: Tensor
    taken: ExcludedNodes
    taken_of: Tensor
    val: Tensor
    test: Tensor
    total: int

    @property
    def nbytes(self) -> int:
        tensors = (self.number, self.source, self.destination, self.taken_of, self.val, self.test)
        return self.taken.nbytes + sum(t.nbytes for t in tensors)

    def to(self, device: torch.device) -> OwnPairs:
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors, taken=self.taken.to(device))

    def candidates(self, chosen: slice, count: int, *, seed: int, epoch: int) -> Tensor:
        """Return destinations of training pairs and of their negatives in an epoch, global ids [n, 1 + count]."""
        key = fold_key(seed, epoch, _TRAIN)
        drawn = self.taken.draw(self.taken_of[chosen], self.number[chosen], count, key)
        return torch.cat([self.destination[chosen, None], drawn], 1)


def split(dataset: Dataset, task: Link, seed: int) -> Dataset:
    """Return the graph of training edges with the pairs of the three splits, determined by (graph, seed). Raises
    ValueError if a split is empty or a node has no negative."""
    num_nodes = dataset.num_nodes
    if num_nodes >= _MAX_NODES:
        raise ValueError(f"dataset {dataset.name} has {num_nodes:,} nodes; task=link draws from fewer than 2^31")
    src, dst = dataset.edge_index.numpy()
    apart = src != dst
    low, high = np.minimum(src, dst)[apart], np.maximum(src, dst)[apart]
    keys, pair_of = np.unique(low * num_nodes + high, return_inverse=True)
    rng = np.random.default_rng(seed)
    order, coin = rng.permutation(len(keys)), rng.random(len(keys)) < 0.5
    num_val, num_test = round(task.val_fraction * len(keys)), round(task.test_fraction * len(keys))
    for name, share, count in (("val", task.val_fraction, num_val), ("test", task.test_fraction, num_test)):
        if share and not count:
            raise ValueError(
                f"dataset {dataset.name} has {len(keys)} pairs of nodes with an edge, too few for "
                f"task.{name}_fraction={share:g}; raise it, or set it to 0"
            )
    if len(keys) <= num_val + num_test:
        raise ValueError(
            f"dataset {dataset.name} has {len(keys)} pairs of nodes with an edge, and {num_val} for validation and "
            f"{num_test} for test leave none to train on; lower task.val_fraction or task.test_fraction"
        )
    forward = np.bincount(pair_of[low == src[apart]], minlength=len(keys)) > 0
    backward = np.bincount(pair_of[low == dst[apart]], minlength=len(keys)) > 0
    first, second = np.divmod(keys, num_nodes)
    turned = np.where(forward & backward, coin, backward)  # an edge in one direction keeps its source
    ends = torch.from_numpy(np.stack([np.where(turned, second, first), np.where(turned, first, second)]))
    test, val, train = np.split(order, [num_test, num_test + num_val])
    train = np.sort(train)
    kept = np.ones(len(src), dtype=bool)
    kept[apart] = np.isin(np.arange(len(keys)), train)[pair_of]
    everyone, taken = ExcludedNodes.of(ends, num_nodes), ExcludedNodes.of(ends[:, train], num_nodes)
    for table, places in ((everyone, np.concatenate([val, test])), (taken, train)):
        sources = ends[0, places]
        if len(full := sources[table.taken(sources) == num_nodes]):
            raise ValueError(
                f"dataset {dataset.name}: node {int(full[0])} has an edge with all other {num_nodes - 1} nodes, so "
                "that no pair is left to be its negative; leave the node out"
            )
    nbytes = 8 * (num_val + num_test) * (2 + task.eval_negatives)
    require_memory(nbytes, f"task.eval_negatives={task.eval_negatives} of {num_val + num_test:,} pairs", "lower it")
    val, test = (_with_negatives(ends, np.sort(each), everyone, task.eval_negatives, seed) for each in (val, test))
    pairs = Pairs(ends[:, train], val, test, taken)
    none = torch.zeros(num_nodes, dtype=torch.bool)
    edges = torch.from_numpy(kept)
    graph = Dataset.of(
        dataset.name,
        x=dataset.x,
        y=torch.zeros(num_nodes, dtype=torch.int64),
        edge_index=dataset.edge_index[:, edges],
        masks=(none, none, none),
        num_classes=task.width,
        task="link",
        edges=dataset.edges.at(edges),
        num_edge_types=dataset.edge_sizes.types or None,
        schema=dataset.edge_sizes.schema,
    )
    split_hash = content_hash((pairs.train, pairs.val, pairs.test), label="pairs")
    return replace(graph, pairs=pairs, split_hash=split_hash)


def _with_negatives(ends: Tensor, chosen: np.ndarray, everyone: ExcludedNodes, count: int, seed: int) -> Tensor:
    """Append negatives. Shapes: ends [2, pairs], chosen [n] -> [n, 2 + count]: source, destination, negatives."""
    numbers = torch.from_numpy(chosen)
    source, destination = ends[:, numbers]
    drawn = everyone.draw(source, numbers, count, fold_key(seed, _EVALUATION))
    return torch.cat([source[:, None], destination[:, None], drawn], 1)
