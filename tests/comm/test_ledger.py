"""Messages taken in a later epoch than they were posted in: what was waited for, and what they say."""

from __future__ import annotations

import time
from typing import Any

import torch

from gnnpar.codecs.uniform import Random
from gnnpar.comm import CodedExchange, Communicator, Incoming, MessageTag, Outgoing, RowLike, ThreadWorld
from gnnpar.comm.ledger import EpochTraffic, Ledger, Receipt
from gnnpar.partition.shard import Shard
from gnnpar.verify.conformance import small_graph


def epoch_of(ledger: Ledger, posts: dict[int, float], *receipts: Receipt) -> EpochTraffic:
    for receipt in receipts:
        ledger.received(receipt)
    ledger.learn_posts(1, posts)
    return ledger.drain()


def test_message_taken_an_epoch_late_has_its_own_post_time() -> None:
    """Message 0 is posted in the first epoch and taken in the second, after message 1 of that epoch is posted."""
    ledger = Ledger()
    assert ledger.expected(1) == 0
    assert epoch_of(ledger, {0: 1.0}).comm_total == 0
    assert ledger.expected(1) == 1
    late = Receipt(1, posted=0.5, wait_began=10.0, arrived=12.0, wait_ended=12.0, number=0)
    traffic = epoch_of(ledger, {1: 11.5}, late)
    assert (traffic.exposed_skew, traffic.exposed_wire) == (0.0, 2.0)  # by order it would be 1.5 of skew
    assert traffic.comm_total == 11.0
    other = Receipt(1, posted=9.0, wait_began=11.0, arrived=12.0, wait_ended=12.0, number=1)
    traffic = epoch_of(ledger, {}, other)
    assert (traffic.exposed_skew, traffic.exposed_wire) == (0.5, 0.5)
    assert not ledger._their_posts[1]


def test_post_times_of_unexpected_messages_are_dropped() -> None:
    ledger = Ledger()
    ledger.learn_posts(1, dict.fromkeys(range(1000), 0.0))
    ledger.drain()
    assert not ledger._their_posts[1]


def test_waiting_a_whole_epoch_late_is_wire_and_no_skew() -> None:
    def body(comm: Communicator) -> Any:
        peer = 1 - comm.rank
        bytes_of = {peer: torch.ones(8, dtype=torch.uint8)}
        late = comm.exchange(bytes_of, {peer: 8}, MessageTag(0, 0, 0, "forward"))
        comm.settle_accounts()
        first = comm.ledger.drain()
        time.sleep(0.1 * comm.rank)  # rank 1 posts its second message late; the first was there long before
        other = comm.exchange(bytes_of, {peer: 8}, MessageTag(1, 0, 0, "forward"))
        for pending in (late, other):
            pending[peer].wait()
        comm.settle_accounts()
        second = comm.ledger.drain()
        return first, second

    (first, second), _ = ThreadWorld(2).run(body)
    assert first.comm_total == first.exposed_wire + first.exposed_skew == 0
    assert 0.05 < second.exposed_skew < 0.5
    assert second.exposed_wire < 0.05


def test_message_is_decoded_by_the_codec_state_of_its_post() -> None:
    """Bits drawn anew in between do not change what a message in flight says."""

    def body(comm: Communicator) -> tuple[bool, int]:
        shard = Shard.open(small_graph() if comm.rank == 0 else None, torch.arange(60) % 2, comm)
        codec = Random(period=1).build(shard.row_lists, comm, 0)
        exchange, peer = CodedExchange(comm, codec), 1 - comm.rank
        rows = (torch.randn(shard.num_inner, 64, generator=torch.Generator().manual_seed(comm.rank)),)
        outgoing, incoming = {peer: Outgoing(rows, shard.boundary[peer])}, {peer: Incoming(shard.num_halo[peer])}
        tag, sizes = MessageTag(0, 0, 0, "forward"), set[int]()
        codec.begin_epoch(0)
        now, late = (exchange.post(outgoing, incoming, RowLike.of(rows), tag) for _ in range(2))
        (expected,) = exchange.take(now, peer)
        for epoch in range(1, 6):
            codec.begin_epoch(epoch)
            sizes.add(codec.nbytes(incoming[peer].num_rows, RowLike.of(rows), tag, peer))
        (got,) = exchange.take(late, peer)
        return torch.equal(got, expected), len(sizes)

    for same, sizes in ThreadWorld(2).run(body):
        assert same
        assert sizes > 1
