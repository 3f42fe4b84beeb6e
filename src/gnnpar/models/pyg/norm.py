"""Modules of PyG with a forward for the rows of all nodes: batch normalisation, with the graph's moments, and modules
that read the number of rows."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GraphSizeNorm
from torch_geometric.nn.attention import PolynormerAttention, SGFormerAttention

from gnnpar.graph import Graph, Moments
from gnnpar.models.norm import WithMoments, batch_norm
from gnnpar.models.pyg.all_rows import GlobalReductions, NodeRows
from gnnpar.models.pyg.checkpointing import runs_again
from gnnpar.models.pyg.layout import Layout, TypeMoments
from gnnpar.models.pyg.marks import EdgeRows, LocalEdges
from gnnpar.models.sgformer import over_all_nodes

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


def graph_size(
    norm: GraphSizeNorm, rows: GlobalReductions, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
) -> Tensor:
    if len(x) != rows.own or (batch is not None and bool(batch.any())):
        return type(norm).forward(norm, x, batch, batch_size)
    return x / rows.number() ** 0.5


def attention(
    conv: SGFormerAttention | PolynormerAttention, rows: GlobalReductions, x: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return linear attention over all nodes. x, mask: from to_dense_batch, which drops the mark of rows. Shapes: x
    [1, N, F], mask [1, N] -> [1, N, F']."""
    if x.shape[:2] != (1, rows.own):
        return type(conv).forward(conv, x, mask)  # pyright: ignore[reportArgumentType] - of one class or the other
    if isinstance(conv, PolynormerAttention):
        return type(conv).forward(conv, NodeRows.of(0, x, 1) if rows.active else x, mask)
    x = x[0].as_subclass(Tensor)
    q, k, v = (lin(x).unflatten(1, (conv.heads, conv.head_channels)) for lin in (conv.q, conv.k, conv.v))
    v = v if mask is None else v.masked_fill(~mask[0][:, None, None], 0.0)
    q, k = (F.normalize(torch.where(t == 0, 1e-6, t), dim=-1) for t in (q, k))
    number, (out, share) = rows.number(), over_all_nodes(rows.g, q, k, v)
    return ((out + number * v) / (share + number)).mean(1).to(x.dtype)[None]


OF_ALL_NODES = {GraphSizeNorm: graph_size, SGFormerAttention: attention, PolynormerAttention: attention}
"""Forwards of modules that read the number of rows, or get rows without a mark. Inputs other than one row per node of a
single graph run the class's forward."""
