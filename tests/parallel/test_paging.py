"""Tensors keep their values, identity and gradients whatever is paged out between operations."""

import threading
from pathlib import Path

import pytest
import torch

from gnnpar.parallel.sequential import paging
from gnnpar.parallel.sequential.out_of_core import RoundRobinWorld
from gnnpar.parallel.sequential.paging import HostFile, HostMemory, Pager, Paging
from streams import Log


@pytest.fixture
def pager(tmp_path):
    return Pager(HostFile(tmp_path), smallest=1)


def gone(tensor):
    return tensor.untyped_storage().nbytes() == 0


def test_what_is_read_comes_back_and_what_changed_is_written_again(pager):
    with Paging(pager):
        x = torch.arange(12.0).view(3, 4)
        column = x[:, 1]
        pager.evict_all()
        assert gone(x)
        x[0].add_(10)  # through a view: the page has changed
        pager.evict_all()
        assert gone(x)
        assert (column + 0).tolist() == [11.0, 5.0, 9.0]
    assert pager.moved == {"out": 2 * 48, "in": 2 * 48}


def test_an_unchanged_page_is_written_once(pager):
    given = torch.ones(4)
    with Paging(pager):
        x, total = torch.randn(1000), torch.zeros(())
        for _ in range(3):
            pager.evict_all()
            total = x.sum() + given.sum()
    assert pager.moved["in"] == 3 * 4000
    assert pager.moved["out"] <= 4000 + 4 * 4  # and the sums
    assert torch.isfinite(pager.release(total))
    assert not gone(given), "not made here: no page"


def test_places_on_the_host_are_used_again(tmp_path):
    host = HostFile(tmp_path)
    pager = Pager(host, smallest=1)
    with Paging(pager):
        for _ in range(5):
            x = torch.randn(5000)
            pager.evict_all()
            del x
    assert host._end <= 2 * 20480  # 20000 bytes each, rounded up; one alive and one dying


def test_most_counts_pages_that_are_here_together(pager):
    with Paging(pager):
        a = torch.zeros(1000)
        b = a + 1
        del a
        c = b + 1  # two at a time
        pager.evict_all()
        pager.most = 0
        d = c + 1
    assert pager.most == 2 * 4000
    assert float(pager.release(d)[0]) == 3.0


@pytest.fixture
def log(monkeypatch):
    yield (log := Log(monkeypatch, paging))
    assert any(log.pinned)


def test_copies_run_beside_kernels(log):
    """Out after the kernels before them, in after nothing but their own way out; kernels wait for what they read."""
    pager = Pager(HostMemory(torch.device("cuda", 0)), smallest=1)
    with Paging(pager):
        x, y = torch.arange(12.0), torch.arange(2.0)
        pager.evict(x)
        pager.evict(y)
        log.append("kernels on main")
        total = x.sum()
    assert log == [
        "out waits for main",
        "copy of 48 bytes on out",
        "48 bytes are used on out",
        "out waits for main",
        "copy of 8 bytes on out",
        "8 bytes are used on out",
        "kernels on main",
        "in waits for event 0 of out",
        "copy of 48 bytes on in",
        "main waits for event 2 of in",
        "48 bytes are used on main",
    ]
    assert float(pager.release(total)) == 66


def test_a_turn_brings_ahead_what_the_last_one_needed(log):
    """In the order of its use, before its kernels are launched; each of them waits for its own pages alone."""
    pager = Pager(HostMemory(torch.device("cuda", 0)), smallest=16)
    pages = [torch.arange(4.0 * n) for n in (1, 2, 3)]
    pager.adopt(pages)
    sums = []
    with Paging(pager):
        for _ in range(2):
            log.clear()
            pager.start("train")
            pager.begin(0)
            for page in (pages[2], pages[0]):
                log.append("kernel")
                sums.append(page.sum())
            pager.evict_all()
        epoch = list(log)
        pager.start("predict")  # another pass needs other pages: nothing is brought ahead
        pager.begin(0)
    assert [gone(page) for page in pages] == [True] * 3
    assert [float(pager.release(each)) for each in sums] == [66, 6] * 2
    assert epoch == [
        "in waits for event 2 of out",
        "copy of 48 bytes on in",
        "in waits for event 0 of out",
        "copy of 16 bytes on in",
        "kernel",
        "main waits for event 7 of in",
        "48 bytes are used on main",
        "kernel",
        "main waits for event 8 of in",
        "16 bytes are used on main",
    ]
    assert pager.moved["in"] == 2 * 64


def test_the_host_is_two_turns_ahead_and_no_more(log):
    pager = Pager(HostMemory(torch.device("cuda", 0)), smallest=1)
    pager.start("train")
    for part in range(5):
        pager.begin(part)
    log.append("kernels")
    assert log == [*(f"host waits for event {n} of main" for n in range(3)), "kernels"]
    with Paging(pager):
        pager.evict(torch.zeros(4))


def test_memory_is_no_host():
    if not Path("/dev/shm").is_dir():
        pytest.skip("no file system in memory here")
    with pytest.raises(ValueError, match=r"strategy\.host_dir=/dev/shm is a tmpfs"):
        HostFile(Path("/dev/shm"))


def test_one_rank_at_a_time_and_no_deadlock():
    running, seen, left, back = [0], [], [], []
    lock = threading.Lock()

    def body(comm):
        for _ in range(20):
            with lock:
                running[0] += 1
                seen.append(running[0])
            with lock:
                running[0] -= 1
            comm.all_reduce(torch.ones(1))
        return float(comm.all_reduce(torch.ones(1)))

    posted = []
    world = RoundRobinWorld(3, device=None, leaves=lambda: left.append(1), returns=back.append, posted=posted.append)
    assert world.run(body) == [3.0, 3.0, 3.0]
    assert max(seen) == 1
    assert left
    assert set(back) <= {0, 1, 2}
    assert len(back) == len(left)
    assert posted


def test_a_rank_that_fails_ends_all():
    def body(comm):
        if comm.rank == 1:
            raise ValueError("broken")
        comm.barrier()

    with pytest.raises(ValueError, match="broken"):
        RoundRobinWorld(3, device=None, leaves=lambda: None, returns=lambda _: None, posted=lambda _: None).run(body)
