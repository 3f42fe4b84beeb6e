"""A flight recorder: where a rank is in the run, for the monitor of its parent: one entry in a small file.

The entry says the last site, whether the rank works or waits there, and for whom.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gnnpar.comm.communicator import Phase, Site
from gnnpar.durable import open_whole

RECORD = struct.Struct("<dqqqqqqq")  # seconds (monotonic), pid, state or peer, epoch, layer, call, phase, chunk
_PHASES: tuple[Phase, ...] = (
    "forward",
    "backward",
    "remat",
    "push",
    "stage",
    "reduce",
    "assign",
    "evaluate",
    "setup",
    "pairs",
)
WORKING, WAITING_FOR_ALL, DONE = -1, -2, -3
_NOWHERE = (-1, -1, -1, -1, -1)


@dataclass(frozen=True)
class Entry:
    """What the recorder of a rank holds, as read from outside.

    `waits_for`: a rank, WAITING_FOR_ALL, WORKING, or DONE, where no other rank waits for this one any more; `seconds`:
    of the monotonic clock, which all processes of a machine share.
    """

    seconds: float
    pid: int
    waits_for: int
    epoch: int
    layer: int
    call: int
    phase: str
    chunk: int

    @property
    def place(self) -> str:
        """'epoch 3, layer 1, backward'."""
        if self.epoch < 0:
            return "before the first epoch"
        layer = f", layer {self.layer}" if self.layer >= 0 else ""
        call = f" call {self.call}" if self.call else ""
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        return f"epoch {self.epoch}{layer}{call}, {self.phase}{chunk}"


class FlightRecorder:
    """Writes the entry of a rank; without a file it writes nothing."""

    def __init__(self, file: Path | None = None) -> None:
        self._map: mmap.mmap | None = None
        self._site: tuple[int, ...] = _NOWHERE
        if file is not None:
            with open_whole(file) as empty:
                empty.write(bytes(RECORD.size))
                empty.flush()
                self._map = mmap.mmap(empty.fileno(), RECORD.size)
                self._write(WORKING)

    def at(self, site: Site) -> None:
        """The rank works, and has come to a site."""
        if self._map is not None:
            self._site = site.epoch, site.layer, site.call, _PHASES.index(site.phase), site.chunk
            self._write(WORKING)

    @contextmanager
    def waiting(self, peer: int) -> Generator[None]:
        """Inside, the rank needs another one to go on."""
        if self._map is None:
            yield
            return
        self._write(peer)
        try:
            yield
        finally:
            self._write(WORKING)

    def done(self) -> None:
        """The rank's work is over: what is left, it does for itself."""
        if self._map is not None:
            self._write(DONE)

    def _write(self, state: int) -> None:
        assert self._map is not None
        RECORD.pack_into(self._map, 0, time.monotonic(), os.getpid(), state, *self._site)


def read_entry(file: Path) -> Entry:
    """What a rank's file says now."""
    seconds, pid, state, epoch, layer, call, phase, chunk = RECORD.unpack(file.read_bytes()[: RECORD.size])
    return Entry(seconds, pid, state, epoch, layer, call, _PHASES[int(phase)] if phase >= 0 else "", chunk)
