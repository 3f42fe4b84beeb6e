"""Ranks that others started join or end with one line in bounded time, and learn of each other's loss.

Ranks are processes of one host here; hosts are in test_hosts.py.
"""

import contextlib
import copy
import io
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from checkpoints import SMALL
from gnnpar.comm import interfaces
from gnnpar.comm.world import Outcome, RunHooks
from gnnpar.config.compose import compose
from gnnpar.launch.failures import Failure
from gnnpar.launch.join import join, refusal
from gnnpar.launch.launch import world_of
from gnnpar.settings import ConfigError
from gnnpar.training.result.record import RunRecord
from ports import free_port
from worlds import FORKED

AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
HOST = socket.gethostname()


class Hooks:
    """What a run tells the launcher. `missing`: this rank does not see rank 0's folder."""

    def __init__(self, folder: Path, about: Mapping[str, str], missing: str = "") -> None:
        self.run_dir, self.about, self.missing = folder, about, missing

    def agreed(self) -> Mapping[str, str]:
        return {"epochs": "8"} | dict(self.about)

    def folder_error(self, folder: Path) -> str:
        return self.missing

    def on_lost(self, line: str, folder: Path) -> str:
        return f"{line}; see {folder.name}"

    def on_end(self, outcome: Outcome) -> Outcome:
        (self.run_dir / "ended").write_text(outcome.error or "")
        return outcome


def _rank(out: Path, env: dict[str, str], keys: dict[str, Any], body: Callable[[Any], None] | None) -> None:
    """Join, and say in a file what came of it."""
    os.environ |= env | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    said = io.StringIO()
    time.sleep(keys.get("after", 0.0))
    began = time.monotonic()
    told: Any = {}
    try:
        with contextlib.redirect_stderr(said):
            if keys.get("refuses"):
                raise refusal(ConfigError(keys["refuses"]), keys.get("seconds", 20.0))
            folder = out.parent / keys.get("folder", "run")
            hooks: Any = Hooks(folder, keys.get("about", {}), keys.get("missing", ""))
            for _ in range(keys.get("times", 1)):
                joined = join(hooks, keys.get("seconds", 20.0))
                told = {"hosts": joined.hosts, "restarts": joined.restarts, "folder": str(joined.folder)}
                with joined.watched(6.0):
                    joined.store.set(f"{joined.rank}", "here")
                    joined.store.wait([f"{rank}" for rank in range(len(joined.hosts))])
                    time.sleep(0.5)  # rank 0 holds the store
                    if body is not None:
                        body(joined.rank)
    except Exception as error:
        told = {"error": type(error).__name__, "line": str(error), "quiet": getattr(error, "quiet", False)}
    out.write_text(json.dumps(told | {"seconds": time.monotonic() - began}))


class Ranks:
    """Ranks of one world; `each` has by rank: env, about, refuses, seconds, missing, folder, absent, after, times."""

    def __init__(self, folder: Path, size: int, each: Mapping[int, dict[str, Any]] | None = None, **more: Any) -> None:
        self.folder, self.port = folder, more.get("port") or free_port()
        self.started: dict[int, BaseProcess] = {}
        for rank in range(size):
            keys = dict((each or {}).get(rank, {}))
            if not keys.pop("absent", False):
                env = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
                env |= {"MASTER_PORT": str(self.port), "GLOO_SOCKET_IFNAME": ""}
                env |= more.get("env", {}) | keys.pop("env", {})
                out = folder / f"{rank}.json"
                out.unlink(missing_ok=True)
                process = FORKED.Process(target=_rank, args=(out, env, keys, more.get("body")))
                process.start()
                self.started[rank] = process

    def told(self) -> dict[int, dict[str, Any]]:
        for process in self.started.values():
            process.join(90)
            process.kill()
        files = {rank: self.folder / f"{rank}.json" for rank in self.started}
        return {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}

    def lines(self) -> list[str]:
        return [told.get("line", "") for told in self.told().values()]


def test_ranks_that_agree_join_and_listen_on_the_loopback_alone(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3, {0: {"env": {"TORCHELASTIC_RESTART_COUNT": "2"}}}, body=_listening)
    told = ranks.told()
    for each in told.values():
        assert each.get("hosts") == [f"{HOST} (127.0.0.1)"] * 3, told
        assert (each["restarts"], each["folder"]) == (2, str(tmp_path / "run"))
    assert not list((tmp_path / "run").iterdir())


def _listening(rank: int) -> None:
    own = psutil.Process().net_connections()
    assert {each.laddr.ip for each in own if each.status == psutil.CONN_LISTEN} <= {"127.0.0.1"}


DIFFERS = f"rank 1 on {HOST} (127.0.0.1) has epochs=9, rank 0 on {HOST} (127.0.0.1) has epochs=8: start all ranks with"


@pytest.mark.parametrize(
    ("each", "line"),
    [
        ({1: {"about": {"epochs": "9"}}}, DIFFERS),
        ({1: {"about": {"model.heads": "2"}}}, "has model.heads=2, rank 0 on HOST (127.0.0.1) has model.heads=nothing"),
        ({1: {"env": {"WORLD_SIZE": "3"}}}, "rank 1 on HOST (127.0.0.1) has WORLD_SIZE=3, rank 0 on"),
        ({1: {"env": {"GLOO_SOCKET_IFNAME": "eth7"}}}, "rank 1: GLOO_SOCKET_IFNAME=eth7 does not exist on HOST"),
        ({0: {"env": {"GLOO_SOCKET_IFNAME": "eth7"}}}, "rank 0: GLOO_SOCKET_IFNAME=eth7 does not exist on HOST"),
        ({1: {"absent": True}, 0: {"seconds": 1.5}}, "rank 1 of 2 did not come within comm.connect_seconds"),
        ({0: {"absent": True}, 1: {"seconds": 1.5}}, "is not reached within comm.connect_seconds (127.0.0.1:"),
        ({1: {"refuses": "no shards here"}}, "no shards here"),
        ({0: {"refuses": "resume=run holds no checkpoint"}}, "resume=run holds no checkpoint"),
        ({1: {"env": {"MASTER_PORT": ""}}, 0: {"absent": True}}, "MASTER_PORT=: set them to the address of rank 0's"),
        (
            {1: {"env": {"MASTER_ADDR": "no.such.host.invalid"}, "seconds": 1.5}, 0: {"absent": True}},
            "MASTER_ADDR=no.such.host.invalid",
        ),
        ({1: {"folder": "other/run", "missing": "rank 1 does not see the folder"}, 0: {}}, ""),
    ],
)
def test_ranks_that_cannot_join_say_why_in_one_line_each(each: dict[int, dict[str, Any]], line: str, tmp_path: Path):
    told = Ranks(tmp_path, 2, each).told()
    assert all(found["seconds"] < 15 for found in told.values()), told
    for found in told.values():
        assert line.replace("HOST", HOST) in found.get("line", ""), told
        assert "\n" not in found.get("line", "")
        assert found.get("error", "") == ("" if not line else "ConfigError" if "refuses" in str(each) else "Failure")


def test_ranks_of_a_host_that_do_not_reach_rank_0_print_one_line(tmp_path: Path) -> None:
    own = {rank: {"seconds": 1.5, "env": {"LOCAL_RANK": str(rank - 1)}} for rank in (1, 2)}
    told = Ranks(tmp_path, 3, {0: {"absent": True}} | own).told()
    assert all("is not reached within comm.connect_seconds" in each["line"] for each in told.values()), told
    assert [told[rank]["quiet"] for rank in (1, 2)] == [False, True]
    assert told[1]["seconds"] + 5 < told[2]["seconds"], "torchrun ends the first one as soon as the second has ended"


def test_a_folder_that_another_host_does_not_see_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, unshared = compose(SMALL[1:]), compose([*SMALL[1:], "checkpoint.keep=0"])
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    mine, other = (RunRecord(each, world_of(settings), tmp_path) for each in (settings, unshared))
    assert mine.folder_error(Path("/elsewhere/run")).startswith(f"rank 3 on {HOST} does not see /elsewhere/run")
    assert other.folder_error(Path("/elsewhere/run")) == ""


def test_ranks_agree_on_what_changes_numbers_and_nothing_else(tmp_path: Path) -> None:
    agreed = []
    for more in ((), ("epochs=7", "data_dir=x", "checkpoint.every=3")):
        settings = compose([*SMALL, *more])
        agreed.append(RunRecord(settings, world_of(settings), tmp_path).agreed())
    assert {name for name in agreed[0] if agreed[0][name] != agreed[1][name]} == {"epochs"}
    assert {"the version of torch", "the version of gnnpar"} < agreed[0].keys()


def _stays(rank: int) -> None:
    time.sleep(8)


@pytest.mark.parametrize("after", [0.0, 3.0])
def test_a_number_that_is_taken_twice_is_told(tmp_path: Path, after: float) -> None:
    each: dict[int, dict[str, Any]] = {rank: {"env": {"WORLD_SIZE": "2"}} for rank in range(2)}
    each[2] = {"env": {"RANK": "1", "WORLD_SIZE": "2"}, "after": after}
    lines = Ranks(tmp_path, 3, each, body=_stays).lines()
    assert any("RANK=1 is taken twice" in line for line in lines), lines


@pytest.mark.parametrize(
    ("each", "line"),
    [
        ({1: {"absent": True}}, "the port is taken by another program there"),
        ({0: {"absent": True}, 1: {"seconds": 1.0}}, "does not answer as rank 0 would"),
    ],
    ids=["rank 0 cannot listen", "rank 1 finds no store"],
)
def test_port_of_another_program_is_told(tmp_path: Path, each: dict[int, dict[str, Any]], line: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert line in Ranks(tmp_path, 2, each, port=other.getsockname()[1]).lines()[0]


def test_a_store_that_torchrun_keeps_over_restarts_holds_no_old_news(tmp_path: Path) -> None:
    """The second attempt finds the first one's verdict, and the third what the second ended with."""
    port = free_port()
    kept = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for about, line in (({}, ""), ({}, ""), ({"epochs": "9"}, "has epochs=9"), ({}, "")):
        found = Ranks(tmp_path, 2, {1: {"about": about}}, port=port, env=AGENT).lines()
        assert all(bool(line) == bool(each) and line in each for each in found), found
    del kept


def _until_killed(rank: int) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait(60)


def test_a_rank_that_is_killed_ends_ranks_that_hang(tmp_path: Path) -> None:
    began = time.monotonic()
    ranks = Ranks(tmp_path, 3, body=_until_killed)
    assert ranks.told() == {}, "the watcher has ended the process"
    assert time.monotonic() - began < 60
    assert [ranks.started[rank].exitcode for rank in range(3)] == [1, 1, -signal.SIGKILL]
    line = f"rank 2 on {HOST} (127.0.0.1): ended without a message (killed, or out of memory?); see run"
    assert (tmp_path / "run" / "ended").read_text() == line


def _lost_peer(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("Connection closed by peer [127.0.0.1]:9")


def test_ranks_that_lose_rank_0_end_in_order(tmp_path: Path) -> None:
    told = Ranks(tmp_path, 3, body=_lost_peer).told()
    line = f"rank 0 on {HOST} (127.0.0.1): ended without a message (killed, or out of memory?); see run"
    assert [(each["line"], each["quiet"]) for each in told.values()] == [(line, False), (line, True)]


def _fails(rank: int) -> None:
    if rank == 1:
        raise ValueError("too\nmuch")
    raise RuntimeError("rank 1 is gone in epoch 2: closed")


def test_a_rank_of_its_own_failure_tells_the_others(tmp_path: Path) -> None:
    told = Ranks(tmp_path, 3, body=_fails).told()
    assert all(each["line"].startswith("rank 1: ValueError: too much") for each in told.values()), told
    assert [told[rank]["quiet"] for rank in range(3)] == [True, False, True], "said once on a host"


def _ends_early(rank: int) -> None:
    time.sleep(1.5 * rank)


def test_a_rank_that_is_done_is_not_missed(tmp_path: Path) -> None:
    assert Ranks(tmp_path, 3, body=_ends_early).lines() == ["", "", ""]


@pytest.mark.parametrize("late", [0, 2])
def test_ranks_that_join_again_at_the_same_port_wait_for_each_other(tmp_path: Path, late: int) -> None:
    each = {rank: {"times": 2, "env": {"LATE": str(late)}} for rank in range(3)}
    assert Ranks(tmp_path, 3, each, body=_stays_longer).lines() == ["", "", ""]


def _stays_longer(rank: int) -> None:
    time.sleep(2.5 if os.environ["LATE"] == str(rank) else 0.5 * rank)


def test_a_rank_without_others_raises_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ConfigError("no")
    assert refusal(error) is error
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ""}.items():
        monkeypatch.setenv(name, value)
    assert refusal(error) is error


def test_a_process_with_a_group_of_torch_is_told_what_to_call() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    try:
        with pytest.raises(Failure, match=r"call torch.distributed.destroy_process_group\(\) first"):
            join(RunHooks(), 1.0)
    finally:
        dist.destroy_process_group()


def test_a_loss_can_be_pickled() -> None:
    again = copy.copy(Failure("line", "trace", quiet=True))
    assert (str(again), again.quiet, again.traceback) == ("line", True, "trace")


def test_a_host_name_that_is_a_loopback_gives_an_interface_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.1"}
    monkeypatch.setattr(interfaces, "addresses", lambda: found)
    assert interfaces.towards("127.0.1.1", 1) == ("eth0", "10.0.0.1", "10.0.0.1")
    monkeypatch.setattr(interfaces, "addresses", lambda: {"lo": "127.0.0.1"})
    with pytest.raises(interfaces.JoinError, match="no network interface but the loopback"):
        interfaces.towards("127.0.1.1", 1)
