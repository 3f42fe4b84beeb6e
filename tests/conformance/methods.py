"""The table of methods that send late, fewer or other rows: what `test_methods.py` asks of each of them.

An entry of METHODS names the settings that its oracle covers, a fault that must be noticed, the same mathematics in
dense matrices, its limits, the bytes that travel, the rows that are kept between epochs, and the refusals.
docs/strategies/NAME.md is the specification of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composing import configured
from engines import Rank
from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import BFloat16, Identity
from gnnpar.codecs.uniform import Random, Uniform
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import ModelSource
from gnnpar.parallel.bns.sample import Reweighted, kept
from gnnpar.parallel.bns.strategy import BoundarySampling
from gnnpar.parallel.broadcast import BroadcastGraph
from gnnpar.parallel.cagnet.strategy import Cagnet
from gnnpar.parallel.cofree import strategy as cofree
from gnnpar.parallel.cofree.strategy import CoFree
from gnnpar.parallel.digest.strategy import Digest
from gnnpar.parallel.feature.strategy import FeatureParallel
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipegcn.strategy import PipeGCN
from gnnpar.parallel.sancus.copies import Copies
from gnnpar.parallel.sancus.strategy import Sancus
from gnnpar.parallel.sketch import sketch
from gnnpar.parallel.stale import StaleExchange
from gnnpar.verify.conformance import Job, small_graph

WORLD, SEED, NODES, LR = 3, 3, 60, 0.1
WIDTHS, LEARNED = 6 + 8 + 3, 8 + 3  # numbers of a row in the layers of `three`, and of those with a gradient


def three(name: str, *overrides: str) -> Any:
    """Three layers of 8 channels."""
    return configured("model", name, "model.hidden=8", "model.num_layers=3", *overrides)


class Two(nn.Module):
    """Two layers of sums; no GNN, but all that an engine asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)

    def forward(self, g: Graph, x: Tensor) -> Tensor:
        h = torch.relu(g.at(0).aggregate(Sum(), (self.first(x),)))
        return g.at(1).aggregate(Sum(), (self.second(h),))


class Dense:
    """Train `Two` by plain autograd on matrices [N, N] by destination and source: no view, fold or kernel of gnnpar.

    `tolerance`: relative, of gradients. The base: parts read each other's rows of this epoch.
    """

    tolerance = 1e-11

    def __init__(self, part_of: Tensor) -> None:
        self.data, self.part_of = small_graph(), part_of
        src, dst = self.data.edge_index
        edges = torch.zeros(NODES, NODES, dtype=torch.float64)
        edges.index_put_((dst, src), torch.ones(len(src), dtype=torch.float64), accumulate=True)
        same = part_of[:, None] == part_of[None, :]
        self.edges, self.own, self.other = edges, edges * same, edges * ~same
        self.table: dict[int, Tensor] = {}  # by layer

    def read(self, layer: int, x: Tensor, epoch: int) -> Tensor:
        """Return the rows [N, F] that other parts read."""
        return x

    def fold(self, layer: int, x: Tensor, epoch: int) -> Tensor:
        return self.own @ x + self.other @ self.read(layer, x, epoch)

    def differentiate(self, loss: Tensor, parameters: list[nn.Parameter]) -> Sequence[Tensor]:
        return torch.autograd.grad(loss, parameters)

    def train(self, model: Two, epochs: int) -> list[Sequence[Tensor]]:
        """Return the gradients of every epoch."""
        found, parameters, train = [], list(model.parameters()), self.data.train_mask
        for epoch in range(epochs):
            h = torch.relu(self.fold(0, model.first(self.data.x.double()), epoch))
            logits = self.fold(1, model.second(h), epoch)
            loss = nn.functional.cross_entropy(logits[train], self.data.y[train])
            found.append(self.differentiate(loss, parameters))
            with torch.no_grad():
                for p, g in zip(parameters, found[-1], strict=True):
                    p -= LR * g
        return found


class LateDense(Dense):
    """Rows of the last epoch, and their gradients, which enter as terms of the next loss."""

    def __init__(self, part_of: Tensor) -> None:
        super().__init__(part_of)
        self.fresh: dict[int, Tensor] = {}
        self.stale: dict[int, Tensor] = {}
        self.late: dict[int, Tensor] = {}

    def read(self, layer: int, x: Tensor, epoch: int) -> Tensor:
        self.fresh[layer] = x
        self.stale[layer] = self.table.get(layer, torch.zeros_like(x)).clone().requires_grad_()
        return self.stale[layer]

    def differentiate(self, loss: Tensor, parameters: list[nn.Parameter]) -> Sequence[Tensor]:
        for layer, gradient in self.late.items():
            loss = loss + (self.fresh[layer] * gradient).sum()
        found = torch.autograd.grad(loss, parameters, retain_graph=True)
        # the late gradient of layer 1 reaches the stale rows of layer 0 through layer 1's rows
        self.late = dict(enumerate(torch.autograd.grad(loss, [self.stale[0], self.stale[1]])))
        self.table = {layer: x.detach() for layer, x in self.fresh.items()}
        return found


class RefreshedDense(Dense):
    """Rows of every third epoch, without a gradient."""

    def read(self, layer: int, x: Tensor, epoch: int) -> Tensor:
        if epoch % 3 == 0:
            self.table[layer] = x.detach()
        return self.table[layer]


class BoundedDense(Dense):
    """Copies of a part's rows until they have changed by more than 0.3 of their norm; gradients as of the rows."""

    broadcasts = 0

    def read(self, layer: int, x: Tensor, epoch: int) -> Tensor:
        table = self.table.setdefault(layer, torch.zeros_like(x))
        for mine in (self.part_of == part for part in range(WORLD)):
            if (x[mine] - table[mine]).norm() > 0.3 * table[mine].norm():
                table[mine] = x[mine].detach()
                self.broadcasts += 1
        return x + (table.clone() - x).detach()

    def train(self, model: Two, epochs: int) -> list[Sequence[Tensor]]:
        found = super().train(model, epochs)
        assert 2 * WORLD < self.broadcasts < 2 * WORLD * epochs, "some are skipped, some are not"
        return found


class SampledDense(Dense):
    """Half of the rows of other parts, which count twice."""

    tolerance = 1e-12

    def fold(self, layer: int, x: Tensor, epoch: int) -> Tensor:
        return (self.edges * drawn(self.part_of, 0.5, epoch)) @ x


def drawn(part_of: Tensor, rate: float, epoch: int) -> Tensor:
    """Return [N, N] by destination and source: how often an edge counts under `strategy=bns`."""
    ids = torch.arange(len(part_of))
    rows = torch.stack([kept(ids, rate=rate, seed=SEED, epoch=epoch, reader=p) for p in range(WORLD)])
    return torch.where(part_of[:, None] == part_of[None, :], 1.0, rows[part_of].double() / rate)


@dataclass(frozen=True)
class Bytes:
    """`strategy` sends what `twin` sends, but for phases that do not travel in an epoch. `slow`: codecs of test-all."""

    strategy: Any
    twin: Any
    codecs: Sequence[Any]
    travels: Callable[[str, int], bool] = lambda phase, epoch: True
    slow: Sequence[Any] = ()


@dataclass(frozen=True)
class Priced:
    """`rows` travel in each of the three layers of a GCN, forward and backward, by job and epoch."""

    strategy: Any
    world: int
    rows: Callable[[Job, int], int]
    codecs: Sequence[Any]
    varies: bool = False


@dataclass(frozen=True)
class Kept:
    """Bytes of rows that a rank keeps after `epochs`, in fp64."""

    strategy: Any
    nbytes: Callable[[Rank], int]
    model: str = "gcn"
    epochs: int = 2
    drains: bool = False


@dataclass(frozen=True, kw_only=True)
class Method:
    """`inexact`: settings that equal the oracle, with models and a world. `fault`: what the oracle, or where there is
    none the single device, must notice, of `faulty`. `limits`: the bits of another strategy. `processes`: the numbers
    of threads. `refused`: overrides or a call, and the line. `resumed`: overrides of a run that is stopped."""

    inexact: Mapping[str, Any] = field(default_factory=dict[str, Any])
    models: Sequence[ModelSource] = ()
    world: int = WORLD
    fault: Callable[[pytest.MonkeyPatch], None] | None = None
    faulty: tuple[Any, ModelSource] | None = None
    reference: str = "its oracle"
    dense: tuple[Any, type[Dense]] | None = None
    limits: Sequence[tuple[Any, Any]] = ()
    sent: Sequence[Bytes | Priced] = ()
    keeps: Sequence[Kept] = ()
    processes: tuple[Any, ModelSource] | None = None
    refused: Sequence[tuple[Any, str]] = ()
    resumed: Sequence[str] = ()


def _without_late_gradients(patch: pytest.MonkeyPatch) -> None:
    take = StaleExchange.take

    def wrong(self: StaleExchange, posted: Any, peer: int) -> Any:
        rows = take(self, posted, peer)
        return tuple(torch.zeros_like(t) for t in rows) if posted.site.phase == "backward" else rows

    patch.setattr(StaleExchange, "take", wrong)


def _never_refreshed(patch: pytest.MonkeyPatch) -> None:
    take, first = StaleExchange.take, dict[Any, Any]()

    def wrong(self: StaleExchange, posted: Any, peer: int) -> Any:
        rows, site = take(self, posted, peer), posted.site
        return first.setdefault((self.comm.rank, peer, site.layer, site.call), rows)

    patch.setattr(StaleExchange, "take", wrong)


def _nothing_skipped(patch: pytest.MonkeyPatch) -> None:
    decide = Copies.broadcasting

    def wrong(self: Copies, rows: Any, site: Any) -> frozenset[int]:
        decide(self, rows, site)
        return frozenset(range(WORLD))

    patch.setattr(Copies, "broadcasting", wrong)


def _without_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reweighted, "_weighted", lambda self, rows: rows)


def _gradients_that_stay(patch: pytest.MonkeyPatch) -> None:
    post = BroadcastGraph.post_gradients

    def wrong(self: BroadcastGraph, part: int, grads: Any, like: Any, site: Any) -> Any:
        return post(self, part, tuple(torch.zeros_like(g) for g in grads), like, site)

    patch.setattr(BroadcastGraph, "post_gradients", wrong)


def _share_of_a_whole_degree(patch: pytest.MonkeyPatch) -> None:
    """Parts of one device have it, parts of ranks do not."""
    true = cofree.union_of

    def wrong(parts: Any) -> Any:
        union = true(parts)
        return replace(union, share=union.share.clamp_min(0.5))

    patch.setattr(cofree, "union_of", wrong)


def _rows_drawn(job: Job, epoch: int) -> int:
    part_of, (src, dst), rate = job.plan.part_of, job.dataset.edge_index, 0.4
    read = [torch.unique(src[(part_of[dst] == p) & (part_of[src] != p)]) for p in range(job.plan.num_parts)]
    return sum(int(kept(r, rate=rate, seed=SEED, epoch=epoch, reader=p).sum()) for p, r in enumerate(read))


def _rows_of_a_column(job: Job, epoch: int) -> int:
    """Rows to a column of ranks, and partial sums."""
    world, copies = job.plan.num_ranks, 2
    readers = [sum(p % copies == q // (world // copies) and p != q for p in range(world)) for q in range(world)]
    assert sorted(set(readers)) == [world // copies - 1, world // copies]
    rows = sum(n * r for n, r in zip(job.plan.statistics["nodes"], readers, strict=True)) + (copies - 1) * NODES
    assert rows < (world - 1) * NODES
    return rows


def _late_messages(times: int, rank: Rank) -> int:
    """Layer 0 folds features, without a gradient."""
    halo, boundary = sum(rank.shard.num_halo.values()), sum(map(len, rank.shard.boundary.values()))
    return times * 8 * (halo * WIDTHS + boundary * LEARNED)


def _halo(rank: Rank) -> int:
    return 8 * sum(rank.shard.num_halo.values()) * WIDTHS


def _others(rank: Rank) -> int:
    return 8 * (NODES - rank.shard.num_inner) * WIDTHS


def _read_again(rank: Rank) -> int:
    width = sum(each.width for use in sketch(rank.model, rank.shard) for each in use.src)
    assert width > 0
    return 8 * (NODES - rank.shard.num_inner) * width


def _first(phase: str, epoch: int) -> bool:
    return phase == "reduce" or (epoch % 2 == 0 and phase == "forward")


def _first_with_gradients(phase: str, epoch: int) -> bool:
    return phase == "reduce" or epoch % 2 == 0


DRAWN = ("codec=random", "codec.period=2", "model=gat")
STILL = ("model.dropout=0",)  # rows change by what is learned alone
SMOOTH = PipeGCN(smooth_features=True, smooth_gradients=True, decay=0.6)
BOUNDED = Sancus(period=3, bound=0.05)
HALF = BoundarySampling(rate=0.5)
SMALL = GCN(hidden=8)
BITS4, EVERY = Uniform(bits=4), Random(period=1)

METHODS = {
    "pipegcn": Method(
        inexact={
            "2 epochs": PipeGCN(staleness=2),
            "smoothed": SMOOTH,
            "features": PipeGCN(smooth_features=True, staleness=2, decay=0.3),
            "gradients": PipeGCN(smooth_gradients=True, overlap="central_marginal"),
        },
        models=[three(name) for name in ("gcn", "gat", "sage_max")],
        fault=_without_late_gradients,
        faulty=(PipeGCN(), SMALL),
        dense=(PipeGCN(), LateDense),
        limits=[(PipeGCN(staleness=0), GraphParallel())],
        sent=[Bytes(PipeGCN(), GraphParallel(), (Identity(), BFloat16(), BITS4, EVERY))],
        keeps=[
            Kept(strategy, partial(_late_messages, times), epochs=4, drains=drains)
            for strategy, times in ((PipeGCN(staleness=2), 2), (SMOOTH, 2))
            for drains in (False, True)
        ],
        processes=(PipeGCN(smooth_features=True), three("gat")),
        refused=[
            (("strategy.staleness=0", "strategy.smooth_features=true"), "strategy.smooth_features=true smooths rows"),
            (("strategy.staleness=0", "strategy.smooth_gradients=true"), "strategy.smooth_gradients=true smooths rows"),
            (("strategy.decay=1",), "decay"),
            (("strategy.staleness=-1",), "staleness"),
            (lambda: PipeGCN(staleness=3).check(2, 2, 3), r"strategy\.staleness=3 in a run of 3 epochs: no rank would"),
        ],
    ),
    "digest": Method(
        inexact={
            "every epoch": Digest(period=1),
            "every third": Digest(period=3, overlap="central_marginal"),
            "gradients": Digest(period=2, gradients=True, overlap="none"),
        },
        models=[three("gat")],
        fault=_never_refreshed,
        faulty=(Digest(), SMALL),
        dense=(Digest(period=3), RefreshedDense),
        limits=[(Digest().exact_limit(), GraphParallel())],
        sent=[
            Bytes(Digest(period=2), GraphParallel(), (Identity(), BITS4), _first, slow=(BFloat16(), EVERY)),
            Bytes(
                Digest(period=2, gradients=True),
                GraphParallel(),
                (BFloat16(), EVERY),
                _first_with_gradients,
                slow=(Identity(), BITS4),
            ),
        ],
        keeps=[Kept(Digest(), _halo)],
        refused=[
            (("strategy.period=0",), "period"),
            (("codec=adaptive",), "codec=adaptive chooses bits"),
            (lambda: Digest(period=5).check(2, 2, 4), r"strategy\.period=5 in a run of 4 epochs: halo rows would"),
        ],
    ),
    "sancus": Method(
        inexact={f"bound {bound}": Sancus(period=3, bound=bound, prefetch=2) for bound in (0.02, 0.05, 0.2)},
        models=[three(name, *STILL) for name in ("gcn", "gat")],
        fault=_nothing_skipped,
        faulty=(Sancus(), SMALL),
        dense=(Sancus(period=None, bound=0.3), BoundedDense),
        limits=[(Sancus().exact_limit(), Cagnet())],
        sent=[
            Bytes(
                Sancus(),
                Cagnet(),
                (Identity(), BFloat16(), BITS4),
                lambda phase, epoch: phase != "forward" or epoch != 1,
            )
        ],
        keeps=[Kept(Sancus(), _others), Kept(BOUNDED, lambda rank: 8 * NODES * WIDTHS)],
        processes=(BOUNDED, three("gcn", *STILL)),
        refused=[
            (("strategy.period=null",), r"strategy.period=null strategy.bound=null would read"),
            (("strategy.period=0",), "period"),
            (("strategy.bound=-1",), "bound"),
            (("codec=adaptive",), "codec=adaptive weighs halo rows"),
            (lambda: Sancus(period=5).check(2, 2, 4), r"strategy\.period=5 in a run of 4 epochs: copies would"),
        ],
    ),
    "bns": Method(
        inexact={"half": HALF},
        models=[three(name) for name in ("gcn", "gat")],
        world=4,
        fault=_without_weights,
        faulty=(HALF, SMALL),
        dense=(HALF, SampledDense),
        limits=[
            (BoundarySampling(rate=1.0, overlap=overlap), GraphParallel(overlap=overlap))
            for overlap in ("none", "edges", "central_marginal")
        ],
        sent=[
            Priced(BoundarySampling(rate=0.4), WORLD, _rows_drawn, (Identity(), BFloat16(), BITS4, EVERY), varies=True)
        ],
        refused=[
            *(((f"strategy.rate={rate}",), "rate") for rate in (-0.1, 1.5, float("nan"))),
            (lambda: BoundarySampling(codec=Adaptive()), "codec=adaptive chooses bits"),
        ],
        resumed=("strategy.rate=0.5", *DRAWN),
    ),
    "cagnet": Method(
        fault=_gradients_that_stay,
        faulty=(Cagnet(), three("gcn")),
        reference="single device",
        sent=[
            Priced(Cagnet(), 4, lambda job, epoch: 3 * NODES, (Identity(), BFloat16(), BITS4, EVERY)),
            Priced(Cagnet(replication=2), 8, _rows_of_a_column, (Identity(), BFloat16(), BITS4)),
        ],
        keeps=[Kept(Cagnet(), lambda rank: 0, epochs=1), Kept(Cagnet(), _read_again, model="gat", epochs=1)],
        processes=(Cagnet(), three("gat")),
        refused=[
            (("codec=adaptive",), "codec=adaptive weighs halo rows"),
            (("strategy.prefetch=-1",), "prefetch"),
            (
                lambda: Cagnet(replication=2).check(6, 2, 10),
                r"strategy\.replication=2 on 6 ranks: its square, 4, does not divide 6; set",
            ),
        ],
    ),
    "cofree": Method(
        fault=_share_of_a_whole_degree,
        faulty=(CoFree(), SMALL),
        refused=[
            ((f"strategy.{wrong}",), wrong.split("=")[0])
            for wrong in ("drop_edge=1", "drop_edge=-0.1", "masks=0", "reweight=half", "degrees=none")
        ],
    ),
    "feature": Method(
        processes=(FeatureParallel(), three("gat")),
        refused=[(lambda: FeatureParallel(codec=Adaptive()), "codec=adaptive weighs halo rows")],
        resumed=DRAWN,
    ),
}
