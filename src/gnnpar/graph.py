"""The one Protocol models are written against. Everything a model does is row-local, except through `aggregate`,
`moments` and `total`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, Self

from torch import Tensor

from gnnpar.folds.aggregator import Aggregator, EdgeDropout
from gnnpar.folds.block import Rows


class Local(Protocol):
    """What a row-local computation may know: the rows it is given, nothing of their neighbours."""

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
        """[N] global sums of the weights of in-edges, in the dtype of the features; None: edges have no weights."""
        ...

    @property
    def normalised(self) -> bool:
        """Do the weights of edges hold d_i^-1/2 d_j^-1/2 already, of destination and source? See Shard.normalised."""
        ...

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        """Dropout keyed by (seed, epoch, layer, tag, global id, column): one mask under every strategy.

        The same tag in the same layer is the same mask; identity when evaluating.
        """
        ...


Message = Callable[..., Rows]
"""(local, *rows) -> source rows: a row-local function, see Graph.source."""


Reduction = Literal["sum", "max"]


class Moments(NamedTuple):
    """Of each column over `rows` rows. Shapes: mean, variance [F]; the variance divides by `rows`.

    `probe`: the pass leaves no trace, so running statistics stay as they are.
    """

    mean: Tensor
    variance: Tensor
    rows: int
    probe: bool = False


class InEdges(NamedTuple):
    """In-edges of the owned rows, in the order of edge operands.

    Shapes: source [E] int64, the owned row that an edge comes from, -1 where another view owns it; row [E] int64, the
    owned row that it ends at; weight, type [E], None where the edges, or this view, have none.
    """

    source: Tensor
    row: Tensor
    weight: Tensor | None = None
    type: Tensor | None = None


class Graph(Local, Protocol):
    """A view of the graph. A tensor that a model holds has one row per node owned; only `aggregate`, `moments` and
    `total` mix rows."""

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole graph."""
        ...

    @property
    def edge_ids(self) -> Tensor:
        """[E] global ids of the in-edges of the owned rows, ascending: the order of edge operands."""
        ...

    @property
    def in_edges(self) -> InEdges:
        """The in-edges of the owned rows, one by one. ValueError where they have no ids."""
        ...

    def type_degree(self, types: int) -> Tensor:
        """[N, types] global in-degrees by type of edge, 0 <= type < types, in the dtype of the features.

        Edges of a graph without types are all of type 0. ValueError where the graph has more types.
        """
        ...

    @property
    def edge_attr(self) -> Tensor | None:
        """[E, D] attributes of the in-edges of the owned rows, in the order of edge operands and the dtype of the
        features; None: edges have none."""
        ...

    @property
    def edge_type(self) -> Tensor | None:
        """[E] types of the in-edges of the owned rows, in the order of edge operands; None: edges have none."""
        ...

    def at(self, layer: int) -> Self:
        """Name the call site: policy, history, bit-widths, dropout keys and accounting go by layer."""
        ...

    def source(self, message: Message, *rows: Tensor) -> Rows:
        """message(local, *rows), the rows that neighbours will read.

        Equal to calling it directly; going through the view lets it evaluate the message on rows that it keeps of
        remote nodes (first_layer=cached), instead of receiving the result every epoch.
        """
        ...

    def destinations(self, *rows: Tensor) -> tuple[Self, Rows]:
        """The view of the rows that the next layer reads, and those of `rows`: the first n, [N, ...] -> [n, ...].

        n = N except in sampled training. A layer that calls it after `source`, and `aggregate` of this view, computes n
        rows; one that does not computes all N, with the same result.
        """
        ...

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        """Fold `agg` over the in-edges of the owned rows. Shapes: src, dst [N, ...], edge [E, ...] -> [N, ...].

        In a view of `destinations`: src [N, ...], dst [n, ...] -> [n, ...].
        """
        ...

    def moments(self, x: Tensor) -> Moments | None:
        """Mean and variance of x [N, F] over all rows of the graph, with exact gradients; None when evaluating.

        Every rank calls it as often, in the same order. ValueError where a view does not hold all rows of a layer at
        once; a model that calls it says so beforehand (`ModelSource.moments`).
        """
        ...

    def total(self, part: Tensor, how: Reduction = "sum") -> Tensor:
        """Sum, over all nodes of the graph, of row-local values: `part` is their sum over the owned rows. With exact
        gradients; sums are taken in fp32 at least. "max": the largest, without a gradient. Shapes: [...] -> [...].

        Every rank calls it as often, in the same order, in training and in evaluation. ValueError where a view does not
        hold all rows of a layer at once; a model that calls it says so beforehand (`ModelSource.totals`).
        """
        ...

    def edge_dropout(self, p: float, *, tag: int = 0) -> EdgeDropout | None:
        """The key of attention dropout for an aggregator; None when evaluating or p = 0."""
        ...
