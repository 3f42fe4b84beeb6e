"""Tensors keep their values, identity and gradients whatever is paged out between operations."""

import threading
from pathlib import Path

import pytest
import torch

from gnnpar.parallel.sequential.out_of_core import RoundRobinWorld
from gnnpar.parallel.sequential.paging import HostFile, HostMemory, Pager, Paging


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
    with Paging(pager):
        x, total = torch.randn(1000), torch.zeros(())
        for _ in range(3):
            pager.evict_all()
            total = x.sum()
    assert pager.moved["in"] == 3 * 4000
    assert pager.moved["out"] <= 4000 + 4 * 4  # and the sums
    assert torch.isfinite(pager.release(total))


def test_places_on_the_host_are_used_again(tmp_path):
    host = HostFile(tmp_path)
    pager = Pager(host, smallest=1)
    with Paging(pager):
        for _ in range(5):
            x = torch.randn(5000)
            pager.evict_all()
            del x
    assert host._end <= 2 * 20480  # 20000 bytes each, rounded up; one alive and one dying


def test_gradients_through_pages(pager):
    def loss_of(x, w):
        hidden = torch.relu(x @ w)
        pager.evict_all()
        return (hidden @ w.T).square().sum()

    x, w = torch.randn(20, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(loss_of(x, w), w)[0]
    pager.adopt([x])
    with Paging(pager):
        loss = loss_of(x, w)
        pager.evict_all()
        got = torch.autograd.grad(loss, w)[0]
    assert torch.equal(pager.release(got), expected)
    assert not gone(w)  # nobody's page: it was there before


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


def test_the_host_does_not_wait_for_copies_to_a_gpu(monkeypatch):
    """Pinned memory: a copy is one more work of the stream."""
    waits, pinned = [], []
    copy, empty = torch.Tensor.copy_, torch.empty

    def copied(into, data, *, non_blocking=False):
        waits.append(not non_blocking)
        return copy(into, data)

    def made(*size, pin_memory=False, **options):
        pinned.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch, "empty", made)
    slot = HostMemory().slot(4)
    data = torch.arange(4, dtype=torch.uint8)
    slot.write(data)
    back = torch.zeros(4, dtype=torch.uint8)
    slot.read(back)
    assert torch.equal(back, data)
    assert (waits, pinned[0]) == ([False, False], True)


def test_memory_is_no_host():
    if not Path("/dev/shm").is_dir():
        pytest.skip("no file system in memory here")
    with pytest.raises(ValueError, match=r"strategy\.host_dir=/dev/shm is a tmpfs"):
        HostFile(Path("/dev/shm"))


def test_one_rank_at_a_time_and_no_deadlock():
    running, seen, left = [0], [], []
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
    world = RoundRobinWorld(3, device=None, leaves=lambda: left.append(1), posted=posted.append)
    assert world.run(body) == [3.0, 3.0, 3.0]
    assert max(seen) == 1
    assert left
    assert posted


def test_a_rank_that_fails_ends_all():
    def body(comm):
        if comm.rank == 1:
            raise ValueError("broken")
        comm.barrier()

    with pytest.raises(ValueError, match="broken"):
        RoundRobinWorld(3, device=None, leaves=lambda: None, posted=lambda _: None).run(body)
