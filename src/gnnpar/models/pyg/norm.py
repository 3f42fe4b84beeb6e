"""Batch normalisation in a PyG model, with the graph's moments over all rows of nodes."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor, nn

from gnnpar.graph import Graph, Moments
from gnnpar.models.norm import WithMoments, batch_norm
from gnnpar.models.pyg.all_rows import NodeRows
from gnnpar.models.pyg.checkpointing import runs_again
from gnnpar.models.pyg.layout import Layout, TypeMoments
from gnnpar.models.pyg.marks import EdgeRows, LocalEdges

IN_A_FOLD: ContextVar[bool] = ContextVar("in_a_fold", default=False)
"""True while a fold runs the user's code on rows of edges or of a block."""


def batch_norms(net: nn.Module) -> dict[str, nn.BatchNorm1d]:
    """Return batch norms by name."""
    return {name: module for name, module in net.named_modules() if type(module) is nn.BatchNorm1d}


@dataclass(frozen=True, eq=False)
class _OverHeads:
    """Moments of rows [N, C, L] passed as [N * L, C]: per channel, over rows and the last dimension."""

    g: WithMoments
    length: int

    def moments(self, x: Tensor) -> Moments | None:
        found = self.g.moments(x.reshape(-1, self.length * x.shape[1]))
        if found is None:
            return None
        mean, variance = (t.view(self.length, -1) for t in found[:2])
        center = mean.mean(0)
        spread = (variance + (mean - center).square()).mean(0)
        return found._replace(mean=center, variance=spread, rows=found.rows * self.length)


def forward_of(norm: nn.BatchNorm1d, g: Graph, layout: Layout | None) -> Callable[[Tensor], Tensor]:
    """Return the module's forward on the own rows of `g`; with a `layout`, on rows of one node type."""
    own = norm.forward

    def forward(input: Tensor) -> Tensor:  # torch's name
        local = LocalEdges.current.get()
        again = norm.training and runs_again()
        if isinstance(input, EdgeRows) and local is not None and local.whole:
            if again:
                own(input.detach())
            return own(input)
        source: WithMoments | None = g if norm.training else None  # may be in evaluation mode while the model trains
        if norm.training and (IN_A_FOLD.get() or isinstance(input, EdgeRows)):
            raise ValueError("a BatchNorm1d normalises rows of edges, which is not supported; use LayerNorm")
        if layout is not None and norm.training:
            if not isinstance(input, NodeRows):
                raise ValueError(
                    f"a BatchNorm1d normalises {list(input.shape)}, which are no rows of one type of nodes"
                )
            source = TypeMoments(g, layout, input.kind)
        rows, length = input.as_subclass(Tensor), input.shape[2] if input.ndim == 3 else 1
        if input.ndim == 3:
            rows, source = rows.transpose(1, 2).flatten(0, 1), source and _OverHeads(source, length)
        out = batch_norm(norm, source, rows, moves=2 if again else 1)
        if input.ndim == 3:
            out = out.unflatten(0, (-1, length)).transpose(1, 2)
        return out.as_subclass(type(input))

    return forward
