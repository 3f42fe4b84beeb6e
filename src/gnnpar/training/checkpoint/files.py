"""Checkpoints of a run: written whole or not at all, verified before they are believed, never unpickled.

checkpoint/epoch-000012/ holds one file a rank and manifest.json, which names what it is a checkpoint of, checksums of
all files, and what rank 0 knew. It is written under another name, through to the disk, and renamed at the end.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path

import torch

from gnnpar.comm import Communicator
from gnnpar.files import (
    DISK_FULL,
    JsonDict,
    JsonObject,
    file_hash,
    read_checked_json,
    remove,
    sync_folder,
    write_checked_json,
)
from gnnpar.partition import learned
from gnnpar.track.text import one_line
from gnnpar.training.checkpoint.state import check_tree, plain, read_tree, tree_hash, write_tree

FOLDER, MANIFEST = "checkpoint", "manifest.json"
BEST = "best"  # of FOLDER: the weights of the best epoch on validation, where no checkpoint was due after it
_PARTIAL, _OLD = ".partial", ".old"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: `epoch` epochs were done."""

    folder: Path
    manifest: JsonObject

    @property
    def epoch(self) -> int:
        return self.manifest["epoch"]

    @property
    def run_dir(self) -> Path:
        """The folder of the run that wrote it."""
        return self.folder.parent.parent

    @property
    def val(self) -> float | None:
        """Validation metric of its weights, where they were evaluated."""
        return self.manifest["val"]

    def rank(self, rank: int, device: torch.device) -> JsonDict:
        """All that a rank left: model, optimizer, engine, random. ValueError where this host has another file than the
        one that the manifest, which is rank 0's, was read with."""
        name = name_of(rank)
        try:
            same = file_hash(self.folder / name) == self.manifest["files"][name]["sha256"]
        except OSError as error:
            raise ValueError(f"{self.folder / name} cannot be read: {error.strerror or error}") from error
        if not same:
            raise ValueError(
                f"{self.folder / name} on {socket.gethostname()} is of another checkpoint than rank 0's: put the "
                "folder on a file system that all hosts share, or copy it to each"
            )
        return read_tree(self.folder / name, device)

    def merged(self, device: torch.device) -> tuple[JsonDict, JsonDict]:
        """(weights, optimizer) by name, of all ranks together."""
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
    say: Say,
    name: str = "",
) -> bool:
    """Write checkpoint/epoch-N under a run's folder and drop what is no longer kept; whether it is there, on rank 0.

    Collective. `manifest`: what rank 0 knows, asked there once all parts are written. `name`: of the folder, in the
    place of epoch-N. A disk that takes no more is a line, not the end of the run: what was there before stays.
    """
    final = folder / FOLDER / (name or f"epoch-{epoch:06d}")
    partial = final.with_name(final.name + _PARTIAL)
    mine: JsonDict = {"error": "", "full": False}
    try:
        partial.mkdir(parents=True, exist_ok=True)
        mine |= write_tree(partial / name_of(comm.rank), tree)
        mine["hashes"] = {name: tree_hash(plain(tree[name])) for name in ("model", "optimizer", "engine")}
    except OSError as error:
        mine |= {"error": f"{error.strerror or error} ({partial})", "full": error.errno in DISK_FULL}
    except RuntimeError as error:  # torch's own writer tells a full disk so
        mine["full"] = True
        mine["error"] = f"{' '.join(str(error).split())[:200]} ({partial})"
    everyone = comm.gather(mine)
    if everyone is None:
        return False
    try:
        if problem := next((each["error"] for each in everyone if each["error"]), ""):
            raise OSError(problem)
        _finish(partial, final, {"schema": 1, "epoch": epoch, "time": time.time(), **manifest()}, everyone)
    except OSError as error:
        remove(partial)
        full = error.errno in DISK_FULL or any(each["full"] for each in everyone)
        stays = "the one before it stays" if full and drop_old(folder) else "those before it stay"
        say(f"checkpoint of epoch {epoch} not written: {error}; {stays}")
        return False
    prune(folder, keep=keep)
    return True


def _finish(partial: Path, final: Path, manifest: JsonObject, everyone: list[JsonDict]) -> None:
    """The manifest, and the name that makes it a checkpoint."""
    files = {name_of(i): {"nbytes": each["nbytes"], "sha256": each["sha256"]} for i, each in enumerate(everyone)}
    for stray in partial.iterdir():
        if stray.name not in files:
            remove(stray)
    hashes = {name: tree_hash([each["hashes"][name] for each in everyone]) for name in ("model", "optimizer", "engine")}
    write_checked_json(partial / MANIFEST, {**manifest, "files": files, "hashes": hashes})
    sync_folder(partial)
    old = final.with_name(final.name + _OLD)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    sync_folder(final.parent)
    remove(old)


def folders(run_dir: Path) -> list[Path]:
    """Folders that claim to be checkpoints, the latest first. OSError where none can be listed: they may be there."""
    try:
        names = os.listdir(run_dir / FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return []
    claim = (run_dir / FOLDER / name for name in names if re.fullmatch(r"epoch-\d+", name, re.ASCII))
    found = [path for path in claim if path.is_dir()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("epoch-")), reverse=True)


def everything(run_dir: Path) -> list[Path]:
    """`folders`, and that of the best weights, where there is one."""
    best = run_dir / FOLDER / BEST
    return [*folders(run_dir), *([best] if best.is_dir() else [])]


def is_one(folder: Path) -> bool:
    """Whether a folder is a checkpoint, and not that of a run: what lies beside a run's own files is not the run's."""
    return (folder / MANIFEST).exists() and not folders(folder) and not (folder / "config.yaml").exists()


def read(folder: Path) -> Checkpoint:
    """A checkpoint whose every byte is as it was written; ValueError says what is not."""
    try:
        manifest = checked(read_checked_json(folder / MANIFEST))
        files, named = manifest["files"], folder.name.removeprefix("epoch-")
        if named.isdecimal() and int(named) != manifest["epoch"]:
            raise ValueError(f"it says that {manifest['epoch']} epochs are done, its name {named}")
        for name, told in files.items():
            if file_hash(folder / Path(name).name) != told["sha256"]:
                raise ValueError(f"{name} has another checksum than manifest.json says")
            check_tree(folder / Path(name).name)
        return Checkpoint(folder, manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} is no good checkpoint: {_why(error)}") from error


_NEEDED = {"epoch": int, "files": dict, "hashes": dict, "progress": dict, "run": dict, "val": (int, float, type(None))}
_NEEDED_OF_RUN = {
    "graph": str,
    "split": str,
    "partition": str,
    "world_size": int,
    "strategy": dict,
    "model": dict,
    "precision": str,
    "first_layer": str,
    "seed": int,
    "num_features": int,
    "num_outputs": int,
    "names": dict,
    "settings": dict,
}
_NEEDED_OF_PROGRESS = {
    "train_seconds": (int, float),
    "num_bytes": int,
    "best_val": (int, float, type(None)),
    "evaluations_since": int,
}


def checked(manifest: JsonDict) -> JsonDict:
    """A manifest in which everything that is read later stands, in its type."""
    if manifest.get("schema") != 1:
        raise ValueError(f"schema {str(manifest.get('schema'))[:20]} is not 1: written by another version of gnnpar")
    _require(manifest, _NEEDED)
    _require(manifest["run"], _NEEDED_OF_RUN)
    _require(manifest["progress"], _NEEDED_OF_PROGRESS)
    if manifest.get("plan") is not None:
        _require(manifest, {"plan": dict})
    size = manifest["run"]["world_size"]
    if size < 1 or size != len(manifest["files"]):
        raise ValueError(f"it is of {size} ranks and names {len(manifest['files'])} files")
    names = [name_of(rank) for rank in range(size)]
    if manifest["epoch"] < 0 or sorted(manifest["files"]) != sorted(names):
        named = one_line(", ".join(manifest["files"])) or "of no rank"
        raise ValueError(f"it names files {named}, epoch {manifest['epoch']}")
    for told in manifest["files"].values():
        _require(told, {"sha256": str, "nbytes": int})
    return manifest


def _require(data: object, kinds: JsonObject) -> None:
    for name, kind in kinds.items():
        value = data.get(name, ...) if isinstance(data, dict) else ...
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, float) and not isfinite(value)):
            raise ValueError(f"{name} is missing or of another type in {MANIFEST}")


def _why(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if type(error) is ValueError else f"{type(error).__name__} {text}"


def latest(run_dir: Path, say: Say) -> Checkpoint | None:
    """The last good checkpoint of a run; a line for each one that is passed over."""
    for folder in folders(run_dir):
        try:
            return read(folder)
        except ValueError as error:
            say(f"{error}; going back to the one before")
    return None


def best(run_dir: Path, say: Say) -> Checkpoint | None:
    """The good checkpoint with the highest validation metric, the first of equals; the last where none has one."""
    marked = sorted((-(value or 0.0), _epoch(p), p) for p in everything(run_dir) if (value := _val(p)) is not None)
    for _, _, folder in marked:
        try:
            return read(folder)
        except ValueError as error:
            say(f"{error}; taking the next best")
    return latest(run_dir, say)


def best_val(run_dir: Path) -> float:
    """The highest validation metric of the checkpoints in a run's folder; -inf: none has any."""
    return max((value for p in everything(run_dir) if (value := _val(p)) is not None), default=-inf)


def prune(run_dir: Path, *, keep: int) -> None:
    """Drop all but the last `keep` and the best on validation."""
    there = everything(run_dir)
    values = {p: value for p in there if (value := _val(p)) is not None}
    kept = set(there[:keep])
    if values:
        kept.add(min(values, key=lambda p: (-values[p], _epoch(p))))
    for folder in there:
        if folder not in kept:
            remove(folder)


def drop_old(run_dir: Path) -> bool:
    """Leave the last good checkpoint alone, for the disk is full; whether there were others."""
    there = everything(run_dir)
    last = latest(run_dir, lambda line: None) if len(there) > 1 else None
    if last is None:
        return False
    for folder in there:
        if folder != last.folder:
            remove(folder)
    return True


def forget_after(run_dir: Path, epoch: int) -> None:
    """Drop checkpoints of epochs that a run which goes on from `epoch` does anew, and what was never finished."""
    for folder in everything(run_dir):
        if _epoch(folder) > epoch:
            remove(folder)
    for ending in (_PARTIAL, _OLD):
        for left in (run_dir / FOLDER).glob(f"*{ending}"):
            remove(left)


def _epoch(folder: Path) -> int:
    if folder.name != BEST:
        return int(folder.name.removeprefix("epoch-"))
    try:
        return int(read_checked_json(folder / MANIFEST)["epoch"])
    except (OSError, ValueError, KeyError, TypeError):
        return sys.maxsize


def _val(folder: Path) -> float | None:
    """Without reading the tensors."""
    try:
        value = read_checked_json(folder / MANIFEST).get("val")
    except (OSError, ValueError):
        return None
    return float(value) if isinstance(value, (int, float)) else None
