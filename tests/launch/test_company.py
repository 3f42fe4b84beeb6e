"""A joined rank ends with the others: in order where it notices by itself, at once where it hangs; one line a host."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from checkpoints import SMALL, result
from gnnpar.cli.train import run_training
from gnnpar.comm.interfaces import MeetingError
from gnnpar.config.compose import compose
from gnnpar.launch import joined
from gnnpar.launch.joined import JoinedRank, PeerLost, monitored, refusal, sees
from gnnpar.launch.launch import world_of
from gnnpar.launch.peer_monitor import Channel, greet
from gnnpar.launch.rendezvous import JoinedWorld, rendezvous
from gnnpar.settings import ConfigError
from gnnpar.training.result.record import RunRecord


def record(folder: Path, *overrides: str) -> RunRecord:
    settings = compose([*SMALL, *overrides])
    return RunRecord(settings, world_of(settings), folder)


def test_ranks_agree_on_what_changes_numbers_and_nothing_else() -> None:
    one, other = (record(Path(), *more).agreed() for more in ((), ("epochs=7", "data_dir=x", "checkpoint.every=3")))
    assert {name for name in one if one[name] != other[name]} == {"epochs"}
    assert one["model.hidden"] == "8"
    assert {"the version of torch", "the version of gnnpar"} < one.keys()


def test_a_folder_that_is_not_shared_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "marker").touch()
    assert sees(tmp_path / "marker")
    assert not sees(Path("/elsewhere/run/marker"))
    mine, unshared = record(tmp_path), record(tmp_path, "checkpoint.keep=0")
    monkeypatch.setenv("RANK", "3")
    line = mine.unseen(Path("/elsewhere/run"))
    assert line.startswith(
        f"rank 3 on {socket.gethostname()} does not see /elsewhere/run, the run's folder on rank 0's"
    )
    assert line.endswith("or set checkpoint.keep=0")
    assert unshared.unseen(Path("/elsewhere/run")) == ""


@pytest.mark.parametrize("refuses", [0, 1])
def test_ranks_hear_what_one_of_them_cannot_run(refuses: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 0, a thread is rank 1; whoever refuses, both have its line at once."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0"}
    for name, value in {**env, "GLOO_SOCKET_IFNAME": ""}.items():  # which a meeting sets
        monkeypatch.setenv(name, value)
    line = f"rank {refuses} on {socket.gethostname()}: resume=/none holds no checkpoint"
    settings = compose([*SMALL[1:], "strategy=graph_parallel", *(["resume=/none"] if refuses == 0 else [])])

    def other() -> None:
        refusal = line if refuses == 1 else ""
        rendezvous(
            env | {"RANK": "1"},
            about=RunRecord(settings, world_of(settings), tmp_path).agreed(),
            patience=20,
            refusal=refusal,
        )

    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(other)
        with pytest.raises(ConfigError, match=f"^{line if refuses else 'resume=/none holds'}"):
            run_training(settings, tmp_path)
        assert isinstance(told := heard.exception(), MeetingError)
    assert str(told).startswith(line)
    assert time.monotonic() - began < 10
    assert not (tmp_path / "result.json").exists()


def test_who_is_alone_raises_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ConfigError("no")
    assert refusal(error) is error
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ""}.items():
        monkeypatch.setenv(name, value)
    assert refusal(error) is error


def two(folder: Path) -> list[JoinedWorld]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GNNPAR_TOKEN": "a secret of tests, which is long enough",
    }
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(
                lambda r: rendezvous(env | {"RANK": str(r)}, about={}, patience=20, marker=f"{folder}/marker"), range(2)
            )
        )


class Rank1:
    """Its end of the connection to rank 0."""

    def __init__(self, connection: socket.socket, channel: Channel) -> None:
        self.connection, self.channel = connection, channel
        self.shutdown = connection.shutdown

    def send(self, message: dict[str, Any]) -> None:
        self.connection.sendall(self.channel.line(message))


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rank 0, the connection of rank 1, and an event that stands for the end of the process."""
    monkeypatch.setattr(joined, "_GRACE_SECONDS", 0.3)
    ended = threading.Event()
    monkeypatch.setattr(joined.os, "_exit", lambda code: ended.set())
    first, second = two(tmp_path)
    with socket.create_connection((first.members[0].address, first.members[0].port)) as other:
        mine = JoinedRank(first, record(tmp_path), 6.0)
        yield mine, Rank1(other, greet(other, second.key, 1)), ended
    second.listener.close()


def test_a_rank_that_hangs_in_a_transfer_is_ended_with_a_line(pair, tmp_path: Path, capsys) -> None:
    mine, other, ended = pair
    other.shutdown(socket.SHUT_RDWR)
    assert ended.wait(10)
    line = "rank 1 on HOST (127.0.0.1) is lost: ended without a message (killed, or out of memory?); there is no "
    assert capsys.readouterr().err.replace(socket.gethostname(), "HOST").startswith(f"gnnpar: {line}")
    assert result(tmp_path)["error"].replace(socket.gethostname(), "HOST").startswith(line)
    mine.monitor.close()


def test_a_rank_that_loses_its_peer_says_who_and_one_that_fails_says_why(pair, tmp_path: Path) -> None:
    mine, other, ended = pair
    (tmp_path / "checkpoint" / "epoch-000004").mkdir(parents=True)
    other.shutdown(socket.SHUT_RDWR)
    found = mine.settle(RuntimeError("Connection closed by peer [127.0.0.1]:9"))
    assert found.line.endswith(
        f"; the last checkpoint is epoch-000004: start all ranks again with resume=auto hydra.run.dir={tmp_path}"
    )
    assert not found.quiet
    assert not ended.is_set()
    mine.monitor.close()


def test_a_rank_of_its_own_failure_tells_the_others(tmp_path: Path) -> None:
    first, second = two(tmp_path)
    records = [record(tmp_path), record(tmp_path)]  # Hydra composes once at a time
    errors = (ConnectionError("rank 1 is gone in epoch 2: closed"), ValueError("too\nmuch"))

    def one(met: JoinedWorld) -> PeerLost | None:
        try:
            with monitored(records[met.me], met, 30.0):
                raise errors[met.me]
        except PeerLost as lost:
            return lost

    with ThreadPoolExecutor(2) as pool:
        told = [lost for lost in pool.map(one, (first, second)) if lost is not None]
    assert told[0].line == told[1].line
    assert told[0].line.startswith("rank 1: ValueError: too much")  # and where in the user's code
    assert [told[rank].quiet for rank in (0, 1)] == [True, False], "said once on a host"
