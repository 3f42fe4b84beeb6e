"""Copies between a GPU and the host run beside its kernels: a log of streams shows the launches."""

import pytest
import torch

from gnnpar.comm import process
from gnnpar.comm.process import Staging
from streams import Log


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
