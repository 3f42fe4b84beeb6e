"""Ranks as processes of one host: failures are named, no rank outlives its parent, nothing that is sent in runs."""

import errno
import json
import multiprocessing
import os
import pickle
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import gnnpar
from conftest import Run, environment
from gnnpar.api import TrainingFailed
from gnnpar.comm import interfaces
from gnnpar.comm.process import NotOfThisRun, connect, opened, sealed
from gnnpar.comm.world import Outcome, RunHooks
from gnnpar.config.compose import compose
from gnnpar.launch.failures import HangTimer, Stop, hanging
from gnnpar.launch.launch import _threads, launch, world_of
from gnnpar.launch.processes import enter_network, first_failure, start_ranks
from gnnpar.planner import calibrate
from started import Sleep, Started, wait_for_epochs

FEW = ("dataset=sbm", "dataset.num_nodes=60", "epochs=2", "threads_per_rank=1", "world_size=2")


@pytest.fixture
def ranks():
    started: list[BaseProcess] = []
    yield started
    for each in started:
        if each.pid is not None:
            each.kill()
            each.join()


@pytest.mark.fault
@pytest.mark.parametrize("fork", [True, False])
def test_killed_rank_is_named(tmp_path: Path, ranks: list[BaseProcess], fork: bool) -> None:
    sleep = Sleep(tmp_path)
    start_ranks(ranks, 2, sleep, fork=fork)
    first, second = sleep.processes(2)
    first.kill()
    failure = first_failure(ranks, tmp_path, 60)
    assert failure is not None and failure.lost
    assert failure.line == "rank 0: killed by SIGKILL (out of memory?)"
    assert second.is_running()


class Ended(RunHooks):
    """As srun --kill-on-bad-exit does once another rank has ended."""

    def on_end(self, outcome: Outcome) -> Outcome:
        os.kill(os.getpid(), signal.SIGTERM)
        return outcome


class Nothing:
    def session(self, *, first: bool) -> AbstractContextManager[Callable[..., None]]:
        return nullcontext(lambda comm, host: None)


def test_sigterm_while_the_result_is_written_does_not_end_the_process() -> None:
    settings = compose([*FEW[:-1], "world_size=1"])
    before = signal.signal(signal.SIGTERM, lambda number, frame: pytest.fail("the handler of the run is gone"))
    try:
        outcome = launch(world_of(settings), Nothing(), Ended(), how=settings.launch, comm=settings.comm)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert outcome == Outcome("completed")


PARENT = """
import sys
from pathlib import Path
from gnnpar.launch.processes import start_ranks
from started import Sleep
ranks = []
start_ranks(ranks, 2, Sleep(Path(sys.argv[1])), fork=sys.argv[2] == "fork")
ranks[0].join()
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("how", ["fork", "server"])
def test_ranks_of_a_killed_parent_end(tmp_path: Path, how: str) -> None:
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), env.get("PYTHONPATH")]))
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), how], env=env)
    found = Sleep(tmp_path).processes(2)
    parent.kill()
    parent.wait()
    assert not psutil.wait_procs(found, timeout=10)[1]


def test_stopped_rank_is_lost(tmp_path: Path, ranks: list[BaseProcess]) -> None:
    sleep = Sleep(tmp_path)
    start_ranks(ranks, 1, sleep, fork=True)
    sleep.processes(1)[0].suspend()
    failure = first_failure(ranks, tmp_path, 1.5)
    assert failure is not None and failure.lost
    line = "rank 0: hangs: nothing heard of it for comm.timeout_seconds=1.5; the process is stopped"
    assert failure.line == line


@pytest.mark.parametrize("over", [frozenset({0, 1}), frozenset({0}), frozenset({1}), frozenset()])
def test_rank_that_ends_after_its_work_is_not_lost(
    tmp_path: Path, ranks: list[BaseProcess], over: frozenset[int]
) -> None:
    for rank in over:
        (tmp_path / f"{rank}.done").touch()
    start_ranks(ranks, 2, os._exit, fork=True)  # the exit code is the rank
    failure = first_failure(ranks, tmp_path, 60)
    assert (failure is None) == bool(over)


class Hanging:
    """Rank 0 waits in gnnpar/comm/process.py, rank 1 in a file of the user's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, rank: int) -> None:
        timer = HangTimer(self.folder / f"{rank}.stack", 1.0)
        timer.beat()
        timer.beat(start=True)
        file = self.folder / ("comm/process.py" if rank == 0 else "net.py")
        exec(compile("import time\ndef wait(): time.sleep(60)\nwait()", str(file), "exec"), {})


def test_hanging_rank_is_told_from_waiting_ranks(tmp_path: Path, ranks: list[BaseProcess]) -> None:
    start_ranks(ranks, 2, Hanging(tmp_path), fork=True)
    failure = first_failure(ranks, tmp_path, 1.0)
    assert failure is not None and failure.lost
    place = f"{tmp_path.name}/net.py:2 in wait"
    assert failure.line == f"rank 1: hangs: nothing heard of it for comm.timeout_seconds=1; at {place}"
    assert hanging({}, set(), 1.0) is None


THREADS = """
import numpy, torch
from gnnpar.launch.processes import has_one_thread
print(has_one_thread())
torch.set_num_threads(2)
torch.ones(1 << 20).add_(1)
print(has_one_thread())
"""


@pytest.mark.slow
def test_process_with_openmp_threads_is_not_forked(run_python: Run) -> None:
    """Threads of numpy's OpenBLAS end at a fork; those of OpenMP stay, and a fork that waits for them hangs."""
    assert run_python("-c", THREADS).stdout.split() == ["True", "False"]


REAPING = """
import os, signal
def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: pass
signal.signal(signal.SIGCHLD, reap)
import gnnpar
gnnpar.train("gcn", "sbm", strategy="graph_parallel", world_size=2, epochs=1, folder="run", **{"dataset.num_nodes": 60})
print("True")
"""


def test_ranks_of_a_daemonic_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(multiprocessing.current_process())["_config"], "daemon", True)
    with pytest.raises(ValueError, match=r"a daemonic process, as those of multiprocessing\.Pool, can"):
        start_ranks([], 2, print, fork=True)


FORKED = """
import os, sys, gnnpar
from concurrent.futures import ProcessPoolExecutor
def train(name):
    small = {"dataset.num_nodes": 2000, "threads_per_rank": 2}
    return gnnpar.train("gcn", "sbm", strategy="single", folder=name, epochs=2, **small).result["loss"]
if __name__ == "__main__":
    mine = train("mine")
    with ProcessPoolExecutor(1) as pool:
        print(list(pool.map(train, ["theirs"])) == [mine])
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [REAPING, FORKED], ids=["reaps children", "fork of a process with threads"])
def test_train_in_a_program_completes(run_python: Run, tmp_path: Path, program: str) -> None:
    """In a fork, OpenMP waits for the threads of its parent."""
    (tmp_path / "program.py").write_text(program)
    done = run_python("program.py", timeout=120)
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr


@pytest.mark.slow
def test_run_with_its_log_on_a_full_disk_completes(tmp_path: Path) -> None:
    """Python flushes stdout before it forks."""
    command = [sys.executable, "-m", "gnnpar", "train", *FEW, "strategy=graph_parallel", "hydra.run.dir=run"]
    env = environment() | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=tmp_path, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300
        )
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"


def test_rank_that_cannot_start_ends_the_run_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few: dict[str, Any] = {"dataset.num_nodes": 60, "epochs": 1, "threads_per_rank": 1}

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(BaseProcess, "start", refuse)
    with pytest.raises(TrainingFailed, match=r"a process for a rank cannot be started \(Resource .*ulimit"):
        gnnpar.train("gcn", "sbm", strategy="graph_parallel", world_size=2, folder=tmp_path, **few)
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "failed"


@pytest.mark.quick(1)
@pytest.mark.parametrize(("hard", "code"), [(28, 2), (4096, 0)])
def test_low_limit_of_open_files_is_raised_or_refused(tmp_path: Path, hard: int, code: int) -> None:
    """A soft limit is raised."""
    ranks = ("strategy=graph_parallel", "world_size=2")
    command = shlex.join([sys.executable, "-m", "gnnpar", "train", *FEW[:4], *ranks])
    script = ["/bin/bash", "-c", f"ulimit -Sn 28; ulimit -Hn {hard}; exec {command}"]
    done = subprocess.run(script, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    line = "a rank of 2 has 80 files open at once, and the limit is 28: raise it (ulimit -n), or start fewer ranks"
    assert (done.returncode, f"gnnpar: {line}" in done.stderr) == (code, code == 2), done.stderr
    assert "Traceback" not in done.stderr


def test_empty_interface_names_give_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """`GLOO_SOCKET_IFNAME=$A,$B` of two variables that are not set: gloo would listen at the host name's address."""
    monkeypatch.setenv(interfaces.VARIABLE, ",")
    enter_network(None, 0)
    assert os.environ[interfaces.VARIABLE] == interfaces.loopback()


def test_gloo_with_lazy_init_set_connects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups that connect at their first use wait for each other."""
    for name, value in (("TORCH_GLOO_LAZY_INIT", "1"), ("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    seen: list[str | None] = []

    def begun(*_: object, **__: object) -> None:
        seen.append(os.environ.get("TORCH_GLOO_LAZY_INIT"))
        raise InterruptedError

    monkeypatch.setattr(dist, "init_process_group", begun)
    with pytest.raises(InterruptedError):
        connect("gloo", device=torch.device("cpu"), timeout_seconds=1, init_method="file:///none")
    assert seen == [None]


MEASURES = """
import sys
from gnnpar.planner.calibrate import _rank
_rank(0, 1, 1, sys.argv[1], b"", None, int(sys.argv[2]))
"""


@pytest.mark.slow
def test_measuring_rank_without_its_parent_ends(run_python: Run, tmp_path: Path) -> None:
    done = run_python("-c", MEASURES, str(tmp_path), "1")
    assert (done.returncode, done.stderr) == (1, "") and not os.listdir(tmp_path)


def test_measuring_ranks_do_not_import_the_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    mains = []

    def start(process: BaseProcess) -> None:
        mains.append(vars(sys.modules["__main__"]).get("__file__"))
        raise KeyboardInterrupt

    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", start)
    with pytest.raises(KeyboardInterrupt):
        calibrate.world_samples(2, 1)
    assert mains == [None]


def fails(rank: int, *_: object) -> None:
    sys.exit(7 if rank == 1 else 0)


@pytest.mark.slow
def test_measuring_rank_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_rank", fails)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made, make = [], tempfile.NamedTemporaryFile
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda *a, **k: (made.append(k), make(*a, **k))[1])
    with pytest.raises(ValueError, match="rank 1 of the measurement ended with exit code 7"):
        calibrate.world_samples(2, 1)
    assert made == [] == list(tmp_path.iterdir())


class Evil:
    """Make a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Return (address, port) of each TCP socket on which a process and its children listen."""
    found: set[tuple[str, int]] = set()
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            sockets = each.net_connections("inet")
            found |= {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}
    return found


def test_local_run_listens_on_loopback_and_runs_nothing_sent_to_it(tmp_path: Path) -> None:
    run = Started(tmp_path, "strategy=graph_parallel")
    try:
        ports = listening(run.all[0])
        assert {address for address, _ in ports} == {"127.0.0.1"}
        evil = pickle.dumps(Evil(tmp_path / "ran"))
        for address, port in ports:
            with suppress(OSError), socket.create_connection((address, port), timeout=2) as stranger:
                stranger.sendall(evil + b"\n" + len(evil).to_bytes(8, "little") + evil)
        done = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        wait_for_epochs(tmp_path / "run", done + 5, [run.process])
    finally:
        run.cleanup()
    assert not (tmp_path / "ran").exists()


def test_object_without_the_key_of_the_run_is_not_unpickled(tmp_path: Path) -> None:
    evil = pickle.dumps(Evil(tmp_path / "ran"))
    for data in (evil, bytes(32) + evil, sealed(b"another key", b"call 1", 1)[:32] + evil, b"", b"\x80"):
        with pytest.raises(NotOfThisRun):
            opened(b"key", b"call 1", data)
    assert not (tmp_path / "ran").exists()
    assert opened(b"key", b"call 1", sealed(b"key", b"call 1", {"a": 1})) == {"a": 1}


class _Work:
    """What each rank finds set: (deterministic, tf32, workspace of cuBLAS)."""

    def __init__(self):
        self.seen = []

    @contextmanager
    def session(self, *, first):
        yield lambda comm, host: self.see()

    def see(self):
        cuda = torch.backends.cuda.matmul.allow_tf32, os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        self.seen.append((torch.are_deterministic_algorithms_enabled(), *cuda))


@pytest.mark.parametrize("asked", ["true", "false"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_deterministic_is_set_in_ranks_and_restored_for_the_caller(asked, ranks, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.use_deterministic_algorithms(False)
    settings = compose(["strategy=graph_parallel", "comm=threads", f"world_size={ranks}", f"deterministic={asked}"])
    work = _Work()
    _threads(world_of(settings), work, Stop())
    assert work.seen == [(asked == "true", False, ":4096:8" if asked == "true" else None)] * ranks
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ, "it is the program's own again"


def test_tf32_is_set_in_ranks_that_ask_for_it():
    work = _Work()
    for asked in ("true", "false"):
        _threads(world_of(compose(["strategy=single", f"tf32={asked}"])), work, Stop())
    assert [tf32 for _, tf32, _ in work.seen] == [True, False]
    assert not torch.backends.cuda.matmul.allow_tf32
