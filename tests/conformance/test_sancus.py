"""SANCUS: broadcasts that are skipped while a copy will do; docs/strategies/sancus.md is the specification."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composing import configured
from gnnpar.codecs.codec import BFloat16, Identity
from gnnpar.codecs.uniform import Uniform
from gnnpar.comm import Communicator, ThreadWorld
from gnnpar.config.compose import compose
from gnnpar.data.tasks import make_task
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph
from gnnpar.models.gcn import GCN
from gnnpar.parallel.cagnet.strategy import Cagnet
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.sancus.copies import Copies, Rule, change_of
from gnnpar.parallel.sancus.strategy import Sancus
from gnnpar.partition.shard import Shard
from gnnpar.settings import ConfigError
from gnnpar.verify.conformance import check, make_job, relative_error, small_graph, train_in_threads
from worlds import run_world

WORLD, SEED, EPOCHS = 3, 3, 4
BOUNDED = Sancus(period=3, bound=0.05)
STILL = ("model.dropout=0",)  # rows change by what is learned alone


def model_of(name: str, *overrides: str) -> Any:
    return configured("model", name, "model.hidden=8", "model.num_layers=3", *overrides)


@pytest.mark.parametrize("bound", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_a_bound_equals_the_oracle(model: str, bound: float) -> None:
    strategy = Sancus(period=3, bound=bound, prefetch=2)
    case = check(strategy, {model: model_of(model, *STILL)}, worlds=(WORLD,))[-1]
    assert case.reference == "its oracle"
    assert case.passed, case


def test_the_oracle_notices_a_part_that_is_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Copies.broadcasting

    def everybody(self: Copies, rows: Any, site: Any) -> frozenset[int]:
        decide(self, rows, site)
        return frozenset(range(WORLD))

    monkeypatch.setattr(Copies, "broadcasting", everybody)
    case = check(Sancus(), {"gcn": GCN(hidden=8)}, worlds=(WORLD,))[-1]
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


def by_hand(model: Two, part_of: Tensor, lr: float, bound: float) -> tuple[list[list[Tensor]], int]:
    """Gradients of every epoch from dense matrices, and how many broadcasts took place."""
    data = small_graph()
    src, dst = data.edge_index
    dense = torch.zeros(data.num_nodes, data.num_nodes, dtype=torch.float64)
    dense.index_put_((dst, src), torch.ones(len(src), dtype=torch.float64), accumulate=True)
    same = part_of[:, None] == part_of[None, :]
    own, other = dense * same, dense * ~same
    tables: dict[int, Tensor] = {}
    found, broadcasts = [], 0

    def read(layer: int, x: Tensor) -> Tensor:
        """Rows as others read them; their gradient is that of x."""
        nonlocal broadcasts
        table = tables.setdefault(layer, torch.zeros_like(x))
        for part in range(WORLD):
            mine = part_of == part
            if (x[mine] - table[mine]).norm() > bound * table[mine].norm():
                table[mine] = x[mine].detach()
                broadcasts += 1
        return x + (table.clone() - x).detach()

    for _ in range(EPOCHS):
        first = model.first(data.x.double())
        second = model.second(torch.relu(own @ first + other @ read(0, first)))
        logits = own @ second + other @ read(1, second)
        loss = nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
        gradients = list(torch.autograd.grad(loss, list(model.parameters())))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p -= lr * g
        found.append(gradients)
    return found, broadcasts


def test_plain_autograd_on_dense_matrices_gives_the_same_gradients() -> None:
    data, strategy = small_graph(), Sancus(period=None, bound=0.3)
    job = make_job(strategy, GCN(hidden=8), data, world=WORLD, seed=SEED, epochs=EPOCHS)
    torch.manual_seed(1)
    model = Two().double()

    def body(comm: Communicator) -> list[dict[str, Tensor]]:
        shard = Shard.open(data, job.plan.part_of, comm).to(comm.device, torch.float64)
        task = make_task(data.task, data.num_classes)
        mine: Any = copy.deepcopy(model)  # no GNN: it has what an engine asks for
        engine = strategy.build(BuildContext(plan=job.plan, shard=shard, model=mine, task=task, comm=comm, seed=SEED))
        optimizer = job.optim.build(engine.named_parameters(), epochs=EPOCHS, layer_of=lambda name: 0)
        reports = [engine.train_epoch(epoch, optimizer, keep_gradient=True) for epoch in range(EPOCHS)]
        return [dict(report.gradient or {}) for report in reports]

    got = ThreadWorld(WORLD).run(body)[0]
    gradients, broadcasts = by_hand(model, job.plan.part_of, 0.1, 0.3)
    assert 2 * WORLD < broadcasts < 2 * WORLD * EPOCHS  # some are skipped, some are not
    for mine, expected in zip(got, gradients, strict=True):
        for gradient, (name, _) in zip(expected, model.named_parameters(), strict=True):
            assert relative_error(mine[name], gradient) < 1e-11


def test_the_exact_limit_is_cagnet_bit_for_bit() -> None:
    config, data = model_of("gat"), small_graph()
    limit = train_in_threads(Sancus().exact_limit(), config, data, world=WORLD)
    other = train_in_threads(Cagnet(), config, data, world=WORLD)
    assert (limit.losses, limit.traffic) == (other.losses, other.traffic)
    assert torch.equal(limit.logits, other.logits)


@pytest.mark.parametrize("codec", [Identity(), BFloat16(), Uniform(bits=4)], ids=str)
def test_bytes_by_period_are_those_of_cagnet_in_epochs_that_broadcast(codec: Any) -> None:
    config, data = model_of("gat"), small_graph()
    strategies = Sancus(codec=codec), Cagnet(codec=codec)
    mine, theirs = (train_in_threads(s, config, data, world=WORLD, epochs=3).traffic for s in strategies)
    assert (mine[0], mine[2]) == (theirs[0], theirs[2])
    assert mine[1] == {phase: n for phase, n in theirs[1].items() if phase != "forward"}


def test_bytes_by_bound_are_those_of_parts_that_broadcast_and_of_the_changes() -> None:
    data = small_graph()
    got = train_in_threads(BOUNDED, model_of("gcn", *STILL), data, world=WORLD, epochs=EPOCHS)
    nodes = make_job(BOUNDED, model_of("gcn", *STILL), data, world=WORLD).plan.statistics["nodes"]
    whole = 8 * (WORLD - 1) * sum(nodes) * (6 + 8 + 3)
    assert got.traffic[0]["forward"] == whole
    assert "assign" not in got.traffic[0]
    changes = 3 * 2 * (WORLD - 1) * WORLD * 4  # a ring sum of a number a rank, a fold
    sent = [epoch.get("forward", 0) for epoch in got.traffic]
    assert [epoch["assign"] for epoch in got.traffic[1:3]] == [changes] * 2
    assert 0 < sum(sent[1:]) < 3 * whole
    assert [epoch["backward"] for epoch in got.traffic] == [8 * (WORLD - 1) * sum(nodes) * (8 + 3)] * EPOCHS


def test_memory_is_that_of_the_copies() -> None:
    data = small_graph()
    for strategy in (Sancus(), BOUNDED):
        job = make_job(strategy, model_of("gcn"), data, world=WORLD, epochs=2)

        def body(comm: Communicator, strategy: Sancus = strategy, job: Any = job) -> tuple[int, int]:
            shard = Shard.open(data, job.plan.part_of, comm).to(comm.device, torch.float64)
            task, mine = make_task(data.task, data.num_classes), copy.deepcopy(job.model).double()
            engine = strategy.build(
                BuildContext(plan=job.plan, shard=shard, model=mine, task=task, comm=comm, seed=SEED)
            )
            optimizer = job.optim.build(engine.named_parameters(), epochs=2, layer_of=mine.layer_of)
            for epoch in range(2):
                engine.train_epoch(epoch, optimizer)
            return engine.live_bytes()["halo"], shard.num_inner

        for held, inner in ThreadWorld(WORLD).run(body):
            rows = data.num_nodes if strategy.bound is not None else data.num_nodes - inner
            assert held == 8 * rows * (6 + 8 + 3)


def test_processes_give_the_numbers_of_threads() -> None:
    data, config = small_graph(), model_of("gcn", *STILL)
    job = make_job(BOUNDED, config, data, world=2, epochs=3)
    threads = train_in_threads(BOUNDED, config, data, world=2, epochs=3)
    ranks = run_world("gloo", 2, job)
    assert ranks[0][0] == threads.losses
    assert [sum(r[4][e].get("forward", 0) for r in ranks) for e in range(3)] == [
        t.get("forward", 0) for t in threads.traffic
    ]


def test_a_change_is_relative_and_what_is_no_number_never_skips() -> None:
    rows = (torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0]]))
    assert float(change_of(rows, (torch.tensor([[3.0, 0.0]]), torch.tensor([[4.0]])))) == pytest.approx(32**0.5 / 5)
    zero = tuple(torch.zeros_like(t) for t in rows)
    assert float(change_of(rows, zero)) == float("inf")
    assert float(change_of(zero, zero)) == 0
    rule = Rule(None, 0.5)
    assert [rule.skips(99, change) for change in (0.5, 0.6, float("nan"))] == [True, False, False]
    assert [Rule(3, None).skips(age, 9.0) for age in (1, 2, 3)] == [True, True, False]


def test_what_cannot_run_is_refused_in_one_line() -> None:
    refused = {
        ("strategy.period=null",): r"strategy.period=null strategy.bound=null would read",
        ("strategy.period=0",): "period",
        ("strategy.bound=-1",): "bound",
        ("codec=adaptive",): "codec=adaptive weighs halo rows",
    }
    for overrides, line in refused.items():
        with pytest.raises(ConfigError, match=line) as caught:
            compose(["strategy=sancus", *overrides])
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"strategy\.period=5 in a run of 4 epochs: copies would"):
        Sancus(period=5).check(2, 2, 4)
    Sancus(period=5, bound=0.1).check(2, 2, 4)
