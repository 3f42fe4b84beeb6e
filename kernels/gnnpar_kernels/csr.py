"""CSR structure of kernels: rows of in-edges, or of out-edges if transposed."""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class Csr(NamedTuple):
    """Edges grouped by row.

    Shapes: indptr [R + 1] and indices [E], both int32 or both int64; rows [R] int64, unique and ascending, or None
    (row r is output row r); edge_ids [E] int64 global ids aligned with indices, or None (needed by dropout only);
    weights [E] floating-point numbers aligned with indices, or None (all are 1; needed by spmm only); types [E] int64
    relations aligned with indices, or None.
    """

    indptr: Tensor
    indices: Tensor
    rows: Tensor | None = None
    edge_ids: Tensor | None = None
    weights: Tensor | None = None
    types: Tensor | None = None


def edge_rows(indptr: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return the output row of every edge. Shapes: indptr [R + 1], rows [R] or None -> [E] int64."""
    outputs = torch.arange(indptr.shape[0] - 1, device=indptr.device) if rows is None else rows
    return torch.repeat_interleave(outputs, (indptr[1:] - indptr[:-1]).long())


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums: fp32 for 16-bit rows, else their own dtype."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def flat_rows(x: Tensor) -> Tensor:
    """Return one contiguous row per node, as a view if possible. Shapes: [M, ...] -> [M, W]."""
    return x.reshape(x.shape[0], prod(x.shape[1:])).contiguous()
