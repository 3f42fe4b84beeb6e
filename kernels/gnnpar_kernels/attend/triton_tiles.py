"""Shared parts of the attention kernels: tiles [R rows, B edges, heads, columns], scores, dropout, passes over tasks.

A score is a jit function of both ends, score(far, near, weigh, SLOPE) -> (argument of the activation, score).

A program covers whole heads, at most 512 elements of a row unless one head is wider, and R rows at once, or one long
row. Scalars per edge and head have the shape [R, B, heads, 1].
"""

from collections.abc import Mapping
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from gnnpar_kernels.attend.naive import Drop, keyed
from gnnpar_kernels.hashing import threshold
from gnnpar_kernels.triton_hashing import column_hash, keep, key_arguments, row_hash
from gnnpar_kernels.triton_tasks import LOW, tasks_of
from gnnpar_kernels.triton_tuning import Tuned, configs

RUNTIME = ["first", "last", "k0", "k1", "k2", "limit"]  # integers that a kernel is not specialised for
TILES = configs({"TILE": 256}, {"TILE": 512})  # elements that a warp gathers at once
MAX_EDGES = 32  # of one step
MAX_ROWS = 32  # of one program


@triton.constexpr_function
def tile_width(D, HG, DP):
    """Return the elements of a row in a tile; twice as many if they are loaded singly, each with its own address."""
    return HG * DP * (1 if D % 4 == 0 else 2)


@triton.constexpr_function
def edges_per_step(tile, width, bound):
    """Return the edges of a row per step, for rows of at most `bound` edges; bound 0: long rows."""
    return max(1, min(tile // width, bound or MAX_EDGES, MAX_EDGES))


@triton.constexpr_function
def rows_per_program(tile, width, bound):
    """Return the rows of one program: one long row, or short rows that fill the tile. A row counts as at least 8 edges,
    since its sums need registers too."""
    return max(1, min(tile // (width * max(edges_per_step(tile, width, bound), 8)), MAX_ROWS)) if bound else 1


@triton.jit
def sum_score(far, near, weigh, SLOPE: tl.constexpr):
    """Return the sum of both ends' scores, before and after the activation (GATv1)."""
    raw = far + near
    return raw, tl.where(raw > 0, raw, raw * SLOPE)


@triton.jit
def weighed_score(far, near, weigh, SLOPE: tl.constexpr):
    """Return weigh . leaky_relu(far + near) (GATv2). Shapes: rows [..., D] -> [..., D], [..., 1]."""
    raw = far + near
    return raw, tl.sum(tl.where(raw > 0, raw, raw * SLOPE) * weigh, 3, keep_dims=True)


@triton.jit
def dot_score(far, near, weigh, SLOPE: tl.constexpr):
    """Return the dot products <far, near>. Shapes: rows [..., D] -> [..., D], [..., 1]."""
    return far, tl.sum(far * near, 3, keep_dims=True)


@triton.jit
def span(row_ptr, begin_ptr, end_ptr, first, last, R: tl.constexpr, BOUND: tl.constexpr):
    """Return the rows and edges of this program. begin_ptr is indptr if BOUND is not 0, else by piece.

    Shapes: -> piece, CSR row, first edge, end of the edges [R]; no edges beyond `last`.
    """
    piece = first + tl.program_id(0) * R + tl.arange(0, R)
    live = piece < last
    row = tl.load(row_ptr + piece, mask=live, other=0)
    if BOUND > 0:
        begin = tl.load(begin_ptr + row, mask=live, other=0)
        end = tl.load(begin_ptr + row + 1, mask=live, other=0)
    else:
        begin = tl.load(begin_ptr + piece, mask=live, other=0)
        end = tl.load(end_ptr + piece, mask=live, other=0)
    return piece, row, begin, end


@triton.jit
def dropped(weight, ids_ptr, edge, valid, head, k0, k1, k2, limit, SCALE: tl.constexpr):
    """Return weight * K. Shapes: weight [R, B, heads, 1], edge, valid [R, B], head [1, 1, heads, 1]."""
    if SCALE > 0:
        ids = tl.load(ids_ptr + edge, mask=valid, other=0)
        kept = keep(row_hash(ids, k0, k1)[:, :, None, None], column_hash(head, k2), limit)
        weight = tl.where(kept, weight * SCALE, 0.0)
    return weight


class Dims(NamedTuple):
    """Constants of a shape [., H, D]: heads of one program, columns padded to a power of two."""

    H: int
    D: int
    HG: int
    DP: int

    @classmethod
    def of(cls, x: Tensor) -> "Dims":
        num_heads, width = x.shape[1:]
        padded = triton.next_power_of_2(max(width, 1))
        return cls(num_heads, width, min(triton.next_power_of_2(max(num_heads, 1)), max(512 // padded, 1)), padded)

    @property
    def groups(self) -> int:
        return triton.cdiv(self.H, self.HG)


def pointers(**tensors: Tensor | None) -> dict[str, object]:
    """Return contiguous tensors as arguments of a kernel."""
    return {f"{name}_ptr": t.contiguous() for name, t in tensors.items() if t is not None}


def padded(name: str, width: int) -> dict[str, object]:
    """Return a number of columns, and the next power of two, as constants of a kernel."""
    return {name: width, f"{name}P": triton.next_power_of_2(max(width, 1))}


def dropping(drop: Drop | None, edge_ids: Tensor | None) -> dict[str, object]:
    """Return the kernel arguments of attention dropout; SCALE 0 means none."""
    if (keys := keyed(drop, edge_ids)) is None:
        return {"k0": 0, "k1": 0, "k2": 0, "limit": 0, "SCALE": 0.0}
    p, key, ids = keys
    return {"ids_ptr": ids.contiguous(), **key_arguments(key), "limit": threshold(p), "SCALE": 1.0 / (1.0 - p)}


def run_tasks(
    kernel: Tuned,
    indptr: Tensor,
    dims: Dims,
    *,
    whole: Mapping[str, object],
    parts: Mapping[str, object],
    **common: object,
) -> None:
    """Launch once per class of rows, the longest first; pieces of split rows have the arguments `parts`. Pointers of
    the kernel that are not given are None."""
    tasks, width = tasks_of(indptr), tile_width(dims.D, dims.HG, dims.DP)
    common = dict.fromkeys(name for name in kernel.fn.arg_names if name.endswith("_ptr")) | common | dims._asdict()

    def launch(first: int, last: int, bound: int, **arguments: object) -> None:
        def grid(meta: dict[str, int]) -> tuple[int, int]:
            return triton.cdiv(last - first, rows_per_program(meta["TILE"], width, bound)), dims.groups

        if last > first and dims.groups > 0:
            kernel[grid](**{**common, **arguments, "first": first, "last": last, "BOUND": bound})

    pieces = {"row_ptr": tasks.row, "begin_ptr": tasks.begin, "end_ptr": tasks.end}
    launch(0, tasks.num_slots, 0, SPLIT=True, **pieces, **parts)
    launch(tasks.num_slots, tasks.num_pieces, 0, SPLIT=False, **pieces, **whole)
    for bound, rows in reversed(tuple(zip(LOW, tasks.low, strict=True))):
        launch(0, rows.shape[0], bound, SPLIT=False, row_ptr=rows, begin_ptr=indptr, end_ptr=indptr, **whole)
