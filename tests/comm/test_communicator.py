"""One suite for every communicator: exchanges, collectives, slices of the grid, accounting."""

import pytest
import torch

from comm_bodies import all_to_all, collectives, deaf_slice, grid, large_two_way, late_sender, sent_buffers, sizes
from gnnpar.comm import Mesh, ThreadWorld
from worlds import run_world

KINDS = ["threads", "gloo"]


@pytest.mark.parametrize(("kind", "size"), [("threads", 1), ("threads", 2), ("threads", 4), ("gloo", 1), ("gloo", 3)])
def test_exchange_delivers_and_counts(kind, size):
    results = run_world(kind, size, all_to_all)
    for rank, result in enumerate(results):
        assert result["wrong"] == []
        sent = sum(sizes(rank, p) for p in range(size) if p != rank)
        traffic = result["traffic"]
        assert traffic.bytes.get("forward", 0) == 3 * sent
        assert traffic.metadata == 0 + 1 + 2
        assert traffic.messages == 3 * sum(sizes(rank, p) > 0 for p in range(size) if p != rank)
        assert result["again"].bytes == {}, "a drained ledger starts afresh"


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_large_messages_travel_both_ways_at_once(kind):
    assert run_world(kind, 2, large_two_way) == [True, True]


def test_sent_buffers_are_released():
    assert run_world("gloo", 2, sent_buffers)[0] == [4, 0, 0]


@pytest.mark.parametrize(("kind", "size"), [("threads", 1), ("threads", 3), ("gloo", 2)])
def test_collectives(kind, size):
    results = run_world(kind, size, collectives)
    for rank, result in enumerate(results):
        assert result["sum"] == [size, 10.0 * size * (size + 1) / 2]
        assert result["mine"] == [1.0, 10.0 * (rank + 1)], "all_reduce leaves its input alone"
        assert result["broadcast"] == {"from": size - 1}
        assert result["scatter"] == f"for {rank}"
        assert result["gather"] == ([r**2 for r in range(size)] if rank == 0 else None)
    moved = sum(r["traffic"].bytes["reduce"] for r in results)
    assert moved == 2 * (size - 1) * 16, "a ring moves 2 (P - 1) / P of the tensor per rank"


@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_the_grid(kind):
    results = run_world(kind, 4, grid)
    assert [r["part"] for r in results] == [3.0, 3.0, 12.0, 12.0]
    assert [r["stage"] for r in results] == [5.0, 10.0, 5.0, 10.0]
    assert [r["place"] for r in results] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(r["message"] for r in results)


def test_slice_has_the_timeout_of_its_world():
    assert run_world("gloo", 2, deaf_slice) == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_waiting_is_split_into_wire_and_skew(kind):
    results = run_world(kind, 2, late_sender)
    traffic, phases = results[1]["skew"]
    assert traffic.exposed_skew > 0.2, "the sender was late"
    assert traffic.exposed_wire < 0.1
    assert phases["exposed"] == pytest.approx(traffic.exposed_skew + traffic.exposed_wire, abs=5e-3)
    traffic, _ = results[1]["hidden"]
    assert traffic.exposed_skew + traffic.exposed_wire < 0.1, "it had arrived before anybody waited"


def test_failing_thread_releases_the_others():
    def body(comm):
        if comm.rank == 1:
            raise KeyError("mine")
        comm.all_reduce(torch.zeros(1))

    with pytest.raises(KeyError, match="mine") as caught:
        ThreadWorld(3).run(body)
    assert caught.value.gnnpar_rank == 1  # type: ignore[attr-defined]


def test_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"6 ranks cannot form stages=2 x parts=2 \(needs 4\)"):
        Mesh.grid(6, stages=2, parts=2)
    mesh = Mesh.grid(6, stages=2)
    assert mesh.groups("part") == [(0, 1, 2), (3, 4, 5)]
    assert mesh.groups("stage") == [(0, 3), (1, 4), (2, 5)]
