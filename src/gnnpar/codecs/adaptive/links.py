"""Cost of a message, seconds = theta bytes + gamma for each ordered pair of ranks, measured once at the start.

Ring rounds as in training: in round r every rank sends to rank + r at once, so the figures include contention. Five
sizes of at most a megabyte, the fastest of five repeats each. The profile also holds the cost of one column of the
inner fold on each rank, for objective=overlap. Measurements decide the bits, so their hash is in result.json and they
are saved in profile.json, which profile=path reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch

from gnnpar.codecs.adaptive.importance import edges_of
from gnnpar.comm import Communicator, MessageTag, RowLists
from gnnpar.comm.clock import perf_counter
from gnnpar.files import JsonDict, read_json
from gnnpar.track.text import counted
from gnnpar_kernels import spmm

SIZES = (1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 20)
_REPEATS, _COLUMNS = 5, 32
_LEAST_SECONDS, _MOST_SECONDS = 1e-15, 3600.0  # bounds of all costs in a profile
NOMINAL_SECONDS_PER_BYTE, NOMINAL_LATENCY_SECONDS = 8e-9, 5e-5  # 1 Gbit/s: worlds without links (threads, one rank)


@dataclass(frozen=True)
class Profile:
    """Costs. links: (sender, receiver) -> (seconds per byte, seconds). fold_seconds: each rank's fold, per column."""

    num_ranks: int
    links: dict[tuple[int, int], tuple[float, float]]
    fold_seconds: tuple[float, ...]

    def as_json(self) -> JsonDict:
        links = [[s, d, theta, gamma] for (s, d), (theta, gamma) in sorted(self.links.items())]
        return {"schema": 1, "num_ranks": self.num_ranks, "links": links, "fold_seconds": list(self.fold_seconds)}

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()

    @staticmethod
    def of_json(data: JsonDict) -> Profile:
        links = {(int(s), int(d)): (float(theta), float(gamma)) for s, d, theta, gamma in data["links"]}
        return Profile(int(data["num_ranks"]), links, tuple(map(float, data["fold_seconds"])))

    @staticmethod
    def read(path: Path, num_ranks: int) -> Profile:
        """Read a profile. ValueError if it cannot be used."""
        try:
            profile = Profile.of_json(read_json(Path(path)))
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            kind = type(error).__name__
            raise ValueError(f"profile={path} cannot be read ({kind}); give the profile.json of a run") from error
        profile.check(num_ranks, f"profile={path}")
        return profile

    def check(self, num_ranks: int, what: str) -> None:
        """Raise ValueError if the profile cannot be used for this number of ranks."""
        if self.num_ranks != num_ranks:
            raise ValueError(f"{what} was measured with {counted(self.num_ranks, 'rank')}, this run has {num_ranks}")
        pairs = {(s, d) for s in range(num_ranks) for d in range(num_ranks) if s != d}
        costs = [*(cost for link in self.links.values() for cost in link), *self.fold_seconds]
        if self.links.keys() != pairs or len(self.fold_seconds) != num_ranks:
            raise ValueError(f"{what} has no link for every pair of {counted(num_ranks, 'rank')}; measure again")
        if not all(cost == 0 or _LEAST_SECONDS <= cost < _MOST_SECONDS for cost in costs):
            raise ValueError(f"{what} has a cost outside 1e-15 to 3600 s; measure again")


def nominal(num_ranks: int) -> Profile:
    """Return a profile with equal nominal links."""
    link = NOMINAL_SECONDS_PER_BYTE, NOMINAL_LATENCY_SECONDS
    pairs = {(s, d): link for s in range(num_ranks) for d in range(num_ranks) if s != d}
    return Profile(num_ranks, pairs, (0.0,) * num_ranks)


_measured: MutableMapping[Communicator, Profile] = WeakKeyDictionary()  # shared by all codecs of a run


def open_profile(path: Path | None, lists: RowLists, comm: Communicator) -> Profile:
    """Return the profile: read, measured, or nominal if ranks have no links. Collective; the same on every rank."""
    if path is None and comm in _measured:
        return _measured[comm]
    profile: Profile | None = None
    if path is not None:
        profile = Profile.read(path, comm.size) if comm.rank == 0 else None
    elif comm.transport in ("gloo", "nccl"):
        profile = measure(lists, comm)
    else:
        profile = nominal(comm.size)
    shared = comm.broadcast(profile)
    assert isinstance(shared, Profile)
    if path is None:
        _measured[comm] = shared
    return shared


def measure(lists: RowLists, comm: Communicator) -> Profile | None:
    """Measure on all ranks; return the profile on rank 0. Collective."""
    mine: dict[tuple[int, int], tuple[float, float]] = {}
    for hop in range(1, comm.size):
        sender = (comm.rank - hop) % comm.size
        seconds = [min(_once(comm, hop, size) for _ in range(_REPEATS)) for size in SIZES]
        mine[sender, comm.rank] = fit(SIZES, seconds)
    everyone = comm.gather((mine, _fold_seconds(lists, comm)))
    if everyone is None:
        return None
    links = {pair: cost for costs, _ in everyone for pair, cost in costs.items()}
    return Profile(comm.size, links, tuple(seconds for _, seconds in everyone))


def fit(nbytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (seconds per byte, seconds) by least squares of relative errors. A byte costs at least a tenth of the
    largest message's seconds per byte, since noise may hide the slope."""
    sizes, times = np.asarray(nbytes, dtype=float), np.asarray(seconds, dtype=float)
    weight = 1.0 / np.maximum(times, 1e-9)
    theta, gamma = np.polyfit(sizes, times, 1, w=weight)
    if gamma < 0:
        theta, gamma = float((weight**2 * sizes * times).sum() / (weight**2 * sizes**2).sum()), 0.0
    return max(float(theta), 0.1 * float(times[-1] / sizes[-1])), float(gamma)


def _once(comm: Communicator, hop: int, nbytes: int) -> float:
    """Return seconds until the message from the rank `hop` before this one arrives, all ranks sending at once."""
    target, source = (comm.rank + hop) % comm.size, (comm.rank - hop) % comm.size
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=comm.device)
    comm.barrier()
    began = perf_counter()
    pending = comm.exchange({target: buffer}, {source: nbytes}, MessageTag(0, -1, 0, "setup"))
    pending[source].wait()
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)
    seconds = perf_counter() - began
    comm.flush(keep=0)
    return seconds


def _fold_seconds(lists: RowLists, comm: Communicator) -> float:
    """Return seconds of the inner block's sum, per column."""
    inner = edges_of(lists).inner
    x = torch.zeros(lists.num_rows, _COLUMNS, device=comm.device)
    best = float("inf")
    for _ in range(_REPEATS):
        began = perf_counter()
        spmm(inner.indptr, inner.indices, x, num_rows=lists.num_rows)
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)
        best = min(best, perf_counter() - began)
    return best / _COLUMNS
