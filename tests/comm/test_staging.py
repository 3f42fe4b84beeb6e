"""Copies between a GPU and the host run beside its kernels: an event log of fake streams shows the launches."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gnnpar.comm import staging
from gnnpar.comm.staging import Staging


class _Stream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class _Event:
    def __init__(self, log):
        self.log, self.stream = log, ""

    def record(self, stream):
        self.log.append(f"event on {stream.name}")
        self.stream = stream.name

    def synchronize(self):
        self.log.append(f"host waits for the event on {self.stream}")


class _Cuda:
    """torch.cuda, as far as Staging uses it; kernels are launched on the current stream."""

    def __init__(self):
        self.log = []
        self.main = self.current = _Stream(self.log, "main")
        self.names = iter(["out", "in"])

    def Stream(self, device):  # torch's name
        return _Stream(self.log, next(self.names))

    def Event(self):  # torch's name
        return _Event(self.log)

    def current_stream(self):
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def launch(self, what):
        self.log.append(f"{what} on {self.current.name}")


class _Rows:
    """A buffer that notes its copies."""

    def __init__(self, cuda, name, shape=(4,)):
        self.cuda, self.name, self.shape, self.dtype = cuda, name, shape, torch.uint8

    def copy_(self, other, *, non_blocking):
        assert non_blocking
        self.cuda.launch(f"copy of {other.name}")

    def to(self, device, *, non_blocking):
        assert non_blocking
        self.cuda.launch(f"copy of {self.name}")
        return self

    def record_stream(self, stream):
        self.cuda.log.append(f"{self.name} is used on {stream.name}")


def _rows(cuda, name) -> Any:
    return _Rows(cuda, name)


@pytest.fixture
def cuda(monkeypatch):
    fake = _Cuda()
    monkeypatch.setattr(staging, "cuda", fake)
    return fake


def test_rows_to_the_host_take_one_wait_an_exchange(cuda, monkeypatch):
    pinned = []

    def empty(shape, *, dtype, pin_memory):
        pinned.append(pin_memory)
        return _Rows(cuda, "host", shape)

    monkeypatch.setattr(staging.torch, "empty", empty)
    side = Staging(torch.device("cuda", 0))
    cuda.launch("encode")
    side.to_host({1: _rows(cuda, "rows for 1"), 2: _rows(cuda, "rows for 2")})
    cuda.launch("inner fold")
    assert cuda.log == [
        "encode on main",
        "out waits for main",
        "copy of rows for 1 on out",
        "rows for 1 is used on out",
        "copy of rows for 2 on out",
        "rows for 2 is used on out",
        "event on out",
        "host waits for the event on out",
        "inner fold on main",
    ]
    assert pinned == [True, True]


def test_rows_to_the_device_are_copied_beside_kernels(cuda):
    side = Staging(torch.device("cuda", 0))
    cuda.launch("inner fold")
    side.to_device(_rows(cuda, "halo"))
    cuda.launch("halo fold")
    assert cuda.log == [
        "inner fold on main",
        "copy of halo on in",
        "main waits for in",
        "halo is used on main",
        "halo fold on main",
    ]
    assert not [line for line in cuda.log if line.startswith("host waits")]


def test_staging_on_a_cpu_copies_nothing(cuda):
    side, rows = Staging(torch.device("cpu")), torch.ones(3)
    assert side.to_host({1: rows})[1] is rows
    assert side.to_device(rows) is rows
    assert cuda.log == []
