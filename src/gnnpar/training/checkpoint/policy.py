"""When a run writes a checkpoint and when it ends before its last epoch: rank 0 decides, all ranks follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from gnnpar.comm import Communicator
from gnnpar.durable import JsonDict, JsonObject
from gnnpar.placement import Plan
from gnnpar.settings import Settings
from gnnpar.source_code import own_code
from gnnpar.targets import classes_in
from gnnpar.track.jsonl import RowDigest
from gnnpar.training.checkpoint import files as checkpoint
from gnnpar.training.checkpoint.files import Say

if TYPE_CHECKING:
    from gnnpar.training.loop import Run


class Decision(NamedTuple):
    """After an epoch: write a checkpoint, end because somebody asked, end because numbers are not finite."""

    save: bool
    interrupted: bool
    broken: bool


class CheckpointPolicy:
    """One a rank."""

    def __init__(self, settings: Settings, run_dir: Path, stop_asked: Callable[[], bool], say: Say) -> None:
        self._when, self._epochs, self._run_dir = settings.checkpoint, settings.epochs, run_dir
        self.stop_asked, self._say, self._saved_at = stop_asked, say, time.monotonic()
        self._rows = RowDigest(run_dir)  # read on rank 0, which writes them

    def decide(self, comm: Communicator, done: int, everyone: Sequence[JsonObject] | None, *, ends: bool) -> Decision:
        """After `done` epochs, from what all ranks reported to rank 0; `ends`: no epoch follows. Collective."""
        decision = None
        if everyone is not None:
            broken = any(each["broken"] for each in everyone)
            asked = any(each["asked"] for each in everyone) and not ends
            decision = Decision(not broken and self._due(done, ends or asked), asked and not broken, broken)
        return comm.broadcast(decision)

    def _due(self, done: int, ends: bool) -> bool:
        when, minutes = self._when, (time.monotonic() - self._saved_at) / 60
        regularly = bool(when.every) and done % when.every == 0
        return bool(when.keep) and (ends or regularly or 0 < when.minutes <= minutes)

    def save(self, run: Run, done: int, progress: JsonObject, val: float | None, plan: Plan | None = None) -> bool:
        """Collective; True on rank 0 where it is written. `plan`: rank 0's, that the run goes on with from here."""
        run.engine.drain()
        tree = {
            "model": dict(run.engine.named_weights()),
            "optimizer": run.optimizer.state_dict(),
            "engine": run.engine.state_dict(),
            "random": random_state(run.comm.device),
        }
        plan = plan or run.replanned
        if plan is not None:
            tree["plan"] = {name: array.to(torch.int32) for name, array in plan.arrays.items()}

        def manifest() -> JsonDict:
            rows = self._rows.read(sync=True)
            made: JsonDict = {"val": val, "rows": rows.count, "rows_sha256": rows.sha256}
            if plan is not None:
                made["plan"] = plan.as_data({name: checkpoint.name_of(0) for name in plan.arrays})
            code = own_code(classes_in(run.settings.resolved))
            return made | {"progress": dict(progress), "run": run.identity, "code": code}

        keep, self._saved_at = self._when.keep, time.monotonic()
        return checkpoint.save(self._run_dir, done, run.comm, tree, manifest, keep=keep, say=self._say)

    def last_good(self) -> str:
        """'; the last good checkpoint is ...', or that there is none."""
        saved = checkpoint.folders(self._run_dir)
        return f"; the last good checkpoint is {saved[0]}" if saved else "; there is no checkpoint yet"


def random_state(device: torch.device) -> JsonDict:
    """Of torch's generators. Nothing of gnnpar draws from them; a model or strategy of a user may."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}
