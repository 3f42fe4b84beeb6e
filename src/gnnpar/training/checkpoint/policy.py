"""Decide on rank 0 when a run writes a checkpoint and when it ends before its last epoch; write checkpoints."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from gnnpar.comm import Communicator
from gnnpar.files import DISK_FULL, JsonDict, JsonObject, remove, sync_folder, write_checked_json
from gnnpar.placement import Plan
from gnnpar.settings import Settings
from gnnpar.track.console import say
from gnnpar.track.jsonl import sync_rows
from gnnpar.training.checkpoint import files as checkpoint

if TYPE_CHECKING:
    from gnnpar.training.loop import Run


class Decision(NamedTuple):
    """Decision after an epoch: write a checkpoint, end on a signal, end on non-finite numbers."""

    save: bool
    interrupted: bool
    broken: bool


class CheckpointPolicy:
    """When to write checkpoints, and the best weights so far. One per rank."""

    def __init__(self, settings: Settings, run_dir: Path, stop_asked: Callable[[], bool]) -> None:
        self._when, self._run_dir, self.stop_asked = settings.checkpoint, run_dir, stop_asked
        self._saved_at = time.monotonic()
        self._best_val = checkpoint.best_val(run_dir)
        self._best: tuple[int, JsonDict, JsonDict] | None = None  # epochs done, tree, manifest entries

    def decide(self, comm: Communicator, done: int, everyone: Sequence[JsonObject] | None, *, ends: bool) -> Decision:
        """Decide after `done` epochs from the reports of all ranks. `ends`: no epoch follows. Collective."""
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

    def remember(self, run: Run, done: int, progress: JsonObject, val: float | None) -> None:
        """Copy the weights to the CPU if `val` is the best so far, for the next checkpoint to write. Collective."""
        if val is None or not self._when.keep or not run.comm.broadcast(val > self._best_val):
            return
        weights = {
            name: each.detach().to("cpu", copy=True) if isinstance(each, torch.Tensor) else copy.deepcopy(each)
            for name, each in run.engine.named_weights()
        }
        tree = {"model": weights, "optimizer": {"kind": "", "state": {}}, "engine": {}}
        tree["random"] = random_state(run.comm.device)
        self._best_val, self._best = val, (done, tree, {"val": val, "progress": progress})

    def save_best(self, run: Run, unless: int = -1) -> None:
        """Write the remembered weights, unless they were taken after `unless` epochs. Collective."""
        best, self._best = self._best, None
        if best is not None and best[0] != unless:
            self._write(run, *best, name=checkpoint.BEST)

    def save(self, run: Run, done: int, progress: JsonObject, val: float | None, plan: Plan | None = None) -> bool:
        """Write a checkpoint. Return on rank 0 whether it was written. plan: a new plan, on rank 0. Collective."""
        self.save_best(run, unless=done)
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
        self._saved_at = time.monotonic()
        return self._write(run, done, tree, {"val": val, "progress": dict(progress)}, plan)

    def _write(
        self, run: Run, done: int, tree: JsonObject, made: JsonDict, plan: Plan | None = None, name: str = ""
    ) -> bool:
        """Write checkpoint/epoch-N, or `name`, and drop old ones. Return on rank 0 whether it was written. On a full
        disk, earlier checkpoints stay and a line reports it. Collective."""
        final = self._run_dir / checkpoint.FOLDER / (name or f"epoch-{done:06d}")
        partial = final.with_name(final.name + checkpoint.PARTIAL)
        mine: JsonDict = {"sha256": "", "error": "", "full": False}
        try:
            partial.mkdir(parents=True, exist_ok=True)
            mine["sha256"] = checkpoint.write_tree(partial / checkpoint.name_of(run.comm.rank), tree)
        except OSError as error:
            mine |= {"error": f"{error.strerror or error} ({partial})", "full": error.errno in DISK_FULL}
        except RuntimeError as error:  # torch's own writer raises it for a full disk
            mine |= {"error": f"{' '.join(str(error).split())[:200]} ({partial})", "full": True}
        everyone = run.comm.gather(mine)
        if everyone is None:
            return False
        files = {checkpoint.name_of(rank): {"sha256": each["sha256"]} for rank, each in enumerate(everyone)}
        try:
            if problem := next((each["error"] for each in everyone if each["error"]), ""):
                raise OSError(problem)
            if not name:  # the rows of an earlier epoch are on the disk already
                sync_rows(self._run_dir)
            if plan is not None:
                made["plan"] = plan.as_data({name: checkpoint.name_of(0) for name in plan.arrays})
            written = {"schema": 1, "epoch": done, "time": time.time(), **made, "run": run.identity, "files": files}
            _finish(partial, final, written)
        except OSError as error:
            remove(partial)
            full = error.errno in DISK_FULL or any(each["full"] for each in everyone)
            stays = "the one before it stays" if full and checkpoint.drop_old(self._run_dir) else "those before it stay"
            say(f"checkpoint of epoch {done} not written: {error}; {stays}")
            return False
        checkpoint.prune(self._run_dir, keep=self._when.keep)
        return True

    def last_good(self) -> str:
        """Return '; the last good checkpoint is ...', or that there is none."""
        saved = checkpoint.all_folders(self._run_dir)
        return f"; the last good checkpoint is {saved[0]}" if saved else "; there is no checkpoint yet"


def _finish(partial: Path, final: Path, manifest: JsonObject) -> None:
    """Write the manifest and rename the folder."""
    for stray in partial.iterdir():
        if stray.name not in manifest["files"]:
            remove(stray)
    write_checked_json(partial / checkpoint.MANIFEST, manifest)
    sync_folder(partial)
    old = final.with_name(final.name + checkpoint.OLD)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    sync_folder(final.parent)
    remove(old)


def random_state(device: torch.device) -> JsonDict:
    """Return the state of torch's generators, which users' models and strategies may use."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}
