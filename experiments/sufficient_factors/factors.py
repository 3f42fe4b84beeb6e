"""Graph parallelism whose dense weights are reduced by sufficient factors: dW = sum_p dZ_p^T X_p, made on every rank.

X [n, F] and dZ [n, O] of each rank travel instead of dW [O, F], and of them only rows where dZ is not zero: in training
on few labels most are zero. Lossless: all ranks add up the same products in rank order.
Source: TAG (arXiv 2302.06126), section 4.2.2; sufficient factor broadcasting, Xie et al. 2016.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any  # nodes of autograd: what they have saved, and for which variable, torch does not declare

import torch
from torch import Tensor, nn

from gnnpar.codecs.codec import Identity
from gnnpar.comm.communicator import Site
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.engine import Engine, FlatEngine
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.halo_engine import halo_engine
from gnnpar.parallel.keys import KeyTable
from gnnpar.parallel.local import Pass
from gnnpar.planner.mincut import break_even_rows

Pair = tuple[Tensor, Tensor]  # (X [n, F], dZ [n, O])


def watch(loss: Tensor, weights: Mapping[str, nn.Parameter]) -> dict[str, Pair]:
    """The factors of every weight that one dense product of the loss has; filled while the loss is differentiated."""
    names = {id(weight): name for name, weight in weights.items()}
    found: dict[str, Pair] = {}
    for node in _nodes(loss.grad_fn):
        for following, _ in node.next_functions:
            name = names.get(id(_variable(following)))
            if name is None or (x := _input(node)) is None:
                continue
            node.register_prehook(lambda grads, name=name, x=x: found.__setitem__(name, (x, grads[0])))
    return found


def _nodes(last: Any) -> Iterator[Any]:
    todo, seen = [last], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
            yield node


def _variable(node: Any) -> Tensor | None:
    """The parameter that a node accumulates into, also through a transposition."""
    if node is not None and node.name() == "TBackward0":
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


def _input(node: Any) -> Tensor | None:
    """X of gnnpar's dense layer, or of F.linear with and without a bias."""
    match node.name():
        case "_DenseBackward":
            return node.saved_tensors[0]
        case "MmBackward0":
            return node._saved_self
        case "AddmmBackward0":
            return node._saved_mat1
    return None


class FactorEngine(FlatEngine):
    """`cheaper`: only weights whose factors are fewer bytes on the fullest rank."""

    cheaper = True

    def reduced_gradient(self, epoch: int, keys: KeyTable | None = None) -> Tensor:
        comm = self._comm
        with comm.clock("compute"):
            run = Pass(self._seed, epoch, training=True, keys=keys)
            loss = self._objective.loss(self._model(self._view.during(run), self._shard.x), run)
            weights = {name: p for name, p in self.named_parameters() if p.dim() == 2}
            seen = watch(loss, weights)
            bucket = self.bucket_of(loss)
            factors = {name: _rows(*seen[name]) for name in weights if name in seen}
        counts = torch.zeros(comm.size, len(weights), dtype=torch.float64, device=bucket.device)
        counts[comm.rank] = torch.tensor([len(factors[n][0]) if n in factors else torch.inf for n in weights])
        counts = comm.all_reduce(counts, Site(epoch, -1, 0, "reduce"))
        chosen = [name for name, rows in zip(weights, counts.T, strict=True) if self._pays(weights[name], rows)]
        sums = self._products({name: factors[name] for name in chosen}, counts, list(weights), epoch)
        rest = {name: g for name, g in self.gradients_of(bucket).items() if name not in sums}
        flat = torch.cat([*(g.reshape(-1) for g in rest.values()), bucket[-1:]])
        flat = comm.all_reduce(flat, Site(epoch, -1, 1, "reduce"))
        comm.flush(keep=0)
        with comm.clock("compute"):
            pieces = flat[:-1].split([g.numel() for g in rest.values()])
            reduced = sums | dict(zip(rest, pieces, strict=True))
            return torch.cat([*(reduced[name].reshape(-1) for name, _ in self.named_parameters()), flat[-1:]])

    def _pays(self, weight: Tensor, rows: Tensor) -> bool:
        most = float(rows.max())
        if most == torch.inf or self._comm.size == 1:  # no dense product has it; nothing is reduced
            return False
        wide, ranks = weight.shape, self._comm.size
        least = break_even_rows(wide[1], wide[0], replicas=ranks, rate=1.0, seconds_per_flop=0.0)
        return not self.cheaper or most < least

    def _products(self, mine: Mapping[str, Pair], counts: Tensor, weights: list[str], epoch: int) -> dict[str, Tensor]:
        """dW of every weight of `mine`, of all ranks, in rank order."""
        if not mine:
            return {}
        comm = self._comm
        with comm.clock("encode"):
            widths = {name: (pair[0].shape[1], pair[1].shape[1]) for name, pair in mine.items()}
            sample = next(iter(mine.values()))[0]
            sent = torch.cat([t.reshape(-1) for pair in mine.values() for t in pair])
        rows = {name: [int(n) for n in counts[:, weights.index(name)]] for name in mine}
        sizes = [sum(rows[name][rank] * sum(widths[name]) for name in mine) for rank in range(comm.size)]
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        outgoing = {rank: sent.view(torch.uint8) for rank in others if len(sent)}
        incoming = {rank: sizes[rank] * sample.element_size() for rank in others if sizes[rank]}
        pending = comm.exchange(outgoing, incoming, Site(epoch, -1, 2, "reduce"))
        received = {rank: pending[rank].wait().view(sample.dtype) for rank in incoming} | {comm.rank: sent}
        with comm.clock("compute"):
            total = {name: sample.new_zeros(out, into) for name, (into, out) in widths.items()}
            for rank in sorted(received):
                pieces = received[rank].split([rows[n][rank] * width for n in mine for width in widths[n]])
                for i, (name, (into, out)) in enumerate(widths.items()):
                    x, dz = pieces[2 * i].view(-1, into), pieces[2 * i + 1].view(-1, out)
                    total[name].addmm_(dz.T, x)
        return total


def _rows(x: Tensor, dz: Tensor) -> Pair:
    """Where dZ is not zero."""
    there = dz.any(1)
    return x.detach()[there].contiguous(), dz[there].contiguous()


@dataclass(frozen=True, kw_only=True)
class Factors(GraphParallel):
    cheaper: bool = True

    @property
    def capabilities(self):
        return replace(super().capabilities, captured=False)

    def exact_limit(self) -> Factors:
        return self

    def build(self, context: BuildContext) -> Engine:
        engine = halo_engine(
            context,
            overlap=self.overlap,
            codec=Identity(),
            exactness=self.exactness,
            features_exact=False,
            engine=FactorEngine,
        )
        engine.cheaper = self.cheaper
        return engine
