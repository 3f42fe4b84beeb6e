"""How ranks that torchrun or Slurm started meet, before anything of theirs can hang.

Rank 0 lays out what it runs, every rank compares itself with that and with its own way to the others, and all go on
together or end with the same line. What goes through the store that MASTER_ADDR and MASTER_PORT name: one generation of
keys a meeting, because torchrun keeps its store over restarts.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gnnpar.comm import interfaces
from gnnpar.comm.authentication import proof
from gnnpar.comm.interfaces import MeetingError
from gnnpar.comm.process import this_host
from gnnpar.deadline import within
from gnnpar.durable import JsonDict, JsonObject, parse_json
from gnnpar.launch.environment import agent
from gnnpar.launch.token import VARIABLE, answer, answer_to, secret_of
from gnnpar.track.text import printable

_POLL_SECONDS = 0.1
_MORE_SECONDS = 30.0  # for the steps of a meeting that do not wait for other ranks
_LAST_LINE_SECONDS = 1.0  # rank 0 may hold the store: the others have to read why it ends
_REACH_SECONDS = 10.0
_GENERATION = "gnnpar/generation"
_MOST_BYTES, _MOST_BYTES_OF_A_RANK = 1 << 16, 1 << 11  # of a record, and what it has more for each rank
_CHOSEN = re.compile(r"[0-9a-f]{16}")  # by a rank, for the file of rank 0's answer


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank, where it is and where it listens."""

    rank: int
    host: str
    interface: str
    address: str
    port: int
    agent: str = ""

    @property
    def home(self) -> tuple[str, str]:
        """What ranks of one host share."""
        return self.host, self.address

    @property
    def place(self) -> str:
        """'node-b (10.0.0.2)'."""
        return f"{self.host} ({self.address})"


@dataclass(frozen=True, kw_only=True)
class JoinedWorld:
    """All ranks are there and run the same thing. `key`: what they prove to each other, of this meeting alone.
    `generation`: 2 after a restart by torchrun; `marker`: rank 0's."""

    me: int
    members: tuple[Member, ...]
    store: Store
    listener: socket.socket
    key: bytes = field(repr=False)
    generation: int
    marker: str

    @property
    def agents(self) -> list[str]:
        """Which processes have started the ranks, of rank 0 first."""
        return list(dict.fromkeys(member.agent for member in self.members))

    def first_of_host(self, without: Sequence[int] = ()) -> int | None:
        """The lowest rank on this rank's host that is not among `without`: it speaks for the host."""
        home = self.members[self.me].home
        return next((m.rank for m in self.members if m.home == home and m.rank not in without), None)


def rendezvous(
    env: MutableMapping[str, str],
    *,
    about: Mapping[str, str],
    patience: float,
    marker: str = "",
    check: Callable[[str], str] = lambda _: "",
    refusal: str = "",
) -> JoinedWorld:
    """Come together with all ranks of the world that an environment names. Collective; MeetingError within three times
    `patience` and half a minute: of three waits each ends by itself, unless what listens at MASTER_PORT is no store.

    `about`: what ranks must agree on, name -> value. `marker`: the file that rank 0 has left for all (token.py).
    `check`: what is wrong with that here. `refusal`: why this rank cannot run at all; it comes to tell the others, and
    no rank is met.
    """
    meet = functools.partial(_meet, env, about=about, patience=patience, marker=marker, check=check, refusal=refusal)
    try:
        return within(3 * patience + _MORE_SECONDS, meet, name="meeting")
    except TimeoutError as error:  # torch's client waits for an answer without an end, and believes its length
        raise MeetingError(
            f"rank {env['RANK']} on {socket.gethostname()}: what listens at MASTER_ADDR={env['MASTER_ADDR']} "
            f"MASTER_PORT={env['MASTER_PORT']} does not answer as rank 0 would: is another program there?"
        ) from error


def _meet(
    env: MutableMapping[str, str],
    *,
    about: Mapping[str, str],
    patience: float,
    marker: str,
    check: Callable[[str], str],
    refusal: str,
) -> JoinedWorld:
    """`rendezvous`, where the store answers."""
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    if not 0 <= rank < size:
        raise MeetingError(f"RANK={rank} is none of WORLD_SIZE={size} ranks, numbered from 0: correct one of them")
    master, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if not master or not port.isdecimal():
        raise MeetingError(
            f"RANK={rank} is set, but MASTER_ADDR={master or 'nothing'} MASTER_PORT={port or 'nothing'}:"
            " set them to the address of rank 0's host and to a free port there"
        )
    inside = master in ("localhost", "::1") or master.startswith("127.")
    several = int(env.get("LOCAL_WORLD_SIZE", "0")) != size and not inside
    interface, address, trouble = _own_end(env, master, int(port), several=several)
    trouble = refusal or trouble
    listener = _listen(address)
    me = Member(
        rank=rank,
        host=socket.gethostname(),
        interface=interface,
        address=address,
        port=listener.getsockname()[1],
        agent=agent(),
    )
    where = f"MASTER_ADDR={master} MASTER_PORT={port}"
    kept = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    bound = _bound(master, address, inside=inside)
    if rank and (kept or bound != address):
        bound = master
    store = _store(master, int(port), rank, patience, agent=kept, trouble=trouble, bound=bound)
    secret, given = functools.partial(secret_of, env), bool(env.get(VARIABLE))
    table = _Table(
        store,
        me,
        size,
        where,
        patience,
        agent=kept,
        refuses=bool(refusal),
        secret=secret,
        given=given,
        begun_as=_begun_as(env, agent=kept),
    )
    try:
        agreed = table.lay(about, marker, trouble) if rank == 0 else table.join(about, trouble)
        members = tuple(Member(**each) for each in agreed["members"])
        table.agree(_unreached(me, members) or check(agreed["marker"]), agreed["nonces"])
    except (RuntimeError, MemoryError) as error:  # of torch's store
        raise MeetingError(
            f"rank {rank} on {me.host}: the store at {where} is gone while ranks were meeting; rank 0's host says why"
        ) from error
    return JoinedWorld(
        me=rank,
        members=members,
        store=PrefixStore(f"{table.room}/group", table.store),
        listener=listener,
        key=table.key(),
        generation=table.generation,
        marker=agreed["marker"],
    )


def _begun_as(env: Mapping[str, str], *, agent: bool) -> dict[str, str]:
    """What tells this start from another one of the same run, and each rank knows beforehand: who writes into the
    stores of two that wait could lead a rank of one to the ranks of the other, whose files of the secret it can read.
    Hosts may give torchrun's agent other names of one address; every host has a loopback."""
    names = ("MASTER_PORT", "TORCHELASTIC_RUN_ID") if agent else ("MASTER_PORT", "MASTER_ADDR")
    begun = {name: env[name] for name in names if name in env}
    if not agent and env.get("MASTER_ADDR", "").startswith(("localhost", "127.", "::1")):
        begun["host"] = this_host("net")
    return begun


def _own_end(env: MutableMapping[str, str], master: str, port: int, *, several: bool) -> tuple[str, str, str]:
    """(interface, address, trouble): a rank that cannot be reached says so to the others, who wait for it."""
    asked = interfaces.asked_for(env)
    try:
        interface, address = interfaces.towards(master, port, asked=asked, other_hosts=several)
    except interfaces.UnknownMaster:
        raise
    except MeetingError as error:
        return "", "127.0.0.1", f"rank {env['RANK']}: {error}"
    if not asked:  # without an interface, gloo would listen at the address of the host name
        env[interfaces.VARIABLE] = interface
    return interface, address, ""


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=1024)
    except OSError as error:
        raise MeetingError(
            f"{socket.gethostname()} cannot listen at its own address {address}: {error.strerror}; set "
            f"{interfaces.VARIABLE} to an interface with another one"
        ) from error


def _bound(master: str, address: str, *, inside: bool) -> str:
    """The address at which rank 0 holds the store: MASTER_ADDR's, or where that name leads to a loopback address on
    rank 0's host alone, that of the interface chosen for the others."""
    found: list[str] = []
    with suppress(OSError):
        kinds = {socket.AF_INET, socket.AF_INET6}
        places = socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)
        found = [str(each[4][0]).partition("%")[0] for each in places if each[0] in kinds]
    if not found:
        return address
    if ipaddress.ip_address(found[0]).is_unspecified:
        raise MeetingError(f"MASTER_ADDR={master} stands for all interfaces: give the address of rank 0's host")
    return found[0] if inside or not (found[0].startswith("127.") or found[0] == "::1") else address


def _store(master: str, port: int, rank: int, patience: float, *, agent: bool, trouble: str, bound: str) -> Store:
    """Rank 0 holds the store, unless torchrun's agent does: at the address `bound` alone, where ranks of its host look
    for it, too: to them MASTER_ADDR may be a name of the loopback. `trouble`: what may be the reason why it is not
    reached."""
    holds = rank == 0 and not agent
    unreached = MeetingError(
        trouble
        or f"rank {rank} on {socket.gethostname()} does not reach MASTER_ADDR={master} MASTER_PORT={port} within "
        f"{patience:g} s (comm.connect_seconds): is rank 0 started there, and no firewall between?"
    )
    if not holds and not _is_there(master if agent else bound, port, patience):  # torch would print its stack
        raise unreached
    try:
        return TCPStore(
            master if agent else bound,
            port,
            is_master=holds,
            timeout=timedelta(seconds=patience),
            wait_for_workers=False,
            multi_tenant=not holds,
            master_listen_fd=_listening(bound, port) if holds else None,
        )
    except RuntimeError as error:
        raise unreached from error


def _is_there(host: str, port: int, seconds: float) -> bool:
    """Does anybody listen there, within a time?"""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with suppress(OSError):
            socket.create_connection((host, port), left).close()
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _listening(address: str, port: int) -> int:
    """A socket that the store takes over: its own would listen on all interfaces."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=1024).detach()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            line = f"MASTER_PORT={port} is taken by another program on {socket.gethostname()}: give all ranks another"
            raise MeetingError(line) from error
        raise MeetingError(
            f"{socket.gethostname()} cannot listen at {address}, port {port}: {error.strerror}; give all ranks another "
            "MASTER_ADDR or MASTER_PORT"
        ) from error


class _Table:
    """The keys of one meeting in the store. Anybody may reach it: records carry a proof of the run's secret, but for
    `trouble`, which can end a meeting and nothing else."""

    def __init__(
        self,
        store: Store,
        me: Member,
        size: int,
        where: str,
        patience: float,
        *,
        agent: bool,
        refuses: bool,
        secret: Callable[[str, str], bytes | None],
        given: bool,
        begun_as: Mapping[str, str],
    ) -> None:
        self.store, self.me, self.size, self.where, self.patience = store, me, size, where, patience
        self.generation, self._began, self._nonce = 0, time.monotonic(), secrets.token_hex(8)
        self._agent, self._refuses = agent, refuses
        self._find_secret, self._secret = secret, b""
        self._given, self._begun_as = given, begun_as
        self._answered: set[int] = set()

    @property
    def room(self) -> str:
        return f"gnnpar/{self.generation}"

    def key(self, nonces: Sequence[str] = ()) -> bytes:
        """Of this meeting: no earlier one had these nonces."""
        return proof(self._secret, self.room.encode(), *(nonce.encode() for nonce in nonces))

    def lay(self, about: Mapping[str, str], marker: str, trouble: str) -> JsonDict:
        """Rank 0: open a generation and wait for everybody."""
        self.generation = self.store.add(_GENERATION, 1)
        if trouble:
            self._fail(trouble)
        self._learn_secret(marker, "")
        mine = self._record(about) | {"marker": marker}  # never read back: what stands there may be of another meeting
        self._put("0", mine)
        with ExitStack() as answers:
            records = self._all(
                "",
                lambda missing: (
                    f"{_ranks(missing)} of {self.size} {'has' if len(missing) == 1 else 'have'} not come to "
                    f"{self.where} within {self.patience:g} s (comm.connect_seconds): were they started, with this "
                    "address and port?"
                ),
                own=mine,
                meanwhile=lambda missing: self._answer(missing, marker, answers),
            )
        for record in records:
            self._compare(mine, record)
        agreed = {
            "members": [record["member"] for record in records],
            "nonces": [record["nonce"] for record in records],
            "about": _digest(mine),
            "marker": marker,
        }
        self._put("agreed", agreed)
        return agreed

    def _answer(self, ranks: Sequence[int], marker: str, answers: ExitStack) -> None:
        """Rank 0: its secret for those that ask, in files that last as long as `answers`; where it is GNNPAR_TOKEN,
        they have that themselves, or none."""
        for rank in ranks:
            asked = self._plain(f"asks/{rank}")
            if asked is None or rank in self._answered:
                continue
            self._answered.add(rank)
            chosen = asked.get("chosen")
            if not self._given and isinstance(chosen, str) and _CHOSEN.fullmatch(chosen):
                try:
                    copy = answer(Path(marker), chosen, self._secret)
                except OSError as error:
                    self._fail(f"rank 0 on {self.me.place} cannot write beside {marker}: {error.strerror}")
                answers.callback(copy.unlink, missing_ok=True)
            self.store.set(f"{self.room}/answered/{rank}", "{}")

    def _ask(self, marker: str) -> str | None:
        """Another rank: the file with the secret, which begins with a word that this rank has chosen; what the store
        names may be any file. None: nobody answers, or a newer meeting has begun."""
        self.store.set(f"{self.room}/asks/{self.me.rank}", json.dumps({"chosen": self._nonce}))
        while self._plain(f"answered/{self.me.rank}") is None:
            self._end_at_trouble()
            if self._waited() or self.store.add(_GENERATION, 0) > self.generation:
                return None
            time.sleep(_POLL_SECONDS)
        return answer_to(marker, self._nonce)

    def join(self, about: Mapping[str, str], trouble: str) -> JsonDict:
        """Another rank: come to the newest generation until one is really about this meeting."""
        mine, stale = self._record(about), False
        while True:
            newest = self.store.add(_GENERATION, 0)
            if newest > self.generation:
                self.generation = newest
                stale = self._agent and self._is_over()
                if not stale:
                    self._come(mine, trouble)
            agreed = None if stale else self._get("agreed")
            if agreed is not None and agreed["nonces"][self.me.rank : self.me.rank + 1] == [self._nonce]:
                if agreed["about"] != _digest(mine):  # what this rank compared itself with was another meeting's
                    self._fail(f"rank {self.me.rank} on {self.me.place} has met the rank 0 of another run: start again")
                return agreed
            if not stale:
                self._end_at_trouble()
            if self._waited():
                raise MeetingError(
                    f"rank {self.me.rank} on {self.me.place} has come to {self.where}, but rank 0 has not within "
                    f"{self.patience:g} s (comm.connect_seconds): was it started?"
                )
            time.sleep(_POLL_SECONDS)

    def _is_over(self) -> bool:
        """Is this a meeting of ranks that have ended, in a store that torchrun keeps?"""
        trouble = self._plain("trouble")
        if trouble is not None and trouble.get("refused") is True:
            return self._plain(f"known/{self.me.rank}") is not None
        return bool(trouble or self._plain("agreed"))

    def _come(self, mine: JsonDict, trouble: str) -> None:
        """Compare with rank 0, and be there."""
        while (stated := self._plain("0")) is None and not self._waited():
            self._end_at_trouble()
            time.sleep(_POLL_SECONDS)
        if stated is None:
            return
        if trouble:
            self._fail(trouble)
        marker = _marker_of(stated)
        file = marker if self._given or not marker else self._ask(marker)
        if file is None:
            return
        self._learn_secret(file, self._nonce)
        first = self._get("0")
        assert first is not None
        self._compare(first, mine)
        if not self._agent and self.store.add(f"{self.room}/count/{self.me.rank}", 1) > 1:
            self._fail(
                f"RANK={self.me.rank} is taken twice, once on {self.me.place}: number ranks from 0 to {self.size - 1}"
            )
        self._put(str(self.me.rank), mine)

    def _compare(self, first: JsonDict, other: JsonDict) -> None:
        """What ranks must agree on. Rank 0 compares, too: what others compared themselves with, a stranger may have
        put into the store, who has read it in an earlier meeting."""
        for name in sorted({**first["about"], **other["about"]}):
            theirs, have = (record["about"].get(name, "nothing") for record in (first, other))
            if theirs != have:
                here, there = Member(**other["member"]), Member(**first["member"])
                self._fail(
                    f"rank {here.rank} on {here.place} has {name}={have}, rank 0 on {there.place} has {name}={theirs}: "
                    "start all ranks with the same command and the same versions"
                )

    def _learn_secret(self, file: str, chosen: str) -> None:
        try:
            found = self._find_secret(file, chosen)
        except MeetingError as error:
            self._fail(f"rank {self.me.rank} on {self.me.place}: {error}")
        if found is None:
            self._fail(
                f"rank {self.me.rank} on {self.me.place} has no {VARIABLE}, and does not see rank 0's run folder "
                f"{file.rpartition('/')[0]}: set {VARIABLE} to the same output of `openssl rand -hex 32` on all "
                "hosts, or share the folder"
            )
        self._secret = found

    def agree(self, trouble: str, nonces: Sequence[str]) -> None:
        """Everybody reaches everybody, or all end. Collective. What is put down from here on is of this meeting."""
        if trouble:
            self._fail(trouble)
        self._secret = self.key(nonces)
        self._began = time.monotonic()
        self._put(f"ready/{self.me.rank}", {})
        self._all("ready/", lambda missing: f"{_ranks(missing)} went silent while ranks were meeting at {self.where}")

    def _all(
        self,
        kind: str,
        silent: Callable[[list[int]], str],
        *,
        own: JsonDict | None = None,
        meanwhile: Callable[[list[int]], None] = lambda _: None,
    ) -> list[JsonDict]:
        """What all ranks put down under their numbers. `own`: of this one. `meanwhile`: for those that are missing."""
        found: dict[int, JsonDict] = {} if own is None else {self.me.rank: own}
        while len(found) < self.size:
            self._end_at_trouble()
            missing = [rank for rank in range(self.size) if rank not in found]
            meanwhile(missing)
            found |= {rank: record for rank in missing if (record := self._get(f"{kind}{rank}")) is not None}
            if len(found) < self.size and self._waited():
                self._fail(silent([rank for rank in range(self.size) if rank not in found]))
            time.sleep(_POLL_SECONDS if len(found) < self.size else 0.0)
        return [found[rank] for rank in range(self.size)]

    def _record(self, about: Mapping[str, str]) -> JsonDict:
        stated = {**about, **self._begun_as, "WORLD_SIZE": str(self.size)}
        return {"member": asdict(self.me), "about": stated, "nonce": self._nonce}

    def _fail(self, line: str) -> NoReturn:
        """Say it to all and end: here in any case, whatever others make of the line in the store."""
        self.store.set(f"{self.room}/trouble", json.dumps({"line": line, "refused": self._refuses}))
        self._end_at_trouble()
        raise MeetingError(line)

    def _end_at_trouble(self) -> None:
        if (trouble := self._plain("trouble")) is not None:
            refused = trouble.get("refused") is True
            if refused:
                self._until_known()
            elif self.me.rank == 0:
                time.sleep(_LAST_LINE_SECONDS)
            line = trouble.get("line")  # anybody may have written it
            if not isinstance(line, str) or not line.strip():
                line = f"what stands in the store at {self.where} has ended the meeting of ranks, and gives no reason"
            error = MeetingError(printable(line[:1000]))
            error.shared, error.refused = True, refused
            raise error

    def _until_known(self) -> None:
        """All ranks know of a refusal before the first of them ends, and with it its host's others, or the store."""
        with suppress(RuntimeError):
            self.store.set(f"{self.room}/known/{self.me.rank}", "{}")
            keys = [f"{self.room}/known/{rank}" for rank in range(self.size)]
            while not self.store.check(keys) and not self._waited():
                time.sleep(_POLL_SECONDS)

    def _waited(self) -> bool:
        return time.monotonic() - self._began > self.patience

    def _put(self, key: str, value: JsonDict) -> None:
        record = json.dumps(value)
        proven = proof(self._secret, self.room.encode(), key.encode(), record.encode()).hex()
        self.store.set(f"{self.room}/{key}", json.dumps({"record": record, "proof": proven}))

    def _get(self, key: str) -> JsonDict | None:
        """A record that proves the run's secret; None: it is not there, or this rank does not know the secret yet."""
        if not self._secret or (stated := self._plain(key)) is None:
            return None
        record, given = str(stated.get("record", "")), str(stated.get("proof", ""))
        words = record.encode(errors="surrogatepass")  # anybody may have put down what is no text
        expected = proof(self._secret, self.room.encode(), key.encode(), words).hex()
        if not hmac.compare_digest(given.encode(errors="surrogatepass"), expected.encode()):
            self._fail(
                f"rank {self.me.rank} on {self.me.place}: what is at {self.where} does not prove this run's "
                f"{VARIABLE}: ranks have different ones, or another program writes there"
            )
        return parse_json(record)

    def _plain(self, key: str) -> JsonDict | None:
        """What anybody may have put; None: it is not there, is larger than any record, or is no object of JSON."""
        key = f"{self.room}/{key}"
        if not self.store.check([key]):
            return None
        try:
            data = self.store.get(key)
            return parse_json(data) if len(data) <= _MOST_BYTES + _MOST_BYTES_OF_A_RANK * self.size else None
        except ValueError:
            return None


def _digest(record: JsonObject) -> str:
    """Of what ranks must agree on."""
    return hashlib.sha256(json.dumps(record["about"], sort_keys=True).encode()).hexdigest()


def _marker_of(stated: JsonObject) -> str:
    """The file that a record of rank 0 names, before its proof can be checked; empty: none."""
    try:
        return str(parse_json(str(stated.get("record", ""))).get("marker", ""))
    except ValueError:
        return ""


def _ranks(numbers: Sequence[int]) -> str:
    """'rank 3', 'ranks 2, 3'."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _unreached(me: Member, members: Sequence[Member]) -> str:
    """Why this rank cannot reach another host; empty where it reaches the first rank of each."""
    hosts: dict[tuple[str, str], Member] = {}
    for member in members:
        hosts.setdefault(member.home, member)
    for member in hosts.values():
        if member.home == me.home:
            continue
        try:
            socket.create_connection((member.address, member.port), _REACH_SECONDS).close()
        except OSError as error:
            return (
                f"rank {me.rank} on {me.place} cannot reach rank {member.rank} on {member.place} from {me.interface} "
                f"to {member.interface}: {error.strerror or error}; set {interfaces.VARIABLE} on both hosts to the "
                "interface that joins them, or open the firewall between them"
            )
    return ""
