"""The promise of SECURITY.md: ranks on one host listen on 127.0.0.1 alone, and run no code that a stranger sends."""

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from checkpoints import SMALL
from conftest import environment
from gnnpar.comm.process import NotOfThisRun, opened, sealed
from hosts import wait_for_epochs

ENDLESS = (*SMALL[1:], "strategy=graph_parallel", "hydra.run.dir=run", "epochs=1000000", "eval_every=1000000")


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
    command = [sys.executable, "-m", "gnnpar", "train", *ENDLESS]
    run = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL)
    try:
        wait_for_epochs(tmp_path / "run", 2, [run])
        ports = listening(psutil.Process(run.pid))
        assert {address for address, _ in ports} == {"127.0.0.1"}
        evil = pickle.dumps(Evil(tmp_path / "ran"))
        for address, port in ports:
            with suppress(OSError), socket.create_connection((address, port), timeout=2) as stranger:
                stranger.sendall(evil + b"\n" + len(evil).to_bytes(8, "little") + evil)
        done = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        wait_for_epochs(tmp_path / "run", done + 5, [run])
    finally:
        run.terminate()
        run.wait(60)
    assert not (tmp_path / "ran").exists()


def test_object_without_the_key_of_the_run_is_not_unpickled(tmp_path: Path) -> None:
    evil = pickle.dumps(Evil(tmp_path / "ran"))
    for data in (evil, bytes(32) + evil, sealed(b"another key", b"call 1", 1)[:32] + evil, b"", b"\x80"):
        with pytest.raises(NotOfThisRun):
            opened(b"key", b"call 1", data)
    assert not (tmp_path / "ran").exists()
    assert opened(b"key", b"call 1", sealed(b"key", b"call 1", {"a": 1})) == {"a": 1}
