"""Preprocess a raw graph into a Dataset: check, symmetrise, drop repeated edges, remove, add or keep self loops, sort
by (destination, source), count degrees, split, normalise (`standard` is fitted on training nodes only), hash.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Protocol, Self, runtime_checkable

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from gnnpar.data.dataset import MATRICES, Dataset, EdgeChanges
from gnnpar.data.raw import EdgeList, RawGraph, check_split, checked, has_label, merged_in, stored_as
from gnnpar.folds.edge_data import EdgeData, SelfLoops
from gnnpar.track.console import say

Masks = tuple[Tensor, Tensor, Tensor]


class DatasetConfig(Protocol):
    """A frozen dataclass with the keys of conf/dataset/*.yaml; also Streamed (stored.py) if read in chunks."""

    @property
    def name(self) -> str: ...

    def load(self, data_dir: Path | None, seed: int) -> Dataset:
        """Read or generate the graph. seed: the run's seed, used if a seed field is null."""
        ...


@runtime_checkable
class Generated(Protocol):
    """A dataset with a number of nodes known before it is generated."""

    @property
    def generated_nodes(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Preprocessing of a graph: part of a dataset's definition, and therefore of its hashes."""

    # true: one per node; false: none; keep: the graph's own; auto: `usual_loops`, or those that a PyG model needs
    self_loops: SelfLoops | Literal["auto"] = "auto"
    symmetrize: bool = False  # add the reverse of every edge
    drop_duplicates: bool | Literal["auto"] = "auto"  # auto: true
    normalize: Literal["none", "row", "standard"] = "none"  # row: rows sum to 1; standard: training mean 0, deviation 1
    split: Literal["public", "per_class", "random"] = "public"
    split_index: Annotated[int, Ge(0)] | None = 0  # number of the public split; null: by the run's seed
    split_seed: Annotated[int, Ge(0)] | None = 0  # seed of splits per_class and random; null: the run's seed
    train_per_class: Annotated[int, Ge(1)] = 20  # per_class: 20 train, 30 val, the rest test (Shchur et al. 2018)
    val_per_class: Annotated[int, Ge(0)] = 30
    train_fraction: Annotated[float, Gt(0), Lt(1)] = 0.6  # random: fractions of the labelled nodes, the rest is test
    val_fraction: Annotated[float, Ge(0), Lt(1)] = 0.2
    double: ClassVar[bool] = False  # `in_float64`

    def in_float64(self) -> Self:
        """Return the configuration for precision=fp64: float64 and wide integers become float64."""
        found = copy.copy(self)
        object.__setattr__(found, "double", True)
        return found

    def rounds(self, float64: Iterable[bool]) -> bool:
        """Return whether float32 stores numbers that were given or computed in float64."""
        return not self.double and (self.normalize != "none" or any(float64))

    usual_loops: ClassVar[SelfLoops] = True

    @property
    def loops(self) -> SelfLoops:
        return self.usual_loops if self.self_loops == "auto" else self.self_loops

    @property
    def merges(self) -> bool:
        """Whether repeated edges are dropped."""
        return self.drop_duplicates is not False

    @property
    def preparation(self) -> Mapping[str, object]:
        """Keys that control how edges and features are prepared, for exports and predictions."""
        edges = {"self_loops": self.loops, "symmetrize": self.symmetrize, "drop_duplicates": self.merges}
        return edges | {"normalize": self.normalize, "features": "file"}

    def without_labels(self) -> Self:
        """Return the configuration without labels and masks, if the reader supports it."""
        return self


def prepare(raw: RawGraph, config: Preprocess, *, seed: int) -> Dataset:
    """Check and preprocess a graph. Raises ValueError in one line."""
    given, how = raw, config.normalize
    raw = checked(given, double=config.double, normalize=how != "none")
    numbers = (given.x, given.edges.weight, given.edges.attr, given.y if given.task == "regression" else None)
    if how != "none" and not config.double and (found := merged_in(given.x, given.x.float())):
        say(f"dataset {raw.name}: x has {found}; dataset.normalize={how} is computed in float64")
    assert raw.num_classes is not None
    num_nodes = raw.x.shape[0]
    edges = canonical_edges(
        EdgeList(raw.edge_index, raw.edges), config, name=raw.name, num_nodes=num_nodes, pairs=raw.pairs
    )
    if raw.task == "link":  # pairs are split later; features are normalised by all nodes
        none = torch.zeros(num_nodes, dtype=torch.bool)
        masks = (~none, none, none)
    else:
        masks = make_split(raw, config, seed=seed)
    dataset = Dataset.of(
        raw.name,
        x=normalized(raw.x, how, train_mask=masks[0], double=config.double, name=raw.name),
        y=raw.y,
        edge_index=edges.edge_index,
        masks=masks,
        num_classes=raw.num_classes,
        task=raw.task,
        edges=edges.data,
        num_edge_types=raw.num_edge_types,
        schema=raw.schema,
        edge_changes=_changes(raw.edge_index, edges.edge_index, both_ways=config.symmetrize or raw.pairs),
    )
    return replace(dataset, rounded=config.rounds(t is not None and t.dtype == torch.float64 for t in numbers))


def _changes(before: Tensor, after: Tensor, *, both_ways: bool) -> EdgeChanges:
    """Count self loops added and removed, and edges dropped. both_ways: reverses were added. Shapes: [2, E]."""
    loops, kept = (int((edges[0] == edges[1]).sum()) for edges in (before, after))
    dropped = 0 if both_ways else before.shape[1] - loops - (after.shape[1] - kept)
    return EdgeChanges(max(0, kept - loops), max(0, loops - kept), dropped)


EdgeValues = dict[str, np.ndarray]  # edge data by kind: [E] or [E, D]


def canonical_edges(
    edges: EdgeList, config: Preprocess, *, num_nodes: int, pairs: bool = False, name: str = "given"
) -> EdgeList:
    """Return edges with their data as configured, sorted by (destination, source), type, weight and attributes.

    Edges of different types do not repeat each other. An added self loop has weight 1, or the weight of the loops it
    replaces. pairs: each edge is listed once, for both directions. Raises ValueError if repetitions to drop differ in
    weight or attributes. Shapes: [2, E].
    """
    src, dst = edges.edge_index.numpy()
    apart = src != dst
    kept = slice(None) if config.loops == "keep" else apart
    given: EdgeValues = {kind: edges.data.tensors[kind].numpy() for kind in sorted(edges.data.kinds)}
    key, values = (dst * num_nodes + src)[kept], {kind: value[kept] for kind, value in given.items()}
    if config.symmetrize or pairs:
        key = np.concatenate([key, (src * num_nodes + dst)[apart]])
        values = {kind: np.concatenate([value, given[kind][apart]]) for kind, value in values.items()}
    if config.loops is True:
        own = added_loops(name, num_nodes, {kind: value.dtype for kind, value in given.items()})
        key = np.concatenate([key, np.arange(num_nodes) * (num_nodes + 1)])
        if own is not None:
            own.add(src[~apart], given["weight"][~apart])
            values = {"weight": np.concatenate([values["weight"], own.weights])}
    key, values = sorted_edges(name, key, values, num_nodes, drop_duplicates=config.merges)
    dst_out, src_out = np.divmod(key, num_nodes)
    data = EdgeData(**{kind: torch.from_numpy(value) for kind, value in values.items()})
    return EdgeList(torch.stack([torch.from_numpy(src_out), torch.from_numpy(dst_out)]), data)


def added_loops(name: str, num_nodes: int, kinds: Mapping[str, np.dtype]) -> LoopWeights | None:
    """Return the weights of the self loops to add; None without weights. kinds: dtypes of edge data. Raises ValueError
    if edges have types or attributes, which added self loops lack."""
    titles = {"type": "types", "attr": "attributes"}
    if lacking := [titles[kind] for kind in sorted(kinds) if kind in titles]:
        raise ValueError(
            f"dataset {name}: its edges have {' and '.join(lacking)}, which self loops that are added have not; set "
            "dataset.self_loops=keep, or false to leave the graph's own out."
        )
    return LoopWeights(name, num_nodes, kinds["weight"]) if kinds else None


class LoopWeights:
    """Weights [N] of the self loops to add: the weight of the node's own loop, else 1.

    `add` raises ValueError for loops of one node with different weights.
    """

    def __init__(self, name: str, num_nodes: int, dtype: np.dtype) -> None:
        self.name, self.weights, self._given = name, np.ones(num_nodes, dtype), np.zeros(num_nodes, bool)

    def add(self, nodes: np.ndarray, weights: np.ndarray) -> None:
        before = np.where(self._given[nodes], self.weights[nodes], weights)
        self.weights[nodes], self._given[nodes] = weights, True
        for other in (before, self.weights[nodes]):
            if len(differ := np.flatnonzero(other != weights)):
                at = int(differ[0])
                raise _two_weights(self.name, int(nodes[at]), int(nodes[at]), float(other[at]), float(weights[at]))


def sorted_edges(
    name: str, key: np.ndarray, values: EdgeValues, num_nodes: int, *, drop_duplicates: bool, first_row: int = 0
) -> tuple[np.ndarray, EdgeValues]:
    """Sort keys (row * nodes + source) and edge data by key, type, weight and attributes, optionally without
    repetitions. Raises ValueError if repetitions to drop differ in weight or attributes. first_row: added to rows in
    messages. Shapes: [E] -> [E']."""
    if values:
        order = np.lexsort([values[kind] for kind in ("weight", "type") if kind in values] + [key])
        key, values = key[order], {kind: value[order] for kind, value in values.items()}
    else:
        key = np.sort(key)  # about 3x faster than torch's sort of int64 on a CPU
    same = key[1:] == key[:-1]
    if "type" in values:
        same &= values["type"][1:] == values["type"][:-1]
    if not same.any():
        return key, values
    if not drop_duplicates:
        return key, _by_attributes(values, same)
    for kind in ("weight", "attr"):
        if kind in values:
            differs = (values[kind][1:] != values[kind][:-1]).reshape(len(same), -1).any(1)
            if len(found := np.flatnonzero(same & differs)):
                at = int(found[0])
                row, source = divmod(int(key[at]), num_nodes)
                if kind == "weight":
                    raise _two_weights(name, source, first_row + row, *values[kind][at : at + 2].tolist())
                raise ValueError(
                    f"dataset {name}: edge {source} -> {first_row + row} has two rows of attributes; merge them "
                    "(torch_geometric.utils.coalesce), or set dataset.drop_duplicates=false where both are meant."
                )
    kept = np.concatenate([[True], ~same])
    return key[kept], {kind: value[kept] for kind, value in values.items()}


def _by_attributes(values: EdgeValues, same: np.ndarray) -> EdgeValues:
    """Sort edges that differ only in attributes by their attributes. same [E - 1]: whether an edge has the key and type
    of its predecessor."""
    if "attr" not in values:
        return values
    if "weight" in values:
        same = same & (values["weight"][1:] == values["weight"][:-1])
    first = np.concatenate([[True], ~same])
    places = np.flatnonzero(~first | np.concatenate([same, [False]]))
    rows, group = values["attr"][places], first.cumsum()[places]
    attr = values["attr"].copy()
    attr[places] = rows[np.lexsort([*rows.T[::-1], group])]
    return {**values, "attr": attr}


def _two_weights(name: str, source: int, destination: int, first: float, second: float) -> ValueError:
    if source == destination:
        return ValueError(
            f"dataset {name}: node {source} has two self loops, of weights {first:.6g} and {second:.6g}; add them up, "
            "or set dataset.self_loops=false, which leaves all loops out."
        )
    return ValueError(
        f"dataset {name}: edge {source} -> {destination} has two weights, {first:.6g} and {second:.6g}; add them up "
        "(torch_geometric.utils.coalesce), or set dataset.drop_duplicates=false where both are meant."
    )


def normalized(x: Tensor, how: str, *, train_mask: Tensor, double: bool = False, name: str = "given") -> Tensor:
    """Normalise features by row sum, or by mean and deviation of training rows, in float64; store as by `stored_as`.

    Rows that sum to 0 and constant columns stay finite. Shapes: x [N, F], train_mask [N] -> [N, F].
    """
    if how == "none":
        return x
    mean, deviation = torch.zeros(1), torch.ones(1)
    if how == "standard":
        rows = x[train_mask].double()
        mean, deviation = rows.mean(0), rows.std(0, correction=0)
        deviation = torch.where(deviation > 1e-12 * mean.abs().clamp_min(1), deviation, torch.ones_like(deviation))

    def normal(rows: Tensor) -> Tensor:
        scale = deviation if how == "standard" else rows.abs().sum(1, keepdim=True)
        out = (rows - mean) / torch.where(scale > 0, scale, torch.ones_like(scale))
        return stored_as(name, f"x normalised by {how}", out, double=double)

    return torch.cat([normal(rows.double()) for rows in x.split(_ROWS_AT_ONCE)])


_ROWS_AT_ONCE = 1 << 16  # in float64


def make_split(raw: RawGraph, config: Preprocess, *, seed: int) -> Masks:
    """Return training, validation and test masks, [N] bool each. seed: the run's seed, used if a field is null. Raises
    ValueError for an empty training split, overlapping splits and unlabelled members."""
    if config.split == "public":
        masks = _public_split(raw, seed if config.split_index is None else config.split_index)
    else:
        rng = np.random.default_rng(seed if config.split_seed is None else config.split_seed)
        drawn = np.zeros((3, len(raw.y)), dtype=bool)
        (_split_classes if config.split == "per_class" else _split_randomly)(raw, config, rng, drawn)
        train, val, test = torch.from_numpy(drawn)
        masks = train, val, test
    check_split(raw, masks)
    return masks


def _public_split(raw: RawGraph, index: int) -> Masks:
    if raw.masks is None:
        raise ValueError(
            f"dataset {raw.name} has no split of its own; set dataset.split=random or dataset.split=per_class."
        )
    count = min(mask.shape[1] for mask in raw.masks)
    if index >= count:
        raise ValueError(
            f"dataset {raw.name} has {count} splits, numbered 0 to {count - 1}; dataset.split_index={index} is not one."
        )
    # A file may hold ten training masks and one test mask: the single one serves all.
    train, val, test = (mask[:, index if mask.shape[1] > 1 else 0].contiguous() for mask in raw.masks)
    return train, val, test


def _split_classes(raw: RawGraph, config: Preprocess, rng: np.random.Generator, masks: np.ndarray) -> None:
    """Set masks [3, N] by split=per_class."""
    if raw.task in MATRICES:
        raise ValueError(
            f"dataset {raw.name} is {raw.task}: dataset.split=per_class needs one class a node; use random."
        )
    assert raw.num_classes is not None
    y = raw.y.numpy()
    masks[2] = y >= 0
    need = config.train_per_class + config.val_per_class
    for label in range(raw.num_classes):
        members = np.flatnonzero(y == label)
        if 0 < len(members) < need:
            raise ValueError(
                f"dataset {raw.name}: class {label} has {len(members)} nodes, fewer than dataset.train_per_class + "
                f"val_per_class = {need}; lower them or set dataset.split=random."
            )
        members = rng.permutation(members)[:need]
        masks[0, members[: config.train_per_class]] = True
        masks[1, members[config.train_per_class :]] = True
        masks[2, members] = False


def _split_randomly(raw: RawGraph, config: Preprocess, rng: np.random.Generator, masks: np.ndarray) -> None:
    """Set masks [3, N] by split=random."""
    if config.train_fraction + config.val_fraction > 1:
        raise ValueError(
            f"dataset.train_fraction={config.train_fraction:g} and dataset.val_fraction={config.val_fraction:g} add "
            "up to more than 1; lower one."
        )
    labelled = np.flatnonzero(has_label(raw.y, raw.task).numpy())
    order = rng.permutation(labelled)
    num_train = max(1, round(config.train_fraction * len(order)))
    num_val = min(round(config.val_fraction * len(order)), len(order) - num_train)
    for mask, nodes in zip(masks, np.split(order, [num_train, num_train + num_val]), strict=True):
        mask[nodes] = True
