"""Messages that cross an epoch: a strategy that reads the halo rows of the epoch before, checkpointed in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnpar.codecs.codec import CodecConfig, Identity
from gnnpar.codecs.uniform import Random, Uniform
from gnnpar.comm import CodedExchange, Communicator, Incoming, MessageTag, Outgoing, RowLike, ThreadWorld
from gnnpar.data.tasks import make_task
from gnnpar.folds.block import Rows
from gnnpar.models.gcn import GCN
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.edges import EdgeOrder
from gnnpar.parallel.engine import FlatEngine
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.local import Pass
from gnnpar.parallel.view import View
from gnnpar.parallel.whole import fold_block
from gnnpar.partition.shard import Shard
from gnnpar.verify.conformance import make_job, small_graph

WORLD, EPOCHS, PARTED = 3, 5, 3


@dataclass(eq=False)
class Late(View):
    """Halo rows are those of the last epoch, zeros in the first, and no gradient flows to them."""

    exchange: CodedExchange = field(kw_only=True)
    edges: EdgeOrder = field(kw_only=True)

    def aggregate(self, agg: Any, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        key, shard, rows = (self.layer, self.next_call()), self.shard, tuple(t.detach() for t in src)
        last = self.exchange.retrieve(key)
        theirs = dict(self.exchange.take_all(last)) if last else {}
        outgoing = {p: Outgoing(rows, index) for p, index in shard.boundary.items()}
        incoming = {p: Incoming(n) for p, n in shard.num_halo.items()}
        tag = MessageTag(self.run.epoch, *key, "forward")
        self.exchange.store(key, self.exchange.post(outgoing, incoming, RowLike.of(rows), tag))
        zeros = {p: tuple(t.new_zeros(n, *t.shape[1:]) for t in rows) for p, n in shard.num_halo.items()}
        block, order = self.edges.combined
        halo = [torch.cat([(theirs or zeros)[p][i] for p in sorted(zeros)]) for i in range(len(src))]
        both = tuple(torch.cat([mine, other])[order] for mine, other in zip(src, halo, strict=True))
        return fold_block(agg, block, both, dst, edge, shared)


def worker(config: CodecConfig, *, stops: bool, drains: bool) -> Callable[[Communicator], Any]:
    job = make_job(GraphParallel(), GCN(hidden=8), small_graph(), world=WORLD)

    def built(shard: Shard, comm: Communicator) -> FlatEngine:
        codec, edges = config.build(shard.row_lists, comm, 5), EdgeOrder(shard, "none")
        exchange, task = CodedExchange(comm, codec), make_task(job.dataset.task, job.dataset.num_classes)
        view = Late(shard, Pass(5), exchange=exchange, edges=edges)
        model, parts = copy.deepcopy(job.model).double(), {"exchange": exchange}
        context = BuildContext(plan=job.plan, shard=shard, model=model, task=task, comm=comm, seed=5)
        return FlatEngine(context, view=view, exact=view, codecs=(codec,), parts=parts)

    def body(comm: Communicator) -> Any:
        data = job.dataset if comm.rank == 0 else None
        shard = Shard.open(data, job.plan.part_of, comm).to(comm.device, job.dtype)
        engine, seen = built(shard, comm), []
        for epoch in range(EPOCHS):
            optimizer = job.optim.build(engine.named_parameters(), epochs=EPOCHS, layer_of=job.model.layer_of)
            report = engine.train_epoch(epoch, optimizer, keep_gradient=True)
            traffic = comm.ledger.drain()
            seen.append((report.loss, report.gradient, traffic.bytes, traffic.metadata))
            if drains:
                engine.drain()
            if stops and epoch == PARTED:
                engine.drain()
                held, state = engine.live_bytes()["halo"], copy.deepcopy(engine.state_dict())
                engine = built(shard, comm)
                for each in range(epoch + 1):
                    engine._codecs[0].begin_epoch(each)
                engine.load_state_dict(state)
                assert held > 0 and engine.live_bytes()["halo"] == held
        return seen

    return body


@pytest.mark.quick(1)
@pytest.mark.parametrize("config", [Identity(), Uniform(bits=4), Random(period=2)], ids=["identity", "4 bits", "drawn"])
def test_a_run_that_stops_with_messages_in_flight_goes_on_bit_for_bit(config: CodecConfig) -> None:
    whole, *others = (
        ThreadWorld(WORLD).run(worker(config, stops=stops, drains=drains))
        for stops, drains in ((False, False), (True, False), (False, True))
    )
    for other in others:
        for mine, theirs in zip(whole, other, strict=True):
            for (loss, gradient, *sent), (loss2, gradient2, *sent2) in zip(mine, theirs, strict=True):
                assert (loss, sent) == (loss2, sent2)
                assert all(torch.equal(gradient[name], g) for name, g in gradient2.items())
    assert whole[0][0][0] != whole[0][1][0]
    assert all(epoch[2] == whole[0][0][2] for epoch in whole[0]) or isinstance(config, Random)


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
