"""Batch normalisation in a PyG model: the moments of all rows of nodes come from the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn
from torch_geometric.nn import BatchNorm

from gnnpar.graph import Graph
from gnnpar.models.norm import batch_norm
from gnnpar.models.pyg.edge_rows import EdgeRows
from gnnpar.models.pyg.layout import Layout, NodeRows, OfOneType

_IN_A_FOLD: ContextVar[bool] = ContextVar("in_a_fold", default=False)


def batch_norms(net: nn.Module) -> dict[str, nn.BatchNorm1d]:
    """By name."""
    return {name: module for name, module in net.named_modules() if type(module) is nn.BatchNorm1d}


def wrappers(net: nn.Module) -> list[nn.Module]:
    """PyG's modules that only call a BatchNorm1d."""
    return [each for each in net.modules() if type(each) is BatchNorm and not each.allow_single_element]


def forward_of(norm: nn.BatchNorm1d, g: Graph, layout: Layout | None) -> Callable[[Tensor], Tensor]:
    """The module's forward on the rows that `g` owns; with a `layout`, on those of one type of nodes."""

    def forward(input: Tensor) -> Tensor:  # the name is torch's
        if _IN_A_FOLD.get() or isinstance(input, EdgeRows):
            raise ValueError("a BatchNorm1d normalises rows of edges, whose moments are not carried; use LayerNorm")
        if layout is None:
            return batch_norm(norm, g, input)
        if not isinstance(input, NodeRows):
            raise ValueError(f"a BatchNorm1d normalises {list(input.shape)}, which are no rows of one type of nodes")
        out = batch_norm(norm, OfOneType(g, layout, input.kind), input.plain())
        return out.as_subclass(type(input))

    return forward


@contextmanager
def in_a_fold() -> Iterator[None]:
    """Inside, rows are those of edges, or of a block."""
    before = _IN_A_FOLD.set(True)
    try:
        yield
    finally:
        _IN_A_FOLD.reset(before)
