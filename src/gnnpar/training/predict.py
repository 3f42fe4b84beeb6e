"""Predict the logits of every node of a graph with a trained model; each rank writes its own rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnpar.comm import Communicator
from gnnpar.comm.world import Host, RunHooks, World
from gnnpar.data.columns import load_npy
from gnnpar.files import JsonObject, WriteError, checksum, file_hash
from gnnpar.parallel.objective import SPLITS, PairObjective
from gnnpar.settings import Settings
from gnnpar.track.console import say
from gnnpar.track.tracker import Null
from gnnpar.training.checkpoint import files as checkpoint
from gnnpar.training.checkpoint.resume import Start, load_weights
from gnnpar.training.loop import Job, Run, prepare
from gnnpar.training.plans import PlanSource
from gnnpar.training.result.result import agreed_on
from gnnpar.training.shards import unlike_rank


@dataclass(frozen=True)
class Prediction:
    """The launcher's `Work` for prediction.

    trained: the folder of a checkpoint. scratch: folder for the plan. partial: rank 0's file, renamed to `out` at the
    end. pairs: a file [n, 2] of node pairs to score instead. remedy: advice in the error for another graph than the
    run's; empty to allow any graph.
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
        """Write exact logits [nodes, outputs], or scores [pairs]. Each rank holds its own rows only. Collective."""
        job = Job(self.settings, self.world, self.scratch, self.plan_source)
        run = prepare(job, comm, host, Null(), Start())
        found = checkpoint.read(self.trained)
        _refuse_unlike(checksum(found.manifest), f"checkpoint at {found.folder}", comm)
        _refuse_another_graph(found, run.identity, self.remedy)
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
        partial = comm.broadcast(self.partial)
        if comm.rank == 0:
            _make_array(partial, logits.cpu().numpy().dtype, shape)
        comm.barrier()
        rows = _mapped(partial)
        rows[ids] = logits.cpu().numpy()
        rows.flush()
        comm.barrier()
        if comm.rank == 0:
            os.replace(partial, self.out)
            shown = {split: value for split in SPLITS if (value := values[f"metric/{split}"]) is not None}
            figures = ", ".join(f"{name} {value:.4f}" for name, value in shown.items()) or "unknown: no split"
            say(f"{what}; {run.task.metric_name} {figures}")


def _refuse_unlike(mine: str, what: str, comm: Communicator) -> None:
    """Raise ValueError on all ranks if a rank's hash differs from rank 0's. Collective."""
    if other := unlike_rank(mine, comm):
        raise ValueError(
            f"rank {other} has another {what} than rank 0: give all ranks one, in a folder that all hosts share"
        )


def _refuse_another_graph(found: checkpoint.Checkpoint, mine: JsonObject, remedy: str) -> None:
    """Raise ValueError for another graph than the run's if `remedy` is given, or for one with other kinds of data."""
    source = found.manifest["run"]
    for name in ("graph", "split"):
        if remedy and source[name] != mine[name]:
            raise ValueError(
                f"{found.folder} was trained on {name} {source[name][:12]}, and its dataset is {mine[name][:12]} here: "
                f"{remedy}"
            )
    if source["labels"] != mine["labels"]:
        raise ValueError(
            f"{found.folder} was trained on labels of task {source['labels']!r:.40}, and this graph's are "
            f"{mine['labels']!r}: its outputs would mean nothing there"
        )
    for name in ("edge_weights", "node_types", "edge_types", "edge_attr"):
        told, here = source.get(name), mine.get(name)
        if told != here:
            raise ValueError(
                f"{found.folder} was trained on {name}={told}, and this graph has {name}={here}: give one with the "
                "same, in the same order"
            )


def _make_array(file: Path, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Create a .npy file of zeros and allocate its pages: writing to a missing page through a mapping would kill the
    process. Raise WriteError if the disk is full."""
    try:
        np.lib.format.open_memmap(file, "w+", dtype, shape)
        with file.open("rb+") as made:
            os.posix_fallocate(made.fileno(), 0, file.stat().st_size)
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(file)) from error


def _mapped(file: Path) -> np.memmap:
    """Map a .npy file for writing. Raise WriteError on a host that does not have it."""
    try:
        return np.lib.format.open_memmap(file, "r+")
    except OSError as error:
        line = f"{error.strerror}; where hosts share no folder, name one (--out) that they do"
        raise WriteError(error.errno, line, str(file)) from error


def scored(file: Path, rows: Tensor, run: Run, num_nodes: int) -> tuple[Tensor, np.ndarray]:
    """Return this rank's share of the scores of the pairs in a file, and their indices. Collective. Raises ValueError
    for ids outside the graph. Shapes: rows [nodes of the rank, width] -> [n], [n]."""
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
class Hooks(RunHooks):
    """Hooks of a prediction. run_dir: folder of the plan."""

    settings: Settings
    run_dir: Path

    def agreed(self) -> Mapping[str, str]:
        return agreed_on(self.settings)
