"""NCCL, simulated: groups are used by all their ranks first, messages run in orders that fit, one work a peer."""

import pytest
import torch

import comm_bodies
from gnnpar.comm import MessageTag, ThreadWorld, process
from gnnpar.config.compose import compose
from gnnpar.launch import launch
from gnnpar.verify.conformance import make_job, small_graph
from simulated_nccl import SimulatedNccl

MESSAGE_TAG = MessageTag(0, 0, 0, "forward")


def test_every_rank_uses_a_group_before_the_first_message(monkeypatch):
    """NCCL connects at a group's first use, for which it needs all ranks: one that has no rows for anybody hangs."""
    nccl = SimulatedNccl(3)

    def body(comm):
        if comm.rank < 2:
            out = {1 - comm.rank: torch.full((4,), comm.rank, dtype=torch.uint8)}
            return comm.exchange(out, {1 - comm.rank: 4}, MESSAGE_TAG)[1 - comm.rank].wait().tolist()
        return None

    assert nccl.run(body, monkeypatch) == [[1] * 4, [0] * 4, None]
    groups = {entry[1] for entry in nccl.log if isinstance(entry[2], tuple)}
    for group in groups:
        first = nccl.log.index(next(e for e in nccl.log if e[1] == group and isinstance(e[2], tuple)))
        warmed = {entry[0] for entry in nccl.log[:first] if entry[1:] == (group, "all")}
        assert warmed == {0, 1, 2}, f"group {group} was used by {warmed} only"
    assert all(entry[2] == torch.device("cpu") for entry in nccl.log if entry[1] == "init"), "the device is named"


def test_nccl_exchange_has_one_work_a_peer(monkeypatch):
    nccl = SimulatedNccl(4)
    assert all(nccl.run(comm_bodies.rows_arrive, monkeypatch))
    batches = [entry for entry in nccl.log if isinstance(entry[2], tuple)]
    for rank in range(4):
        mine = [operations for r, _, operations in batches if r == rank]
        assert all(len([kind for kind, _ in each if kind == "receive"]) <= 1 for each in mine)
        distances = [(peer - rank) % 4 for each in mine for kind, peer in each if kind == "send"]
        assert distances == sorted(distances), "ring distance by ring distance, on every rank"


def test_ranks_with_share_gpu_set_talk_by_sockets(monkeypatch):
    """NCCL takes two ranks with one GPU for one that was given twice, unless they are on hosts of their own."""
    seen = {}

    def body(comm):
        seen[comm.rank] = dict(process.os.environ)

    SimulatedNccl(1).run(body, monkeypatch)
    assert seen == {0: {}}
    monkeypatch.setenv("GNNPAR_SHARE_GPU", "1")
    SimulatedNccl(1).run(body, monkeypatch)
    assert seen[0]["NCCL_HOSTID"] == "rank0"
    assert (seen[0]["NCCL_SOCKET_IFNAME"], seen[0]["NCCL_IB_DISABLE"]) == ("lo", "1")


def test_more_ranks_than_gpus_are_refused_without_share_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    settings = compose(["strategy=graph_parallel", "world_size=2", "comm=nccl", "device=cuda"])
    with pytest.raises(ValueError, match="comm=nccl: 2 ranks on 1 GPUs; set world_size=1 or comm=threads"):
        launch.world_of(settings)
    monkeypatch.setenv("GNNPAR_SHARE_GPU", "1")
    assert launch.world_of(settings).device == "cuda"


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        ("graph_parallel", 3),
        ("sar", 3),
        ("gnnpipe strategy.chunks=4", 2),
        ("gnnpipe strategy.chunks=8 strategy.virtual=2 model.num_layers=4", 2),
        ("hybrid strategy.chunks=8 strategy.parts=2", 4),
    ],
)
def test_epochs_over_nccl_have_the_losses_of_threads(strategy, world, monkeypatch):
    """Stages post receives ahead of sends: on one group of NCCL they would wait for each other."""
    settings = compose([f"strategy={strategy.split()[0]}", "model=gcn", *strategy.split()[1:]])
    job = make_job(settings.strategy, settings.model, small_graph(), world=world)
    expected = ThreadWorld(world).run(job)[0][0]
    got = SimulatedNccl(world).run(job, monkeypatch)[0][0]
    assert got == pytest.approx(expected, rel=1e-12)


def test_simulated_nccl_hangs_on_orders_that_do_not_fit(monkeypatch):
    """A tool that never hangs would prove nothing: two ranks that both receive first, on one group, without a batch."""
    nccl = SimulatedNccl(2, patience=1.0)

    def body(comm):
        peer, buffer = 1 - comm.rank, torch.zeros(4, dtype=torch.uint8)
        receive = nccl.irecv(buffer, peer, comm.upward)
        nccl.isend(torch.ones(4, dtype=torch.uint8), peer, comm.upward)
        receive.wait()

    with pytest.raises(TimeoutError, match="it waits forever"):
        nccl.run(body, monkeypatch)
