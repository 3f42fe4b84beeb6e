"""Checkpoint folders of a run: atomic writes with checksums, read without running code.

checkpoint/epoch-000012/ holds one file per rank and manifest.json with the identity of the run, checksums of all files
and the state of rank 0. It is written under another name, with fsync, and renamed at the end.

A file holds a tree: a tensor, None, a bool, int, float, str, or a dict, list or tuple (from a NamedTuple too) of trees.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnpar.files import JsonDict, JsonObject, file_hash, load_tensors, read_checked_json, remove
from gnnpar.partition import learned

FOLDER, MANIFEST = "checkpoint", "manifest.json"
BEST = "best"  # the best epoch's weights, if it has no checkpoint of its own
PARTIAL, OLD = ".partial", ".old"
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


def prune(run_dir: Path, *, keep: int) -> None:
    """Drop all checkpoints but the last `keep` and the best one on validation."""
    _keep_only({*all_folders(run_dir)[:keep], *_by_val(run_dir)[:1]}, run_dir)


def drop_old(run_dir: Path) -> bool:
    """Drop all checkpoints but the last valid one. Return whether there were others."""
    last = latest(run_dir, lambda line: None) if len(all_folders(run_dir)) > 1 else None
    if last is not None:
        _keep_only({last.folder}, run_dir)
    return last is not None


def remove_after(run_dir: Path, epoch: int) -> None:
    """Drop checkpoints of later epochs than `epoch`, and unfinished ones."""
    _keep_only({folder for folder in all_folders(run_dir) if _epoch(folder) <= epoch}, run_dir)
    for ending in (PARTIAL, OLD):
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
