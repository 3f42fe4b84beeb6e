"""A stranger at the ports of a run: whatever he sends is not read, and the run goes on, or ends in one line."""

from __future__ import annotations

import base64
import functools
import json
import os
import pickle
import queue
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from checkpoints import SMALL
from conftest import environment
from gnnpar.comm.authentication import NotOfThisRun, opened, proof, sealed
from gnnpar.comm.interfaces import MeetingError
from gnnpar.launch import token
from gnnpar.launch.peer_monitor import Channel, PeerMonitor, admit, greet
from gnnpar.launch.rendezvous import JoinedWorld, Member, _Table, rendezvous
from hosts import Hosts, two_hosts, wait_for_epochs
from ports import free_port

ROOT = Path(__file__).parents[2]
SECRET = "0123456789abcdef" * 2


def meet(
    port: int, *, tokens: tuple[str, ...] = (SECRET, SECRET), marker: str = "", patience: float = 20.0
) -> list[Any]:
    """A rank a token: the world of each, or its line."""

    def one(rank: int) -> JoinedWorld | str:
        env = {"RANK": str(rank), "WORLD_SIZE": str(len(tokens)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if tokens[rank]:
            env[token.VARIABLE] = tokens[rank]
        try:
            return rendezvous(env, about={}, patience=patience, marker=marker)
        except MeetingError as error:
            return str(error)

    with ThreadPoolExecutor(len(tokens)) as pool:
        return list(pool.map(one, range(len(tokens))))


class Evil:
    """Runs code where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.marker),)


# --- what is sent between ranks


def test_an_object_of_a_stranger_is_not_unpickled(tmp_path: Path) -> None:
    evil = pickle.dumps(Evil(tmp_path / "ran"))
    for data in (evil, bytes(32) + evil, proof(b"another key", b"call 1", evil) + evil, b"", b"\x80"):
        with pytest.raises(NotOfThisRun, match="proves no knowledge of the run's key"):
            opened(b"key", b"call 1", data)
    assert not (tmp_path / "ran").exists()
    sent = sealed(b"key", b"call 1 of ranks (0, 1), 0", {"a": 1})
    assert opened(b"key", b"call 1 of ranks (0, 1), 0", sent) == {"a": 1}
    for label in (b"call 2 of ranks (0, 1), 0", b"call 1 of ranks (0, 1), 1"):  # repeated, or said by another
        with pytest.raises(NotOfThisRun):
            opened(b"key", label, sent)


# --- how ranks meet


def test_ranks_prove_the_secret_and_keep_it_to_themselves() -> None:
    port = free_port()
    first, second = meet(port)
    assert first.key == second.key
    assert first.key not in (b"", SECRET.encode())
    again = meet(free_port())
    assert again[0].key != first.key, "a key is of one meeting"
    store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=5))
    seen = b"".join(store.get(f"gnnpar/1/{name}") for name in ("0", "1", "agreed", "ready/0"))
    assert SECRET.encode() not in seen
    assert first.key.hex().encode() not in seen


def test_the_store_and_the_ranks_listen_at_the_chosen_address_alone() -> None:
    before = listening(os.getpid())
    port = free_port()
    worlds = meet(port)
    mine = listening(os.getpid()) - before
    assert ("127.0.0.1", port) in mine
    assert {address for address, _ in mine} == {"127.0.0.1"}
    assert all(isinstance(world, JoinedWorld) for world in worlds)


def listening(pid: int) -> set[tuple[str, int]]:
    """Of a process in any network namespace; psutil reads the sockets of its own one alone."""
    process = Path("/proc", str(pid))
    own = {os.readlink(each) for each in (process / "fd").iterdir() if each.is_symlink()}
    rows = [line.split() for line in (process / "net" / "tcp").read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == _LISTEN and f"socket:[{row[9]}]" in own]
    rows6 = [line.split() for line in (process / "net" / "tcp6").read_text().splitlines()[1:]]
    assert not [row for row in rows6 if row[3] == _LISTEN and f"socket:[{row[9]}]" in own], "IPv6"
    return {(socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in places}


_LISTEN = "0A"


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        ((SECRET, SECRET.upper()), "does not prove this run's GNNPAR_TOKEN: ranks have different ones, or another"),
        ((SECRET, ""), "has no GNNPAR_TOKEN, and does not see rank 0's run folder"),
        (("", ""), "has no GNNPAR_TOKEN, and does not see rank 0's run folder"),
        (("short", "short"), "GNNPAR_TOKEN has 5 characters, at least 32 are needed"),
    ],
)
def test_a_wrong_secret_or_none_is_one_line_on_both_ranks(
    tokens: tuple[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token, "_FILE_SECONDS", 0.2)
    found = meet(free_port(), tokens=tokens, marker="/nowhere/.meeting")
    assert all(isinstance(each, str) and line in each and "\n" not in each for each in found), found


def test_a_secret_is_in_a_file_that_only_its_user_can_read(tmp_path: Path) -> None:
    file = tmp_path / ".meeting"
    token.leave(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = meet(free_port(), tokens=("", ""), marker=str(file))
    assert all(isinstance(each, JoinedWorld) for each in found), found
    assert list(tmp_path.iterdir()) == [file], "the copy for rank 1"
    with pytest.raises(FileExistsError):  # nothing that another has put there is taken
        token.leave(file)


@pytest.mark.parametrize("spoil", ["mode", "owner", "link"])
def test_a_file_that_others_could_write_is_no_secret(
    spoil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / ".meeting"
    token.leave(file)
    if spoil == "mode":
        file.chmod(0o644)
    elif spoil == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    else:
        file = tmp_path / ".meeting-link"
        file.symlink_to(tmp_path / ".meeting")
        assert token.secret_of({}, str(file)) is None
        return
    with pytest.raises(MeetingError, match="can be written or read by others"):
        token.secret_of({}, str(file))


@pytest.mark.parametrize("file", ["/a/.meeting\0", "/root/.meeting" * 2000, "relative/.meeting", "/proc/1/.meeting"])
def test_no_path_that_a_stranger_names_is_a_traceback(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token, "_FILE_SECONDS", 0.1)
    assert token.secret_of({}, file) is None


@pytest.mark.parametrize("key", ["0", "agreed"])
@pytest.mark.parametrize(
    "forged", ["unsigned", "wrong proof", "garbage", "nested", "no record", "no object", "no text"]
)
def test_a_record_that_a_stranger_has_put_into_the_store_is_not_believed(key: str, forged: str) -> None:
    """He holds the store himself: rank 1 ends with a line, and joins nothing."""
    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    store.add("gnnpar/generation", 1)
    member = {"rank": 0, "host": "h", "interface": "lo", "address": "127.0.0.1", "port": 1}
    record = json.dumps({"member": member, "about": {}, "nonce": "0", "members": [member] * 2, "nonces": ["0", "0"]})
    texts = {
        "unsigned": json.dumps({"record": record}),
        "wrong proof": json.dumps({"record": record, "proof": proof(b"guess", record.encode()).hex()}),
        "garbage": "\x80\x04evil",
        "nested": "[" * 100_000,
        "no record": "{}",
        "no object": json.dumps({"record": "[" * 5_000}),
        "no text": json.dumps({"record": "\ud800", "proof": "\ud800"}),
    }
    store.set(f"gnnpar/1/{key}", texts[forged])
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), token.VARIABLE: SECRET}
    with pytest.raises(MeetingError) as refused:
        rendezvous(env, about={}, patience=2.0)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("trouble", ["{}", '{"line": " "}', '{"line": {"a": [1]}}'])
def test_a_stranger_who_ends_a_meeting_without_a_reason_is_a_line(trouble: str) -> None:
    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    store.add("gnnpar/generation", 1)
    store.set("gnnpar/1/trouble", trouble)
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), token.VARIABLE: SECRET}
    with pytest.raises(MeetingError, match=r"the store at MASTER_ADDR=.* has ended the meeting of ranks, and gives no"):
        rendezvous(env, about={}, patience=2.0)


@pytest.mark.parametrize(("name", "text"), [("vmlinuz", b"MZ" * 100), (".meeting-0123abcd", b"ab" * 32)])
@pytest.mark.parametrize("answered", [True, False])
def test_a_stranger_cannot_name_a_file_whose_content_he_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: bytes, answered: bool
) -> None:
    """Ranks without GNNPAR_TOKEN read the secret from a file whose name they choose themselves, beside the one that the
    record of rank 0 names: not from one that was there before, out of an archive of the stranger's."""
    monkeypatch.setattr(token, "_FILE_SECONDS", 0.1)
    known = tmp_path / name
    known.write_bytes(text)
    known.chmod(0o600)
    if answered:  # who can write into the folder gives it the name that the rank waits for
        monkeypatch.setattr("gnnpar.launch.rendezvous.answer_to", lambda file, chosen: str(known))
    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    store.add("gnnpar/generation", 1)
    member = {"rank": 0, "host": "h", "interface": "lo", "address": "127.0.0.1", "port": 1}
    record = json.dumps({"member": member, "about": {"WORLD_SIZE": "2"}, "nonce": "0", "marker": str(known)})
    proven = proof(text, b"gnnpar/1", b"0", record.encode()).hex()
    store.set("gnnpar/1/0", json.dumps({"record": record, "proof": proven}))
    if answered:
        store.set("gnnpar/1/answered/1", "{}")
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    line = "has no GNNPAR_TOKEN, and does not see rank 0's run folder" if answered else "but rank 0 has not within 2 s"
    with pytest.raises(MeetingError, match=line):
        rendezvous(env, about={}, patience=2.0)


@pytest.mark.parametrize("chosen", ["../../x", "", "0" * 17, 7, None])
def test_rank_0_answers_no_name_that_it_could_not_have_been_asked_for(chosen: object, tmp_path: Path) -> None:
    file = tmp_path / ".meeting"
    token.leave(file)
    store = HashStore()
    store.set("gnnpar/1/asks/1", json.dumps({"chosen": chosen}))
    me = Member(rank=0, host="h", interface="lo", address="127.0.0.1", port=1)
    secret = functools.partial(token.secret_of, {})
    table = _Table(store, me, 2, "here", 0.5, agent=False, refuses=False, secret=secret, given=False, begun_as={})
    with pytest.raises(MeetingError, match="rank 1 of 2 has not come"):
        table.lay({}, str(file), "")
    assert [each.name for each in tmp_path.iterdir()] == [".meeting"]


class Forgetful(HashStore):
    """A stranger removes what a rank says of its trouble before it reads it back."""

    def check(self, keys: list[str]) -> bool:
        return not keys[0].endswith("/trouble") and super().check(keys)


def test_a_rank_that_finds_a_forged_record_ends_whatever_a_stranger_does_meanwhile() -> None:
    store = Forgetful()
    store.add("gnnpar/generation", 1)
    store.set("gnnpar/1/0", json.dumps({"record": "{}", "proof": "00"}))
    me = Member(rank=1, host="h", interface="lo", address="127.0.0.1", port=1)
    secret = SECRET.encode()
    table = _Table(
        store,
        me,
        2,
        "here",
        1.0,
        agent=False,
        refuses=False,
        secret=lambda file, chosen: secret,
        given=True,
        begun_as={},
    )
    with pytest.raises(MeetingError, match="does not prove this run's GNNPAR_TOKEN"):
        table.join({}, "")


# --- the connections of the peer monitor


@dataclass
class Watched:
    """Two of three ranks whose monitors watch each other, and wait for the third."""

    worlds: list[JoinedWorld]
    monitors: list[PeerMonitor]
    told: queue.Queue[Any]

    @property
    def hub(self) -> tuple[str, int]:
        return self.worlds[0].members[0].address, self.worlds[0].members[0].port


@pytest.fixture
def watched() -> Iterator[Watched]:
    worlds, told = meet(free_port(), tokens=(SECRET, SECRET, SECRET)), queue.Queue[Any]()
    assert all(isinstance(world, JoinedWorld) for world in worlds), worlds
    monitors = watching(worlds[:2], told)
    yield Watched(worlds, monitors, told)
    for monitor in reversed(monitors):
        monitor.close()
    worlds[2].listener.close()


def watching(worlds: list[JoinedWorld], told: queue.Queue[Any]) -> list[PeerMonitor]:
    with ThreadPoolExecutor(len(worlds)) as pool:
        return list(pool.map(lambda w: PeerMonitor(w, lost_seconds=60, on_failure=told.put), worlds))


def challenge_of(connection: socket.socket) -> bytes:
    return connection.makefile("rb").readline().rstrip(b"\n")


def closed(connection: socket.socket, seconds: float = 5.0) -> bool:
    """Whether the other side hangs up."""
    connection.settimeout(seconds)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_strangers_at_rank_0_are_hung_up_on_and_the_run_goes_on(watched: Watched, tmp_path: Path) -> None:
    evil = pickle.dumps(Evil(tmp_path / "ran"))
    key = watched.worlds[0].key
    for sent in (
        b"\n",
        b"garbage\n",
        evil + b"\n",
        b"9" * 100_000,
        b'{"failed": "x"}\n',
        b'{"token": "x", "rank": 1}\n{"failed": "x"}\n',
        b"1 00 " + proof(b"guess", b"rank").hex().encode() + b"\n",
        b"[" * 300,
    ):
        with socket.create_connection(watched.hub) as stranger:
            challenge_of(stranger)
            stranger.sendall(sent)
            assert closed(stranger), sent[:40]
    # what a rank once said is of no use to who has heard it
    with socket.create_connection(watched.hub) as stranger:
        challenge_of(stranger)
        old = proof(key, b"rank", b"another challenge", b"00", b"1").hex().encode()
        stranger.sendall(b"1 00 " + old + b"\n")
        assert closed(stranger)
    assert not (tmp_path / "ran").exists()
    assert watched.told.empty()
    watched.monitors[1].report("rank 1: its own reason")
    failure = watched.told.get(timeout=10)
    assert failure.line == "rank 1: its own reason"


def test_many_silent_strangers_do_not_keep_a_rank_out(watched: Watched) -> None:
    strangers = [socket.create_connection(watched.hub) for _ in range(100)]
    time.sleep(0.5)
    watched.monitors[1].report("rank 1: its own reason")
    assert watched.told.get(timeout=10).line == "rank 1: its own reason"
    for stranger in strangers:
        stranger.close()


def test_who_comes_after_many_silent_strangers_is_heard(watched: Watched) -> None:
    """The oldest of them is hung up on, not the newcomer, who may be a rank."""
    strangers = [socket.create_connection(watched.hub) for _ in range(100)]
    with socket.create_connection(watched.hub) as last:
        last.settimeout(5)
        assert len(challenge_of(last)) == 32
    assert closed(strangers[0])
    for stranger in strangers:
        stranger.close()


def test_nobody_comes_when_all_ranks_have(watched: Watched) -> None:
    """A flood of connections, each of which rank 0 took up while it trained, doubled the time of its epochs."""

    def listens() -> bool:
        try:
            socket.create_connection(watched.hub).close()
        except ConnectionRefusedError:
            return False
        return True

    assert listens()
    (third,) = watching(watched.worlds[2:], watched.told)
    deadline = time.monotonic() + 10
    while listens() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not listens() and watched.told.empty()
    third.report("rank 2: its own reason")
    assert {watched.told.get(timeout=10).line for _ in range(2)} == {"rank 2: its own reason"}
    third.close()


def test_strangers_who_speak_while_they_are_hung_up_on_end_nothing(watched: Watched) -> None:
    """A newcomer and the last word of the oldest, whom it pushes out, are found together."""
    strangers = [socket.create_connection(watched.hub) for _ in range(100)]
    time.sleep(0.5)
    for _ in range(300):
        strangers.append(socket.create_connection(watched.hub))
        with strangers.pop(0) as oldest, suppress(ConnectionError):
            oldest.send(b"x")
    watched.monitors[1].report("rank 1: its own reason")
    assert watched.told.get(timeout=10).line == "rank 1: its own reason"
    for stranger in strangers:
        stranger.close()


def test_a_line_that_is_changed_repeated_or_turned_round_is_not_read() -> None:
    one, other = socket.socketpair()
    with one, other, ThreadPoolExecutor(1) as pool:
        rank = pool.submit(greet, one, b"key", 1)
        other.sendall(b"challenge\n")
        line = other.makefile("rb").readline().rstrip(b"\n")
        number, hub, answer = admit(line, b"key", b"challenge", 2)
        other.sendall(answer)
        channel: Channel = rank.result(timeout=5)
    assert number == 1
    first, second = (channel.line({"n": i}) for i in range(2))
    assert hub.read(first) == {"n": 0}
    for bad in (first, second[:-3] + b"9}\n", b"", b"\n", hub.line({"n": 1})):
        with pytest.raises(NotOfThisRun):
            Channel.read(hub, bad)
        hub._read -= 1
    assert hub.read(second) == {"n": 1}


def test_a_rank_does_not_wait_for_a_greeting_that_comes_letter_by_letter() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(1.0)

    def write() -> None:
        with suppress(OSError):
            for _ in range(100):
                theirs.sendall(b"a")
                time.sleep(0.2)

    writing = threading.Thread(target=write)
    writing.start()
    began = time.monotonic()
    with pytest.raises(NotOfThisRun, match="does not greet as rank 0 does"):
        greet(ours, b"key", 1)
    assert time.monotonic() - began < 10
    ours.close()
    writing.join()
    theirs.close()


def test_a_rank_does_not_talk_to_who_only_listens_at_the_address() -> None:
    """A stranger at rank 0's port sends a challenge, and cannot prove the key."""
    for answer in (b"x\n", b"00" * 32 + b"\n", b"9" * 1000, b""):
        one, other = socket.socketpair()
        with one, other:
            other.sendall(b"challenge\n" + answer)
            other.shutdown(socket.SHUT_WR)
            with pytest.raises(NotOfThisRun):
                greet(one, b"key", 1)
    with pytest.raises(NotOfThisRun):
        admit(b"1 00 " + proof(b"guess", b"rank").hex().encode(), b"key", b"challenge", 2)


# --- whole runs

LONG = (*SMALL[1:], "strategy=graph_parallel", "hydra.run.dir=run", "epochs=1000000", "eval_every=1000000")


@pytest.fixture
def hosts(tmp_path: Path, shaped_links: None) -> Iterator[Hosts]:
    with two_hosts(tmp_path) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stranger_connects_to_every_port_of_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """Each listens at its own interface; garbage at every port of ours leaves the run as it is. torchrun's store and
    gloo's ports are not ours: SECURITY.md."""
    started = [hosts.train(host, *LONG) for host in (0, 1)]
    wait_for_epochs(tmp_path / "run", 3, started)
    for host in (0, 1):
        for process in hosts.ranks(host):
            ports = listening(process.pid)
            assert ports
            assert {address for address, _ in ports} <= {f"10.77.0.{host + 1}"}, ports
    rank0 = hosts.ranks(0)[0]
    done = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    for address, port in listening(rank0.pid):
        script = (
            f"import socket; s = socket.create_connection(({address!r}, {port}), 5); s.settimeout(2)\n"
            "s.sendall(b'{\"failed\": \"x\"}\\n' + b'9' * 1000)\n"
        )
        stranger = hosts.run(1, ["python3", "-c", script])
        stranger.communicate(timeout=30)
    wait_for_epochs(tmp_path / "run", done + 20, started)


def stores(agent: psutil.Process) -> Iterator[TCPStore]:
    """What torchrun's agent holds, as a stranger opens it."""
    for each in agent.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN:
            with suppress(RuntimeError):
                yield TCPStore("127.0.0.1", each.laddr.port, is_master=False, timeout=timedelta(seconds=2))


def test_torchrun_as_it_is_documented_unpickles_nothing(tmp_path: Path) -> None:
    """With a port its agent asks for addresses as text; without one it meets by c10d, whose store holds pickles."""
    documented = (ROOT / "docs/guide/train.md").read_text().splitlines()
    (line,) = [line for line in documented if line.startswith("torchrun ")]
    options = line.partition(" -m gnnpar")[0].split()[1:]
    assert options == ["--master-port", "29500", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "gnnpar", "train", *LONG]
    command[command.index("29500")] = str(free_port())
    evil = base64.b64encode(pickle.dumps(Evil(tmp_path / "ran"))).decode()
    started = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        wait_for_epochs(tmp_path / "run", 3, [started])
        found = list(stores(psutil.Process(started.pid)))
        keys = [key for store in found for key in store.list_keys()]
        assert keys
        assert not [key for key in keys if "rendezvous" in key], "c10d"
        for store in found:
            for key in (*keys, "torch.rendezvous.none", "/torch.rendezvous.none"):
                store.set(key, evil)
        time.sleep(7)  # c10d's agent looks every five seconds
    finally:
        started.terminate()
        said = started.communicate(timeout=60)[1]
    assert not (tmp_path / "ran").exists()
    assert "without --master-port" not in said


def test_threads_are_not_left(watched: Watched) -> None:
    names = [thread.name for thread in threading.enumerate() if thread.name == "peers"]
    assert len(names) >= 2
