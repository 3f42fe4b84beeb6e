"""How ranks that torchrun or Slurm started meet, before anything of theirs can hang.

Rank 0 lays out what it runs, every rank compares itself with that and with its own way to the others, and all go on
together or end with the same line. What goes through the store that MASTER_ADDR and MASTER_PORT name: one generation of
keys a meeting, because torchrun keeps its store over restarts.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gnnpar.comm import interfaces
from gnnpar.comm.interfaces import MeetingError
from gnnpar.durable import JsonDict

_POLL_SECONDS = 0.1
_LAST_LINE_SECONDS = 1.0  # rank 0 may hold the store: the others have to read why it ends
_REACH_SECONDS = 10.0
_GENERATION = "gnnpar/generation"


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank, where it is and where it listens."""

    rank: int
    host: str
    interface: str
    address: str
    port: int

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
    """All ranks are there and run the same thing. `generation`: 2 after a restart by torchrun; `marker`: rank 0's."""

    me: int
    members: tuple[Member, ...]
    store: Store
    listener: socket.socket
    token: str
    generation: int
    marker: str

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
    """Come together with all ranks of the world that an environment names. Collective; MeetingError within about twice
    `patience` seconds.

    `about`: what ranks must agree on, name -> value. `marker`: a path that rank 0 gives to all. `check`: what is wrong
    with that here. `refusal`: why this rank cannot run at all; it comes to tell the others, and no rank is met.
    """
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    if not 0 <= rank < size:
        raise MeetingError(f"RANK={rank} is none of WORLD_SIZE={size} ranks, numbered from 0: correct one of them")
    master, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if not master or not port.isdigit():
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
        rank=rank, host=socket.gethostname(), interface=interface, address=address, port=listener.getsockname()[1]
    )
    where = f"MASTER_ADDR={master} MASTER_PORT={port}"
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _store(master, int(port), rank, patience, agent=agent, trouble=trouble)
    table = _Table(store, me, size, where, patience, agent=agent, refuses=bool(refusal))
    try:
        agreed = table.lay(about, marker, trouble) if rank == 0 else table.join(about, trouble)
        members = tuple(Member(**each) for each in agreed["members"])
        table.agree(_unreached(me, members) or check(agreed["marker"]))
    except RuntimeError as error:  # of torch's store
        raise MeetingError(
            f"rank {rank} on {me.host}: the store at {where} is gone while ranks were meeting; rank 0's host says why"
        ) from error
    return JoinedWorld(
        me=rank,
        members=members,
        store=PrefixStore(f"{table.room}/group", table.store),
        listener=listener,
        token=agreed["token"],
        generation=table.generation,
        marker=agreed["marker"],
    )


def _own_end(env: MutableMapping[str, str], master: str, port: int, *, several: bool) -> tuple[str, str, str]:
    """(interface, address, trouble): a rank that cannot be reached says so to the others, who wait for it."""
    try:
        interface, address = interfaces.towards(
            master, port, asked=env.get(interfaces.VARIABLE, ""), other_hosts=several
        )
    except interfaces.UnknownMaster:
        raise
    except MeetingError as error:
        return "", "127.0.0.1", f"rank {env['RANK']}: {error}"
    if several:
        env.setdefault(interfaces.VARIABLE, interface)
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


def _store(master: str, port: int, rank: int, patience: float, *, agent: bool, trouble: str) -> Store:
    """Rank 0 holds the store, unless torchrun's agent does. `trouble`: what may be the reason why it is not reached."""
    try:
        return TCPStore(
            master,
            port,
            is_master=rank == 0 and not agent,
            timeout=timedelta(seconds=patience),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            line = f"MASTER_PORT={port} is taken by another program on {socket.gethostname()}: give all ranks another"
            raise MeetingError(line) from error
        raise MeetingError(
            trouble
            or f"rank {rank} on {socket.gethostname()} does not reach MASTER_ADDR={master} MASTER_PORT={port} within "
            f"{patience:g} s (comm.connect_seconds): is rank 0 started there, and no firewall between?"
        ) from error


class _Table:
    """The keys of one meeting in the store."""

    def __init__(
        self, store: Store, me: Member, size: int, where: str, patience: float, *, agent: bool, refuses: bool
    ) -> None:
        self.store, self.me, self.size, self.where, self.patience = store, me, size, where, patience
        self.generation, self._began, self._nonce = 0, time.monotonic(), secrets.token_hex(8)
        self._agent, self._refuses = agent, refuses

    @property
    def room(self) -> str:
        return f"gnnpar/{self.generation}"

    def lay(self, about: Mapping[str, str], marker: str, trouble: str) -> JsonDict:
        """Rank 0: open a generation and wait for everybody."""
        self.generation = self.store.add(_GENERATION, 1)
        if trouble:
            self._fail(trouble)
        self._put("0", self._record(about))
        records = self._all(
            "",
            lambda missing: (
                f"{_ranks(missing)} of {self.size} {'has' if len(missing) == 1 else 'have'} not come to {self.where} "
                f"within {self.patience:g} s (comm.connect_seconds): were they started, with this address and "
                "port?"
            ),
        )
        agreed = {
            "members": [record["member"] for record in records],
            "nonces": [record["nonce"] for record in records],
            "token": secrets.token_hex(16),
            "marker": marker,
        }
        self._put("agreed", agreed)
        return agreed

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
        trouble = self._get("trouble")
        if trouble is not None and trouble["refused"]:
            return self._get(f"known/{self.me.rank}") is not None
        return bool(trouble or self._get("agreed"))

    def _come(self, mine: JsonDict, trouble: str) -> None:
        """Compare with rank 0, and be there."""
        while (first := self._get("0")) is None and not self._waited():
            self._end_at_trouble()
            time.sleep(_POLL_SECONDS)
        if first is None:
            return
        if trouble:
            self._fail(trouble)
        for name in sorted({**first["about"], **mine["about"]}):
            theirs, have = (record["about"].get(name, "nothing") for record in (first, mine))
            if theirs != have:
                self._fail(
                    f"rank {self.me.rank} on {self.me.place} has {name}={have}, rank 0 on "
                    f"{Member(**first['member']).place} has {name}={theirs}: start all ranks with the same command and "
                    "the same versions"
                )
        if not self._agent and self.store.add(f"{self.room}/count/{self.me.rank}", 1) > 1:
            self._fail(
                f"RANK={self.me.rank} is taken twice, once on {self.me.place}: number ranks from 0 to {self.size - 1}"
            )
        self._put(str(self.me.rank), mine)

    def agree(self, trouble: str) -> None:
        """Everybody reaches everybody, or all end. Collective."""
        if trouble:
            self._fail(trouble)
        self._began = time.monotonic()
        self._put(f"ready/{self.me.rank}", {})
        self._all("ready/", lambda missing: f"{_ranks(missing)} went silent while ranks were meeting at {self.where}")

    def _all(self, kind: str, silent: Callable[[list[int]], str]) -> list[JsonDict]:
        """What all ranks put down under their numbers."""
        found: dict[int, JsonDict] = {}
        while len(found) < self.size:
            self._end_at_trouble()
            missing = [rank for rank in range(self.size) if rank not in found]
            found |= {rank: record for rank in missing if (record := self._get(f"{kind}{rank}")) is not None}
            if len(found) < self.size and self._waited():
                self._fail(silent([rank for rank in range(self.size) if rank not in found]))
            time.sleep(_POLL_SECONDS if len(found) < self.size else 0.0)
        return [found[rank] for rank in range(self.size)]

    def _record(self, about: Mapping[str, str]) -> JsonDict:
        stated = {**about, "WORLD_SIZE": str(self.size)}
        return {"member": asdict(self.me), "about": stated, "nonce": self._nonce}

    def _fail(self, line: str) -> None:
        """Say it to all and end."""
        self._put("trouble", {"line": line, "refused": self._refuses})
        self._end_at_trouble()

    def _end_at_trouble(self) -> None:
        if (trouble := self._get("trouble")) is not None:
            if trouble["refused"]:
                self._until_known()
            elif self.me.rank == 0:
                time.sleep(_LAST_LINE_SECONDS)
            error = MeetingError(trouble["line"])
            error.shared, error.refused = True, trouble["refused"]
            raise error

    def _until_known(self) -> None:
        """All ranks know of a refusal before the first of them ends, and with it its host's others, or the store."""
        with suppress(RuntimeError):
            self._put(f"known/{self.me.rank}", {})
            keys = [f"{self.room}/known/{rank}" for rank in range(self.size)]
            while not self.store.check(keys) and not self._waited():
                time.sleep(_POLL_SECONDS)

    def _waited(self) -> bool:
        return time.monotonic() - self._began > self.patience

    def _put(self, key: str, value: JsonDict) -> None:
        self.store.set(f"{self.room}/{key}", json.dumps(value))

    def _get(self, key: str) -> JsonDict | None:
        key = f"{self.room}/{key}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None


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
