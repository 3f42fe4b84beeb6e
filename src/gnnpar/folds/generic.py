"""Fold of a user's message: two functions of one edge, folded and differentiated block by block, without a kernel.

`SourceRows` returns the source's row of every in-edge, for code that folds them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnpar.folds.aggregator import ByBlock, EdgeDropout, Separates
from gnnpar.folds.block import Block, Operands, Rows, chosen, widened
from gnnpar.folds.mergeable import Merging, MergingSoftmax
from gnnpar_kernels import keep_mask

EdgeFunction = Callable[[Rows, Rows, Rows, Rows], Tensor]
"""(src rows, dst rows, edge rows, shared) of the same e edges -> [e, ...]: called with rows gathered per edge."""

_EdgeRows = tuple[Rows, Rows, Rows, Rows]  # the arguments of an edge function

_EDGES_AT_ONCE = 1 << 16  # bounds the per-edge tensors alive; rows are never split
_BYTES_ON_A_CORE = 1 << 21  # bytes of one per-edge tensor on a CPU, to stay in the cache for the next operation


@dataclass(frozen=True)
class Generic(ByBlock):
    """out_i = sum_j softmax_j(score_ij) value_ij with a score, sum_j value_ij without.

    `score` returns [e, H], `value` returns [e, H, D] (with a score) or [e, ...]. The gradient runs autograd on slices
    of edges with the saved logsumexp: it costs recomputation, not memory.
    weighted: append edge weights [e] to the edge rows, 1 without weights. types (not 0): prepend edge types [e] int64,
    0 <= type < types, 0 without types. within: fold the in-edges of each type separately, each with its own softmax.
    by_heads: both functions treat every head separately, dimension 1 of rows and 0 of shared tensors.
    Row-local state goes into `src` and `dst`, learned tensors into `shared`. A function must not close over a tensor
    that requires grad.

    Shapes: src (any [M, ...]), dst (any [N, ...]), edge (any [E, ...]) -> out [N, ...], or [N, types, ...] `within`.
    """

    value: EdgeFunction
    score: EdgeFunction | None = None
    dropout: EdgeDropout | None = None
    by_heads: bool = False
    weighted: bool = False
    types: int = 0
    within: bool = False
    needs_src = True
    linear = False

    @property
    def separates(self) -> Separates:
        """Separation by heads, except with attention dropout, which draws one mask per edge for all heads."""
        return "heads" if self.by_heads and self.dropout is None else "no"

    @property
    def summed(self) -> bool:
        return self.score is None

    @property
    def needs_edge_ids(self) -> bool:
        return self.dropout is not None

    @property
    def merging(self) -> Merging | None:
        return None if self.within else Merging() if self.score is None else MergingSoftmax()

    def update(self, state: Rows, block: Block, x: Operands) -> Rows:
        num = block.num_dst * (self.types if self.within else 1)
        state = tuple(map(self._listed, state))
        for piece in self._slices(block, x):
            value, score = self._of_edges(piece.rows)
            state = state or _begun(num, value, score)
            if score is None:
                state[0].index_add_(0, piece.into, value)
            else:
                self._attend(state, piece, score, value)
        if not state:  # no edges: call the functions on zero rows for shapes
            none, nothing = torch.zeros(0, dtype=torch.long, device=block.indices.device), slice(0, 0)
            weights = (_weights(block, x, nothing),) if self.weighted else ()
            rows = _gather(x, none, none, nothing, (none,) if self.types else (), weights)
            state = _begun(num, *self._of_edges(rows))
        if not self.within:
            return state
        return tuple(t.view(block.num_dst, self.types, *t.shape[1:]) for t in state)

    def _of_edges(self, rows: _EdgeRows) -> tuple[Tensor, Tensor | None]:
        """Return values and scores."""
        return self.value(*rows), None if self.score is None else self.score(*rows)

    def _listed(self, rows: Tensor) -> Tensor:
        """Return the rows of each result. Shapes: [N, ...], or [N, types, ...] -> [N * results, ...]."""
        return rows.flatten(0, 1) if self.within else rows

    def _attend(self, state: Rows, piece: _Slice, score: Tensor, value: Tensor) -> None:
        m, total, acc = state
        rows, local = piece.rows_with_edges, piece.result_index
        old = m[rows]
        new = old.scatter_reduce(0, local[:, None].expand_as(score), score, "amax")
        rescale = torch.where(old > -torch.inf, (old - new).exp(), 0.0)
        weight = (score - new[local]).exp()
        m[rows] = new
        total[rows] = (total[rows] * rescale).index_add_(0, local, weight)
        acc[rows] = (acc[rows] * rescale[..., None]).index_add_(0, local, self._kept(weight, piece)[..., None] * value)

    def finish(self, state: Rows) -> tuple[Tensor, Rows]:
        if self.score is None:
            return state[0], ()
        m, total, acc = state
        out = torch.where(total[..., None] > 0, acc / total.clamp_min(torch.finfo(acc.dtype).tiny)[..., None], 0.0)
        return out, (out, torch.where(total > 0, m + total.log(), torch.inf))

    def prepare(self, saved: Rows, grad_out: Tensor) -> Rows:
        """Return (logsumexp, <grad_out, out>), each [N, H], or [N, types, H]; () without a score."""
        return (saved[1], (grad_out * saved[0]).sum(-1)) if saved else ()

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        grads = Operands(*(tuple(torch.zeros_like(widened(t)) for t in group) for group in x))
        grad_out, prepared = self._listed(grad_out), tuple(map(self._listed, prepared))
        for piece in self._slices(block, x):
            src, dst, edge, shared = piece.rows
            leaves = (_leaves(src), _leaves(dst), _leaves(edge), _leaves(shared))
            with torch.enable_grad():
                outputs, seeds = self._differentials(leaves, piece, prepared, grad_out[piece.into])
            flat = [t for group in leaves for t in group]
            wanted = [t for t in flat if t.requires_grad]
            by_leaf = dict(
                zip(map(id, wanted), torch.autograd.grad(outputs, wanted, seeds, allow_unused=True), strict=True)
            )
            self._scatter(grads, leaves, by_leaf, piece)
        return grads

    def _differentials(
        self, leaves: _EdgeRows, piece: _Slice, prepared: Rows, grad_edges: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return results of the functions and gradients: alpha K dO of value, alpha (K <dO, v> - delta) of score."""
        value, score = self._of_edges(leaves)
        if score is None:
            return [value], [grad_edges]
        logsumexp, delta = prepared
        alpha = (score.detach() - logsumexp[piece.into]).exp()
        along = self._kept((grad_edges * value.detach()).sum(-1), piece)
        return [value, score], [self._kept(alpha, piece)[..., None] * grad_edges, alpha * (along - delta[piece.into])]

    def _kept(self, weight: Tensor, piece: _Slice) -> Tensor:
        if self.dropout is None:
            return weight
        assert piece.edge_ids is not None
        keep = keep_mask(piece.edge_ids, weight.shape[1], p=self.dropout.p, key=self.dropout.key)
        return weight * keep / (1 - self.dropout.p)

    def _scatter(self, grads: Operands, leaves: _EdgeRows, by_leaf: Mapping[int, Tensor | None], piece: _Slice) -> None:
        src, dst, edge, shared = leaves
        for total, index, group in ((grads.src, piece.src, src), (grads.dst, piece.dst, dst)):
            for into, leaf in zip(total, group, strict=True):
                if (g := by_leaf.get(id(leaf))) is not None:
                    into.index_add_(0, index, g)
        for into, leaf in zip(grads.edge, edge[bool(self.types) :], strict=False):  # types and weights are constants
            if (g := by_leaf.get(id(leaf))) is not None:
                into[piece.at] = g
        for into, leaf in zip(grads.shared, shared, strict=True):
            if (g := by_leaf.get(id(leaf))) is not None:
                into.add_(g)

    def _slices(self, block: Block, x: Operands) -> Iterator[_Slice]:
        """Yield whole CSR rows, at most about `edges_at_once` edges at a time (more if one row has more)."""
        edges = block.pairs(self.types) if self.within else block
        for span, rows in edges.spans(edges_at_once(x)):
            src, into, edge_ids = edges.indices[span].long(), edges.edge_dst[span], chosen(edges.edge_ids, span)
            dst = into // self.types if self.within else into
            types = (edges.types_of(span.start, span.stop),) if self.types else ()
            weights = (_weights(edges, x, span),) if self.weighted else ()
            at = block.sorted_by_type(self.types).order[span] if self.within else span
            yield _Slice(at, rows, src, dst, into, edge_ids, _gather(x, src, dst, at, types, weights))


def _begun(num: int, value: Tensor, score: Tensor | None) -> Rows:
    """Return the state of `num` results before their first edge. Shapes: value [e, ...], score [e, H]."""
    acc = value.new_zeros(num, *value.shape[1:])
    if score is None:
        return (acc,)
    return score.new_full((num, score.shape[1]), -torch.inf), score.new_zeros(num, score.shape[1]), acc


@dataclass(frozen=True, eq=False)
class _Slice:
    """Consecutive edges of a block and their gathered rows. at: indices of their edge rows. into: indices of their
    result rows. rows_with_edges: `into` without duplicates."""

    at: slice | Tensor
    rows_with_edges: Tensor
    src: Tensor
    dst: Tensor
    into: Tensor
    edge_ids: Tensor | None
    rows: _EdgeRows

    @property
    def result_index(self) -> Tensor:
        """Index of each edge's result in `rows_with_edges`. Shapes: [e] int64."""
        starts = torch.zeros_like(self.into)
        starts[1:] = self.into[1:] != self.into[:-1]
        return starts.cumsum(0)


def _gather(x: Operands, src: Tensor, dst: Tensor, at: slice | Tensor, first: Rows, last: Rows) -> _EdgeRows:
    """Return the arguments of the functions, in fp32 for 16-bit rows. first, last: edge rows before and after x's."""
    by_src, by_dst = (tuple(widened(t.index_select(0, at)) for t in ts) for ts, at in ((x.src, src), (x.dst, dst)))
    edge = (*first, *(widened(t[at]) for t in x.edge), *last)
    return by_src, by_dst, edge, tuple(map(widened, x.shared))


def _leaves(rows: Rows) -> Rows:
    return tuple(t.detach().requires_grad_() if t.is_floating_point() else t for t in rows)


def _weights(block: Block, x: Operands, span: slice) -> Tensor:
    if block.weights is not None:
        return block.weights[span]
    return widened(next(t for t in x.src if t.is_floating_point())[:0]).new_ones(span.stop - span.start)


def edges_at_once(x: Operands) -> int:
    """Return the most edges of a slice; a single row may have more."""
    tensors = (*x.src, *x.dst, *x.edge)
    if any(t.is_cuda for t in tensors):
        return _EDGES_AT_ONCE
    widest = max((t.shape[1:].numel() * t.element_size() for t in tensors), default=1)
    return min(_EDGES_AT_ONCE, max(_BYTES_ON_A_CORE // max(widest, 1), 1024))


@dataclass(frozen=True)
class SourceRows(ByBlock):
    """The source's row of each in-edge, by ascending edge id. No fold over blocks: one block holds all in-edges.
    Shapes: src ([M, ...],) -> [E, ...]."""

    needs_src = False
    linear = False
    summed = False

    @property
    def whole_neighborhood(self) -> bool:
        return True

    @property
    def needs_edge_ids(self) -> bool:
        return True

    def update(self, state: Rows, block: Block, x: Operands) -> Rows:
        """Return the rows. ValueError for a second block of the same destinations."""
        if state:
            raise ValueError(
                "a convolution reads whole neighbourhoods, and the strategy folds them in pieces: use single, "
                "graph_parallel or another that reads halo rows"
            )
        return (x.src[0].index_select(0, _by_id(block)),)

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        zeros = grad_out.new_zeros(block.num_src, *grad_out.shape[1:])
        return Operands((zeros.index_add_(0, _by_id(block), grad_out),))


def _by_id(block: Block) -> Tensor:
    """Return the column of each edge, by ascending edge id. Shapes: [E] int64."""
    columns, places = block.indices.long(), block.edge_places
    return columns if places is None else torch.empty_like(columns).index_copy_(0, places, columns)
