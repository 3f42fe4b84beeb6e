"""One suite for all communicators: exchanges, collectives, slices of the grid, accounting; simulated NCCL, streams."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnpar.codecs.uniform import Random
from gnnpar.comm import (
    CodedExchange,
    Communicator,
    Incoming,
    Mesh,
    MessageTag,
    Outgoing,
    RowLike,
    ThreadWorld,
    process,
)
from gnnpar.comm.ledger import EpochTraffic, Ledger, Receipt
from gnnpar.comm.process import ProcessCommunicator, Staging, connect
from gnnpar.config.compose import compose
from gnnpar.launch import launch
from gnnpar.partition.shard import Shard
from gnnpar.verify.conformance import make_job, small_graph
from streams import Log
from worlds import run_world

MESSAGE_TAG = MessageTag(epoch=0, layer=0, call=0, phase="forward")


def message(src: int, dst: int, number: int, nbytes: int) -> torch.Tensor:
    """A buffer that says who sent it to whom."""
    return ((torch.arange(nbytes) * 7 + src * 31 + dst * 17 + number) % 251).to(torch.uint8)


def sizes(src: int, dst: int) -> int:
    """Uneven, some empty."""
    return 0 if (src + dst) % 4 == 3 else 100 * src + 1000 * dst + 1


def all_to_all(comm: Communicator) -> dict:
    """Three exchanges posted before any is waited for; waited for in reverse order."""
    peers = [p for p in range(comm.size) if p != comm.rank]
    posted = []
    for number in range(3):
        outgoing = {p: message(comm.rank, p, number, sizes(comm.rank, p)) for p in peers}
        posted.append(comm.exchange(outgoing, {p: sizes(p, comm.rank) for p in peers}, MESSAGE_TAG, metadata=number))
    wrong = []
    for number, pending in reversed(list(enumerate(posted))):
        for p in peers:
            if not torch.equal(pending[p].wait(), message(p, comm.rank, number, sizes(p, comm.rank))):
                wrong.append((number, p))
    comm.settle_accounts()
    return {"wrong": wrong, "traffic": comm.ledger.drain(), "again": comm.ledger.drain()}


def rows_arrive(comm: Communicator) -> bool:
    """One exchange of tensors on the communicator's device, and a sum over ranks."""
    peers = [p for p in range(comm.size) if p != comm.rank]
    outgoing = {p: message(comm.rank, p, 0, sizes(comm.rank, p)).to(comm.device) for p in peers}
    pending = comm.exchange(outgoing, {p: sizes(p, comm.rank) for p in peers}, MESSAGE_TAG)
    right = [torch.equal(pending[p].wait().cpu(), message(p, comm.rank, 0, sizes(p, comm.rank))) for p in peers]
    total = comm.all_reduce(torch.full((3,), float(comm.rank), device=comm.device))
    return all(right) and total.tolist() == [sum(range(comm.size))] * 3


def large_two_way(comm: Communicator) -> bool:
    """Big messages both ways at once, larger than any socket buffer."""
    peer, nbytes = 1 - comm.rank, 8_000_000
    pending = comm.exchange({peer: message(comm.rank, peer, 0, nbytes)}, {peer: nbytes}, MESSAGE_TAG)
    return torch.equal(pending[peer].wait(), message(peer, comm.rank, 0, nbytes))


def sent_buffers(comm: Communicator) -> list[int]:
    """How many buffers of four exchanges still live: before the peer asks for them, after keep=1, after keep=0."""
    peer, nbytes, alive = 1 - comm.rank, 1_000_000, []
    if comm.rank == 0:
        buffers = [message(0, 1, i, nbytes) for i in range(4)]
        refs = [weakref.ref(buffer) for buffer in buffers]
        for i in range(4):
            comm.exchange({peer: buffers[i]}, {}, MESSAGE_TAG)
        del buffers
        alive.append(sum(ref() is not None for ref in refs))
        comm.barrier()
        comm.flush(keep=1)
        alive.append(sum(ref() is not None for ref in refs[:3]))
        comm.flush(keep=0)
        alive.append(sum(ref() is not None for ref in refs))
        return alive
    comm.barrier()
    pending = [comm.exchange({}, {peer: nbytes}, MESSAGE_TAG)[peer] for _ in range(4)]
    assert all(torch.equal(p.wait(), message(0, 1, i, nbytes)) for i, p in enumerate(pending))
    return alive


def collectives(comm: Communicator) -> dict:
    mine = torch.tensor([1.0, 10.0 * (comm.rank + 1)], dtype=torch.float64)
    total = comm.all_reduce(mine, MessageTag(0, -1, 0, "reduce"))
    scattered = comm.scatter([f"for {r}" for r in range(comm.size)] if comm.rank == 0 else None)
    return {
        "sum": total.tolist(),
        "mine": mine.tolist(),
        "broadcast": comm.broadcast({"from": comm.rank}, src=comm.size - 1),
        "scatter": scattered,
        "gather": comm.gather(comm.rank**2),
        "traffic": comm.ledger.drain(),
    }


def grid(comm: Communicator) -> dict:
    """Sums and messages along both axes of a 2 x 2 mesh."""
    mesh = Mesh.grid(4, stages=2)
    part, stage = comm.along(mesh, "part"), comm.along(mesh, "stage")
    number = torch.tensor([2.0**comm.rank])
    pending = part.exchange({1 - part.rank: message(part.rank, 1 - part.rank, 9, 50)}, {1 - part.rank: 50}, MESSAGE_TAG)
    return {
        "part": float(part.all_reduce(number)),
        "stage": float(stage.all_reduce(number)),
        "place": (stage.rank, part.rank),
        "message": torch.equal(pending[1 - part.rank].wait(), message(1 - part.rank, part.rank, 9, 50)),
    }


def deaf_slice(comm: Communicator) -> bool:
    """Rank 1 takes no part in a sum over their slice: does rank 0 give up within the communicator's patience?"""
    assert isinstance(comm, ProcessCommunicator)
    both = replace(comm, timeout=timedelta(seconds=5)).along(Mesh.grid(2), "part")
    gave_up = False
    if comm.rank == 0:
        try:
            both.all_reduce(torch.ones(1))
        except RuntimeError:
            gave_up = True
    comm.barrier()  # of the world, which waits longer
    return gave_up


def late_sender(comm: Communicator) -> dict:
    """Rank 0 sends 0.3 s late and rank 1 waits from the start: skew. Then rank 1 asks late: nothing is exposed."""
    import time

    peer = 1 - comm.rank
    out = {}
    for name, sleeper in (("skew", 0), ("hidden", 1)):
        comm.barrier()
        comm.clock.start()
        if name == "skew" and comm.rank == sleeper:
            time.sleep(0.3)
        pending = comm.exchange({peer: message(comm.rank, peer, 0, 1000)}, {peer: 1000}, MESSAGE_TAG)
        if name == "hidden" and comm.rank == sleeper:
            time.sleep(0.3)
        pending[peer].wait()
        phases = comm.clock.drain()
        comm.settle_accounts()
        out[name] = (comm.ledger.drain(), phases)
    return out


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
    assert all(nccl.run(rows_arrive, monkeypatch))
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


@pytest.fixture
def log(monkeypatch):
    return Log(monkeypatch, process)


def rows_of(n):
    return torch.arange(n, dtype=torch.uint8)


def test_rows_to_the_host_take_one_wait_an_exchange(log):
    side = Staging(torch.device("cuda", 0))
    log.append("encode on main")
    found = side.to_host({1: rows_of(4), 2: rows_of(6)})
    log.append("inner fold on main")
    assert log == [
        "encode on main",
        "out waits for main",
        "copy of 4 bytes on out",
        "4 bytes are used on out",
        "copy of 6 bytes on out",
        "6 bytes are used on out",
        "host waits for event 0 of out",
        "inner fold on main",
    ]
    assert log.pinned == [True, True]
    assert [rows.tolist() for rows in found.values()] == [[*range(4)], [*range(6)]]


def test_rows_to_the_device_are_copied_beside_kernels(log):
    """And the host waits for nothing."""
    side = Staging(torch.device("cuda", 0))
    log.append("inner fold on main")
    assert side.to_device(rows_of(4)).tolist() == [*range(4)]
    log.append("halo fold on main")
    assert log == [
        "inner fold on main",
        "copy of 4 bytes on in",
        "main waits for in",
        "4 bytes are used on main",
        "halo fold on main",
    ]


def test_staging_on_a_cpu_copies_nothing(log):
    side, rows = Staging(torch.device("cpu")), torch.ones(3)
    assert side.to_host({1: rows})[1] is rows
    assert side.to_device(rows) is rows
    assert log == []


class Group:
    def __init__(self, number: int, ranks: Sequence[int]) -> None:
        self.number, self.ranks = number, tuple(ranks)


class Work:
    """`events`: what was waited for, in order."""

    def __init__(self, patience: float) -> None:
        self.done, self._patience, self.error = threading.Event(), patience, ""

    def wait(self) -> bool:
        if not self.done.wait(self._patience):
            raise TimeoutError("a message was posted in an order that does not fit: it waits forever")
        return True


class SimulatedNccl:
    """The part of torch.distributed that `comm/process.py` uses, for threads; messages run as NCCL runs them. `log`:
    (rank, what, group, ...) of every operation.

    A group's operations run one after the other on each rank, in the order of posting; those of a batch run together. A
    send is over when its receive runs at the other end: nothing is buffered. So messages that are posted in orders that
    do not fit wait forever here, too, and fail after `patience` seconds. Every group notes its first use.
    """

    ProcessGroup, Work = Group, Work

    def __init__(self, size: int, *, patience: float = 30.0) -> None:
        self.size, self.patience = size, patience
        self.log: list[tuple] = []
        self._rank = threading.local()
        self._lock = threading.Lock()
        self._groups: dict[int, Group] = {}
        self._made: dict[int, int] = defaultdict(int)
        self._boxes: dict[tuple, queue.Queue] = defaultdict(queue.Queue)
        self._streams: dict[tuple[int, int], queue.Queue] = {}
        self._meetings: dict[tuple, int] = defaultdict(int)
        self._gathered: dict[tuple, dict[int, Any]] = defaultdict(dict)
        self._barriers: dict[tuple, threading.Barrier] = {}

    def run(self, body: Callable[[ProcessCommunicator], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """body(communicator) in every rank's thread."""
        nccl = self

        class Environment(dict[str, str]):
            def __missing__(self, key: str) -> str:
                return {"RANK": str(nccl.me), "WORLD_SIZE": str(nccl.size)}[key]

        monkeypatch.setattr(process, "dist", self)
        asked = {name: value for name, value in os.environ.items() if name == "GNNPAR_SHARE_GPU"}
        monkeypatch.setattr(process, "os", SimpleNamespace(environ=Environment(asked)))
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def rank(number: int) -> None:
            self._rank.number = number
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    results[number] = body(connect("nccl", device=torch.device("cpu"), key=b"test", timeout_seconds=60))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not errors:
                thread.join(0.1)
        if errors:
            raise errors[0]
        return results

    @property
    def me(self) -> int:
        return self._rank.number

    def P2POp(self, op: Callable, tensor: Tensor, peer: int, group: Group) -> tuple:  # torch's name
        return ("send" if op == self.isend else "receive", tensor, peer, group)

    def isend(self, tensor: Tensor, peer: int, group: Group) -> Work:
        return self._post([("send", tensor, peer, group)])

    def irecv(self, tensor: Tensor, peer: int, group: Group) -> Work:
        return self._post([("receive", tensor, peer, group)])

    def batch_isend_irecv(self, operations: list[tuple]) -> list[Work]:
        return [self._post(operations)]

    def _post(self, operations: list[tuple]) -> Work:
        group, work = operations[0][3], Work(self.patience)
        with self._lock:
            self.log.append((self.me, group.number, tuple((kind, peer) for kind, _, peer, _ in operations)))
            stream = self._streams.get((self.me, group.number))
            if stream is None:
                stream = self._streams[self.me, group.number] = queue.Queue()
                threading.Thread(target=self._work_off, args=(self.me, stream), daemon=True).start()
        stream.put((operations, work))
        return work

    def _work_off(self, rank: int, stream: queue.Queue) -> None:
        while True:
            operations, work = stream.get()
            running = [threading.Thread(target=self._move, args=(rank, *op), daemon=True) for op in operations]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()
            work.done.set()

    def _move(self, rank: int, kind: str, tensor: Tensor, peer: int, group: Group) -> None:
        there, back = (rank, peer) if kind == "send" else (peer, rank), "taken"
        if kind == "send":
            self._boxes[group.number, *there].put(tensor)
            self._boxes[group.number, *there, back].get()
        else:
            tensor.copy_(self._boxes[group.number, *there].get())
            self._boxes[group.number, *there, back].put(True)

    def init_process_group(self, backend: str, *, device_id: object, **options: object) -> None:
        self.log.append((self.me, "init", device_id))

    def new_group(self, ranks: Sequence[int] | None, *, backend: str, timeout: timedelta) -> Group | object:
        with self._lock:
            number = self._made[self.me] = self._made[self.me] + 1
            group = self._groups.setdefault(number, Group(number, ranks or range(self.size)))
        return group if self.me in group.ranks else object()

    def _gather(self, obj: Any, group: Group | None) -> dict[int, Any]:
        ranks = tuple(range(self.size)) if group is None else group.ranks
        number = 0 if group is None else group.number
        with self._lock:
            self._meetings[self.me, number] += 1
            key = number, self._meetings[self.me, number]
            barrier = self._barriers.setdefault(key, threading.Barrier(len(ranks), timeout=self.patience))
            self._gathered[key][self.me] = obj
        barrier.wait()
        return self._gathered[key]

    def all_reduce(self, tensor: Tensor, *, group: Group | None) -> None:
        self.log.append((self.me, "reduce" if group is None else group.number, "all"))
        everything = self._gather(tensor.clone(), group)
        tensor.copy_(sum((everything[r] for r in sorted(everything)), torch.zeros_like(tensor)))

    def all_gather(self, into: list[Tensor], tensor: Tensor, *, group: Group | None) -> None:
        everything = self._gather(tensor.clone(), group)
        for place, rank in zip(into, sorted(everything), strict=True):
            place.copy_(everything[rank])

    def broadcast(self, tensor: Tensor, src: int, *, group: Group | None) -> None:
        tensor.copy_(self._gather(tensor.clone(), group)[src])

    def barrier(self, *, group: Group | None) -> None:
        self._gather(None, group)

    def send(self, tensor: Tensor, peer: int, *, group: Group) -> None:
        self._boxes["host", group.number, self.me, peer].put(tensor)

    def recv(self, tensor: Tensor, peer: int, *, group: Group) -> None:
        tensor.copy_(self._boxes["host", group.number, peer, self.me].get(timeout=self.patience))
