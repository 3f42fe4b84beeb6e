"""Ranks on two hosts, network namespaces of this machine: they train as one does, and say in one line what ails."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from checkpoints import SMALL, hashes, result, rows
from conftest import environment
from gnnpar.cli.train import run_training
from gnnpar.config.compose import compose
from started import Hosts, two_hosts, wait_for_epochs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # six interpreters a start
JOB = (*SMALL[1:], "strategy=graph_parallel", "hydra.run.dir=run", "checkpoint.every=2", "checkpoint.keep=1")
LONG = (*JOB, "epochs=1000000", "eval_every=1000000", "comm.lost_seconds=6")


@pytest.fixture
def hosts(tmp_path: Path, shaped_links: None) -> Iterator[Hosts]:
    with two_hosts(tmp_path) as made:
        yield made


def alone(folder: Path, *overrides: str) -> Path:
    """The same by four ranks of one host."""
    folder.mkdir()
    settings = compose([*SMALL[1:], "strategy=graph_parallel", "world_size=4", "checkpoint.every=2", *overrides])
    assert run_training(settings, folder).exit_code == 0
    return folder


def ours(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("gnnpar:")]


def completed(started: list[subprocess.Popen[str]]) -> list[str]:
    """What each printed."""
    told = [(*process.communicate(timeout=200), process.returncode) for process in started]
    assert [code for *_, code in told] == [0, 0], told
    return [out for out, *_ in told]


def test_two_hosts_after_a_cut_resume_with_the_bits_of_one_host(hosts: Hosts, tmp_path: Path) -> None:
    started = [hosts.train(host, *LONG) for host in (0, 1)]
    wait_for_epochs(tmp_path / "run", 10, started)
    cut = time.monotonic()
    hosts.cut(1)
    lines = []
    for process in started:
        _, err = process.communicate(timeout=60)
        assert process.returncode != 0
        lines.append(ours(err))
    seconds = time.monotonic() - cut
    assert seconds < 60, seconds
    kept = [p.name for p in (tmp_path / "run" / "checkpoint").iterdir() if not p.name.endswith(".partial")]
    (again,) = {line[0].partition("; the last checkpoint is ")[2] for line in lines}
    assert again == f"{kept[0]}: start all ranks again with resume=auto hydra.run.dir={tmp_path}/run"
    gone = "no answer for 6 s (comm.lost_seconds); is the host down, or a link cut?"
    assert [line[0].partition("; the last")[0] for line in lines] == [
        f"gnnpar: ranks 2, 3 on node-b (10.77.0.2): {gone}",
        f"gnnpar: ranks 0, 1 on node-a (10.77.0.1): {gone}",
    ]
    assert [len(line) for line in lines] == [1, 1]
    found = result(tmp_path / "run")
    assert (found["status"], found["error"]) == ("failed", lines[0][0].removeprefix("gnnpar: "))
    done = int(kept[0].removeprefix("epoch-"))
    hosts.plug(1)
    going_on = (*JOB, f"epochs={done + 5}", "resume=auto", "optim.lr=0.01")
    completed([hosts.train(host, *going_on) for host in (0, 1)])
    assert result(tmp_path / "run")["status"] == "completed"
    whole = alone(tmp_path / "alone", f"epochs={done + 5}", "optim.lr=0.01")
    assert hashes(tmp_path / "run") == hashes(whole)
    assert losses(tmp_path / "run") == losses(whole)


def losses(folder: Path) -> list[float]:
    return [row["loss/train"] for row in rows(folder)]


def test_killed_host_ends_the_other_and_leaves_the_checkpoint(hosts: Hosts, tmp_path: Path) -> None:
    started = [hosts.train(host, *LONG) for host in (0, 1)]
    wait_for_epochs(tmp_path / "run", 6, started)
    killed = time.monotonic()
    started[1].kill()  # torchrun first: nobody is there to say what happened
    for process in hosts.ranks(1):
        process.kill()
    _, err = started[0].communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert started[0].returncode != 0
    (line,) = ours(err)
    gone = "ended without a message (killed, or out of memory?); the last checkpoint is epoch-"
    assert line.startswith(f"gnnpar: ranks 2, 3 on node-b (10.77.0.2): {gone}")
    assert result(tmp_path / "run")["error"] == line.removeprefix("gnnpar: ")
    assert list((tmp_path / "run" / "checkpoint").glob("epoch-*/manifest.json"))


def test_torchrun_restarts_both_hosts_from_the_last_checkpoint(hosts: Hosts, tmp_path: Path) -> None:
    """A rank of the host that does not hold rank 0 is killed: that host's torchrun counts a restart, the other's
    none."""
    job = (*JOB, "epochs=400", "eval_every=400")
    started = [hosts.train(host, *job, elastic=2) for host in (0, 1)]
    wait_for_epochs(tmp_path / "run", 8, started)
    first = json.loads((tmp_path / "run" / "result.json").read_text())
    assert first["error"] == "ended without saying why"
    hosts.ranks(1)[0].kill()
    said = completed(started)
    found = result(tmp_path / "run")
    assert (found["status"], found["restarts"]) == ("completed", 1)
    assert sum("resumed from" in out for out in said) == 1, said
    whole = alone(tmp_path / "alone", "epochs=400", "eval_every=400")
    assert hashes(tmp_path / "run") == hashes(whole)
    assert losses(tmp_path / "run") == losses(whole)


def test_restart_by_torchrun_resumes_in_the_first_folder(tmp_path: Path) -> None:
    """No folder is given: the second attempt finds the first one's."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = ("strategy=graph_parallel", "epochs=400", "eval_every=400", "checkpoint.every=2", *SMALL[1:-1])
    command = [*torchrun, "--max-restarts", "1", "-m", "gnnpar", "train", *job]
    read = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), **read) as process:
        try:
            deadline = time.monotonic() + 120
            while not (found := list(tmp_path.rglob("epoch-*/manifest.json"))) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert found, process.poll()
            ranks = [p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1"]
            ranks[0].kill()
            out, err = process.communicate(timeout=150)
        finally:
            process.kill()
    assert process.returncode == 0, (out, err)
    (file,) = tmp_path.rglob("result.json")
    assert (result(file.parent)["status"], result(file.parent)["restarts"]) == ("completed", 1)
    assert out.count("resumed from") == 1
    lost = ": ended without a message (killed, or out of memory?); torchrun starts all ranks again, from epoch-"
    assert sum(lost in line for line in ours(err)) == 1, err
