"""DIGEST: halo rows of the last refresh; docs/strategies/digest.md is the specification."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composing import configured
from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import BFloat16, Identity
from gnnpar.codecs.uniform import Random, Uniform
from gnnpar.comm import Communicator, ThreadWorld
from gnnpar.config.compose import compose
from gnnpar.data.tasks import make_task
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph
from gnnpar.models.gcn import GCN
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.digest.strategy import Digest
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.stale import StaleExchange
from gnnpar.partition.shard import Shard
from gnnpar.settings import ConfigError
from gnnpar.verify.conformance import check, make_job, relative_error, small_graph, train_in_threads

WORLD, SEED, EPOCHS = 3, 3, 4


def model_of(name: str) -> Any:
    return configured("model", name, "model.hidden=8", "model.num_layers=3")


@pytest.mark.parametrize(
    "strategy",
    [Digest(period=1), Digest(period=3, overlap="central_marginal"), Digest(period=2, gradients=True, overlap="none")],
    ids=["every epoch", "every third", "gradients"],
)
def test_other_settings_equal_the_oracle(strategy: Digest) -> None:
    case = check(strategy, {"gat": model_of("gat")}, worlds=(WORLD,))[-1]
    assert case.reference == "its oracle"
    assert case.passed, case


def test_the_oracle_notices_a_table_that_is_refreshed_late(monkeypatch: pytest.MonkeyPatch) -> None:
    take, first = StaleExchange.take, dict[Any, Any]()

    def never_refreshed(self: StaleExchange, posted: Any, peer: int) -> Any:
        rows, site = take(self, posted, peer), posted.site
        return first.setdefault((self.comm.rank, peer, site.layer, site.call), rows)

    monkeypatch.setattr(StaleExchange, "take", never_refreshed)
    case = check(Digest(), {"gcn": GCN(hidden=8)}, worlds=(WORLD,))[-1]
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


def by_hand(model: Two, part_of: Tensor, lr: float, period: int) -> list[list[Tensor]]:
    """Gradients of every epoch from dense matrices."""
    data = small_graph()
    src, dst = data.edge_index
    dense = torch.zeros(data.num_nodes, data.num_nodes, dtype=torch.float64)
    dense.index_put_((dst, src), torch.ones(len(src), dtype=torch.float64), accumulate=True)
    same = part_of[:, None] == part_of[None, :]
    own, other = dense * same, dense * ~same
    first_table = second_table = torch.zeros(0)
    found = []
    for epoch in range(EPOCHS):
        first = model.first(data.x.double())
        if epoch % period == 0:
            first_table = first.detach()
        second = model.second(torch.relu(own @ first + other @ first_table))
        if epoch % period == 0:
            second_table = second.detach()
        logits = own @ second + other @ second_table
        loss = nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
        gradients = list(torch.autograd.grad(loss, list(model.parameters())))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p -= lr * g
        found.append(gradients)
    return found


def test_plain_autograd_on_dense_matrices_gives_the_same_gradients() -> None:
    data, strategy = small_graph(), Digest(period=3)
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
    for mine, expected in zip(got, by_hand(model, job.plan.part_of, 0.1, 3), strict=True):
        for gradient, (name, _) in zip(expected, model.named_parameters(), strict=True):
            assert relative_error(mine[name], gradient) < 1e-11


def test_the_exact_limit_is_graph_parallelism_bit_for_bit() -> None:
    config, data = model_of("gat"), small_graph()
    limit = train_in_threads(Digest().exact_limit(), config, data, world=WORLD)
    other = train_in_threads(GraphParallel(), config, data, world=WORLD)
    assert (limit.losses, limit.traffic) == (other.losses, other.traffic)
    assert torch.equal(limit.logits, other.logits)


@pytest.mark.parametrize(
    ("codec", "gradients"),
    [
        (Identity(), False),
        (BFloat16(), True),
        (Uniform(bits=4), False),
        (Random(period=1), True),
        *(pytest.param(codec, False, marks=pytest.mark.slow) for codec in (BFloat16(), Random(period=1))),
        *(pytest.param(codec, True, marks=pytest.mark.slow) for codec in (Identity(), Uniform(bits=4))),
    ],
    ids=str,
)
def test_bytes_are_those_of_graph_parallelism_in_epochs_that_refresh(codec: Any, gradients: bool) -> None:
    strategies = Digest(period=2, gradients=gradients, codec=codec), GraphParallel(codec=codec)
    config, data = model_of("gat"), small_graph()
    mine, theirs = (train_in_threads(s, config, data, world=WORLD, epochs=3).traffic for s in strategies)
    kept = {"forward", "reduce"} | ({"backward"} if gradients else set())
    for epoch in (0, 2):
        assert mine[epoch] == {phase: n for phase, n in theirs[epoch].items() if phase in kept}
    assert mine[1] == {"reduce": theirs[1]["reduce"]}


def test_memory_is_that_of_the_table() -> None:
    strategy, config, data = Digest(), model_of("gcn"), small_graph()
    job = make_job(strategy, config, data, world=WORLD, epochs=2)

    def body(comm: Communicator) -> tuple[int, int]:
        shard = Shard.open(data, job.plan.part_of, comm).to(comm.device, torch.float64)
        task, mine = make_task(data.task, data.num_classes), copy.deepcopy(job.model).double()
        engine = strategy.build(BuildContext(plan=job.plan, shard=shard, model=mine, task=task, comm=comm, seed=SEED))
        optimizer = job.optim.build(engine.named_parameters(), epochs=2, layer_of=mine.layer_of)
        for epoch in range(2):
            engine.train_epoch(epoch, optimizer)
        return engine.live_bytes()["halo"], sum(shard.num_halo.values())

    for held, halo in ThreadWorld(WORLD).run(body):
        assert held == 8 * halo * (6 + 8 + 3)


def test_what_cannot_run_is_refused_in_one_line() -> None:
    for overrides, line in {
        ("strategy.period=0",): "period",
        ("codec=adaptive",): "codec=adaptive chooses bits",
    }.items():
        with pytest.raises(ConfigError, match=line) as caught:
            compose(["strategy=digest", *overrides])
        assert "\n" not in str(caught.value)
    assert Digest(period=1, gradients=True, codec=Adaptive()).exactness == {"quantized"}
    with pytest.raises(ValueError, match=r"strategy\.period=5 in a run of 4 epochs: halo rows would"):
        Digest(period=5).check(2, 2, 4)
