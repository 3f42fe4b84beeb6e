"""PipeGCN: rows and gradients of an earlier epoch; docs/strategies/pipegcn.md is the specification."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composing import configured
from gnnpar.codecs.codec import BFloat16, Identity
from gnnpar.codecs.uniform import Random, Uniform
from gnnpar.comm import Communicator, ThreadWorld
from gnnpar.config.compose import compose
from gnnpar.data.tasks import make_task
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph
from gnnpar.models.gcn import GCN
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipegcn.strategy import PipeGCN
from gnnpar.parallel.stale import StaleExchange
from gnnpar.partition.shard import Shard
from gnnpar.settings import ConfigError
from gnnpar.verify.conformance import check, make_job, relative_error, small_graph, train_in_threads
from worlds import run_world

WORLD, SEED = 3, 3
SMOOTH = PipeGCN(smooth_features=True, smooth_gradients=True, decay=0.6)


def model_of(name: str) -> Any:
    return configured("model", name, "model.hidden=8", "model.num_layers=3")


@pytest.mark.parametrize("model", ["gcn", "gat", "sage_max"])
@pytest.mark.parametrize(
    "strategy",
    [
        PipeGCN(staleness=2),
        SMOOTH,
        PipeGCN(smooth_features=True, staleness=2, decay=0.3),
        PipeGCN(smooth_gradients=True, overlap="central_marginal"),
    ],
    ids=["2 epochs", "smoothed", "features", "gradients"],
)
def test_what_else_is_late_equals_the_oracle(strategy: PipeGCN, model: str) -> None:
    case = check(strategy, {model: model_of(model)}, worlds=(WORLD,))[-1]
    assert case.reference == "its oracle"
    assert case.passed, case


def test_the_oracle_notices_gradients_that_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    take = StaleExchange.take

    def without_gradients(self: StaleExchange, posted: Any, peer: int) -> Any:
        rows = take(self, posted, peer)
        return tuple(torch.zeros_like(t) for t in rows) if posted.site.phase == "backward" else rows

    monkeypatch.setattr(StaleExchange, "take", without_gradients)
    case = check(PipeGCN(), {"gcn": GCN(hidden=8)}, worlds=(WORLD,))[-1]
    assert case.reference == "its oracle"
    assert not case.passed


class Two(nn.Module):
    """Two layers of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)

    def forward(self, g: Graph, x: Tensor) -> Tensor:
        h = torch.relu(g.at(0).aggregate(Sum(), (self.first(x),)))
        return g.at(1).aggregate(Sum(), (self.second(h),))


def by_hand(model: Two, part_of: Tensor, lr: float, epochs: int) -> list[list[Tensor]]:
    """Gradients of every epoch from dense matrices; the late gradients enter as terms of the loss."""
    data = small_graph()
    src, dst = data.edge_index
    dense = torch.zeros(data.num_nodes, data.num_nodes, dtype=torch.float64)
    dense.index_put_((dst, src), torch.ones(len(src), dtype=torch.float64), accumulate=True)
    same = part_of[:, None] == part_of[None, :]
    own, other = dense * same, dense * ~same
    old = [torch.zeros(60, 8).double(), torch.zeros(60, 3).double()]
    late = [torch.zeros(60, 8).double(), torch.zeros(60, 3).double()]
    found = []
    for _ in range(epochs):
        stale = [t.clone().requires_grad_() for t in old]
        first = model.first(data.x.double())
        second = model.second(torch.relu(own @ first + other @ stale[0]))
        logits = own @ second + other @ stale[1]
        loss = nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
        surrogate = loss + (first * late[0]).sum() + (second * late[1]).sum()
        parameters = list(model.parameters())
        gradients = list(torch.autograd.grad(surrogate, parameters, retain_graph=True))
        # of the stale rows of layer 0: the late gradient of layer 1 reaches them through layer 1's rows
        given = torch.autograd.grad(surrogate, stale)
        old, late = [first.detach(), second.detach()], list(given)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p -= lr * g
        found.append(gradients)
    return found


def test_plain_autograd_on_dense_matrices_gives_the_same_gradients() -> None:
    data = small_graph()
    job = make_job(PipeGCN(), GCN(hidden=8), data, world=WORLD, seed=SEED, epochs=4)
    torch.manual_seed(1)
    model = Two().double()

    def body(comm: Communicator) -> list[dict[str, Tensor]]:
        shard = Shard.open(data, job.plan.part_of, comm).to(comm.device, torch.float64)
        task = make_task(data.task, data.num_classes)
        mine: Any = copy.deepcopy(model)  # no GNN: it has what an engine asks for
        engine = PipeGCN().build(BuildContext(plan=job.plan, shard=shard, model=mine, task=task, comm=comm, seed=SEED))
        optimizer = job.optim.build(engine.named_parameters(), epochs=4, layer_of=lambda name: 0)
        reports = [engine.train_epoch(epoch, optimizer, keep_gradient=True) for epoch in range(4)]
        return [dict(report.gradient or {}) for report in reports]

    got = ThreadWorld(WORLD).run(body)[0]
    for mine, expected in zip(got, by_hand(model, job.plan.part_of, 0.1, 4), strict=True):
        for gradient, (name, _) in zip(expected, model.named_parameters(), strict=True):
            assert relative_error(mine[name], gradient) < 1e-11


def test_no_staleness_is_graph_parallelism_bit_for_bit() -> None:
    config, data = model_of("gat"), small_graph()
    none = train_in_threads(PipeGCN(staleness=0), config, data, world=WORLD)
    other = train_in_threads(GraphParallel(), config, data, world=WORLD)
    assert (none.losses, none.traffic) == (other.losses, other.traffic)
    assert torch.equal(none.logits, other.logits)


@pytest.mark.parametrize("codec", [Identity(), BFloat16(), Uniform(bits=4), Random(period=1)], ids=str)
def test_bytes_are_those_of_graph_parallelism(codec: Any) -> None:
    runs = [
        train_in_threads(strategy, model_of("gat"), small_graph(), world=WORLD, epochs=3)
        for strategy in (PipeGCN(codec=codec), GraphParallel(codec=codec))
    ]
    assert runs[0].traffic == runs[1].traffic
    assert runs[0].losses != runs[1].losses


@pytest.mark.parametrize("drains", [False, True])
@pytest.mark.parametrize("strategy", [PipeGCN(staleness=2), SMOOTH], ids=["2 epochs", "smoothed"])
def test_memory_is_that_of_the_messages_that_wait(strategy: PipeGCN, drains: bool) -> None:
    config, data = model_of("gcn"), small_graph()
    job = make_job(strategy, config, data, world=WORLD, epochs=4)

    def body(comm: Communicator) -> tuple[int, int, int]:
        shard = Shard.open(data, job.plan.part_of, comm).to(comm.device, torch.float64)
        task, mine = make_task(data.task, data.num_classes), copy.deepcopy(job.model).double()
        engine = strategy.build(BuildContext(plan=job.plan, shard=shard, model=mine, task=task, comm=comm, seed=SEED))
        optimizer = job.optim.build(engine.named_parameters(), epochs=4, layer_of=mine.layer_of)
        for epoch in range(4):
            engine.train_epoch(epoch, optimizer)
        if drains:
            engine.drain()
        return engine.live_bytes()["halo"], sum(shard.num_halo.values()), sum(map(len, shard.boundary.values()))

    for held, halo, sent in ThreadWorld(WORLD).run(body):
        forward, backward = 8 * halo * (6 + 8 + 3), 8 * sent * (8 + 3)  # layer 0 folds features, without a gradient
        times = strategy.staleness + strategy.smooth_features
        assert held == times * (forward + backward)


def test_messages_are_in_flight_between_epochs() -> None:
    """The engine waits for nothing that it does not read."""
    config, data = model_of("gcn"), small_graph()
    job = make_job(PipeGCN(), config, data, world=2)

    def body(comm: Communicator) -> list[int]:
        shard = Shard.open(data, job.plan.part_of, comm).to(comm.device, torch.float64)
        task, mine = make_task(data.task, data.num_classes), copy.deepcopy(job.model).double()
        engine: Any = PipeGCN().build(
            BuildContext(plan=job.plan, shard=shard, model=mine, task=task, comm=comm, seed=SEED)
        )
        optimizer = job.optim.build(engine.named_parameters(), epochs=2, layer_of=mine.layer_of)
        exchange, found = engine._parts["late"], []
        begun: Callable[..., Any] = engine._differentiate
        engine._differentiate = lambda *given: (found.append(len(exchange._in_flight)), begun(*given))[1]
        for epoch in range(2):
            engine.train_epoch(epoch, optimizer)
        engine.drain()
        return [*found, len(exchange._in_flight)]

    assert ThreadWorld(2).run(body) == [[0, 5, 0]] * 2  # three exchanges forward, two back


def test_processes_give_the_numbers_of_threads() -> None:
    strategy, data = PipeGCN(smooth_features=True), small_graph()
    job = make_job(strategy, model_of("gat"), data, world=2, epochs=4)
    threads = train_in_threads(strategy, model_of("gat"), data, world=2, epochs=4)
    ranks = run_world("gloo", 2, job)
    assert ranks[0][0] == threads.losses
    assert [sum(rank[4][e]["forward"] for rank in ranks) for e in range(4)] == [t["forward"] for t in threads.traffic]


def test_what_cannot_run_is_refused_in_one_line() -> None:
    refused = {
        ("strategy.staleness=0", "strategy.smooth_features=true"): "strategy.smooth_features=true smooths rows",
        ("strategy.staleness=0", "strategy.smooth_gradients=true"): "strategy.smooth_gradients=true smooths rows",
        ("strategy.decay=1",): "decay",
        ("strategy.staleness=-1",): "staleness",
    }
    for overrides, line in refused.items():
        with pytest.raises(ConfigError, match=line) as caught:
            compose(["strategy=pipegcn", *overrides])
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"strategy\.staleness=3 in a run of 3 epochs: no rank would"):
        PipeGCN(staleness=3).check(2, 2, 3)
