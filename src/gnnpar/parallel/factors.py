"""Gradients of dense weights by sufficient factors: dW[O, F] = sum_p dZ_p[n, O]^T X_p[n, F], computed on every rank.

X and dZ of each rank are sent in place of dW, restricted to rows with dZ != 0; with few labels most rows are zero.
Lossless: all ranks add the same products in rank order. A weight is sent this way in an epoch if that is fewer bytes on
the rank with most rows; row counts are exchanged first. Source: TAG (arXiv 2302.06126), section 4.2.2; sufficient
factor broadcasting, Xie et al. 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gnnpar.comm.communicator import MessageTag
from gnnpar.parallel.engine import FlatEngine
from gnnpar.parallel.torch_types import floats

Pair = tuple[Tensor, Tensor]  # (X [n, F], dZ [n, O])


class _Product(NamedTuple):
    """A node of X W^T. `place`: of W among its operands. `kept`: its attribute with X. `transposed`: it reads W by
    t()."""

    place: int
    kept: str
    transposed: bool


_PRODUCTS = {
    "_DenseBackward": _Product(1, "saved_tensors", transposed=False),  # gnnpar's dense layer
    "MmBackward0": _Product(1, "_saved_self", transposed=True),  # F.linear
    "AddmmBackward0": _Product(2, "_saved_mat1", transposed=True),  # F.linear with a bias
}


def break_even_rows(
    width_in: int, width_out: int, *, replicas: int, rate: float = 1.0, seconds_per_flop: float = 0.0
) -> float:
    """Return the rows of a replica below which sending factors wins: K = (2 m n / P) / (m + n + 2 m n B / (4 F)).

    By bytes alone if `seconds_per_flop`, 1 / F, is zero. `rate`: B, bytes per second.
    """
    m, n = width_in, width_out
    return (2 * m * n / replicas) / (m + n + 2 * m * n * rate * seconds_per_flop / 4)


def watch(loss: Tensor, weights: Mapping[str, nn.Parameter]) -> dict[str, Pair]:
    """Return the factors of each weight W that exactly one product X W^T reads; filled while the loss is
    differentiated.

    Other weights have no factors: read by another product (X W, alpha X W^T), by several, or with a gradient hook.
    """
    names = {id(weight): name for name, weight in weights.items() if not _of(weight, "_backward_hooks")}
    readers: dict[str, list[tuple[Node, Tensor | None]]] = {}  # with X of a product, None for any other node
    for node in _nodes(loss.grad_fn):
        if node.name() != "TBackward0":
            for place, (following, _) in enumerate(node.next_functions):
                transposed = following is not None and following.name() == "TBackward0"
                following = following.next_functions[0][0] if following is not None and transposed else following
                name = names.get(id(None if following is None else _of(following, "variable")))
                if name is not None:
                    readers.setdefault(name, []).append((node, _input(node, place, transposed=transposed)))
    found: dict[str, Pair] = {}
    for name, [(node, x), *others] in readers.items():
        if x is not None and not others:
            node.register_prehook(_keep(found, name, x))
    return found


def _keep(found: dict[str, Pair], name: str, x: Tensor) -> Callable[[tuple[Tensor | None, ...]], None]:
    """Return a hook that keeps X with the gradient of its product."""

    def hook(grads: tuple[Tensor | None, ...]) -> None:
        if grads[0] is not None:
            found[name] = x, grads[0]

    return hook


def _nodes(last: Node | None) -> Iterator[Node]:
    todo, seen = [last], set[Node]()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
            yield node


def _input(node: Node, place: int, *, transposed: bool) -> Tensor | None:
    """Return X if the node is X W^T with W as its operand `place`, else None."""
    product = _PRODUCTS.get(node.name())
    if product is None or (product.place, product.transposed) != (place, transposed):
        return None
    if _of(node, "_saved_alpha") not in (None, 1):
        return None
    kept = _of(node, product.kept)
    return kept if isinstance(kept, Tensor) else cast("tuple[Tensor, ...]", kept)[0]


def _of(thing: Node | Tensor, name: str) -> object:
    """Return an attribute that torch does not declare, or None if it is missing."""
    return getattr(thing, name, None)


class FactorEngine(FlatEngine):
    """Reduce gradients of matrices by their factors if these are fewer bytes, the others by their sum."""

    _seen: Mapping[str, Pair] = {}

    def bucket_of(self, loss: Tensor | None) -> Tensor:
        self._seen = {} if loss is None else watch(loss, self._matrices)
        return super().bucket_of(loss)

    def exact_bucket(self, epoch: int) -> Tensor:
        bucket = super().exact_bucket(epoch)
        self._seen = {}
        return bucket

    def reduce(self, bucket: Tensor, epoch: int) -> Tensor:
        comm, matrices = self._comm, self._matrices
        with comm.clock("compute"):
            mine = {n: _rows(*self._seen[n], matrices[n].dtype) for n in matrices if n in self._seen}
            self._seen = {}
        counts = torch.zeros(comm.size, len(matrices), dtype=torch.float64, device=bucket.device)
        counts[comm.rank] = torch.tensor([len(mine[n][0]) if n in mine else torch.inf for n in matrices])
        counts = comm.all_reduce(counts, MessageTag(epoch, -1, 0, "reduce"))
        columns = {n: floats(column) for n, column in zip(matrices, counts.unbind(1), strict=True)}
        rows = {n: column for n, column in columns.items() if self.pays(n, column)}
        sums = self._products({n: mine[n] for n in rows}, rows, epoch)
        gradients = self.gradients_of(bucket)
        rest = {n: g for n, g in gradients.items() if n not in sums}
        flat = torch.cat([*(g.reshape(-1) for g in rest.values()), bucket[-1:]])
        flat = comm.all_reduce(flat, MessageTag(epoch, -1, 1, "reduce"))
        pieces = torch.split(flat[:-1], [g.numel() for g in rest.values()])
        reduced = sums | dict(zip(rest, pieces, strict=True))
        return torch.cat([*(reduced[name].reshape(-1) for name in gradients), flat[-1:]])

    @property
    def _matrices(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._trained.items() if p.dim() == 2}

    def pays(self, name: str, rows: list[float]) -> bool:
        """Return True if the factors of a weight are fewer bytes. `rows`: of each rank; infinite without a dense
        product."""
        out, into = self._matrices[name].shape
        return self._comm.size > 1 and max(rows) < break_even_rows(into, out, replicas=self._comm.size)

    def _products(self, mine: Mapping[str, Pair], rows: Mapping[str, list[float]], epoch: int) -> dict[str, Tensor]:
        """Return dW [O, F] of each weight of `mine` over all ranks, added in rank order."""
        if not mine:
            return {}
        comm = self._comm
        with comm.clock("encode"):
            widths = {name: (x.shape[1], dz.shape[1]) for name, (x, dz) in mine.items()}
            sent = torch.cat([t.reshape(-1) for pair in mine.values() for t in pair])
        sizes = [sum(int(rows[name][rank]) * sum(widths[name]) for name in mine) for rank in range(comm.size)]
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        outgoing = {rank: sent.view(torch.uint8) for rank in others if len(sent)}
        incoming = {rank: sizes[rank] * sent.element_size() for rank in others if sizes[rank]}
        pending = comm.exchange(outgoing, incoming, MessageTag(epoch, -1, 2, "reduce"))
        received = {rank: pending[rank].wait().view(sent.dtype) for rank in incoming} | {comm.rank: sent}
        with comm.clock("compute"):
            total = {name: sent.new_zeros(out, into) for name, (into, out) in widths.items()}
            for rank in sorted(received):
                pieces = iter(torch.split(received[rank], [int(rows[n][rank]) * w for n in mine for w in widths[n]]))
                for name, (into, out) in widths.items():
                    x, dz = next(pieces).view(-1, into), next(pieces).view(-1, out)
                    total[name].addmm_(dz.T, x)
        return total


def _rows(x: Tensor, dz: Tensor, dtype: torch.dtype) -> Pair:
    """Return the rows with dZ != 0, in the dtype of the weight."""
    there = dz.any(1)
    return x.detach()[there].to(dtype), dz[there].to(dtype)
