"""Freed memory stays with every rank: page faults by the kernel's count, live bytes by the allocator's events.

Each check runs in a process of its own: thresholds of glibc are set for a process and never unset.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median

import pytest
import torch

from conftest import environment
from gnnpar.comm import Communicator, ThreadWorld, allocator
from gnnpar.comm.world import Host, World
from gnnpar.data.tasks import make_task
from gnnpar.launch import processes
from gnnpar.launch.failures import Stop
from gnnpar.launch.launch import _threads
from gnnpar.models.gcn import GCN
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.single.strategy import Single
from gnnpar.partition.shard import Shard
from gnnpar.settings import Comm, Launch
from gnnpar.training.meter import measure_epoch
from gnnpar.verify.conformance import make_job, small_graph

EPOCHS, TIMES = 16, 60
ROWS, WIDTH, PAGE = 70_000, 128, 4096  # 34 MiB: above all that glibc keeps by itself


def faults_of(run: Callable[[], object]) -> int:
    before = getrusage(RUSAGE_SELF).ru_minflt
    run()
    return getrusage(RUSAGE_SELF).ru_minflt - before


def rows() -> torch.Tensor:
    return torch.ones(ROWS, WIDTH)


class Reused:
    """What a rank does: rows, freed, and rows again, often; the faults of each go to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @contextmanager
    def session(self, *, first: bool) -> Iterator[Callable[[Communicator, Host], None]]:
        yield self

    def __call__(self, comm: Communicator, host: Host) -> None:
        self.file.write_text(json.dumps([faults_of(rows) for _ in range(TIMES)]))


def in_own_process(folder: Path, name: str, *arguments: str, **variables: str) -> list[int]:
    """What one of the functions of this module, called with a file, writes to it."""
    file = folder / "found.json"
    code = f"import test_allocator; test_allocator.{name}(*{(str(file), *arguments)!r})"
    path = ":".join([str(Path(__file__).parent), *filter(None, sys.path)])
    env = environment() | {"PYTHONPATH": path, **variables}
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


def run_a_rank(file: str, how: str) -> None:
    world = World(how=how, size=1, local_size=1, threads_per_rank=1, cores=1, device="cpu", backend="none")  # pyright: ignore[reportArgumentType]
    if how == "processes":
        processes.attempt(world, Reused(Path(file)), Launch(), Comm(), None, Stop())
    else:
        _threads(world, Reused(Path(file)), Stop())


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("alone", marks=pytest.mark.slow), "processes"])
def test_rank_keeps_freed_memory(how, tmp_path: Path) -> None:
    """The heap grows by some rows first: up to glibc 2.37, aligned rows do not fit a hole of exactly their size."""
    faults = in_own_process(tmp_path, "run_a_rank", how)
    assert faults[0] > 0.9 * ROWS * WIDTH * 4 / PAGE
    assert median(faults[TIMES // 2 :]) < 0.01 * faults[0]


@pytest.mark.slow
def test_malloc_settings_of_the_user_come_first(tmp_path: Path) -> None:
    faults = in_own_process(tmp_path, "run_a_rank", "alone", MALLOC_TRIM_THRESHOLD_="131072")
    assert min(faults) > 0.9 * ROWS * WIDTH * 4 / PAGE


def train_epochs(file: str) -> None:
    torch.set_num_threads(1)
    allocator.keep_freed()
    (comm,) = ThreadWorld(1).communicators()
    data = replace(small_graph(num_nodes=ROWS, num_edges=2 * ROWS), x=torch.randn(ROWS, WIDTH))
    config, task = GCN(num_layers=3, hidden=WIDTH), make_task("single_label", 3)
    shard = Shard.open(data, torch.zeros(ROWS, dtype=torch.int64), comm, edge_ids=False)
    job = make_job(Single(), config, data, world=1)
    parts = {"shard": shard.to(torch.device("cpu"), torch.float32), "model": config.build(WIDTH, 3, seed=1)}
    engine = Single().build(BuildContext(plan=job.plan, task=task, comm=comm, seed=1, **parts))
    optimizer = Still([parameter for _, parameter in engine.named_parameters()])
    faults = [faults_of(lambda epoch=epoch: engine.train_epoch(epoch, optimizer)) for epoch in range(EPOCHS)]
    peaks = []
    for epoch in range(EPOCHS, EPOCHS + 2):
        with measure_epoch(comm.device) as report:
            engine.train_epoch(epoch, optimizer)
        peaks.append(report.peak)
    Path(file).write_text(json.dumps([*faults, *peaks]))


class Still:
    """An optimizer that makes no step."""

    refused = False

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, norm: float | None = None) -> None: ...


@pytest.mark.slow
def test_epochs_after_the_second_have_a_tenth_of_the_faults_and_a_constant_live_peak(tmp_path: Path) -> None:
    """The heap still grows in some of these epochs, by the load of the machine in other ones: so their median."""
    found = in_own_process(tmp_path, "train_epochs")
    faults, peaks = found[:EPOCHS], found[EPOCHS:]
    assert faults[0] > 3 * ROWS * WIDTH * 4 / PAGE
    assert median(faults[2:]) <= 0.1 * faults[0]
    assert max(peaks) == pytest.approx(min(peaks), rel=1e-3)
    assert peaks[0] > 3 * ROWS * WIDTH * 4


def test_other_allocator_is_left_alone_with_one_line(monkeypatch, caplog) -> None:
    """musl and macOS have no mallopt."""
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    with caplog.at_level(logging.DEBUG, logger="gnnpar.comm.allocator"):
        allocator.keep_freed()
        assert [r.levelname for r in caplog.records] == ["DEBUG"]
        allocator.return_freed(above=1 << 20)
    assert "not glibc's" in caplog.records[0].message
