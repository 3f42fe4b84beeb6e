"""Attention by every score function: operands, scores on edges by plain torch, and the calls of a body."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from gnnpar_kernels import keep_mask

SLOPE = 0.2
Operands = tuple[Tensor, ...]


def _rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def places(ids: Tensor, among: Tensor) -> Tensor:
    """Where each id is among others, all distinct."""
    by_id = among.argsort()
    return by_id[torch.searchsorted(among[by_id], ids)]


@dataclass(frozen=True)
class Gat:
    """leaky_relu(a_src + a_dst). `narrow`: how many operands have the type of rows, the others at least fp32.
    `by_scale`: rows times the scale of scores are in their gradients."""

    narrow, by_scale, attributes = 1, False, 0

    def operands(self, graph: Any, heads: int, width: int, scale: float) -> Operands:
        x = _rows(graph.num_src, heads, width)
        return x, scale * _rows(graph.num_src, heads), scale * _rows(graph.num_dst, heads)

    def on_edges(self, graph: Any, x: Tensor, a_src: Tensor, a_dst: Tensor, *, slope: float) -> tuple[Tensor, Tensor]:
        return leaky_relu(a_src[graph.src] + a_dst[graph.dst], slope), x[graph.src]

    def fold(self, body: Any, graph: Any, piece: Any, given: Operands, *, slope: float, **how: Any) -> Operands:
        return body.attend(*piece.forward[:2], *given, slope=slope, **how)

    def grad(self, body: Any, graph: Any, piece: Any, given: Operands, ends: Operands, *, slope: float, drop: Any):
        return body.attend_grad(piece.forward, piece.reverse, *given, *ends, slope=slope, drop=drop)


@dataclass(frozen=True)
class Gatv2:
    """a . leaky_relu(x + y)."""

    narrow, by_scale, attributes = 2, True, 0

    def operands(self, graph: Any, heads: int, width: int, scale: float) -> Operands:
        x, y = (_rows(n, heads, width) for n in (graph.num_src, graph.num_dst))
        return x, y, scale * max(width, 1) ** -0.5 * _rows(heads, width)

    def on_edges(self, graph: Any, x: Tensor, y: Tensor, a: Tensor, *, slope: float) -> tuple[Tensor, Tensor]:
        return (leaky_relu(x[graph.src] + y[graph.dst], slope) * a).sum(-1), x[graph.src]

    def fold(self, body: Any, graph: Any, piece: Any, given: Operands, *, slope: float, **how: Any) -> Operands:
        return body.attend_v2(*piece.forward[:2], *given, slope=slope, **how)

    def grad(self, body: Any, graph: Any, piece: Any, given: Operands, ends: Operands, *, slope: float, drop: Any):
        out, lse, grad_out = ends
        delta = body.row_dots(out, grad_out, dtype=lse.dtype)
        sides = piece.forward, piece.reverse, places(piece.reverse.edge_ids, piece.forward.edge_ids)
        return body.attend_v2_grad(*sides, *given, lse, grad_out, delta, slope=slope, drop=drop)


@dataclass(frozen=True)
class Dot:
    """query . key, with `attributes` columns of edges, ordered by ascending id, beside the rows of sources."""

    attributes: int = 0
    narrow, by_scale = 5, True

    def operands(self, graph: Any, heads: int, width: int, scale: float) -> Operands:
        key, value = (_rows(graph.num_src, heads, width) for _ in range(2))
        query = scale * max(width, 1) ** -0.5 * _rows(graph.num_dst, heads, width)
        if not self.attributes:
            return key, value, query
        near = scale * _rows(graph.num_dst, heads, self.attributes)
        return key, value, query, near, _rows(len(graph.ids), self.attributes)

    def on_edges(self, graph: Any, key: Tensor, value: Tensor, query: Tensor, *beside: Tensor, slope: float):
        score, values = (key[graph.src] * query[graph.dst]).sum(-1), value[graph.src]
        if not beside:
            return score, values
        near, edge = beside[0], beside[1][:, None].expand(-1, key.shape[1], -1)
        return score + (near[graph.dst] * edge).sum(-1), torch.cat([values, edge], -1)

    def _beside(self, graph: Any, piece: Any, given: Operands) -> dict[str, Tensor]:
        if not self.attributes:
            return {}
        return {"edge": given[4][places(piece.forward.edge_ids, graph.ids)], "edge_query": given[3]}

    def fold(self, body: Any, graph: Any, piece: Any, given: Operands, *, slope: float, **how: Any) -> Operands:
        return body.attend_dot(*piece.forward[:2], *given[:3], **how, **self._beside(graph, piece, given))

    def grad(self, body: Any, graph: Any, piece: Any, given: Operands, ends: Operands, *, slope: float, drop: Any):
        out, lse, grad_out = ends
        delta, more = body.row_dots(out, grad_out, dtype=lse.dtype), self._beside(graph, piece, given)
        sides = piece.forward, piece.reverse, places(piece.reverse.edge_ids, piece.forward.edge_ids)
        found = body.attend_dot_grad(*sides, *given[:3], lse, grad_out, delta, drop=drop, of_edge=bool(more), **more)
        if not more:
            return found
        where = places(piece.forward.edge_ids, graph.ids)
        return *found[:4], torch.zeros_like(given[4]).index_copy_(0, where, found[4])


Attention = Gat | Gatv2 | Dot
GAT, V2, DOT = Gat(), Gatv2(), Dot()
KINDS = (GAT, V2, DOT, Dot(2))


def inputs(
    kind: Attention, graph: Any, heads: int, width: int, *, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> tuple[Operands, Tensor]:
    """Operands, and the gradient of the result [N, H, D], of rows of a type."""
    wide = torch.promote_types(dtype, torch.float32)
    made = kind.operands(graph, heads, width, scale)
    operands = tuple(t.to(dtype if i < kind.narrow else wide) for i, t in enumerate(made))
    return operands, _rows(graph.num_dst, heads, width + kind.attributes).to(dtype)


def autograd(
    kind: Attention, graph: Any, operands: Operands, grad_out: Tensor, drop: Any, *, slope: float = SLOPE
) -> Operands:
    """(out, lse, gradients) by plain autograd over edge tensors in fp64."""
    operands = tuple(t.detach().double().clone().requires_grad_() for t in operands)
    score, values = kind.on_edges(graph, *operands, slope=slope)
    none = torch.full((graph.num_dst, score.shape[1]), -torch.inf, dtype=score.dtype)
    top = none.scatter_reduce(0, graph.dst[:, None].expand_as(score), score.detach(), "amax")
    weight = torch.exp(score - top[graph.dst])
    mass = torch.zeros_like(none).index_add(0, graph.dst, weight)
    alpha = weight / mass[graph.dst]
    if drop is not None:
        alpha = alpha * keep_mask(graph.ids, alpha.shape[1], p=drop[0], key=drop[1]) / (1.0 - drop[0])
    out = score.new_zeros(grad_out.shape).index_add(0, graph.dst, alpha[..., None] * values)
    lse = torch.where(mass > 0, top + mass.log(), torch.inf)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, operands, grad_out.double())


def fold(
    kind: Attention, body: Any, graph: Any, pieces: Any, operands: Operands, drop: Any, *, slope=SLOPE, **more: Any
) -> Operands:
    """(out, lse), chained over blocks of the graph; of GAT with branch=True also the sums over positive scores."""
    state = None
    for piece in pieces:
        csr = piece.forward
        how = {"num_rows": graph.num_dst, "rows": csr.rows, "drop": drop, "edge_ids": csr.edge_ids, "state": state}
        state = kind.fold(body, graph, piece, operands, slope=slope, **how, **more)
    return body.attend_finish(state)


def total(parts: list[Any]) -> list[Tensor]:
    return [torch.stack(column).sum(0) for column in zip(*parts, strict=True)]


def run(
    kind: Attention,
    body: SimpleNamespace,
    graph: Any,
    pieces: Any,
    operands: Operands,
    grad_out: Tensor,
    drop: Any,
    *,
    slope: float = SLOPE,
    **more: Any,
) -> Operands:
    """(out, lse, gradients), chained over blocks; the sums of `more` stand before the gradients."""
    out, lse, *sums = fold(kind, body, graph, pieces, operands, drop, slope=slope, **more)
    parts = [kind.grad(body, graph, p, operands, (out, lse, grad_out), slope=slope, drop=drop) for p in pieces]
    return out, lse, *sums, *total(parts)
