"""Minimum vertex covers of cut edges: choose the rows to send, and the destinations to fold at their sources.

The edges from part q to part p form a bipartite graph. A cut edge reaches p in the row of its source, or in a partial
row of its destination, folded by q. Every choice is a vertex cover, and the smallest one sends least. By König's
theorem it follows from a maximum matching if all rows weigh the same, else from a minimum cut (Ford and Fulkerson).
SciPy finds both in O(E sqrt(V)).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

_MOST = 1000  # largest numerator and denominator of rounded weights: capacities of a flow are 32-bit


def least_cover(dst: Tensor, src: Tensor, num_dst: int, num_src: int, *, weights: tuple[int, int] = (1, 1)) -> Tensor:
    """Return the destinations of a minimum vertex cover. Its sources are the sources of edges to other destinations.

    weights: of a source and of a destination. Equal covers prefer sources. Shapes: dst, src [E] -> [num_dst] bool.
    """
    chosen = torch.zeros(num_dst, dtype=torch.bool)
    if len(dst):
        edges = _adjacency(src.cpu().numpy(), dst.cpu().numpy(), num_src, num_dst)
        of_source, of_destination = _in_lowest_terms(*weights)
        reached = _by_matching(edges) if of_source == of_destination else _by_flow(edges, of_source, of_destination)
        chosen[torch.from_numpy(reached)] = True
    return chosen.to(dst.device)


def _adjacency(rows: NDArray[np.int64], columns: NDArray[np.int64], num_rows: int, num_columns: int) -> csr_matrix:
    """Return the adjacency matrix, repeated edges once, with 32-bit ones."""
    from scipy.sparse import csr_matrix

    edges = csr_matrix((np.ones(len(rows), np.int32), (rows, columns)), shape=(num_rows, num_columns))
    edges.sum_duplicates()
    edges.data[:] = 1
    return edges


def _shape(edges: csr_matrix) -> tuple[int, int]:
    assert edges.shape is not None
    return edges.shape


def _in_lowest_terms(a: int, b: int) -> tuple[int, int]:
    scale = max(a, b) / _MOST
    a, b = (a, b) if scale <= 1 else (max(1, round(a / scale)), max(1, round(b / scale)))
    return a // int(np.gcd(a, b)), b // int(np.gcd(a, b))


def _by_matching(edges: csr_matrix) -> NDArray[np.int64]:
    """Return the columns that an alternating path reaches from an unmatched row."""
    from scipy.sparse.csgraph import maximum_bipartite_matching

    partner = maximum_bipartite_matching(edges, perm_type="column")  # of each row, -1: none
    matched = (partner >= 0).nonzero()[0]
    return _columns_reached(edges, (partner < 0).nonzero()[0], partner[matched], matched)


def _by_flow(edges: csr_matrix, of_row: int, of_column: int) -> NDArray[np.int64]:
    """Return the columns on the near side of a minimum cut."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_flow

    rows, columns = _shape(edges)
    begin, end = rows + columns, rows + columns + 1
    found = edges.tocoo()
    pieces = [
        (np.full(rows, begin), np.arange(rows), of_row),
        (found.row, found.col + rows, of_row + of_column),  # never full
        (rows + np.arange(columns), np.full(columns, end), of_column),
    ]
    tails, heads = (np.concatenate([piece[i] for piece in pieces]) for i in (0, 1))
    capacity = np.concatenate([np.full(len(tail), most, np.int32) for tail, _, most in pieces])
    network = csr_matrix((capacity, (tails, heads)), shape=(end + 1, end + 1))
    flow = maximum_flow(network, begin, end).flow.tocoo()
    sent = flow.data > 0
    filled = sent & (flow.row == begin) & (flow.data == of_row)
    open_rows = np.setdiff1d(np.arange(rows), flow.col[filled])
    back = sent & (flow.row < rows)  # the residual network reverses edges with flow
    return _columns_reached(edges, open_rows, flow.col[back] - rows, flow.row[back])


def _columns_reached(
    edges: csr_matrix, begins: NDArray[np.int64], back_columns: NDArray[np.int64], back_rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the columns reached from rows `begins`, by edges forwards and by the given pairs backwards."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order

    rows, columns = _shape(edges)
    found, root = edges.tocoo(), rows + columns
    tails = np.concatenate([np.full(len(begins), root), found.row, back_columns + rows])
    heads = np.concatenate([begins, found.col + rows, back_rows])
    walk = csr_matrix((np.ones(len(tails), np.int8), (tails, heads)), shape=(root + 1, root + 1))
    order = breadth_first_order(walk, root, return_predecessors=False)
    return (order[(order >= rows) & (order < root)] - rows).astype(np.int64)


class CoverCounts(NamedTuple):
    """Counts of a cover of all cut edges, [p][q] of part p from q: halo rows, partial rows, edges folded at sources."""

    rows: tuple[tuple[float, ...], ...]
    partial: tuple[tuple[float, ...], ...]
    folded: tuple[tuple[float, ...], ...]


def count_cover(
    edge_index: Tensor, part_of: Tensor, parts: int, weights: tuple[int, int], *, edge_type: Tensor | None, types: int
) -> CoverCounts:
    """Count the minimum covers between all parts. types: partial rows are of pairs of a destination and a type. Shapes:
    edge_index [2, E], part_of [N], edge_type [E]."""
    src, dst = edge_index
    source, target = part_of[src], part_of[dst]
    pair = torch.where(source == target, parts * parts, target * parts + source)
    order = torch.argsort(pair, stable=True)
    ends = [0, *torch.bincount(pair, minlength=parts * parts + 1).cumsum(0).tolist()]
    counts = torch.zeros(3, parts, parts, dtype=torch.float64)
    for p in range(parts):
        for q in range(parts):
            edges = order[ends[p * parts + q] : ends[p * parts + q + 1]] if p != q else order[:0]
            if not len(edges):
                continue
            of = dst[edges]
            if types:
                of = of * types + (0 if edge_type is None else edge_type[edges])
            destinations, number = torch.unique(of, return_inverse=True)
            sources, column = torch.unique(src[edges], return_inverse=True)
            folded = least_cover(number, column, len(destinations), len(sources), weights=weights)
            there = folded[number]
            found = len(torch.unique(column[~there])), int(folded.sum()), int(there.sum())
            counts[:, p, q] = torch.tensor(found, dtype=counts.dtype)
    return CoverCounts(*(tuple(map(tuple, table)) for table in counts.tolist()))
