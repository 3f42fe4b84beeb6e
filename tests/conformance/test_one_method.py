"""What one method of the table does and no other: messages in flight, rules by bound, shared edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.methods import BOUNDED, HALF, NODES, STILL, WORLD, three
from engines import Rank, on_ranks
from gnnpar.codecs.codec import Drop
from gnnpar.parallel.bns.strategy import BoundarySampling
from gnnpar.parallel.cagnet.strategy import Cagnet
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


def test_layer_0_is_sent_once_where_it_is_kept() -> None:
    got = train_in_threads(Cagnet(), three("sage"), small_graph(), world=WORLD, epochs=2, first_layer="cached")
    first, second = (epoch["forward"] for epoch in got.traffic)
    assert first - second == 8 * (WORLD - 1) * NODES * 6


def test_dropped_rows_are_not_broadcast() -> None:
    dropped = train_in_threads(Cagnet(codec=Drop()), three("gcn"), small_graph(), world=WORLD, epochs=1)
    assert set(dropped.traffic[0]) == {"reduce"}
