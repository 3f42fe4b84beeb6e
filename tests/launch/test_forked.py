"""Ranks of a process in between: their ends are heard of, and nobody outlives whom it belongs to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest

from gnnpar.launch.forked import Ranks, warm
from gnnpar.launch.signals import postponed
from gnnpar.planner import calibrate


class Sleep:
    """A rank that says who it is and sleeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, rank: int) -> None:
        (self.folder / f"{rank}.pid").write_text(str(os.getpid()))
        time.sleep(60.0)

    def processes(self, size: int) -> list[psutil.Process]:
        files = [self.folder / f"{rank}.pid" for rank in range(size)]
        deadline = time.monotonic() + 60
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return [psutil.Process(int(file.read_text())) for file in files]


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


class Tell:
    """A rank that leaves where it runs, and ends; `code`: how."""

    def __init__(self, file: Path, code: int = 0) -> None:
        self.file, self.code = file, code

    def __call__(self, rank: int) -> None:
        server = psutil.Process(os.getppid()).ppid()
        told = [server, os.getcwd(), os.environ.get("GNNPAR_OF_THE_RUN"), "of_the_run" in sys.modules]
        sys.modules["of_the_run"] = sys
        self.file.with_suffix(f".{rank}").write_text(json.dumps(told))
        os._exit(self.code)


@pytest.fixture
def another_thread() -> Iterator[None]:
    """This process cannot be forked while there is one."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    yield
    done.set()
    thread.join()


def told(file: Path, code: int = 0) -> list[Any]:
    """What the two ranks of a run of its own left."""
    ranks = Ranks(2, Tell(file, code), fork=True)
    ranks.start()
    assert collected(ranks, 2) == {0: code, 1: code}
    ranks.end()
    return [json.loads(file.with_suffix(f".{rank}").read_text()) for rank in range(2)]


def test_ranks_of_several_runs_are_forked_from_one_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another_thread: None
) -> None:
    """It has the environment and the folder of each run, nothing of the last one, and is gone afterwards."""
    seen = []
    with warm():
        for run in ("first", "second"):
            folder = tmp_path / run
            folder.mkdir()
            monkeypatch.chdir(folder)
            monkeypatch.setenv("GNNPAR_OF_THE_RUN", run)
            seen.append(told(folder / "told", code=3 * (run == "first")))
        server = psutil.Process(seen[0][0][0])
        assert server.ppid() == os.getpid()
        server.kill()
        assert gone([server])
        another = psutil.Process(told(tmp_path / "another")[0][0])
        assert another.ppid() == os.getpid(), "one that was killed meanwhile costs no run"
    for run, ranks in zip(("first", "second"), seen, strict=True):
        assert ranks == [[server.pid, str(tmp_path / run), run, False]] * 2
    assert gone([another])
    later = told(tmp_path / "later")
    assert later[0][0] == os.getpid(), "outside, the process in between is this one's child"


@pytest.mark.fault
@pytest.mark.parametrize("victim", ["rank", "origin", "server"])
def test_a_run_that_is_ended_takes_its_server_along_and_the_next_has_another(
    tmp_path: Path, victim: str, another_thread: None
) -> None:
    with warm():
        (tmp_path / "first").mkdir()
        sleep = Sleep(tmp_path / "first")
        ranks = Ranks(2, sleep, fork=True)
        ranks.start()
        first, second = sleep.processes(2)
        origin = psutil.Process(first.ppid())
        server = psutil.Process(origin.ppid())
        {"rank": first, "origin": origin, "server": server}[victim].kill()
        both = {0: -signal.SIGKILL, 1: -signal.SIGKILL}
        assert collected(ranks, 1 if victim == "rank" else 2) == ({0: -signal.SIGKILL} if victim == "rank" else both)
        ranks.end()
        assert gone([first, second, origin])
        assert told(tmp_path / "next")[0][0] != server.pid or victim == "origin"


def test_the_end_comes_before_the_server_has_started_anything(tmp_path: Path, another_thread: None) -> None:
    resource_tracker.ensure_running()
    before = set(psutil.Process().children())
    with warm():
        ranks = Ranks(2, Sleep(tmp_path), fork=True)
        ranks.start()
        ranks.end()
        assert not set(psutil.Process().children()) - before
        assert not list(tmp_path.iterdir())


@pytest.mark.fault
def test_a_server_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, threading, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path;"
        "from gnnpar.launch import forked; from test_forked import Sleep;"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); context = forked.warm();"
        "context.__enter__(); ranks = forked.Ranks(2, Sleep(Path(sys.argv[2])), fork=True); ranks.start();"
        "time.sleep(60)"
    )
    here = str(Path(__file__).parent)
    parent = subprocess.Popen([sys.executable, "-c", code, here, str(tmp_path)], env={**os.environ, "PYTHONPATH": here})
    first, second = Sleep(tmp_path).processes(2)
    below = [first, second, psutil.Process(first.ppid()), psutil.Process(psutil.Process(first.ppid()).ppid())]
    assert below[-1].ppid() == parent.pid
    parent.kill()
    parent.wait()
    assert gone(below)


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

    def start() -> None:
        with postponed([signal.SIGINT]):
            os.kill(os.getpid(), signal.SIGINT)
            reached.append(1)
        time.sleep(1.0)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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

    def spawn(*arguments: object, **more: object) -> None:
        mains.append((vars(sys.modules["__main__"]).get("__file__"), os.environ["PYTHONSAFEPATH"]))
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.multiprocessing.spawn", spawn)
    with pytest.raises(KeyboardInterrupt):
        calibrate.world_samples(2, 1)
    assert mains == [(None, "1")]
