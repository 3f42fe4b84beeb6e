"""Files of torch.save that anybody may have written: no code runs, and no tensor reaches outside its memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    classes = tuple(known)
    with torch.serialization.safe_globals(list(classes)):
        found = torch.load(file, map_location=places, weights_only=True, mmap=mmap)
    for tensor in _sparse_tensors(found, classes):
        _hold_to_shape(tensor)
    return found


def _sparse_tensors(found: object, classes: tuple[type, ...]) -> Iterator[Tensor]:
    """All that containers and objects of `classes` hold; these may hold each other in a circle."""
    met: dict[int, object] = {}
    left = [found]
    while left:
        each = left.pop()
        if id(each) in met:
            continue
        met[id(each)] = each
        if isinstance(each, Tensor):
            if each.layout != torch.strided and not each.is_nested:
                yield each
        elif isinstance(each, Mapping):
            left.extend(each.values())
        elif isinstance(each, (list, tuple, set)):
            left.extend(each)
        elif isinstance(each, classes):
            left.extend(vars(each).values())


def _hold_to_shape(tensor: Tensor) -> None:
    """RuntimeError where an index of a sparse tensor is outside its shape.

    torch's switch for such checks is one for the whole process: ranks that are threads would be checked by it too.
    """
    if tensor.layout == torch.sparse_coo:
        torch._validate_sparse_coo_tensor_args(  # pyright: ignore[reportPrivateImportUsage]
            tensor._indices(), tensor._values(), tensor.shape, tensor.is_coalesced()
        )
        return
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    ends = tensor.crow_indices() if by_row else tensor.ccol_indices()
    indices = tensor.col_indices() if by_row else tensor.row_indices()
    torch._validate_sparse_compressed_tensor_args(  # pyright: ignore[reportPrivateImportUsage]
        ends, indices, tensor.values(), tensor.shape, tensor.layout
    )


def oddity(tensor: Tensor) -> str | None:
    """What makes a tensor nothing to compute with: 'nested', 'quantized', 'without values'; None: nothing."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    return "without values" if tensor.is_meta else None
