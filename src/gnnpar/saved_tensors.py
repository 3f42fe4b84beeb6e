"""Files of torch.save that anybody may have written: no code runs, and no tensor reaches outside its memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor


def load_saved(
    file: Path, *, places: str | dict[str, str] = "cpu", known: Iterable[type] = (), mmap: bool = False
) -> object:
    """What torch.save wrote, of tensors, plain values and the classes in `known` alone. `places`: as map_location.

    Indices of sparse tensors are held to their shapes, which torch.load leaves out by itself, and whose sums and
    conversions then write where indices say. Raises whatever torch's readers raise.
    """
    with torch.serialization.safe_globals(list(known)), torch.sparse.check_sparse_tensor_invariants():
        return torch.load(file, map_location=places, weights_only=True, mmap=mmap)


def oddity(tensor: Tensor) -> str | None:
    """What makes a tensor nothing to compute with: 'nested', 'quantized', 'without values'; None: nothing."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    return "without values" if tensor.is_meta else None
