"""A user's own graph: one .npz file, `dataset=npz dataset.path=my.npz`.

Keys (N nodes, E edges, F features, C classes; S numbered splits, chosen with dataset.split_index):

| key | shape | meaning |
|---|---|---|
| `edge_index` | [2, E] integers | row 0 sources, row 1 destinations; dataset.symmetrize=true adds the reverse edges |
| `edge_weight` | [E] numbers | optional: weights of edges |
| `edge_type` | [E] integers | optional: types of edges, 0, 1, 2, ... |
| `edge_attr` | [E, D] numbers | optional: a row of attributes per edge |
| `x` | [N, F] numbers | features; may be left out with dataset.features=identity or degree |
| `y` | [N] class ids, or [N, C] of 0/1 (multi-label) | labels; -1 or NaN = unlabelled |
| `train_mask`, `val_mask`, `test_mask` | [N] or [N, S] or [S, N] booleans | optional: else split=random or per_class |

Files of the heterophilous-graph collections are read too: `node_features`, `node_labels`, `edges` [E, 2] (undirected
pairs, symmetrised) and `train_masks`, `val_masks`, `test_masks`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from gnnpar.data.columns import tensor_of
from gnnpar.data.dataset import Dataset
from gnnpar.data.files import find_path
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.raw import RawGraph, TaskChoice, refuse_unread
from gnnpar.files import require_memory

_ALIASES = {"edge_index": "edges", "x": "node_features", "y": "node_labels"} | {
    f"{part}_mask": f"{part}_masks" for part in ("train", "val", "test")
}


@dataclass(frozen=True, kw_only=True)
class NPZ(Preprocess):
    """A graph in one .npz file; `path` is relative to the working folder or to data_dir.

    features: identity, one-hot node ids; degree, one-hot log2(in-degree + 1).
    """

    name: str = "npz"
    path: str | None = None
    task: TaskChoice = "auto"  # multi_label if y is [N, C > 1]
    features: Literal["file", "identity", "degree"] = "file"

    @property
    def preparation(self) -> Mapping[str, object]:
        return {**super().preparation, "features": self.features}

    def without_labels(self) -> Self:
        return replace(self, task="link") if self.features == "file" else self

    def load(self, data_dir: Path | None, seed: int) -> Dataset:
        return prepare(_raw_graph(self, data_dir), self, seed=seed)


def _raw_graph(config: NPZ, data_dir: Path | None) -> RawGraph:
    file = find_path(config.name, config.path, data_dir, example="dataset=npz dataset.path=my.npz")
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {key: array for key in archive.files if isinstance(array := archive[key], np.ndarray)}
    except Exception as error:  # zipfile, zlib and numpy raise errors of all kinds
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"dataset {config.name}: {file} cannot be read as .npz ({text}); save it with numpy.savez."
        ) from error
    refuse_unread(config.name, arrays)
    held, pairs = ", ".join(arrays) or "nothing", "edges" in arrays
    unlabelled, from_file = config.task == "link", config.features == "file"
    for key, other in _ALIASES.items():
        if key in arrays and other in arrays:
            raise ValueError(f"dataset {config.name}: {config.path} has both {key} and {other}; leave one of them out.")
        if other in arrays:
            arrays[key] = arrays.pop(other).T if key == "edge_index" else arrays.pop(other)
    needed = ["edge_index", *(["y"] if not unlabelled else []), *(["x"] if unlabelled or from_file else [])]
    for key in needed:
        if key not in arrays:
            hint = "; or set dataset.features=identity or degree" if key == "x" else ""
            raise ValueError(f"dataset {config.name}: {config.path} has no {key} (it holds {held}); add it{hint}.")
    optional = [key for key in arrays if key.startswith("edge_") or key.endswith("_mask")]
    rows = {key: tensor_of(arrays[key], f"dataset {config.name}: {key}") for key in (*needed, *optional)}
    y = torch.zeros(rows["x"].shape[:1]) if unlabelled else rows["y"]
    if not y.ndim or not len(y):
        raise ValueError(f"dataset {config.name}: y has shape {list(y.shape)}; give one label a node.")
    if not from_file:
        rows["x"] = _features(config, rows["edge_index"], num_nodes=len(y), pairs=pairs)
    return replace(RawGraph.of(config.name, {**rows, "y": y}, config.task), pairs=pairs)


def _features(config: NPZ, edge_index: Tensor, *, num_nodes: int, pairs: bool) -> Tensor:
    """Return one-hot node ids, or one-hot log2(in-degree + 1)."""
    if config.features == "identity":
        require_memory(12 * num_nodes**2, f"dataset.features=identity of {num_nodes:,} nodes", "set features=degree")
        return torch.eye(num_nodes)
    # the check of edges reports a wrong shape and wrong ids
    ends = edge_index.flatten() if pairs or config.symmetrize or len(edge_index) != 2 else edge_index[1]
    valid = ends[(ends >= 0) & (ends < num_nodes)].to(torch.int64)
    bucket = torch.bincount(valid, minlength=num_nodes).add(1).float().log2().long()
    return torch.nn.functional.one_hot(bucket).float()
