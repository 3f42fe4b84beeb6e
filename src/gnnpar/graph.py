"""The Protocol that models are written against. Models are row-local except `aggregate`, `moments` and `total`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, Self

from torch import Tensor

from gnnpar.folds.aggregator import Aggregator, EdgeDropout
from gnnpar.folds.block import Rows


class Local(Protocol):
    """Inputs of a row-local computation: data of the given rows, without their neighbours."""

    @property
    def node_ids(self) -> Tensor:
        """[N] global ids of the rows."""
        ...

    @property
    def in_degree(self) -> Tensor:
        """[N] global in-degree, counted before partitioning, in the dtype of the features."""
        ...

    @property
    def in_weight(self) -> Tensor | None:
        """[N] global sums of the weights of in-edges, in the dtype of the features; None without weights."""
        ...

    @property
    def normalised(self) -> bool:
        """Whether edge weights already contain d_i^-1/2 d_j^-1/2 of destination and source. See Shard.normalised."""
        ...

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        """Apply dropout keyed by (seed, epoch, layer, tag, global id, column): one mask under every strategy. The same
        tag in the same layer is the same mask; identity when evaluating."""
        ...


Message = Callable[..., Rows]
"""(local, *rows) -> source rows: a row-local function, see Graph.source."""


def unchanged(local: Local, *rows: Tensor) -> Rows:
    """Return the rows unchanged: the identity message."""
    return rows


Reduction = Literal["sum", "max"]


class Moments(NamedTuple):
    """Mean and variance of each column over `rows` rows. Shapes: mean, variance [F]; the variance divides by `rows`.
    probe: the pass leaves no trace, so running statistics stay unchanged."""

    mean: Tensor
    variance: Tensor
    rows: int
    probe: bool = False


class InEdges(NamedTuple):
    """In-edges of the owned rows, in the order of edge operands.

    Shapes: source [E] int64, the owned row at the edge's source, -1 if another view owns it; row [E] int64, the owned
    row at its destination; weight, type [E], None if the edges, or this view, have none.
    """

    source: Tensor
    row: Tensor
    weight: Tensor | None = None
    type: Tensor | None = None


class Graph(Local, Protocol):
    """A view of the graph. A model's tensors have one row per owned node; `aggregate`, `moments`, `total` mix rows."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the whole graph."""
        ...

    @property
    def edge_ids(self) -> Tensor:
        """[E] global ids of the in-edges of the owned rows, ascending: the order of edge operands."""
        ...

    @property
    def in_edges(self) -> InEdges:
        """Return the in-edges of the owned rows, one by one. ValueError if they have no ids."""
        ...

    def type_degree(self, types: int) -> Tensor:
        """Return [N, types] global in-degrees by edge type, 0 <= type < types, in the dtype of the features. Edges of a
        graph without types have type 0. ValueError if the graph has more types."""
        ...

    @property
    def edge_attr(self) -> Tensor | None:
        """[E, D] attributes of the in-edges of the owned rows, in the order of edge operands and the dtype of the
        features; None without attributes."""
        ...

    @property
    def edge_type(self) -> Tensor | None:
        """[E] types of the in-edges of the owned rows, in the order of edge operands; None without types."""
        ...

    def at(self, layer: int) -> Self:
        """Return the view of a layer, the key of policies, history, bit-widths, dropout and accounting."""
        ...

    def source(self, message: Message, *rows: Tensor) -> Rows:
        """Return message(local, *rows), the rows that neighbours will read.

        Equal to calling it directly. The view may evaluate the message on cached rows of remote nodes
        (first_layer=cached), instead of receiving the result every epoch.
        """
        ...

    def destinations(self, *rows: Tensor) -> tuple[Self, Rows]:
        """Return the view of the rows that the next layer reads, and the first n of `rows`, [N, ...] -> [n, ...].

        n = N except in sampled training. A layer that calls it after `source`, and `aggregate` of this view, computes n
        rows; other layers compute all N, with the same result.
        """
        ...

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        """Fold `agg` over the in-edges of the owned rows. Shapes: src, dst [N, ...], edge [E, ...] -> [N, ...]. In a
        view of `destinations`: src [N, ...], dst [n, ...] -> [n, ...]."""
        ...

    def moments(self, x: Tensor) -> Moments | None:
        """Return mean and variance of x [N, F] over all rows of the graph, with exact gradients; None when evaluating.

        Every rank must call it equally often, in the same order. ValueError if a view does not hold all rows of a layer
        at once; a model that calls it must declare so (`ModelSource.moments`).
        """
        ...

    def total(self, part: Tensor, how: Reduction = "sum") -> Tensor:
        """Return the sum over all nodes of row-local values; `part` is their sum over the owned rows.

        Gradients are exact; sums are taken in fp32 at least. how="max": the largest, without a gradient. Shapes: [...]
        -> [...]. Every rank must call it equally often, in the same order, in training and in evaluation. ValueError if
        a view does not hold all rows of a layer at once; a model that calls it must declare so (`ModelSource.totals`).
        """
        ...

    def edge_dropout(self, p: float, *, tag: int = 0) -> EdgeDropout | None:
        """Return the key of attention dropout for an aggregator; None when evaluating or p = 0."""
        ...


class OneView:
    """Defaults of a Graph that holds all rows of every layer, in evaluation."""

    normalised = False

    def at(self, layer: int) -> Self:
        return self

    def source(self, message: Message, *rows: Tensor) -> Rows:
        return message(self, *rows)

    def destinations(self, *rows: Tensor) -> tuple[Self, Rows]:
        return self, rows

    def moments(self, x: Tensor) -> Moments | None:
        return None

    def total(self, part: Tensor, how: Reduction = "sum") -> Tensor:
        return part
