"""Worlds for tests: the same body on threads or on gloo processes that meet in a file (no port races).

The processes are forked from a server that has imported what bodies need, which takes longer than most bodies; the rest
of their start is that of a spawned process.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.multiprocessing.spawn import start_processes

from gnnpar.comm import Communicator, ThreadWorld
from gnnpar.comm.process import connect
from gnnpar.launch.emulated.namespaces import Network
from gnnpar.launch.processes import enter_network

Kind = Literal["threads", "gloo"]
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["torch", "gnnpar.training.loop", "pytest", "checkpoints"])


@dataclass(frozen=True)
class Several:
    """Bodies run one after the other in one world: starting processes costs seconds."""

    bodies: tuple[Callable[[Communicator], Any], ...]

    def __call__(self, comm: Communicator) -> list[Any]:
        return [body(comm) for body in self.bodies]


def run_world(kind: Kind, size: int, body: Callable[[Communicator], Any], network: Network | None = None) -> list[Any]:
    """body(communicator) on every rank; results in rank order. For gloo the body must be picklable, and ranks may live
    on the hosts of a network that is built."""
    if kind == "threads":
        return ThreadWorld(size).run(body)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_process, (size, folder, body, network), nprocs=size, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _process(rank: int, size: int, folder: str, body: Callable[[Communicator], Any], network: Network | None) -> None:
    torch.set_num_threads(1)
    enter_network(network, rank)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    meet = f"file://{folder}/meet"
    comm = connect("gloo", device=torch.device("cpu"), key=b"test", timeout_seconds=60, init_method=meet)
    result = body(comm)
    torch.save(result, Path(folder) / f"{rank}.pt")
    comm.barrier()
    comm.close()
