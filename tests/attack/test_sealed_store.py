"""Addresses of ranks that a stranger has put into the store: nobody connects to them."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Self

import pytest
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gnnpar.comm import sealed_store
from gnnpar.comm.authentication import SIZE, NotOfThisRun
from gnnpar.comm.sealed_store import SealedStore

RANK = """
import sys
from datetime import timedelta
import torch
from torch.distributed import PrefixStore, TCPStore
from gnnpar.comm.process import connect

store = PrefixStore("room", TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timeout=timedelta(seconds=60)))
connect("gloo", device=torch.device("cpu"), key=b"k" * 32, timeout_seconds=60, store=store)
"""
LOOPBACK = bytes((127, 0, 0, 1))


def address_of(store: TCPStore, name: str) -> bytes:
    for _ in range(600):
        if store.check([name]):
            return bytes(store.get(name))
        time.sleep(0.1)
    raise TimeoutError(name)


@pytest.mark.fault
def test_a_rank_does_not_connect_to_an_address_of_a_stranger() -> None:
    """In the place of rank 1's, which has not come yet. Of rank 0's he reads nothing."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=timedelta(seconds=60))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(2)
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-P", "-c", RANK, str(store.port)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as rank:
        mine = address_of(store, "room/0//cpu//0/0")
        assert LOOPBACK not in mine
        assert bytes(8) not in mine, "the address is in a structure of 128 bytes"
        port = listener.getsockname()[1].to_bytes(2, "big")
        forged = mine[:-128] + b"\2\0" + port + LOOPBACK + bytes(120)
        store.set("room/0//cpu//0/1", forged)  # pyright: ignore[reportArgumentType]
        try:
            with pytest.raises(TimeoutError):
                listener.accept()
            said = rank.communicate(timeout=60)[1]
        finally:
            rank.kill()
    assert rank.returncode != 0
    assert "proves no knowledge of the run's key: a stranger writes there" in said
    listener.close()


def test_a_store_that_answers_no_more_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host was stopped, or who forwards to it keeps what it says: ranks waited for ever, and heard no signal."""
    monkeypatch.setattr(sealed_store, "_MORE_SECONDS", 0.5)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with Silencer(store.port) as way:
        client = TCPStore("127.0.0.1", way.port, None, False, timeout=timedelta(seconds=1))
        sealed = SealedStore(client, b"k" * 32)
        sealed.set("a", b"1")
        assert sealed.get("a") == b"1"
        way.silent.set()
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"the store of the ranks does not answer within 1\.5 s"):
            sealed.get("a")
        assert time.monotonic() - began < 30


class Silencer:
    """A port that forwards to another one; no longer once it is `silent`."""

    def __init__(self, port: int) -> None:
        self.silent, self._to = threading.Event(), port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for each in (self._listener, *self._ends):
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ends = (self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._to)))
                self._ends.extend(ends)
                for one, other in (ends, ends[::-1]):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while (data := one.recv(1 << 16)) and not self.silent.is_set():
                other.sendall(data)


GROUPS = """
import gc, sys
from datetime import timedelta
import torch
from torch.distributed import PrefixStore, TCPStore
from gnnpar.comm.mesh import Mesh
from gnnpar.comm.process import connect

rank = int(sys.argv[2])
store = PrefixStore("room", TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timeout=timedelta(seconds=60)))
comm = connect("gloo", device=torch.device("cpu"), key=b"k" * 32, timeout_seconds=60, store=store)
del store
gc.collect()
stages = comm.along(Mesh.grid(2, stages=2), "stage")
print(stages.broadcast(stages.gather(rank)))
"""


@pytest.mark.fault
def test_groups_are_made_after_ranks_have_met() -> None:
    """Pipelines and grids, whose axes are known when their plan is: torch alone kept no Python part of the store."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=timedelta(seconds=60))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", GROUPS, str(store.port), str(rank)],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [each.communicate(timeout=90) for each in ranks]
    assert [out for out, _ in told] == ["[0, 1]\n"] * 2, told


def test_a_value_is_that_of_its_name() -> None:
    inner = HashStore()
    mine, theirs = SealedStore(inner, b"a" * SIZE), SealedStore(inner, b"b" * SIZE)
    mine.set("one", "1")
    mine.set("two", b"2")
    assert (mine.get("one"), mine.get("two")) == (b"1", b"2")
    with pytest.raises(NotOfThisRun, match="one proves no knowledge"):
        theirs.get("one")
    inner.set("one", inner.get("two"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(NotOfThisRun, match="one proves no knowledge"):
        mine.get("one")
    inner.set("two", "")
    with pytest.raises(NotOfThisRun, match="two proves no knowledge"):
        mine.get("two")
