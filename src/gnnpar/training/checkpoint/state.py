"""Write and read trees of tensors and plain values; reading a file runs no code.

A tree is a tensor, None, a bool, int, float or str, or a dict, list or tuple of trees. A NamedTuple becomes a tuple.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnpar.files import file_hash, load_tensors

_SCALARS = (bool, int, float, str)


def plain(tree: object, at: str = "state") -> Any:  # Any: a tree, as above
    """Convert a tree to exact types, and clone views of larger tensors. Raises TypeError for other types."""
    if tree is None or type(tree) in _SCALARS:
        return tree
    if isinstance(tree, Tensor):
        part = tree.untyped_storage().nbytes() != tree.numel() * tree.element_size()
        return tree.detach().clone() if part else tree.detach()
    if isinstance(tree, Mapping):
        return {plain(k, f"a key of {at}"): plain(v, f"{at}[{k!r}]") for k, v in tree.items()}
    if isinstance(tree, tuple):
        return tuple(plain(v, f"{at}[{i}]") for i, v in enumerate(tree))
    if isinstance(tree, list):
        return [plain(v, f"{at}[{i}]") for i, v in enumerate(tree)]
    raise TypeError(
        f"{at} is a {type(tree).__name__}: a state holds tensors, None, bool, int, float, str, and dict, "
        "list and tuple of them"
    )


def write_tree(file: Path, tree: object) -> str:
    """Write a tree, with fsync. Return the sha256 of the file."""
    with file.open("wb") as out:
        torch.save(plain(tree), out)
        out.flush()
        os.fsync(out.fileno())
    return file_hash(file)


def is_extra(name: str) -> bool:
    """Return whether a weight of this name is a module's get_extra_state, which may be any tree."""
    return name.rpartition(".")[2] == "_extra_state"


def read_tree(file: Path, device: torch.device) -> Any:  # Any: a tree
    """Read a tree of `write_tree`; move GPU tensors to `device`, others to the CPU."""
    return load_tensors(file, places={f"cuda:{i}": str(device) for i in range(64)})
