"""CAGNET: all rows of all parts, block by block; docs/strategies/cagnet.md is the specification."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from composing import configured
from gnnpar.codecs.codec import BFloat16, Drop, Identity
from gnnpar.codecs.uniform import Random, Uniform
from gnnpar.comm import Communicator, ThreadWorld
from gnnpar.config.compose import compose
from gnnpar.data.tasks import make_task
from gnnpar.parallel.broadcast import BroadcastGraph
from gnnpar.parallel.cagnet.strategy import Cagnet
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.sketch import sketch
from gnnpar.partition.shard import Shard
from gnnpar.settings import ConfigError
from gnnpar.verify.conformance import check, make_job, small_graph, train_in_threads
from graphs import with_weights
from worlds import run_world

WORLD, SEED = 3, 3


def model_of(name: str) -> Any:
    return configured("model", name, "model.hidden=8", "model.num_layers=3")


@pytest.mark.parametrize("prefetch", [0, 2, 9])
def test_any_number_of_parts_ahead_is_exact(prefetch: int) -> None:
    (case,) = check(Cagnet(prefetch=prefetch), {"gat": model_of("gat")}, worlds=(5,))
    assert case.passed, case


def test_a_gradient_that_does_not_come_home_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    post = BroadcastGraph.post_gradients

    def zeros(self: BroadcastGraph, part: int, grads: Any, like: Any, site: Any) -> Any:
        return post(self, part, tuple(torch.zeros_like(g) for g in grads), like, site)

    monkeypatch.setattr(BroadcastGraph, "post_gradients", zeros)
    (case,) = check(Cagnet(), {"gcn": model_of("gcn")}, worlds=(WORLD,))
    assert not case.passed


@pytest.mark.parametrize("codec", [Identity(), BFloat16(), Uniform(bits=4), Random(period=1)], ids=str)
def test_bytes_are_those_of_all_rows_to_all_others(codec: Any) -> None:
    data, world = small_graph(), 4
    config = configured("model", "gcn", "model.hidden=32", "model.num_layers=3", "model.order=transform_first")
    got = train_in_threads(Cagnet(codec=codec), config, data, world=world, dtype=torch.float32)
    rows = (world - 1) * data.num_nodes
    expected = sum(codec.price(rows, [w]).nbytes for w in (32, 32, 3))
    for epoch in got.traffic:
        for phase in ("forward", "backward"):
            if isinstance(codec, Random):  # its price is a mean
                assert 0.5 * expected < epoch[phase] < 1.5 * expected
            else:
                assert epoch[phase] == expected


def test_a_part_without_edges_to_another_still_sends_its_rows() -> None:
    """Bytes do not depend on edges, and blocks without edges fold."""
    data = small_graph(num_nodes=12, num_edges=3)
    (case,) = check(Cagnet(), {"gat": model_of("gat")}, worlds=(4,), dataset=data)
    assert case.passed, case
    got = train_in_threads(Cagnet(), model_of("gcn"), data, world=4)
    assert [epoch["forward"] for epoch in got.traffic] == [8 * 3 * 12 * (6 + 8 + 3)] * 2


def test_only_what_backward_reads_again_is_held() -> None:
    data = small_graph()

    def held(model: str) -> list[tuple[int, int, int]]:
        job = make_job(Cagnet(), model_of(model), data, world=WORLD)

        def body(comm: Communicator) -> tuple[int, int, int]:
            shard = Shard.open(data, job.plan.part_of, comm).to(comm.device, torch.float64)
            task, mine = make_task(data.task, data.num_classes), copy.deepcopy(job.model).double()
            engine = Cagnet().build(
                BuildContext(plan=job.plan, shard=shard, model=mine, task=task, comm=comm, seed=SEED)
            )
            optimizer = job.optim.build(engine.named_parameters(), epochs=1, layer_of=mine.layer_of)
            engine.train_epoch(0, optimizer)
            width = sum(each.width for use in sketch(mine, shard) for each in use.src)
            return engine.live_bytes()["halo"], data.num_nodes - shard.num_inner, width

        return ThreadWorld(WORLD).run(body)

    assert [nbytes for nbytes, _, _ in held("gcn")] == [0] * WORLD
    for nbytes, others, width in held("gat"):
        assert nbytes == 8 * others * width > 0


def test_layer_0_is_sent_once_where_it_is_kept() -> None:
    got = train_in_threads(Cagnet(), model_of("sage"), small_graph(), world=WORLD, epochs=2, first_layer="cached")
    first, second = (epoch["forward"] for epoch in got.traffic)
    assert first - second == 8 * (WORLD - 1) * 60 * 6


def test_processes_give_the_numbers_of_threads() -> None:
    data = small_graph()
    job = make_job(Cagnet(), model_of("gat"), data, world=3)
    threads = train_in_threads(Cagnet(), model_of("gat"), data, world=3)
    ranks = run_world("gloo", 3, job)
    assert ranks[0][0] == threads.losses
    assert [sum(rank[4][e]["forward"] for rank in ranks) for e in range(2)] == [t["forward"] for t in threads.traffic]


def test_what_cannot_run_is_refused_in_one_line() -> None:
    for override, line in {
        "codec=adaptive": "codec=adaptive weighs halo rows",
        "strategy.prefetch=-1": "prefetch",
    }.items():
        with pytest.raises(ConfigError, match=line) as caught:
            compose(["strategy=cagnet", override])
        assert "\n" not in str(caught.value)
    dropped = train_in_threads(Cagnet(codec=Drop()), model_of("gcn"), small_graph(), world=WORLD, epochs=1)
    assert set(dropped.traffic[0]) == {"reduce"}


@pytest.mark.parametrize(("world", "copies"), [(4, 2), (8, 2), (9, 3)])
def test_shared_edges_are_exact(world: int, copies: int) -> None:
    (case,) = check(Cagnet(replication=copies), {"gcn": model_of("gcn")}, worlds=(world,))
    assert case.passed, case


@pytest.mark.parametrize("model", ["sage", "gin", "gcnii"])
def test_every_model_of_sums_is_exact(model: str) -> None:
    strategy = Cagnet(replication=2, prefetch=0)
    (case,) = check(strategy, {model: model_of(model)}, worlds=(4,), dataset=with_weights(small_graph()))
    assert case.passed, case


@pytest.mark.parametrize("codec", [Identity(), BFloat16(), Uniform(bits=4)], ids=str)
def test_bytes_of_shared_edges_are_those_of_rows_to_a_column_and_of_partial_sums(codec: Any) -> None:
    data, world, copies, strategy = small_graph(), 8, 2, Cagnet(replication=2, codec=codec)
    config = configured("model", "gcn", "model.hidden=32", "model.num_layers=3", "model.order=transform_first")
    nodes = make_job(strategy, config, data, world=world).plan.statistics["nodes"]
    readers = [sum(p % copies == q // (world // copies) and p != q for p in range(world)) for q in range(world)]
    assert sorted(set(readers)) == [world // copies - 1, world // copies]
    rows = sum(n * r for n, r in zip(nodes, readers, strict=True)) + (copies - 1) * data.num_nodes
    expected = sum(codec.price(rows, [w]).nbytes for w in (32, 32, 3))
    got = train_in_threads(strategy, config, data, world=world, dtype=torch.float32)
    assert [(epoch["forward"], epoch["backward"]) for epoch in got.traffic] == [(expected, expected)] * 2
    assert rows < (world - 1) * data.num_nodes


def test_shared_edges_keep_layer_0_and_processes_give_the_numbers_of_threads() -> None:
    data, strategy = small_graph(), Cagnet(replication=2)
    (case,) = check(strategy, {"gcn": model_of("gcn")}, worlds=(4,), first_layer="cached")
    assert case.passed, case
    job = make_job(strategy, model_of("gcn"), data, world=4)
    threads = train_in_threads(strategy, model_of("gcn"), data, world=4)
    ranks = run_world("gloo", 4, job)
    assert ranks[0][0] == pytest.approx(threads.losses, rel=1e-14)  # gloo adds four losses in another order
    assert [sum(rank[4][e]["forward"] for rank in ranks) for e in range(2)] == [t["forward"] for t in threads.traffic]


def test_a_replication_that_cannot_be_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"strategy\.replication=2 on 6 ranks: its square, 4, does not divide 6; set"):
        Cagnet(replication=2).check(6, 2, 10)
    (case,) = check(Cagnet(replication=2), {"gat": model_of("gat")}, worlds=(4,))
    assert case.error is not None
    assert "strategy.replication=2 adds up partial sums of ranks, but Softmax of layer 0 is no sum" in case.error
