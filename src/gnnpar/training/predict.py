"""Logits of every node of a graph by a trained model, on as many ranks as are asked for: each writes its own rows."""

from __future__ import annotations

import errno
import math
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import dtype_to_descr, read_array_header_1_0, read_magic, write_array_header_1_0
from torch import Tensor

from gnnpar.comm import Communicator
from gnnpar.comm.world import Host, Outcome, World
from gnnpar.data.columns import load_npy
from gnnpar.durable import JsonObject, WriteError, checksum, file_hash
from gnnpar.parallel.objective import SPLITS, PairObjective
from gnnpar.settings import Settings
from gnnpar.track.console import say
from gnnpar.track.tracker import Null
from gnnpar.training.checkpoint import files as checkpoint
from gnnpar.training.checkpoint.resume import Start, load_weights
from gnnpar.training.loop import Job, PlanSource, Run, prepare
from gnnpar.training.result.record import agreed_on


@dataclass(frozen=True)
class Prediction:
    """The launcher's `Work`. `trained`: the folder of a checkpoint; `scratch`: where the plan is left; `partial`: what
    becomes `out` when it is whole, of rank 0: two predictions of one run share no file.

    `pairs`: a file [n, 2] of pairs of nodes, whose scores are asked for instead. `remedy`: where the graph must be the
    one that the run trained on, what to do where it is another.
    """

    settings: Settings
    world: World
    plan_source: PlanSource
    trained: Path
    scratch: Path
    out: Path
    partial: Path
    pairs: Path | None = None
    remedy: str = ""

    @contextmanager
    def session(self, *, first: bool) -> Iterator[Callable[[Communicator, Host], None]]:
        yield self.predict

    def predict(self, comm: Communicator, host: Host) -> None:
        """Exact logits, [nodes, outputs] in the order of the graph's nodes: no codec, no stale rows, no dropout.
        Collective; no rank holds more than its own rows."""
        job = Job(self.settings, self.world, self.scratch, self.plan_source)
        run = prepare(job, comm, host, Null(), Start())
        found = checkpoint.read(self.trained)
        _refuse_others(found, comm)
        if self.remedy:
            _refuse_another_graph(found, run.identity, self.remedy)
        _refuse_other_types(found, run.identity)
        load_weights(run.engine, run.model, found.merged(comm.device), found)
        logits, ids = run.engine.predict(), run.engine.node_ids.cpu().numpy()
        values = run.objective.metrics(logits)
        counts = comm.gather(len(ids))
        shape: tuple[int, ...] = comm.broadcast(None if counts is None else (sum(counts), logits.shape[1]))
        what = f"{shape[0]} nodes, {shape[1]} outputs each"
        if self.pairs is not None:
            _refuse_unlike(file_hash(self.pairs), f"content of {self.pairs}", comm)
            logits, ids = scored(self.pairs, logits, run, shape[0])
            shape = comm.broadcast((int(ids[-1]) + 1,), comm.size - 1)
            what = f"{shape[0]} pairs"
        partial, mark = comm.broadcast((self.partial, secrets.token_bytes(_MARK)))
        if comm.rank == 0:
            make_array(partial, logits.cpu().numpy().dtype, shape, mark)
        comm.barrier()
        rows = _mapped(partial, mark)
        rows[ids] = logits.cpu().numpy()
        rows.flush()
        comm.barrier()
        if comm.rank == 0:
            os.truncate(partial, partial.stat().st_size - _MARK)
            os.replace(partial, self.out)
            shown = {split: value for split in SPLITS if (value := values[f"metric/{split}"]) is not None}
            figures = ", ".join(f"{name} {value:.4f}" for name, value in shown.items()) or "unknown: no split"
            say(f"{what}; {run.task.metric_name} {figures}")


def _refuse_others(found: checkpoint.Checkpoint, comm: Communicator) -> None:
    """ValueError on all ranks where one has found another checkpoint at its own host's path. Collective."""
    _refuse_unlike(checksum(found.manifest), f"checkpoint at {found.folder}", comm)


def _refuse_unlike(mine: str, what: str, comm: Communicator) -> None:
    everyone = comm.broadcast(comm.gather(mine))
    if others := [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]:
        raise ValueError(
            f"rank {others[0]} has another {what} than rank 0: give all ranks one, in a folder that all hosts share"
        )


def _refuse_other_types(found: checkpoint.Checkpoint, mine: JsonObject) -> None:
    """ValueError where edges carry other data, types have other numbers or labels are of another kind than what the
    model was trained on."""
    theirs, here = found.manifest["run"].get("labels", mine["labels"]), mine["labels"]
    if theirs != here:
        raise ValueError(
            f"{found.folder} was trained on labels of task {theirs!r:.40}, and this graph's are {here!r}: its outputs "
            "would mean nothing there"
        )
    for name in ("edge_weights", "node_types", "edge_types", "edge_attr"):
        theirs, here = found.manifest["run"].get(name), mine.get(name)
        if theirs != here:
            raise ValueError(
                f"{found.folder} was trained on {name}={theirs}, and this graph has {name}={here}: give one with the "
                "same, in the same order"
            )


def _refuse_another_graph(found: checkpoint.Checkpoint, mine: JsonObject, remedy: str) -> None:
    """ValueError where the dataset is another graph, or split otherwise, than when the run trained."""
    theirs = found.manifest["run"]
    for name in ("graph", "split"):
        if theirs[name] != mine[name]:
            raise ValueError(
                f"{found.folder} was trained on {name} {theirs[name][:12]}, and its dataset is {mine[name][:12]} here: "
                f"{remedy}"
            )


_MARK = 16  # bytes that only ranks of this meeting know, behind an array that is being made


def make_array(file: Path, dtype: np.dtype, shape: tuple[int, ...], mark: bytes) -> None:
    """A new .npy file of zeros, and `mark` behind it. WriteError where the disk has no room for all of it: a page that
    it lacks later, when it is written through a mapping, kills the process."""
    facts = {"descr": dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    try:
        with os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), "wb+") as made:
            write_array_header_1_0(made, facts)
            end = made.tell() + math.prod(shape) * dtype.itemsize
            os.posix_fallocate(made.fileno(), 0, end + len(mark))
            made.seek(end)
            made.write(mark)
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(file)) from error


def _mapped(file: Path, mark: bytes) -> np.memmap:
    """To be written into. WriteError where a link has its name by now, a file of another name or one that is not rank
    0's: the folder may be somebody else's, and that of another host another one."""
    try:
        with os.fdopen(os.open(file, os.O_RDWR | os.O_NOFOLLOW), "rb+") as made:
            there = os.fstat(made.fileno())
            if not stat.S_ISREG(there.st_mode) or there.st_nlink > 1:
                raise OSError(errno.EEXIST, "another file has its name")
            made.seek(-len(mark), os.SEEK_END)
            if made.read() != mark:
                raise OSError(errno.EEXIST, "it is not rank 0's file: name one (--out) that all hosts share")
            made.seek(0)
            read_magic(made)
            shape, _, dtype = read_array_header_1_0(made)
            return np.memmap(made, dtype, "r+", offset=made.tell(), shape=shape)
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(file)) from error


def scored(file: Path, rows: Tensor, run: Run, num_nodes: int) -> tuple[Tensor, np.ndarray]:
    """This rank's share of the scores of the pairs in a file, and their places. Collective; ValueError where a pair
    names no node. Shapes: rows [nodes of the rank, width] -> [n], [n]."""
    assert isinstance(run.objective, PairObjective)
    table, rank, size = load_npy(file, mapped=True), run.comm.rank, run.comm.size
    low, high = int(table.min()), int(table.max())
    if low < 0 or high >= num_nodes:
        raise ValueError(f"{file} names node {low if low < 0 else high} of {num_nodes}: give ids from 0")
    ends = [len(table) * r // size for r in range(size + 1)]
    places = np.arange(ends[rank], ends[rank + 1])
    mine = torch.from_numpy(np.array(table[ends[rank] : ends[rank + 1]], dtype=np.int64)).to(rows.device)
    return run.objective.examples.scores(rows, mine, -(-len(table) // size)), places


@dataclass(frozen=True)
class Hooks:
    """What is done around a prediction: nothing. `run_dir`: of its plan."""

    settings: Settings
    run_dir: Path

    def agreed(self) -> Mapping[str, str]:
        return agreed_on(self.settings)

    def unseen(self, folder: Path) -> str:
        return ""

    def before_start(self) -> None: ...

    def on_links(self, reached_gbps: Sequence[float]) -> None: ...

    def on_restart(self, restarts: int) -> str:
        return "from the beginning"

    def on_lost(self, line: str, folder: Path) -> str:
        return line

    def on_end(self, outcome: Outcome) -> Outcome:
        return outcome
