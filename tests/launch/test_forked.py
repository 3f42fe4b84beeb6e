"""Ranks of a process in between: their ends are heard of, and nobody outlives whom it belongs to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from gnnpar.launch.forked import Ranks
from gnnpar.launch.signals import postponed
from gnnpar.planner import calibrate
from sleeping import Sleep


def collected(ranks: Ranks, size: int) -> dict[int, int]:
    deadline = time.monotonic() + 60
    while len(ranks.exit_codes) < size and time.monotonic() < deadline:
        ranks.wait(0.1)
    return ranks.exit_codes


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=10)[1]


@pytest.mark.fault
@pytest.mark.parametrize("fork", [True, False])
def test_a_killed_rank_is_heard_of_and_the_end_ends_the_others(tmp_path: Path, fork: bool) -> None:
    sleep = Sleep(tmp_path)
    ranks = Ranks(2, sleep, fork=fork)
    ranks.start()
    first, second = sleep.processes(2)
    first.kill()
    assert collected(ranks, 1) == {0: -signal.SIGKILL}
    assert second.is_running()
    ranks.end()
    assert gone([first, second])


def test_ranks_end_with_the_process_between_and_a_stopped_one_goes_on(tmp_path: Path) -> None:
    sleep = Sleep(tmp_path)
    ranks = Ranks(2, sleep, fork=True)
    ranks.start()
    processes = sleep.processes(2)
    origin = psutil.Process(processes[0].ppid())
    origin.suspend()
    processes[1].kill()
    assert collected(ranks, 1) == {1: -signal.SIGKILL}
    origin.kill()
    assert collected(ranks, 2) == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    ranks.end()
    assert gone(processes)


def test_the_end_comes_at_any_time(tmp_path: Path) -> None:
    Ranks(2, Sleep(tmp_path), fork=True).end()
    ranks = Ranks(2, Sleep(tmp_path), fork=True)
    before = set(psutil.Process().children())
    ranks.start()
    started = set(psutil.Process().children()) - before
    assert len(started) == 1
    ranks.end()
    assert gone(list(started))


def test_what_a_scheduler_sends_to_all_ends_no_process_between(tmp_path: Path) -> None:
    """SIGUSR1 was its death, and that of the ranks."""
    sleep = Sleep(tmp_path)
    ranks = Ranks(1, sleep, fork=True)
    ranks.start()
    (only,) = sleep.processes(1)
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        os.kill(only.ppid(), number)
    only.kill()
    assert collected(ranks, 1) == {0: -signal.SIGKILL}
    ranks.end()


def test_a_signal_waits_until_the_ranks_are_started() -> None:
    """One thread had it blocked, another received it, and the pipe to the new process was left empty."""
    reached = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where make runs in the background

    def start() -> None:
        with postponed([signal.SIGINT]):
            os.kill(os.getpid(), signal.SIGINT)
            reached.append(1)
        time.sleep(1.0)

    try:
        with pytest.raises(KeyboardInterrupt):
            start()
        assert reached == [1]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_only_a_process_of_one_thread_is_forked() -> None:
    """Threads of numpy's OpenBLAS end at a fork; those of OpenMP stay, and a fork that waits for them hangs."""
    code = (
        "import os, numpy, torch; from gnnpar.launch.forked import has_one_thread as one; print(one());"
        "torch.set_num_threads(2); torch.ones(1 << 20).add_(1); print(one())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["True", "False"]


def test_ranks_that_measure_run_no_script_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gnnpar.plan` of a script ran the script in each of them."""
    mains = []

    def start(process: BaseProcess) -> None:
        mains.append((vars(sys.modules["__main__"]).get("__file__"), os.environ["PYTHONSAFEPATH"]))
        raise KeyboardInterrupt

    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", start)
    with pytest.raises(KeyboardInterrupt):
        calibrate.world_samples(2, 1)
    assert mains == [(None, "1")]


def fails(rank: int, *_: object) -> None:
    sys.exit(7 if rank == 1 else 0)


def test_a_rank_that_fails_to_measure_is_one_line_and_nothing_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's spawn unpickled the errors of ranks from a file of /tmp that others could put there."""
    monkeypatch.setattr(calibrate, "_rank", fails)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made, make = [], tempfile.NamedTemporaryFile
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda *a, **k: (made.append(k), make(*a, **k))[1])
    with pytest.raises(ValueError, match="rank 1 of the measurement has ended with exit code 7"):
        calibrate.world_samples(2, 1)
    assert made == [] == list(tmp_path.iterdir())
