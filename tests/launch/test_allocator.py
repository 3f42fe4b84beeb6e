"""Freed memory stays with every rank: page faults by the kernel's count.

Each check runs in a process of its own: thresholds of glibc are set for a process and never unset.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median

import pytest
import torch

from conftest import environment
from gnnpar.comm import Communicator, allocator
from gnnpar.comm.world import Host, World
from gnnpar.launch import processes
from gnnpar.launch.failures import Stop
from gnnpar.launch.launch import _threads
from gnnpar.settings import Comm, Launch

TIMES = 60
ROWS, WIDTH, PAGE = 70_000, 128, 4096  # 34 MiB: above all that glibc keeps by itself


def faults_of_rows() -> int:
    before = getrusage(RUSAGE_SELF).ru_minflt
    torch.ones(ROWS, WIDTH)
    return getrusage(RUSAGE_SELF).ru_minflt - before


class Reused:
    """What a rank does: rows, freed, and rows again, often; the faults of each go to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @contextmanager
    def session(self, *, first: bool) -> Iterator[Callable[[Communicator, Host], None]]:
        yield self

    def __call__(self, comm: Communicator, host: Host) -> None:
        self.file.write_text(json.dumps([faults_of_rows() for _ in range(TIMES)]))


def run_a_rank(file: str, how: str) -> None:
    world = World(how=how, size=1, local_size=1, threads_per_rank=1, cores=1, device="cpu", backend="none")  # pyright: ignore[reportArgumentType]
    if how == "processes":
        processes.attempt(world, Reused(Path(file)), Launch(), Comm(), None, Stop())
    else:
        _threads(world, Reused(Path(file)), Stop())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "settings", "kept"),
    [("alone", {}, True), ("processes", {}, True), ("alone", {"MALLOC_TRIM_THRESHOLD_": "131072"}, False)],
    ids=["alone", "processes", "settings of the user"],
)
def test_rank_keeps_freed_memory_unless_the_user_sets_malloc(how, settings, kept, tmp_path: Path) -> None:
    """The heap grows by some rows first: up to glibc 2.37, aligned rows do not fit a hole of exactly their size."""
    code = f"import test_allocator; test_allocator.run_a_rank({str(tmp_path / 'found.json')!r}, {how!r})"
    env = environment() | {"PYTHONPATH": ":".join([str(Path(__file__).parent), *filter(None, sys.path)]), **settings}
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    faults = json.loads((tmp_path / "found.json").read_text())
    assert (faults[0] if kept else min(faults)) > 0.9 * ROWS * WIDTH * 4 / PAGE
    assert not kept or median(faults[TIMES // 2 :]) < 0.01 * faults[0]


def test_other_allocator_is_left_alone_with_one_line(monkeypatch, caplog) -> None:
    """musl and macOS have no mallopt."""
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    with caplog.at_level(logging.DEBUG, logger="gnnpar.comm.allocator"):
        allocator.keep_freed()
        assert [r.levelname for r in caplog.records] == ["DEBUG"]
        allocator.return_freed(above=1 << 20)
    assert "not glibc's" in caplog.records[0].message
