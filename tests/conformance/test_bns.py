"""BNS-GCN: what a sample of the boundary rows computes and sends; docs/strategies/bns.md is the specification."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoints import hashes, rows, train
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
from gnnpar.parallel.bns.sample import kept
from gnnpar.parallel.bns.strategy import BoundarySampling
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.partition.shard import Shard
from gnnpar.settings import ConfigError
from gnnpar.verify.conformance import check, make_job, relative_error, small_graph, train_in_threads

WORLD, SEED = 3, 3
HALF = BoundarySampling(rate=0.5)


def model_of(name: str) -> Any:
    return configured("model", name, "model.hidden=8", "model.num_layers=3")


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_another_rate_equals_the_oracle(model: str) -> None:
    case = check(HALF, {model: model_of(model)}, worlds=(4,))[-1]
    assert case.reference == "its oracle"
    assert case.passed, case


def test_the_oracle_notices_a_weight_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from gnnpar.parallel.bns.sample import Reweighted

    monkeypatch.setattr(Reweighted, "_weighted", lambda self, rows: rows)
    case = check(HALF, {"gcn": GCN(hidden=8)}, worlds=(3,))[-1]
    assert case.reference == "its oracle"
    assert not case.passed


def masks_of(part_of: Tensor, rate: float, epoch: int) -> Tensor:
    """[N, N] by destination and source: how often an edge counts."""
    ids = torch.arange(len(part_of))
    drawn = torch.stack([kept(ids, rate=rate, seed=SEED, epoch=epoch, reader=p) for p in range(WORLD)])
    same = part_of[:, None] == part_of[None, :]
    return torch.where(same, 1.0, drawn[part_of].double() / rate)


def test_plain_autograd_on_a_dense_matrix_gives_the_same_gradient() -> None:
    """No view, fold or kernel of gnnpar: two layers of sums, by hand."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)

        def forward(self, g: Graph, x: Tensor) -> Tensor:
            h = torch.relu(g.at(0).aggregate(Sum(), (self.first(x),)))
            return g.at(1).aggregate(Sum(), (self.second(h),))

    data = small_graph()
    job = make_job(HALF, GCN(hidden=8), data, world=WORLD, seed=SEED)
    torch.manual_seed(1)
    model = Two().double()

    def body(comm: Communicator) -> dict[str, Tensor]:
        shard = Shard.open(data, job.plan.part_of, comm).to(comm.device, torch.float64)
        task = make_task(data.task, data.num_classes)
        mine: Any = copy.deepcopy(model)  # no GNN: it has what an engine asks for
        engine = HALF.build(BuildContext(plan=job.plan, shard=shard, model=mine, task=task, comm=comm, seed=SEED))
        optimizer = job.optim.build(engine.named_parameters(), epochs=4, layer_of=lambda name: 0)
        gradient = engine.train_epoch(2, optimizer, keep_gradient=True).gradient
        assert gradient is not None
        return gradient

    got = ThreadWorld(WORLD).run(body)[0]
    src, dst = data.edge_index
    dense = torch.zeros(data.num_nodes, data.num_nodes, dtype=torch.float64)
    dense.index_put_((dst, src), torch.ones(len(src), dtype=torch.float64), accumulate=True)
    dense = dense * masks_of(job.plan.part_of, HALF.rate, epoch=2)
    logits = dense @ model.second(torch.relu(dense @ model.first(data.x.double())))
    loss = nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
    for (name, _), expected in zip(
        model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        assert relative_error(got[name], expected) < 1e-12


def test_sums_are_unbiased_over_epochs() -> None:
    part_of = torch.arange(60) % WORLD
    mean = torch.stack([masks_of(part_of, 0.3, epoch) for epoch in range(2000)]).mean(0)
    # the standard error of an entry is sqrt(0.7 / 0.3 / 2000) = 0.034; 3600 entries
    assert (mean - 1).abs().max() < 5 * 0.034


@pytest.mark.parametrize("overlap", ["none", "edges", "central_marginal"])
def test_rate_one_is_graph_parallelism_bit_for_bit(overlap: str) -> None:
    config, data = model_of("gat"), small_graph()
    one = train_in_threads(BoundarySampling(rate=1.0, overlap=overlap), config, data, world=WORLD)  # type: ignore[arg-type]
    other = train_in_threads(GraphParallel(overlap=overlap), config, data, world=WORLD)  # type: ignore[arg-type]
    assert (one.losses, one.traffic) == (other.losses, other.traffic)
    assert torch.equal(one.logits, other.logits)


def test_rate_zero_sends_nothing_in_training() -> None:
    got = train_in_threads(BoundarySampling(rate=0.0), model_of("sage"), small_graph(), world=WORLD)
    assert [set(epoch) for epoch in got.traffic] == [{"reduce"}] * 2


@pytest.mark.parametrize("codec", [Identity(), BFloat16(), Uniform(bits=4), Random(period=1)], ids=str)
def test_bytes_are_those_of_the_rows_that_were_drawn(codec: object) -> None:
    strategy, data = BoundarySampling(rate=0.4, codec=codec), small_graph()  # type: ignore[arg-type]
    config = configured("model", "gcn", "model.hidden=32", "model.num_layers=3", "model.order=transform_first")
    job = make_job(strategy, config, data, world=WORLD, dtype=torch.float32)
    got = train_in_threads(strategy, config, data, world=WORLD, dtype=torch.float32)
    part_of, (src, dst) = job.plan.part_of, data.edge_index
    counts = []
    for epoch in range(2):
        num = 0
        for p in range(WORLD):
            read = torch.unique(src[(part_of[dst] == p) & (part_of[src] != p)])
            num += int(kept(read, rate=0.4, seed=SEED, epoch=epoch, reader=p).sum())
        counts.append(num)
        price = sum(codec.price(num, [w]).nbytes for w in (32, 32, 3))  # type: ignore[attr-defined]
        if not isinstance(codec, Random):  # its price is a mean
            assert got.traffic[epoch]["forward"] == got.traffic[epoch]["backward"] == price
        else:
            assert 0.5 * price < got.traffic[epoch]["forward"] < 1.5 * price
    assert counts[0] != counts[1]


def test_layer_0_reads_all_kept_features_and_they_are_sent_once() -> None:
    config, data = model_of("sage"), small_graph()
    got = train_in_threads(replace(HALF, rate=0.2), config, data, world=WORLD, epochs=3, first_layer="cached")
    halo = sum(make_job(HALF, config, data, world=WORLD).plan.statistics["halo_rows"])
    fetched = got.traffic[0]["forward"] - 8 * 6 * halo
    assert 0 < fetched < 0.5 * 8 * (8 + 3) * halo  # layers 1 and 2 send a sample
    assert got.traffic[2]["forward"] < 0.5 * 8 * (8 + 3) * halo
    exact = train_in_threads(GraphParallel(), replace(config, num_layers=1), data, world=WORLD)
    one = train_in_threads(HALF, replace(config, num_layers=1), data, world=WORLD, first_layer="cached")
    assert relative_error(one.logits, exact.logits) < 1e-9


def test_what_cannot_run_is_refused_in_one_line() -> None:
    for rate in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="rate") as caught:
            compose(["strategy=bns", f"strategy.rate={rate}"])
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="codec=adaptive chooses bits"):
        BoundarySampling(codec=Adaptive())
    assert BoundarySampling(rate=1.0, codec=Adaptive()).exactness == {"quantized"}


def test_a_resumed_run_draws_the_same_samples(tmp_path: Path) -> None:
    common = ("strategy=bns", "strategy.rate=0.5", "codec=random", "codec.period=2", "model=gat")
    assert train(tmp_path / "whole", *common, "epochs=4").exit_code == 0
    assert train(tmp_path / "parted", *common, "epochs=2").exit_code == 0
    assert train(tmp_path / "parted", "resume=auto", *common, "epochs=4").exit_code == 0
    assert hashes(tmp_path / "parted") == hashes(tmp_path / "whole")
    assert rows(tmp_path / "parted") == rows(tmp_path / "whole")
