"""Joined ranks meet or end with one line in bounded time, and learn of each other's loss.

Ranks are threads here; hosts are in test_hosts.py.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gnnpar.comm.interfaces import MeetingError, addresses, towards
from gnnpar.durable import JsonDict, parse_json
from gnnpar.launch import rendezvous as rendezvous_module
from gnnpar.launch.peer_monitor import PeerFailure, PeerMonitor
from gnnpar.launch.rendezvous import JoinedWorld, rendezvous
from ports import free_port

SAME = {"epochs": "8", "the version of torch": "2"}


def env_of(rank: int, size: int, port: int, **more: str) -> dict[str, str]:
    told = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return told | {"GNNPAR_TOKEN": "a secret of tests, which is long enough"} | more


def gather(
    size: int,
    about: Mapping[int, Mapping[str, str]] | None = None,
    env: Mapping[int, Mapping[str, str]] | None = None,
    *,
    patience: float = 20.0,
    absent: tuple[int, ...] = (),
    check: Callable[[str], str] = lambda _: "",
    refusals: Mapping[int, str] | None = None,
) -> list[JoinedWorld | str]:
    """What every rank found: the others, or a line."""
    port = free_port()

    def one(rank: int) -> JoinedWorld | str:
        mine = env_of(rank, size, port) | dict((env or {}).get(rank, {}))
        try:
            told, refusal = SAME | dict((about or {}).get(rank, {})), (refusals or {}).get(rank, "")
            return rendezvous(mine, about=told, patience=patience, marker="x", check=check, refusal=refusal)
        except MeetingError as error:
            return f"refused: {error}" if error.refused else str(error)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, [rank for rank in range(size) if rank not in absent]))


def agree(found: list[JoinedWorld | str]) -> list[JoinedWorld]:
    assert all(isinstance(each, JoinedWorld) for each in found), found
    return [each for each in found if isinstance(each, JoinedWorld)]


def test_ranks_that_agree_meet_and_learn_of_each_other() -> None:
    found = agree(gather(3))
    for met in found:
        assert [m.rank for m in met.members] == [0, 1, 2]
        assert (met.generation, met.marker) == (1, "x")
        assert (met.first_of_host(), met.first_of_host((0, 1))) == (0, 2)
        met.store.set(f"{met.me}", "here")
    assert found[1].store.get("2") == b"here"


@pytest.mark.parametrize(
    ("about", "env", "absent", "line"),
    [
        (
            {1: {"epochs": "9"}},
            {},
            (),
            "rank 1 on HOST (127.0.0.1) has epochs=9, rank 0 on HOST (127.0.0.1) has "
            "epochs=8: start all ranks with the same command and the same versions",
        ),
        ({1: {"model.heads": "2"}}, {}, (), "has model.heads=2, rank 0 on HOST (127.0.0.1) has model.heads=nothing"),
        (
            {},
            {1: {"WORLD_SIZE": "3"}},
            (),
            "rank 1 on HOST (127.0.0.1) has WORLD_SIZE=3, rank 0 on HOST (127.0.0.1) has WORLD_SIZE=2",
        ),
        (
            {},
            {1: {"GLOO_SOCKET_IFNAME": "eth7"}},
            (),
            "rank 1: GLOO_SOCKET_IFNAME=eth7 does not exist on HOST, which has lo (127.0.0.1)",
        ),
        ({}, {0: {"GLOO_SOCKET_IFNAME": "eth7"}}, (), "rank 0: GLOO_SOCKET_IFNAME=eth7 does not exist on HOST"),
        (
            {},
            {},
            (1,),
            "rank 1 of 2 has not come to MASTER_ADDR=127.0.0.1 MASTER_PORT=PORT within 1.5 s "
            "(comm.connect_seconds): were they started, with this address and port?",
        ),
        ({}, {}, (0,), "rank 1 on HOST does not reach MASTER_ADDR=127.0.0.1 MASTER_PORT=PORT within 1.5 s"),
    ],
)
def test_ranks_that_cannot_meet_say_why_in_one_line_each(about, env, absent, line: str) -> None:
    began = time.monotonic()
    found = gather(2, about, env, patience=1.5 if absent else 20.0, absent=absent)
    assert time.monotonic() - began < 8
    assert len(set(found)) == 1, found
    (said,) = set(found)
    assert isinstance(said, str)
    assert "\n" not in said
    shown = said.replace(socket.gethostname(), "HOST")
    for part in line.split("PORT"):
        assert part in shown


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_cannot_run_what_it_was_told_ends_all_at_once(rank: int) -> None:
    began = time.monotonic()
    found = gather(3, {rank: {"epochs": "other"}}, refusals={rank: "resume=run holds no checkpoint"})
    assert set(found) == {"refused: resume=run holds no checkpoint"}
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("late", [0, 1])
def test_a_refusal_waits_for_those_who_come_late_also_in_the_store_of_torchrun(late: int) -> None:
    port = free_port()
    agent = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)

    def one(rank: int) -> str:
        time.sleep(0.5 * (rank == late))
        env = env_of(rank, 3, port, TORCHELASTIC_USE_AGENT_STORE="True")
        with pytest.raises(MeetingError, match="no shards here") as raised:
            rendezvous(env, about=SAME, patience=20.0, refusal="no shards here" if rank in (0, 2) else "")
        return str(raised.value)

    for _ in range(2):  # torchrun starts all again, and its store still has the refusal
        with ThreadPoolExecutor(3) as pool:
            began = time.monotonic()
            assert set(pool.map(one, range(3))) == {"no shards here"}
            assert time.monotonic() - began < 5
    assert agent.num_keys()


def test_what_rank_0_tells_is_checked_by_all() -> None:
    assert set(gather(2, check=lambda word: f"no {word} here")) == {"no x here"}


def test_a_number_taken_twice_and_a_port_that_is_taken_are_told() -> None:
    twice = gather(3, env={2: {"RANK": "1"}})
    assert any("RANK=1 is taken twice" in str(line) for line in twice), twice
    with socket.create_server(("", 0)) as other:
        taken = gather(1, env={0: {"MASTER_PORT": str(other.getsockname()[1])}})
    assert str(taken[0]).startswith(f"MASTER_PORT={other_port(taken)} is taken by another program on ")


def other_port(found: list[JoinedWorld | str]) -> str:
    return str(found[0]).partition("=")[2].partition(" ")[0]


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({"RANK": "5"}, "RANK=5 is none of WORLD_SIZE=2 ranks"),
        ({"MASTER_PORT": ""}, "RANK=0 is set, but MASTER_ADDR=127.0.0.1 MASTER_PORT=nothing"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, "MASTER_ADDR=no.such.host.invalid: "),
    ],
)
def test_an_environment_that_cannot_be_is_one_line_at_once(env: dict[str, str], line: str) -> None:
    with pytest.raises(MeetingError, match=line):
        rendezvous(env_of(0, 2, 1) | env, about={}, patience=1)


def test_the_interface_is_the_one_that_leads_to_the_master() -> None:
    assert towards("127.0.0.1", 1, asked="", other_hosts=False) == ("lo", "127.0.0.1")
    assert towards("127.0.0.1", 1, asked="lo", other_hosts=True) == ("lo", "127.0.0.1")
    outward = [name for name, address in addresses().items() if not address.startswith("127.")]
    if not outward:
        with pytest.raises(MeetingError, match="no network interface but the loopback"):
            towards("127.0.0.1", 1, asked="", other_hosts=True)
    else:
        assert towards("127.0.0.1", 1, asked="", other_hosts=True)[0] in outward


def test_a_store_that_torchrun_keeps_over_restarts_holds_no_old_news() -> None:
    """The second attempt finds the first one's verdict, and the third what the second ended with."""
    port = free_port()
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    kept = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)

    def one(rank: int, late: float, epochs: str) -> JoinedWorld | str:
        time.sleep(late)
        try:
            return rendezvous(env_of(rank, 2, port) | agent, about={"epochs": epochs}, patience=15)
        except MeetingError as error:
            return str(error)

    def both(late: tuple[float, float], epochs: tuple[str, str] = ("8", "8")) -> list[JoinedWorld | str]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, (0, 1), late, epochs))

    assert [met.generation for met in agree(both((0, 0)))] == [1, 1]
    assert [met.generation for met in agree(both((0.5, 0)))] == [2, 2]
    assert all("epochs=9" in str(line) for line in both((0, 0), ("8", "9")))
    assert [met.generation for met in agree(both((0.5, 0)))] == [4, 4]
    del kept


class Tied:
    """Ranks with ties, and what each was told."""

    def __init__(self, size: int) -> None:
        self.told: list[queue.Queue[PeerFailure]] = [queue.Queue() for _ in range(size)]
        self.ties: list[PeerMonitor] = []
        met = agree(gather(size))
        with ThreadPoolExecutor(size) as pool:
            self.ties = list(
                pool.map(lambda m: PeerMonitor(m, lost_seconds=6, on_failure=self.told[m.me].put), sorted(met, key=_me))
            )
        deadline = time.monotonic() + 10
        hub = self.ties[0]._hub
        assert hub is not None
        while hub._absent() and time.monotonic() < deadline:
            time.sleep(0.02)

    def kill(self, rank: int) -> None:
        connection = self.ties[rank]._to_hub
        if connection is None:
            hub = self.ties[0]._hub
            assert hub is not None
            self.ties[0]._over.set()  # the thread stops, the kernel closes what it had
            time.sleep(0.4)
            hub.close()
        else:
            connection.shutdown(socket.SHUT_RDWR)


def _me(met: JoinedWorld) -> int:
    return met.me


def test_a_rank_that_ends_without_a_word_is_named_to_all() -> None:
    tied = Tied(3)
    tied.kill(2)
    for rank in (0, 1):
        said = tied.told[rank].get(timeout=5)
        assert said.line.startswith("rank 2 on ")
        assert said.line.endswith(" is lost: ended without a message (killed, or out of memory?)")
        assert (said.lost, said.reported_on) == ((2,), None)
        assert tied.ties[rank].wait() == said


def test_the_loss_of_rank_0_is_seen_by_all() -> None:
    tied = Tied(3)
    tied.kill(0)
    assert all(tied.told[rank].get(timeout=5).lost == (0,) for rank in (1, 2))


def test_a_rank_that_fails_says_why_and_one_that_is_done_is_not_missed() -> None:
    tied = Tied(4)
    tied.ties[3].close()
    time.sleep(0.5)
    assert all(queue.empty() for queue in tied.told)
    tied.ties[1].report("rank 1: ValueError: too much")
    tied.kill(2)  # because of it
    for rank in (0,):
        said = tied.told[rank].get(timeout=5)
        assert said.line == "rank 1: ValueError: too much"
        assert said.reported_on == tied.ties[0]._world.members[1].home
    assert all(thread.is_alive() for thread in threading.enumerate())


def test_all_are_done() -> None:
    tied = Tied(3)
    for ties in (tied.ties[1], tied.ties[0], tied.ties[2]):
        ties.close()
    time.sleep(0.5)
    assert all(queue.empty() for queue in tied.told)


def test_settings_are_compared_with_those_of_this_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger had rank 1 compare itself with what rank 0 of an earlier run had put down."""
    read = rendezvous_module._Table._get

    def replayed(table: rendezvous_module._Table, key: str) -> JsonDict | None:
        found = read(table, key)
        if found is not None and (table.me.rank, key) == (1, "0"):
            found["about"]["epochs"] = "9"
        return found

    monkeypatch.setattr(rendezvous_module._Table, "_get", replayed)
    for said in gather(2, {1: {"epochs": "9"}}):
        assert isinstance(said, str)
        assert "has epochs=9, rank 0 on" in said


def test_a_rank_of_another_run_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record, moved from one store to another with rank 0's answer, joined it to a run with other settings."""
    monkeypatch.setattr(rendezvous_module._Table, "_compare", lambda table, first, other: None)
    found = gather(2, {1: {"epochs": "9"}})
    assert all(isinstance(each, str) and "has met the rank 0 of another run" in each for each in found), found


def test_a_rank_that_was_started_for_another_place_is_not_met() -> None:
    """By both stores a stranger led a rank of one run to rank 0 of another one, whose files of the secret both read."""
    found = gather(2, env={1: {"MASTER_ADDR": "localhost"}})
    assert all("has MASTER_ADDR=localhost, rank 0 on" in str(each) for each in found), found


def test_rank_0_meets_no_ranks_of_an_earlier_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that a stranger has read in an earlier meeting, and puts back faster than rank 0 reads, its own too."""
    monkeypatch.setattr(rendezvous_module, "_begun_as", lambda env, agent: {})  # ports differ: the first store is there
    met = agree(gather(2))  # which hold the store
    assert isinstance(met[1].store, PrefixStore)
    old = met[1].store.underlying_store
    names = [f"gnnpar/1/{name}" for name in ("0", "1", "agreed", "ready/0", "ready/1")]
    kept = {name: parse_json(old.get(name)) for name in names}
    monkeypatch.setattr(rendezvous_module._Table, "_plain", lambda table, key: kept.get(f"{table.room}/{key}"))
    (said,) = gather(2, absent=(1,), patience=2.0)
    assert isinstance(said, str), "rank 0 went on alone"
    assert "does not prove this run's GNNPAR_TOKEN" in said
