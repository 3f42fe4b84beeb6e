"""Effect of a sent row's variance on its readers, from the weights of its edges, by global degrees.

Forward: a row u for part p is added to p's destinations v with weight alpha_v. alpha_v = d_v^-1/2 for GCN (the row
already contains the source's factor), 1/d_v for a mean, 1 for a sum. Attention weights of a destination add up to 1, so
their mean 1/d_v approximates them. A maximum has one winner per entry, so 1/d_v is used too. A convolution declares its
exponents `degree_powers = (destination, source)`, by default (-1, 0).

Backward: the gradient row of u has one reader, its owner, which multiplies it by the source's factor.

square_of_sum is (sum of alpha)^2, as in AdaQP. sum_of_squares is the variance that arrives if destinations are weighted
separately. energy is an addition and compares exchanges: a weight's gradient holds products x_u g_u^T of a row and the
gradient returned for it, so noise in the row counts with |g_u|^2 and noise in the gradient row with |x_u|^2. Both ends
know both. If no gradient is returned (features), degrees are used, scaled to the nearest layer. Noise of a row also
reaches all later layers and the loss, which the product ignores; forward_weight accounts for it. Variance of the
gradient relative to 4 bits for all rows, at the same bytes (3 layers, 2 METIS parts; a power-law graph of 500 nodes,
then sbm), below 1 for a weight of 4:

    forward_weight     2            4            6
    GCN           0.88, 1.03   0.86, 0.97   0.83, 0.95
    GraphSAGE     0.76, 0.94   0.62, 0.89   0.60, 0.85
    GAT           0.69, 0.54   0.81, 0.48   0.87, 0.55
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from gnnpar.comm import Communicator, MessageTag, RowLists
from gnnpar.comm.rows import PartEdges
from gnnpar.folds.block import Block

Importance = Literal["square_of_sum", "sum_of_squares", "energy"]
Powers = tuple[float, float]  # exponents of the in-degrees of an edge's destination and source
MEAN: Powers = (-1.0, 0.0)


@runtime_checkable
class WeighsEdges(Protocol):
    """A convolution that declares its exponents."""

    degree_powers: Powers


class Convolutional(Protocol):
    """A model that lists its convolutions, layer by layer."""

    @property
    def convolutions(self) -> Sequence[object]: ...


def powers_of(convolutions: Sequence[object]) -> tuple[Powers, ...]:
    return tuple(conv.degree_powers if isinstance(conv, WeighsEdges) else MEAN for conv in convolutions)


def column_scores(block: Block, alpha: Tensor, form: Importance) -> Tensor:
    """Return the score of each column of a block, [num_src] fp32. alpha [num_dst]: edge weights by destination."""
    weights = alpha[block.edge_dst].float()
    if block.weights is not None:
        weights = weights * block.weights.float()
    scores = torch.zeros(block.num_src, device=weights.device)
    columns = block.indices.long()
    if form != "square_of_sum":
        return scores.index_add_(0, columns, weights.square())
    return scores.index_add_(0, columns, weights).square_()


def edges_of(lists: RowLists) -> PartEdges:
    """Return the edges of a part. ValueError if the rows are not halo rows of a part of a graph."""
    if lists.edges is None:
        raise ValueError(
            "codec=adaptive weighs rows by the edges that read them, and there are none between these ranks: "
            "use codec=uniform, random, bf16 or identity"
        )
    return lists.edges


class Scores:
    """Scores of the rows this rank sends, computed by their readers at the start. The constructor is collective."""

    def __init__(self, lists: RowLists, comm: Communicator, powers: Sequence[Powers], form: Importance) -> None:
        edges = edges_of(lists)
        self._read_in_degree, self._powers = edges.read_in_degree, tuple(powers)
        self._forward: dict[float, dict[int, Tensor]] = {}
        for power in sorted({destination for destination, _ in self._layers()}):
            alpha = edges.in_degree.clamp_min(1) ** power
            mine = {p: column_scores(b, alpha, form).view(torch.uint8) for p, b in edges.halo.items()}
            sizes = {p: 4 * len(index) for p, index in lists.sent.items()}
            pending = comm.exchange(mine, sizes, MessageTag(0, -1, 0, "setup"))
            self._forward[power] = {p: buffer.wait().view(torch.float32) for p, buffer in pending.items()}
            comm.flush(keep=0)
        self._halo_rows: dict[int, slice] = {}
        start = 0
        for p in sorted(lists.read):
            self._halo_rows[p] = slice(start, start + len(lists.read[p]))
            start += len(lists.read[p])

    def forward(self, layer: int, peer: int) -> Tensor:
        """Return the scores of the rows in boundary[peer]."""
        return self._forward[self._power(layer)[0]][peer]

    def backward(self, layer: int, peer: int) -> Tensor:
        """Return the scores of the gradient rows of halo[peer]."""
        degrees = self._read_in_degree[self._halo_rows[peer]].float().clamp_min(1)
        return degrees ** (2 * self._power(layer)[1])

    def _layers(self) -> tuple[Powers, ...]:
        return self._powers or (MEAN,)

    def _power(self, layer: int) -> Powers:
        return self._layers()[min(layer, len(self._layers()) - 1)]
