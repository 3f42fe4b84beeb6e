"""What the ranks of the communicator suite do; importable by name, so that spawned processes find it."""

import weakref
from dataclasses import replace
from datetime import timedelta

import torch

from gnnpar.comm import Communicator, Mesh, MessageTag
from gnnpar.comm.process import ProcessCommunicator

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
