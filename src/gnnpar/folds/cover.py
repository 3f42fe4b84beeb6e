"""Minimum vertex covers of cut edges: choose the rows to send, and the destinations to fold at their sources.

The edges from part q to part p form a bipartite graph. A cut edge reaches p in the row of its source, or in a partial
row of its destination, folded by q. Every choice is a vertex cover, and the lightest one sends least. By König's
theorem it follows from a maximum matching if all rows weigh the same, else from a minimum cut (Ford and Fulkerson).
SciPy finds both in O(E sqrt(V)).
"""

# pyright: standard
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_MOST = 1000  # largest rounded weight: capacities of a flow are 32-bit


def least_cover(dst: Tensor, src: Tensor, weights: tuple[int, int]) -> Tensor:
    """Return the edges of a bipartite graph with a destination in its minimum vertex cover; the rest of the cover are
    the sources of all other edges.

    weights: of a source and of a destination. Equal covers prefer sources. Shapes: dst, src [E] any numbers
    -> [E] bool.
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_bipartite_matching, maximum_flow

    if not len(dst):
        return torch.zeros_like(dst, dtype=torch.bool)
    (sources, row), (found, column) = (np.unique(each.cpu().numpy(), return_inverse=True) for each in (src, dst))
    scale = max(1.0, max(weights) / _MOST)
    of_source, of_destination = (max(1, round(each / scale)) for each in weights)
    rows, begin, end = len(sources), len(sources) + len(found), len(sources) + len(found) + 1
    if of_source == of_destination:  # paths alternate from unmatched rows
        partner = maximum_bipartite_matching(csr_matrix((np.ones(len(row)), (row, column))), perm_type="column")
        (matched,), (unmatched,) = (partner >= 0).nonzero(), (partner < 0).nonzero()
        tails = np.concatenate([np.full(len(unmatched), begin), row, partner[matched] + rows])
        heads = np.concatenate([unmatched, column + rows, matched])
        left = csr_matrix((np.ones(len(tails)), (tails, heads)), shape=(end, end))
    else:
        tails = np.concatenate([np.full(rows, begin), row, np.arange(rows, begin)])
        heads = np.concatenate([np.arange(rows), column + rows, np.full(len(found), end)])
        most = np.array([of_source, of_source + of_destination, of_destination], np.int32)  # edges are never full
        capacity = csr_matrix((most.repeat([rows, len(row), len(found)]), (tails, heads)), shape=(end + 1, end + 1))
        left = capacity - maximum_flow(capacity, begin, end).flow
        left.eliminate_zeros()
    reached = np.zeros(end + 1, bool)
    reached[breadth_first_order(left, begin, return_predecessors=False)] = True
    return torch.from_numpy(reached[column + rows]).to(dst.device)


def count_cover(
    edge_index: Tensor, part_of: Tensor, parts: int, edge_type: Tensor | None, weights: tuple[int, int], types: int
) -> Tensor:
    """Count the minimum covers between all parts: halo rows, partial rows, edges folded at their sources.

    types: partial rows are of pairs of a destination and a type, if not 0. Shapes: edge_index [2, E], part_of [N],
    edge_type [E] -> [3, parts, parts] of the reader from the owner.
    """
    cut = part_of[edge_index[0]] != part_of[edge_index[1]]
    src, dst = edge_index[:, cut]
    link = part_of[dst] * parts + part_of[src]
    number = 0 if edge_type is None or not types else edge_type[cut]
    source, destination = (each * parts**2 + link for each in (src, dst * max(1, types) + number))
    there = least_cover(destination, source, weights)  # of all pairs of parts: their edges share no ends
    counted = source[~there].unique(), destination[there].unique(), destination[there]
    counts = torch.stack([torch.bincount(each % parts**2, minlength=parts**2) for each in counted])
    return counts.view(3, parts, parts).double()
