"""What one method of the table does and no other: messages in flight, rules by bound, shares of columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from composing import configured
from conformance.methods import BOUNDED, HALF, STILL, WORLD, three
from engines import Rank, on_ranks
from gnnpar.codecs.codec import BFloat16, Drop
from gnnpar.codecs.uniform import Random, Uniform
from gnnpar.comm import RowLike
from gnnpar.folds.generic import Generic
from gnnpar.folds.max import Max
from gnnpar.folds.softmax import Softmax
from gnnpar.folds.sum import Sum
from gnnpar.parallel.bns.strategy import BoundarySampling
from gnnpar.parallel.cagnet.strategy import Cagnet
from gnnpar.parallel.feature.strategy import FeatureParallel
from gnnpar.parallel.feature.view import Slices, slices_of
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipegcn.strategy import PipeGCN
from gnnpar.parallel.sancus.strategy import Rule, change_of
from gnnpar.verify.conformance import make_job, relative_error, small_graph, train_in_threads


def test_late_messages_are_in_flight_between_epochs() -> None:
    """The engine waits for nothing that it does not read."""

    def in_flight(rank: Rank) -> list[int]:
        exchange, found = rank.engine._parts["late"], []
        begun: Callable[..., Any] = rank.engine._differentiate
        rank.engine._differentiate = lambda *given: (found.append(len(exchange._in_flight)), begun(*given))[1]
        rank.train(2)
        rank.engine.drain()
        return [*found, len(exchange._in_flight)]

    job = make_job(PipeGCN(), three("gcn"), small_graph(), world=2)
    assert on_ranks(job, in_flight) == [[0, 5, 0]] * 2  # three exchanges forward, two back


def test_sancus_bytes_by_bound_are_those_of_parts_that_broadcast_and_of_the_changes() -> None:
    data = small_graph()
    got = train_in_threads(BOUNDED, three("gcn", *STILL), data, world=WORLD, epochs=4)
    nodes = make_job(BOUNDED, three("gcn", *STILL), data, world=WORLD).plan.statistics["nodes"]
    whole = 8 * (WORLD - 1) * sum(nodes) * (6 + 8 + 3)
    assert got.traffic[0]["forward"] == whole
    assert "assign" not in got.traffic[0]
    changes = 3 * 2 * (WORLD - 1) * WORLD * 4  # a ring sum of a number a rank, a fold
    sent = [epoch.get("forward", 0) for epoch in got.traffic]
    assert [epoch["assign"] for epoch in got.traffic[1:3]] == [changes] * 2
    assert 0 < sum(sent[1:]) < 3 * whole
    assert [epoch["backward"] for epoch in got.traffic] == [8 * (WORLD - 1) * sum(nodes) * (8 + 3)] * 4


def test_a_change_is_relative_and_what_is_no_number_never_skips() -> None:
    rows = (torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0]]))
    assert float(change_of(rows, (torch.tensor([[3.0, 0.0]]), torch.tensor([[4.0]])))) == pytest.approx(32**0.5 / 5)
    zero = tuple(torch.zeros_like(t) for t in rows)
    assert float(change_of(rows, zero)) == float("inf")
    assert float(change_of(zero, zero)) == 0
    rule = Rule(None, 0.5)
    assert [rule.skips(99, change) for change in (0.5, 0.6, float("nan"))] == [True, False, False]
    assert [Rule(3, None).skips(age, 9.0) for age in (1, 2, 3)] == [True, True, False]


def test_bns_at_rate_zero_sends_nothing_in_training() -> None:
    got = train_in_threads(BoundarySampling(rate=0.0), three("sage"), small_graph(), world=WORLD)
    assert [set(epoch) for epoch in got.traffic] == [{"reduce"}] * 2


def test_bns_layer_0_reads_all_kept_features_and_they_are_sent_once() -> None:
    config, data = three("sage"), small_graph()
    got = train_in_threads(replace(HALF, rate=0.2), config, data, world=WORLD, epochs=3, first_layer="cached")
    halo = sum(make_job(HALF, config, data, world=WORLD).plan.statistics["halo_rows"])
    fetched = got.traffic[0]["forward"] - 8 * 6 * halo
    assert 0 < fetched < 0.5 * 8 * (8 + 3) * halo  # layers 1 and 2 send a sample
    assert got.traffic[2]["forward"] < 0.5 * 8 * (8 + 3) * halo
    exact = train_in_threads(GraphParallel(), replace(config, num_layers=1), data, world=WORLD)
    one = train_in_threads(HALF, replace(config, num_layers=1), data, world=WORLD, first_layer="cached")
    assert relative_error(one.logits, exact.logits) < 1e-9


def test_a_part_without_edges_to_another_still_sends_its_rows() -> None:
    """Bytes do not depend on edges, and blocks without edges fold."""
    data = small_graph(num_nodes=12, num_edges=3)
    got = train_in_threads(Cagnet(), three("gcn"), data, world=4)
    assert [epoch["forward"] for epoch in got.traffic] == [8 * 3 * 12 * (6 + 8 + 3)] * 2


def test_dropped_rows_are_not_broadcast() -> None:
    dropped = train_in_threads(Cagnet(codec=Drop()), three("gcn"), small_graph(), world=WORLD, epochs=1)
    assert set(dropped.traffic[0]) == {"reduce"}


def model_of(name: str, *overrides: str) -> Any:
    return configured("model", name, "model.hidden=8", "model.num_layers=3", *overrides)


def like(*shape: int) -> RowLike:
    return RowLike(shape, torch.float64, torch.device("cpu"))


def test_what_is_divided_follows_from_the_fold() -> None:
    attention = (like(4, 6), like(4))
    assert slices_of(Sum(), (like(3, 5),), 0, 2, 0) == Slices("columns", 15, 2)
    assert slices_of(Max(), (like(7),), 0, 2, 0).how == "columns"
    assert slices_of(Softmax(), attention, 1, 4, 0) == Slices("heads", 4, 4)
    assert slices_of(Softmax(), attention, 1, 5, 0) == Slices("values", 6, 5, frozenset({1, 2}))
    with_dropout = Softmax(dropout=configured_dropout())
    assert slices_of(with_dropout, attention, 1, 2, 0).how == "values"
    heads = Generic(value=lambda s, d, e, w: s[0], by_heads=True)
    assert slices_of(heads, (like(2, 6),), 1, 4, 0) == Slices("heads", 2, 4)
    with pytest.raises(ValueError, match="but Generic of layer 2 separates by neither: use strategy=graph_parallel"):
        slices_of(Generic(value=lambda s, d, e, w: s[0]), (like(6),), 0, 2, 2)


def configured_dropout() -> Any:
    from gnnpar.folds.aggregator import EdgeDropout

    return EdgeDropout(0.5, 1)


def part_sizes(model: str = "gcn") -> list[int]:
    plan = make_job(FeatureParallel(), model_of(model), small_graph(), world=WORLD).plan
    return torch.bincount(plan.part_of).tolist()


def shares(width: int, ranks: int, sizes: list[int]) -> list[int]:
    """Numbers that each rank receives of the rows of others."""
    mine = [width // ranks + (q < width % ranks) for q in range(ranks)]
    return [(sum(sizes) - n) * w for n, w in zip(sizes, mine, strict=True)]


def test_bytes_are_those_of_the_formula_whatever_the_cut() -> None:
    sizes = part_sizes()
    got = train_in_threads(
        FeatureParallel(), model_of("gcn", "model.order=transform_first"), small_graph(), world=WORLD
    )
    expected = 2 * 8 * sum(sum(shares(w, WORLD, sizes)) for w in (8, 8, 3))
    for epoch in got.traffic:
        assert epoch["forward"] == epoch["backward"] == expected
    # 4 heads on 3 ranks: features, scores of sources and of destinations, results; then one head of 3 values
    got = train_in_threads(FeatureParallel(), model_of("gat", "model.heads=4"), small_graph(), world=WORLD)
    heads = sum(shares(4, WORLD, sizes))
    last = 2 * sum(shares(3, WORLD, sizes)) + 2 * sum(sum(sizes) - n for n in sizes)
    expected = 8 * (2 * (2 + 1 + 1 + 2) * heads + last)
    for epoch in got.traffic:
        assert epoch["forward"] == epoch["backward"] == expected


@pytest.mark.quick(2)
@pytest.mark.parametrize("codec", [BFloat16(), Uniform(bits=8), Random(menu=(4, 8), period=1), Drop()], ids=str)
@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_codecs_change_what_travels(model: str, codec: Any) -> None:
    config, data = configured("model", model, "model.hidden=96", "model.num_layers=2"), small_graph()
    exact = train_in_threads(FeatureParallel(), config, data, world=2)
    got = train_in_threads(FeatureParallel(codec=codec), config, data, world=2)
    assert torch.isfinite(got.logits).all()
    assert got.traffic[0].get("forward", 0) < exact.traffic[0]["forward"]
    mine, expected = (torch.cat([g.flatten() for g in run.gradients[0].values()]) for run in (got, exact))
    error = float((mine - expected).norm() / expected.norm())
    assert (0.5 if isinstance(codec, Drop) else 1e-4) < error < (10 if isinstance(codec, Drop) else 0.3)
