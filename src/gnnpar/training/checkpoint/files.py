"""Checkpoint folders of a run: atomic writes with checksums, read without running code.

checkpoint/epoch-000012/ holds one file per rank and manifest.json with the identity of the run, checksums of all files
and the state of rank 0. It is written under another name, with fsync, and renamed at the end.

A file holds a tree: a tensor, None, a bool, int, float or str, or a dict, list or tuple of trees. A NamedTuple becomes
a tuple.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnpar.comm import Communicator
from gnnpar.files import (
    DISK_FULL,
    JsonDict,
    JsonObject,
    file_hash,
    load_tensors,
    read_checked_json,
    remove,
    sync_folder,
    write_checked_json,
)
from gnnpar.partition import learned
from gnnpar.track.console import say

FOLDER, MANIFEST = "checkpoint", "manifest.json"
BEST = "best"  # the best epoch's weights, if it has no checkpoint of its own
_PARTIAL, _OLD = ".partial", ".old"
Say = Callable[[str], None]


def plain(tree: object, at: str = "state") -> Any:  # Any: a tree, as above
    """Convert a tree to exact types, and clone views of larger tensors. Raises TypeError for other types."""
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    if isinstance(tree, Tensor):
        part = tree.untyped_storage().nbytes() != tree.numel() * tree.element_size()
        return tree.detach().clone() if part else tree.detach()
    if isinstance(tree, Mapping):
        return {plain(k, f"a key of {at}"): plain(v, f"{at}[{k!r}]") for k, v in tree.items()}
    if isinstance(tree, tuple):
        return tuple(plain(v, f"{at}[{i}]") for i, v in enumerate(tree))
    if isinstance(tree, list):
        return [plain(v, f"{at}[{i}]") for i, v in enumerate(tree)]
    raise TypeError(
        f"{at} is a {type(tree).__name__}: a state holds tensors, None, bool, int, float, str, and dict, "
        "list and tuple of them"
    )


def write_tree(file: Path, tree: object) -> str:
    """Write a tree, with fsync. Return the sha256 of the file."""
    with file.open("wb") as out:
        torch.save(plain(tree), out)
        out.flush()
        os.fsync(out.fileno())
    return file_hash(file)


def is_extra(name: str) -> bool:
    """Return whether a weight of this name is a module's get_extra_state, which may be any tree."""
    return name.rpartition(".")[2] == "_extra_state"


def read_tree(file: Path, device: torch.device) -> Any:  # Any: a tree
    """Read a tree of `write_tree`; move GPU tensors to `device`, others to the CPU."""
    return load_tensors(file, places={f"cuda:{i}": str(device) for i in range(64)})


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint after `epoch` epochs."""

    folder: Path
    manifest: JsonObject

    @property
    def epoch(self) -> int:
        return self.manifest["epoch"]

    @property
    def run_dir(self) -> Path:
        """Return the folder of the run that wrote it."""
        return self.folder.parent.parent

    @property
    def val(self) -> float | None:
        """Validation metric of its weights; None if they were not evaluated."""
        return self.manifest["val"]

    def rank(self, rank: int, device: torch.device) -> JsonDict:
        """Return the state of a rank: model, optimizer, engine, random. Raises ValueError if the file cannot be opened,
        or belongs to another checkpoint than the manifest."""
        file = self.folder / name_of(rank)
        try:
            if file_hash(file) == self.manifest["files"][file.name]["sha256"]:
                return read_tree(file, device)
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # torch's readers raise errors of all kinds
            raise ValueError(f"{file} cannot be opened ({type(error).__name__})") from error
        raise ValueError(
            f"{file} on {socket.gethostname()} is of another checkpoint than rank 0's: put the folder on a file "
            "system that all hosts share, or copy it to each"
        )

    def merged(self, device: torch.device) -> tuple[JsonDict, JsonDict]:
        """Return weights and optimizer state by parameter name, merged over all ranks."""
        model: JsonDict = {}
        optimizer: JsonDict = {"kind": "", "state": {}}
        for rank in range(len(self.manifest["files"])):
            tree = self.rank(rank, device)
            model |= tree["model"]
            optimizer["kind"] = tree["optimizer"]["kind"]
            optimizer["state"] |= tree["optimizer"]["state"]
        learned.join(model, optimizer["state"])
        return model, optimizer


def name_of(rank: int) -> str:
    return f"rank-{rank}.pt"


def save(
    folder: Path,
    epoch: int,
    comm: Communicator,
    tree: JsonObject,
    manifest: Callable[[], JsonObject],
    *,
    keep: int,
    name: str,
) -> bool:
    """Write checkpoint/epoch-N; drop all but the last `keep` and the best. Return on rank 0 whether it was written.
    Collective.

    manifest: called on rank 0 once all files are written. name: folder name, if not empty. On a full disk, earlier
    checkpoints stay and a line reports it.
    """
    final = folder / FOLDER / (name or f"epoch-{epoch:06d}")
    partial = final.with_name(final.name + _PARTIAL)
    mine: JsonDict = {"sha256": "", "error": "", "full": False}
    try:
        partial.mkdir(parents=True, exist_ok=True)
        mine["sha256"] = write_tree(partial / name_of(comm.rank), tree)
    except OSError as error:
        mine |= {"error": f"{error.strerror or error} ({partial})", "full": error.errno in DISK_FULL}
    except RuntimeError as error:  # torch's own writer raises it for a full disk
        mine |= {"error": f"{' '.join(str(error).split())[:200]} ({partial})", "full": True}
    everyone = comm.gather(mine)
    if everyone is None:
        return False
    files = {name_of(rank): {"sha256": each["sha256"]} for rank, each in enumerate(everyone)}
    try:
        if problem := next((each["error"] for each in everyone if each["error"]), ""):
            raise OSError(problem)
        _finish(partial, final, {"schema": 1, "epoch": epoch, "time": time.time(), **manifest(), "files": files})
    except OSError as error:
        remove(partial)
        full = error.errno in DISK_FULL or any(each["full"] for each in everyone)
        stays = "the one before it stays" if full and drop_old(folder) else "those before it stay"
        say(f"checkpoint of epoch {epoch} not written: {error}; {stays}")
        return False
    _keep_only({*all_folders(folder)[:keep], *_by_val(folder)[:1]}, folder)
    return True


def _finish(partial: Path, final: Path, manifest: JsonObject) -> None:
    """Write the manifest and rename the folder."""
    for stray in partial.iterdir():
        if stray.name not in manifest["files"]:
            remove(stray)
    write_checked_json(partial / MANIFEST, manifest)
    sync_folder(partial)
    old = final.with_name(final.name + _OLD)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    sync_folder(final.parent)
    remove(old)


def folders(run_dir: Path) -> list[Path]:
    """Return folders named as checkpoints, the latest first. Raises OSError if they cannot be listed."""
    try:
        named = [path for path in (run_dir / FOLDER).iterdir() if re.fullmatch(r"epoch-\d+", path.name, re.ASCII)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(filter(Path.is_dir, named), key=_epoch, reverse=True)


def all_folders(run_dir: Path) -> list[Path]:
    """Return `folders`, and the folder of the best weights if there is one."""
    best = run_dir / FOLDER / BEST
    return [*folders(run_dir), *([best] if best.is_dir() else [])]


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint and not the folder of a run."""
    return (folder / MANIFEST).exists() and not folders(folder) and not (folder / "config.yaml").exists()


def read(folder: Path) -> Checkpoint:
    """Return a checkpoint after comparing all checksums. Raises ValueError."""
    try:
        manifest = read_checked_json(folder / MANIFEST)
        if manifest["schema"] != 1:
            raise ValueError(f"schema {manifest['schema']!r:.20} is not 1: written by another version of gnnpar")
        for name, told in manifest["files"].items():
            if file_hash(folder / name) != told["sha256"]:
                raise ValueError(f"{name} has another checksum than manifest.json says")
        return Checkpoint(folder, manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = str(error) if type(error) is ValueError else f"{type(error).__name__} {error}"
        raise ValueError(f"{folder} is no good checkpoint: {' '.join(why.split())}") from error


def latest(run_dir: Path, say: Say) -> Checkpoint | None:
    """Return the last valid checkpoint of a run; call `say` for each damaged one."""
    return _first_good(folders(run_dir), say, "going back to the one before")


def best(run_dir: Path, say: Say) -> Checkpoint | None:
    """Return the valid checkpoint with the highest validation metric, the first if equal; without metrics the last."""
    return _first_good(_by_val(run_dir), say, "taking the next best") or latest(run_dir, say)


def _first_good(chosen: list[Path], say: Say, then: str) -> Checkpoint | None:
    for folder in chosen:
        try:
            return read(folder)
        except ValueError as error:
            say(f"{error}; {then}")
    return None


def best_val(run_dir: Path) -> float:
    """Return the highest validation metric of a run's checkpoints; -inf without one."""
    return max((_number_in(folder, "val", -inf) for folder in all_folders(run_dir)), default=-inf)


def drop_old(run_dir: Path) -> bool:
    """Drop all checkpoints but the last valid one. Return whether there were others."""
    last = latest(run_dir, lambda line: None) if len(all_folders(run_dir)) > 1 else None
    if last is not None:
        _keep_only({last.folder}, run_dir)
    return last is not None


def remove_after(run_dir: Path, epoch: int) -> None:
    """Drop checkpoints of later epochs than `epoch`, and unfinished ones."""
    _keep_only({folder for folder in all_folders(run_dir) if _epoch(folder) <= epoch}, run_dir)
    for ending in (_PARTIAL, _OLD):
        for left in (run_dir / FOLDER).glob(f"*{ending}"):
            remove(left)


def _keep_only(kept: set[Path], run_dir: Path) -> None:
    for folder in all_folders(run_dir):
        if folder not in kept:
            remove(folder)


def _by_val(run_dir: Path) -> list[Path]:
    """Return checkpoints with a validation metric, the best first, the earlier first among equals."""
    marked = [(-_number_in(folder, "val", -inf), _epoch(folder), folder) for folder in all_folders(run_dir)]
    return [folder for worse, _, folder in sorted(marked) if worse < inf]


def _epoch(folder: Path) -> int:
    if folder.name == BEST:
        return int(_number_in(folder, "epoch", sys.maxsize))
    return int(folder.name.removeprefix("epoch-"))


def _number_in(folder: Path, name: str, missing: float) -> float:
    """Return a number of a manifest without reading tensors."""
    try:
        value = read_checked_json(folder / MANIFEST).get(name)
    except (OSError, ValueError):
        return missing
    return value if isinstance(value, (int, float)) else missing
