"""Processes that tests start, to be killed, stopped or joined: ranks that sleep, `gnnpar train`, and two hosts made of
this machine, a network namespace and a host name each, in which torchrun starts ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from conftest import environment
from gnnpar.comm.world import Links
from gnnpar.launch.emulated.namespaces import Network, address, netns

TINY = ("dataset.num_nodes=300", "dataset.avg_degree=6", "threads_per_rank=1")
LONG = ("epochs=1000000", "eval_every=1000000", "tracker=jsonl", *TINY, "hydra.run.dir=run")


class Started:
    """A running `gnnpar train` whose ranks have finished some epochs."""

    def __init__(self, folder: Path, *arguments: str, num_ranks: int = 2) -> None:
        command = [sys.executable, "-m", "gnnpar", "train", *LONG, *arguments]
        self.folder = folder
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(),
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.all = [psutil.Process(self.process.pid)]
        wait_for_epochs(folder / "run", 3, [self.process])
        self.ranks = sorted(self.all[0].children(), key=lambda process: process.pid) if num_ranks > 1 else []
        self.all += self.all[0].children(recursive=True)
        if num_ranks > 1:
            assert len(self.ranks) == num_ranks

    def end(self, within: float = 30) -> tuple[int, str, dict]:
        """Exit code, stderr, result; everything is gone."""
        _, err = self.process.communicate(timeout=within)
        _, alive = psutil.wait_procs(self.all, timeout=5)
        assert not alive
        return self.process.returncode, err, json.loads((self.folder / "run" / "result.json").read_text())

    def cleanup(self) -> None:
        for process in self.all:
            if process.is_running():
                process.kill()
        self.process.communicate()


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


NAMES = ("node-a", "node-b")
PORT = 29500


class Hosts:
    """`commands` run in `folder`, which both hosts see."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.started: list[subprocess.Popen[str]] = []

    def run(self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command on a host."""
        inside = ["nsenter", f"--net={self.network.namespaces[host]}", "unshare", "--uts", "--mount", "sh", "-c"]
        names = self.folder / "hosts"  # torchrun wants to know its own
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{address(i)} {name}\n" for i, name in enumerate(NAMES)))
        script = f'hostname {NAMES[host]} && mount --bind {names} /etc/hosts && exec "$@"'
        process = subprocess.Popen(
            [*inside, script, "sh", *command],
            cwd=self.folder,
            text=True,
            env=environment() | {"OMP_NUM_THREADS": "1"} | dict(env or {}),
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def train(self, host: int, *overrides: str, env: Mapping[str, str] | None = None, elastic: int | None = None):
        """Two ranks on a host, by torchrun; `elastic`: restarts, with the rendezvous that allows them."""
        how = ["--node-rank", str(host), "--master-addr", address(0), "--master-port", str(PORT)]
        if elastic is not None:
            how = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address(0)}:{PORT}"]
            how += ["--rdzv-id", "gnnpar", "--local-addr", address(host), "--max-restarts", str(elastic)]
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *how]
        return self.run(host, [*command, "-m", "gnnpar", "train", *overrides], env)

    def cut(self, host: int) -> None:
        """The host's cable is pulled: at the switch, so that the host itself still has an interface."""
        self.plug(host, "down")

    def plug(self, host: int, state: str = "up") -> None:
        """The cable is back."""
        with netns(self.network.namespaces[-1]):
            subprocess.run(["ip", "link", "set", f"port{host}", state], check=True)

    def ranks(self, host: int) -> list[psutil.Process]:
        """The processes of gnnpar on a host, by rank."""
        found = [p for p in psutil.process_iter() if _rank_on(p, self.network.namespaces[host])]
        return sorted(found, key=lambda p: p.environ()["RANK"])

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for host in (0, 1):  # in sessions of their own, with the pipes of who started them
            for rank in self.ranks(host):
                rank.kill()
        for process in self.started:
            process.communicate()


def _rank_on(process: psutil.Process, namespace: str) -> bool:
    try:
        words = process.cmdline()
        if "gnnpar" not in words or "torch.distributed.run" in words:
            return False
        if not process.environ().get("RANK", "").isdigit():
            return False
        return os.stat(f"/proc/{process.pid}/ns/net").st_ino == os.stat(namespace).st_ino
    except (psutil.Error, OSError):
        return False


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    with Network.built(Links(host_gbps=(1.0, 1.0))) as network:
        hosts = Hosts(network, folder)
        try:
            yield hosts
        finally:
            hosts.close()


def wait_for_epochs(folder: Path, count: int, processes: Sequence[subprocess.Popen[Any]], seconds: float = 120) -> None:
    """Until so many epochs stand in metrics.jsonl."""
    deadline = time.monotonic() + seconds
    rows = folder / "metrics.jsonl"
    while not (rows.exists() and len(rows.read_text().splitlines()) >= count):
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
