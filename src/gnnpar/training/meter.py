"""Measure the cost of an epoch on every rank, and merge it on rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Self

import torch

from gnnpar.comm import Communicator
from gnnpar.comm.clock import perf_counter
from gnnpar.files import JsonDict, JsonObject
from gnnpar.track.keys import BYTE_PHASES, PHASES, RARE_PHASES


class EpochMeter:
    """Measure wall time, phases, traffic and CPU time of an epoch, which ranks enter together."""

    def __init__(self, comm: Communicator, interface: Callable[[], int] | None = None) -> None:
        self.comm = comm
        self.interface = interface  # counts the bytes that this rank's host has sent
        self.wire = 0
        self.seconds = self.cpu_seconds = 0.0
        self._cpu_clock = time.thread_time if comm.transport == "threads" else time.process_time

    def __enter__(self) -> Self:
        self.comm.barrier()
        self.comm.ledger.drain()  # drop the bytes of evaluation and probes
        self.wire = self.interface() if self.interface else 0
        self._cpu = self._cpu_clock()
        self._began = perf_counter()
        self.comm.clock.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.comm.device.type == "cuda":
            torch.cuda.synchronize(self.comm.device)
        self.comm.clock.stop()
        self.seconds = perf_counter() - self._began
        self.cpu_seconds = self._cpu_clock() - self._cpu
        if self.interface:
            self.wire = self.interface() - self.wire

    def read(self) -> JsonDict:
        """Return the figures of this rank as plain data. Collective."""
        self.comm.settle_accounts()
        traffic, phases = self.comm.ledger.drain(), self.comm.clock.drain()
        exposed = phases.pop("exposed")
        skew = min(traffic.exposed_skew, exposed)
        bubble = min(traffic.bubble, exposed - skew)
        phases["bubble"] += bubble
        return {
            "seconds": self.seconds,
            "phases": {**phases, "exposed_skew": skew, "exposed_wire": exposed - skew - bubble},
            "comm_total": traffic.comm_total,
            "bytes": traffic.bytes,
            "layer_bytes": traffic.layer_bytes,
            "metadata": traffic.metadata,
            "messages": traffic.messages,
            "cpu": self.cpu_seconds,
        } | ({"wire": self.wire} if self.interface else {})


def merge(everyone: Sequence[JsonObject]) -> JsonDict:
    """Merge the figures of all ranks: times of the slowest, bytes summed."""
    slowest = max(range(len(everyone)), key=lambda rank: everyone[rank]["seconds"])
    slow = everyone[slowest]
    layers = sorted({layer for rank in everyone for layer in rank["layer_bytes"]})
    sent = {name: sum(rank["bytes"].get(name, 0) for rank in everyone) for name in BYTE_PHASES}
    sent = {name: count for name, count in sent.items() if count or name not in RARE_PHASES}
    row = {
        "time/epoch_seconds": slow["seconds"],
        "time/slowest_rank": slowest,
        **{f"time/{name}_seconds": slow["phases"][name] for name in PHASES},
        "time/comm_total_seconds": slow["comm_total"],
        "time/cpu_seconds": [rank["cpu"] for rank in everyone],
        "comm/total_bytes": sum(sent.values()),
        **{f"comm/{name}_bytes": count for name, count in sent.items()},
        "comm/layer_bytes": {str(i): sum(rank["layer_bytes"].get(i, 0) for rank in everyone) for i in layers},
        "comm/metadata_bytes": sum(rank["metadata"] for rank in everyone),
        "comm/messages": sum(rank["messages"] for rank in everyone),
        "memory/peak_rss_bytes": [rank["peak_rss"] for rank in everyone],
    }
    if any("wire" in rank for rank in everyone):
        row["comm/wire_bytes"] = sum(rank.get("wire", 0) for rank in everyone)
    if "live" in slow:
        peaks = [rank["peak"] for rank in everyone]
        largest = max(range(len(everyone)), key=lambda rank: peaks[rank])
        row |= {"memory/peak_bytes": peaks, "memory/live_bytes": everyone[largest]["live"]}
    if "pinned" in slow:
        row["memory/pinned_bytes"] = [rank["pinned"] for rank in everyone]
    return row
