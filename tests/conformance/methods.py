"""The table of methods: what `test_methods.py` asks of each of them.

An entry of METHODS names the settings that its oracle covers, a fault that must be noticed, the same mathematics in
dense matrices, other ways to run with the same bits, the bytes that travel, the rows that are kept between epochs, what
processes must repeat, and the refusals.
docs/strategies/NAME.md is the specification of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from composing import configured, names
from engines import Rank
from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import BFloat16, CodecConfig, Drop, Identity
from gnnpar.codecs.uniform import Random, Uniform
from gnnpar.comm import MessageTag, Posted, RowLike
from gnnpar.config.compose import compose
from gnnpar.folds.block import Rows
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph
from gnnpar.models.gat import GAT
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import ModelConfig, ModelSource
from gnnpar.models.resgcn import ResGCN
from gnnpar.parallel.bns.strategy import BoundarySampling, Reweighted, kept
from gnnpar.parallel.broadcast import BroadcastGraph
from gnnpar.parallel.cagnet.strategy import Cagnet
from gnnpar.parallel.cofree import strategy as cofree
from gnnpar.parallel.cofree.strategy import CoFree
from gnnpar.parallel.digest.strategy import Digest
from gnnpar.parallel.feature.strategy import FeatureParallel
from gnnpar.parallel.halo.adaqp import AdaQP
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipegcn.strategy import PipeGCN
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.pipeline.strategy import GNNPipe
from gnnpar.parallel.sampling.strategy import Minibatch
from gnnpar.parallel.sancus.strategy import CachedParts, Sancus
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.shape_trace import shape_trace
from gnnpar.parallel.stale import StaleExchange
from gnnpar.parallel.strategy import Strategy
from gnnpar.parallel.view import FirstLayer
from gnnpar.partition.shard import Mirrors
from gnnpar.training.checks import check_strategy
from gnnpar.verify.conformance import Job, small_graph, train_in_threads

T = TypeVar("T")
Refused = tuple[str, ...] | Callable[[], object]
"""Overrides, or a call, that are refused."""
Coded = BoundarySampling | Cagnet | Digest | FeatureParallel | GraphParallel | Hybrid | PipeGCN | Sancus
WORLD, SEED, NODES, LR = 3, 3, 60, 0.1
WIDTHS, LEARNED = 6 + 8 + 3, 8 + 3  # numbers of a row in the layers of `three`, and of those with a gradient


def three(name: str, *overrides: str) -> ModelConfig:
    """Three layers of 8 channels."""
    return configured("model", name, "model.hidden=8", "model.num_layers=3", *overrides)


def four(name: str, *overrides: str) -> ModelConfig:
    """Four layers of 8 channels with dropout: up to four stages."""
    return configured("model", name, "model.hidden=8", "model.num_layers=4", "model.dropout=0.4", *overrides)


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
class Same:
    """`strategy` has the bits of `twin` on `of_twin` ranks, and its bytes, or those of `phases`.

    `slow`: in test-all alone.
    """

    strategy: Strategy
    twin: Strategy
    config: ModelSource = field(default_factory=partial(three, "gat"))
    world: int = WORLD
    of_twin: int = WORLD
    phases: Sequence[str] | None = None
    epochs: int = 2
    dtype: torch.dtype = torch.float64
    slow: bool = False


@dataclass(frozen=True)
class Bytes:
    """`strategy` sends what `twin` sends, but for phases that do not travel in an epoch. `slow`: codecs of test-all."""

    strategy: Coded
    twin: Coded
    codecs: Sequence[CodecConfig]
    travels: Callable[[str, int], bool] = lambda phase, epoch: True
    slow: Sequence[CodecConfig] = ()


@dataclass(frozen=True)
class Priced:
    """`rows` of each of the `widths` travel, forward and backward, by job and epoch."""

    strategy: Coded
    world: int
    rows: Callable[[Job, int], int]
    codecs: Sequence[CodecConfig]
    varies: bool = False
    config: ModelSource = field(
        default_factory=partial(
            configured, "model", "gcn", "model.hidden=32", "model.num_layers=3", "model.order=transform_first"
        )
    )
    widths: Sequence[int] = (32, 32, 3)


@dataclass(frozen=True)
class Kept:
    """Bytes of rows that a rank keeps after `epochs`, in fp64."""

    strategy: Strategy
    nbytes: Callable[[Rank], int]
    model: str = "gcn"
    epochs: int = 2
    drains: bool = False


@dataclass(frozen=True, kw_only=True)
class Method:
    """`inexact`: settings that equal the oracle, with models and a world. `fault`: what the oracle, or where there is
    none the single device, must notice, of `faulty`. `processes`: the numbers of threads, by strategy, model and ranks.
    `refused`: overrides or a call, and the line. `resumed`: overrides of runs that are stopped."""

    inexact: Mapping[str, Strategy] = field(default_factory=dict[str, Strategy])
    models: Sequence[ModelSource] = ()
    world: int = WORLD
    fault: Callable[[pytest.MonkeyPatch], None] | None = None
    faulty: tuple[Strategy, ModelSource] | None = None
    reference: str = "its oracle"
    dense: tuple[Strategy, type[Dense]] | None = None
    same: Sequence[Same] = ()
    sent: Sequence[Bytes | Priced] = ()
    keeps: Sequence[Kept] = ()
    processes: Sequence[tuple[Strategy, ModelSource, int]] = ()
    refused: Sequence[tuple[Refused, str]] = ()
    resumed: Sequence[tuple[str, ...]] = ()


def _without_late_gradients(patch: pytest.MonkeyPatch) -> None:
    take = StaleExchange.take

    def wrong(self: StaleExchange, posted: Posted, peer: int) -> Rows:
        rows = take(self, posted, peer)
        return tuple(torch.zeros_like(t) for t in rows) if posted.tag.phase == "backward" else rows

    patch.setattr(StaleExchange, "take", wrong)


def _never_refreshed(patch: pytest.MonkeyPatch) -> None:
    take, first = StaleExchange.take, dict[tuple[int, ...], Rows]()

    def wrong(self: StaleExchange, posted: Posted, peer: int) -> Rows:
        rows, tag = take(self, posted, peer), posted.tag
        return first.setdefault((self.comm.rank, peer, tag.layer, tag.call), rows)

    patch.setattr(StaleExchange, "take", wrong)


def _nothing_skipped(patch: pytest.MonkeyPatch) -> None:
    decide = CachedParts.broadcasting

    def wrong(self: CachedParts, rows: Rows, tag: MessageTag) -> frozenset[int]:
        decide(self, rows, tag)
        return frozenset(range(WORLD))

    patch.setattr(CachedParts, "broadcasting", wrong)


def _without_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reweighted, "_weighted", lambda self, rows: rows)


def _gradients_that_stay(patch: pytest.MonkeyPatch) -> None:
    post = BroadcastGraph.post_gradients

    def wrong(self: BroadcastGraph, part: int, grads: Rows, like: Sequence[RowLike], tag: MessageTag) -> Posted:
        return post(self, part, tuple(torch.zeros_like(g) for g in grads), like, tag)

    patch.setattr(BroadcastGraph, "post_gradients", wrong)


def _share_of_a_whole_degree(patch: pytest.MonkeyPatch) -> None:
    """Parts of one device have it, parts of ranks do not."""
    true = cofree.union_of

    def wrong(parts: Sequence[Mirrors]) -> Mirrors:
        union = true(parts)
        return replace(union, share=union.share.clamp_min(0.5))

    patch.setattr(cofree, "union_of", wrong)


def _built(kind: Callable[..., T], **fields: object) -> T:
    return kind(**fields)


def _run(
    strategy: Strategy, config: ModelSource | None = None, world: int = 2, *, first_layer: FirstLayer = "live"
) -> None:
    config = config or GCN(hidden=8)
    strategy.check(world, config.num_layers, 2)
    train_in_threads(strategy, config, small_graph(), world=world, first_layer=first_layer)


def _halo_rows(job: Job, epoch: int) -> int:
    return sum(job.plan.statistics["halo_rows"])


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


def _rows_of_a_stage(job: Job, epoch: int) -> int:
    """N alpha."""
    return round(NODES * job.plan.statistics["alpha"])


def _late_messages(times: int, rank: Rank) -> int:
    """Layer 0 folds features, without a gradient."""
    halo, boundary = sum(rank.shard.num_halo.values()), sum(map(len, rank.shard.boundary.values()))
    return times * 8 * (halo * WIDTHS + boundary * LEARNED)


def _halo(rank: Rank) -> int:
    return 8 * sum(rank.shard.num_halo.values()) * WIDTHS


def _others(rank: Rank) -> int:
    return 8 * (NODES - rank.shard.num_inner) * WIDTHS


def _read_again(rank: Rank) -> int:
    width = sum(each.width for use in shape_trace(rank.model, rank.shard) for each in use.src)
    assert width > 0
    return 8 * (NODES - rank.shard.num_inner) * width


def _first(phase: str, epoch: int) -> bool:
    return phase == "reduce" or (epoch % 2 == 0 and phase == "forward")


def _first_with_gradients(phase: str, epoch: int) -> bool:
    return phase == "reduce" or epoch % 2 == 0


DRAWN = ("codec=random", "codec.period=3", "model=gat")
STILL = ("model.dropout=0",)  # rows change by what is learned alone
SMOOTH = PipeGCN(smooth_features=True, smooth_gradients=True, decay=0.6)
BOUNDED = Sancus(period=3, bound=0.05)
HALF = BoundarySampling(rate=0.5)
SMALL = GCN(hidden=8)
BITS4, EVERY = Uniform(bits=4), Random(period=1)
QUICK = Adaptive(warmup=1, period=2)
TOLD = replace(QUICK, powers=((-1.0, 0.0),))
TINY = 400 / 2**20  # MiB; rows here have 24 to 176 bytes: pieces of a few rows
HEADS = ("model.heads=2", "model.attention_dropout=0.4")
FOLDS = [three("gcn"), three("gat", *HEADS), three("sage_max"), three("gatv2", *HEADS)]
DEEP: dict[str, Any] = {"hidden": 8, "num_layers": 4, "encoder": "linear", "decoder": "linear"}
RANDOM_BITS = Random(period=2)
CHUNK: dict[str, Any] = {"remat": "chunk"}
LAYER: dict[str, Any] = {"remat": "layer"}
HALOS = ("forward", "backward")
EXACT_HISTORY: dict[str, Any] = {"chunks": 8, "history_init": "exact", "refresh_exact": True, "refresh": 2}


def _pulled() -> list[Same]:
    """Rounds that pull have the bits of halos: each fold once with each way to cut, and with each way to hold rows."""
    holds: list[dict[str, Any]] = [{"prefetch": 0}, {"prefetch": 2}, {"remat": False}]
    return [
        Same(SAR(rounds=rounds, backward="pull", **hold), GraphParallel(), config, 4, 4, (), slow=k != (i + j) % 3)
        for i, rounds in enumerate(("peer", "one", "part"))
        for j, hold in enumerate(holds)
        for k, config in enumerate(FOLDS)
    ]


def _coded_rounds() -> list[Same]:
    """Random numbers know no phase, and bits are told by powers that do not either."""
    models = (three("gcn"), (BITS4, Random())), (three("gatv2", "model.heads=2"), (TOLD,))
    peers = partial(SAR, rounds="peer", backward="pull")
    found = [
        Same(peers(codec=codec), GraphParallel(codec=codec), config, phases=(), epochs=4, slow=codec not in quick)
        for config, quick in models
        for codec in (BITS4, Random(), TOLD)
    ]
    return found + [
        Same(SAR(codec=codec, backward="pull"), GraphParallel(codec=codec), config, 4, 4, ())
        for codec in (BFloat16(), Drop())
        for config in FOLDS[:2]
    ]


def _staged() -> list[Same]:
    """Stages do not change a bit: dropout, shuffled chunks, history, doubled gradients and random bits on."""
    found = list[Same]()
    given: dict[str, Any] = {"chunks": 8, "refresh": 2}
    for model, usual in (("gcnii", 1), ("gat", 1), ("sage_max", 2)):
        for stages, virtual, parts in ((2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)):
            strategy = Hybrid(stages=stages, parts=parts, virtual=virtual, **given)
            twin, slow = Hybrid(stages=1, parts=parts, **given), parts != usual
            found.append(Same(strategy, twin, four(model), stages * parts, parts, (), 4, slow=slow))
    both: dict[str, Any] = {"virtual": 2, "remat": "layer"}
    for i, (codec, rules) in enumerate(
        [(RANDOM_BITS, both), (RANDOM_BITS, {}), (RANDOM_BITS, CHUNK), (BITS4, CHUNK), (BITS4, both)]
    ):
        one = Hybrid(stages=1, parts=2, codec=codec, **given)
        strategy, config = replace(one, stages=2, **rules), four("resgcn", "model.norm=layer")
        found.append(Same(strategy, one, config, 4, 2, (), 3, slow=i > 0))
    return found


def _computed_again() -> list[Same]:
    """Chunks that are computed again send nothing twice: a sum, attention and a second tensor by default."""
    found = list[Same]()
    for i, (parts, stages, virtual, remat) in enumerate(
        [
            *((1, 1, 1, CHUNK), (1, 2, 1, LAYER), (1, 4, 1, CHUNK), (1, 2, 2, CHUNK), (1, 1, 2, LAYER)),
            *((2, 2, 1, CHUNK), (2, 2, 1, LAYER)),
        ]
    ):
        kept = Hybrid(parts=parts, stages=2, chunks=4 * parts, refresh=1)
        strategy = replace(kept, stages=stages, virtual=virtual, **remat)
        for model in names("model"):
            slow = model != ("gcn", "gat", "gcnii")[i % 3]
            found.append(Same(strategy, kept, four(model), stages * parts, 2 * parts, HALOS, slow=slow))
    mixed: dict[str, Any] = {"chunks": 8, "gradient": "mix", "mixing": 0.3, "refresh": 2}
    fresh: dict[str, Any] = {**EXACT_HISTORY, "gradient": "fresh", "order": "fixed"}
    for rules in (mixed, fresh):
        plain = Hybrid(stages=2, parts=2, **rules)
        for remat in (CHUNK, LAYER):
            found.append(Same(replace(plain, **remat), plain, four("resgcn"), 4, 4, HALOS, 3, torch.float32))
    return found


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
        same=[Same(PipeGCN(staleness=0), GraphParallel())],
        sent=[Bytes(PipeGCN(), GraphParallel(), (Identity(), BFloat16(), BITS4, EVERY))],
        keeps=[
            Kept(strategy, partial(_late_messages, times), epochs=4, drains=drains)
            for strategy, times in ((PipeGCN(staleness=2), 2), (SMOOTH, 2))
            for drains in (False, True)
        ],
        processes=[(PipeGCN(smooth_features=True), three("gat"), WORLD)],
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
        same=[Same(Digest().exact_limit(), GraphParallel())],
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
        same=[Same(Sancus().exact_limit(), Cagnet())],
        sent=[
            Bytes(
                Sancus(),
                Cagnet(),
                (Identity(), BFloat16(), BITS4),
                lambda phase, epoch: phase != "forward" or epoch != 1,
            )
        ],
        keeps=[Kept(Sancus(), _others), Kept(BOUNDED, lambda rank: 8 * NODES * WIDTHS)],
        processes=[(BOUNDED, three("gcn", *STILL), WORLD)],
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
        same=[
            Same(BoundarySampling(rate=1.0, overlap=overlap), GraphParallel(overlap=overlap))
            for overlap in ("none", "edges", "central_marginal")
        ],
        sent=[
            Priced(BoundarySampling(rate=0.4), WORLD, _rows_drawn, (Identity(), BFloat16(), BITS4, EVERY), varies=True)
        ],
        refused=[
            *(((f"strategy.rate={rate}",), "rate") for rate in (-0.1, 1.5, float("nan"))),
            (lambda: BoundarySampling(codec=Adaptive()), "codec=adaptive chooses bits"),
        ],
        resumed=[("strategy.rate=0.5", *DRAWN)],
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
        processes=[(Cagnet(), three("gat"), WORLD), (Cagnet(replication=2), three("gcn"), 4)],
        refused=[
            (("codec=adaptive",), "codec=adaptive weighs halo rows"),
            (("strategy.prefetch=-1",), "prefetch"),
            (
                lambda: Cagnet(replication=2).check(6, 2, 10),
                r"strategy\.replication=2 on 6 ranks: its square, 4, does not divide 6; set",
            ),
            (
                lambda: _run(Cagnet(replication=2), three("gat"), 4),
                r"strategy\.replication=2 adds up partial sums of ranks, but Softmax of layer 0 is no sum",
            ),
        ],
    ),
    "cofree": Method(
        inexact={"whole degrees, no weights": CoFree(degrees="graph", reweight="none")},
        models=[three("gat", "model.attention_dropout=0.3")],
        fault=_share_of_a_whole_degree,
        faulty=(CoFree(), SMALL),
        refused=[
            ((f"strategy.{wrong}",), wrong.split("=")[0])
            for wrong in ("drop_edge=1", "drop_edge=-0.1", "masks=0", "reweight=half", "degrees=none")
        ]
        + [(lambda: _run(CoFree(drop_edge=0.1), first_layer="cached"), "first_layer=cached is for strategies without")],
    ),
    "feature": Method(
        processes=[(FeatureParallel(), three("gat"), WORLD)],
        refused=[
            (lambda: FeatureParallel(codec=Adaptive()), "codec=adaptive weighs halo rows"),
            (
                lambda: _run(FeatureParallel(), three("gatv2", "model.attention_dropout=0.3")),
                "SoftmaxV2 of layer 0 separates by neither",
            ),
        ],
        resumed=[DRAWN],
    ),
    "graph_parallel": Method(
        processes=[(GraphParallel(), three("gat"), WORLD), (GraphParallel(halo="cover"), three("gat"), WORLD)],
    ),
    "adaqp": Method(
        same=[
            Same(AdaQP(codec=Identity()), GraphParallel(), three("gcn"), dtype=torch.float32),
            Same(AdaQP(codec=Uniform(bits=32)), GraphParallel(), three("gcn"), dtype=torch.float32),
            Same(AdaQP(codec=Uniform(bits=32)), GraphParallel()),
            *(
                Same(AdaQP(codec=codec), AdaQP(codec=codec, overlap="none"), epochs=4, slow=codec == Uniform(bits=2))
                for codec in (Uniform(bits=2), RANDOM_BITS, QUICK)
            ),
        ],
        sent=[Priced(AdaQP(), WORLD, _halo_rows, (Uniform(bits=2), Uniform(bits=8), Uniform(bits="bf16")))],
        refused=[
            (
                lambda: _run(AdaQP(codec=replace(QUICK, group_size=500, period=1))),
                r"codec.group_size=500, but the forward message from rank \d to \d has \d+ rows; ",
            )
        ],
    ),
    "sar": Method(
        same=[*_pulled(), *_coded_rounds()],
        processes=[
            (SAR(rounds=TINY, prefetch=2), three("gat", *HEADS), WORLD),
            (SAR(rounds=TINY, backward="pull"), three("gat", *HEADS), WORLD),
            (SAR(backward="pull", prefetch=5), three("gat", *HEADS), WORLD),
            (SAR(prefetch=0), three("gcn"), WORLD),
        ],
        refused=[
            (
                lambda: SAR(logical_parts=4).check(2, 2, 5),
                "logical_parts=4 puts all parts on one device, but there are 2 ranks",
            )
        ],
    ),
    "gnnpipe": Method(
        same=[
            Same(Hybrid(stages=2, parts=1, chunks=8), GNNPipe(chunks=8), four("resgcn"), 2, 2),
            Same(GNNPipe(**EXACT_HISTORY), GNNPipe(**EXACT_HISTORY), four("resgcn", "model.norm=layer"), 2, 1, (), 5),
        ],
        processes=[(GNNPipe(chunks=8, refresh=2), four("gcnii"), WORLD)],
        refused=[
            (lambda: GNNPipe(boundary=Adaptive()), "boundary=adaptive needs traces"),
            (
                lambda: GNNPipe(codec=Drop()).check(2, 4, 2),
                r"^codec=drop is for rows between the parts .*strategy\.parts=1",
            ),
            (
                lambda: check_strategy(compose(["strategy=gnnpipe", "codec=bf16"]), 2),
                r"^codec=bfloat16 is for rows between the parts .*strategy=hybrid",
            ),
            (lambda: _run(GNNPipe(chunks=64), ResGCN(**DEEP)), "60 nodes and cannot fill 64 chunks"),
            (lambda: _run(GNNPipe(cut="balanced"), ResGCN(**DEEP)), "cut=balanced needs measured layers"),
            (
                lambda: _run(GNNPipe(gradient="mix"), GAT(hidden=8), 1),
                "gradient=mix needs sums, but layer 0 folds by Softmax",
            ),
        ],
        resumed=[
            ("strategy.chunks=8", "strategy.refresh=3"),
            ("strategy.chunks=8", "strategy.refresh=3", "strategy.gradient=mix"),
        ],
    ),
    "hybrid": Method(
        same=[*_staged(), *_computed_again()],
        sent=[
            Priced(
                Hybrid(stages=2, parts=2, chunks=8),
                4,
                _rows_of_a_stage,
                (Uniform(bits=8), BITS4, Uniform(bits=2, gradient_bits=8), Uniform(bits="bf16")),
                config=replace(ResGCN(**DEEP), hidden=32),
                widths=(32,) * 4,
            )
        ],
        processes=[(Hybrid(stages=2, parts=2, chunks=8, refresh=2), four("gcnii"), 4)],
        refused=[
            (lambda: Hybrid(codec=Adaptive()), r"^codec=adaptive chooses bits .* use codec=uniform"),
            *(
                (partial(_built(Hybrid, **{"parts": 1, **rules}).check, world, layers, 2), line)
                for rules, world, layers, line in (
                    ({}, 4, 3, r"3 layers cannot fill 4 stages: use model\.num_layers=4"),
                    ({"virtual": 2}, 2, 3, "3 layers cannot fill 2 stages x 2 virtual ones"),
                    (
                        {"chunks": 3},
                        4,
                        8,
                        r"strategy\.chunks=3 gives each of 1 parts 3 chunks, fewer than its 4 stages",
                    ),
                    ({"stages": 2, "parts": 2}, 3, 8, "3 ranks cannot form stages=2 x parts=2"),
                    (
                        {"parts": 2, "chunks": 9},
                        4,
                        8,
                        r"strategy\.chunks=9 does not divide by strategy\.parts=2: use 10 chunks",
                    ),
                )
            ),
        ],
    ),
    "minibatch": Method(
        refused=[
            *(
                ((f"strategy.{wrong}",), wrong.split("=")[0])
                for wrong in ("sampler=both", "saint=star", "walk_length=0", "coverage=0", "clusters=0")
            ),
            *(
                (partial(Minibatch, fanout=fanout), "must be numbers of neighbours, one a layer, or -1 for all")
                for fanout in ((), (5, 0))
            ),
            *(
                (
                    partial(Minibatch, sampler=sampler, clusters=4, clusters_per_batch=5),
                    r"clusters_per_batch=5 of strategy\.clusters=4",
                )
                for sampler in ("cluster", "uniform")
            ),
            (
                lambda: _run(Minibatch(num_workers=2)),
                "num_workers=2 starts processes, which ranks that are threads cannot: set comm=gloo",
            ),
            (
                lambda: _run(Minibatch(), first_layer="cached"),
                "first_layer=cached is for strategies without chunks or batches",
            ),
            (
                lambda: _run(Minibatch(fanout=(5, 5, 5))),
                r"fanout=\[5, 5, 5\] has 3 numbers, but the model 2 layers: give 2 or fewer",
            ),
            *(
                (partial(_run, _built(Minibatch, **fields)), line)
                for fields, line in (
                    ({"sampler": "saint", "batch_size": 1}, "less than a node for each of 2 ranks"),
                    *(
                        (fields | {"sampler": sampler}, line)
                        for sampler in ("cluster", "uniform")
                        for fields, line in (
                            ({"clusters": 4, "clusters_per_batch": 1}, "leaves 1 of 2 ranks without a cluster"),
                            ({"clusters": 1000}, "clusters=1000, but the graph has 60 nodes"),
                        )
                    ),
                )
            ),
        ],
    ),
}
