"""Messages that cross an epoch, checkpointed in between."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch

from engines import open_rank
from gnnpar.codecs.codec import CodecConfig, Identity
from gnnpar.codecs.uniform import Random, Uniform
from gnnpar.comm import CodedExchange, Communicator, Incoming, MessageTag, Outgoing, RowLike, ThreadWorld
from gnnpar.models.gcn import GCN
from gnnpar.parallel.pipegcn.strategy import PipeGCN
from gnnpar.partition.shard import Shard
from gnnpar.training.optim import SGD
from gnnpar.verify.conformance import Job, make_job, small_graph


def epochs_of(comm: Communicator, job: Job, stops: bool, drains: bool) -> list[Any]:
    """Of a run that stops after epoch 3, or drains after each."""
    rank, seen = open_rank(job, comm), []
    comm.ledger.drain()
    for epoch in range(5):
        report = rank.engine.train_epoch(epoch, rank.optimizer, keep_gradient=True)
        traffic = comm.ledger.drain()
        seen.append((report.loss, report.gradient, traffic.bytes, traffic.metadata))
        if drains or (stops and epoch == 3):
            rank.engine.drain()
        if stops and epoch == 3:
            held, state = rank.engine.live_bytes()["halo"], copy.deepcopy(rank.engine.state_dict())
            rank = open_rank(job, comm)
            for each in range(epoch + 1):
                rank.engine._codecs[0].begin_epoch(each)
            rank.engine.load_state_dict(state)
            assert held > 0 and rank.engine.live_bytes()["halo"] == held
            comm.ledger.drain()
    return seen


@pytest.mark.quick(1)
@pytest.mark.parametrize("config", [Identity(), Uniform(bits=4), Random(period=2)], ids=["identity", "4 bits", "drawn"])
def test_a_run_that_stops_with_messages_in_flight_goes_on_bit_for_bit(config: CodecConfig) -> None:
    job = make_job(PipeGCN(codec=config), GCN(hidden=8), small_graph(), world=3, epochs=5, optim=SGD(lr=0.1))
    whole, *others = (
        ThreadWorld(3).run(partial(epochs_of, job=job, stops=stops, drains=drains))
        for stops, drains in ((False, False), (True, False), (False, True))
    )
    for other in others:
        for mine, theirs in zip(whole, other, strict=True):
            for (loss, gradient, *sent), (loss2, gradient2, *sent2) in zip(mine, theirs, strict=True):
                assert (loss, sent) == (loss2, sent2)
                assert all(torch.equal(gradient[name], g) for name, g in gradient2.items())
    assert whole[0][0][0] != whole[0][1][0]


def test_a_state_with_messages_in_flight_is_refused() -> None:
    def body(comm: Communicator) -> str:
        data = small_graph() if comm.rank == 0 else None
        lists = Shard.open(data, torch.arange(60) % 2, comm).row_lists
        exchange = CodedExchange(comm, Identity().build(lists, comm, 0))
        rows, tag, peer = (torch.ones(2, 3),), MessageTag(0, 0, 0, "forward"), 1 - comm.rank
        posted = exchange.post({peer: Outgoing(rows)}, {peer: Incoming(2)}, RowLike.of(rows), tag)
        exchange.store("late", posted)
        with pytest.raises(ValueError, match="a message is stored under late already"):
            exchange.store("late", posted)
        with pytest.raises(RuntimeError, match="messages are in flight: drain the exchange"):
            exchange.state_dict()
        exchange.drain()
        assert exchange.nbytes == 24
        again = CodedExchange(comm, exchange.codec)
        again.load_state_dict(exchange.state_dict())
        restored = again.retrieve("late")
        assert restored is not None and again.retrieve("late") is None
        assert torch.equal(again.take(restored, peer)[0], rows[0])
        return "done"

    assert ThreadWorld(2).run(body) == ["done", "done"]
