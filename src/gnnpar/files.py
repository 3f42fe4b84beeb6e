"""Atomic file writes, checksummed JSON, fsync; a lock on a folder; limits of memory and disk."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
"""A JSON value to write or pass on."""
JsonObject = Mapping[str, Any]  # Any: the schema of a file gives the types of its keys, and is checked on reading
"""An object of JSON or YAML that is read by its keys: a row of metrics, a result, resolved settings."""
JsonDict = dict[str, Any]  # Any: as above
"""The same under construction."""

StateDict = dict[Any, Any]  # Any: only its owner reads it; `Engine.state_dict` says what a tree may hold
"""State of one object in a checkpoint."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_RESERVED, _RESERVED_BYTES = ".reserved", 1 << 20
_LARGEST = (1 << 63) - 1
LOCK = ".gnnpar.lock"
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def reserve_room(folder: Path) -> None:
    """Reserve 1 MiB of disk for the files written at the end of a run; do nothing on a full disk."""
    file = folder / _RESERVED
    try:
        file.write_bytes(os.urandom(_RESERVED_BYTES))  # random: a compressing file system would keep less
    except OSError:
        release_room(folder)


def release_room(folder: Path) -> bool:
    """Release the reserved room. Return whether there was any."""
    try:
        (folder / _RESERVED).unlink()
    except OSError:
        return False
    return True


class WriteError(OSError):
    """A file that could not be written: one line with its name and the reason of the operating system."""

    def __str__(self) -> str:
        return f"{self.filename} cannot be written: {self.strerror}"


def remove(path: Path) -> None:
    """Delete a file or a directory tree; ignore errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def require_writable(file: Path) -> None:
    """Raise WriteError if `file` is a directory or a device. Call it before the work."""
    if file.is_dir():
        raise WriteError(errno.EISDIR, "it is a folder; name a file", str(file))
    if file.exists() and not file.is_file():
        raise WriteError(errno.EEXIST, "it is no file, but a device, pipe or socket; name a file", str(file))


@contextmanager
def open_atomic(file: Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Write a temporary file, renamed when the block ends, and removed if the block raises. sync: fsync before the
    rename. Raises WriteError for every OSError of the writing."""
    partial = file.with_name(f"{file.name}.{threading.get_native_id()}.partial")
    try:
        with partial.open("wb+") as out:
            yield out
            out.flush()
            if sync:
                os.fsync(out.fileno())
        partial.replace(file)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise WriteError(error.errno, error.strerror or str(error), str(file)) from error
        raise


def write_text_atomic(file: Path, text: str, *, sync: bool = False) -> None:
    """Write UTF-8 text atomically. Raises WriteError."""
    with open_atomic(file, sync=sync) as out:
        out.write(text.encode(errors="backslashreplace"))  # names of files need not be UTF-8


def write_json_atomic(file: Path, data: object, *, indent: int | None = 1, sync: bool = False) -> None:
    """Write JSON and a line end atomically. Raise WriteError; TypeError for objects without a JSON form."""
    write_text_atomic(file, json.dumps(data, indent=indent) + "\n", sync=sync)


def read_json(file: Path) -> JsonDict:
    """Return the object in a JSON file. Raise OSError, and ValueError for other content."""
    return parse_json(file.read_bytes().decode())


def parse_json(text: str | bytes) -> JsonDict:
    """Parse a JSON object with whole numbers of at most 64 bits, as arrays need them. Raises ValueError."""
    try:
        data = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(data, dict):
        raise ValueError(f"it is no object but {type(data).__name__}")
    return data


def _integer(digits: str) -> int:
    if len(digits) > 20 or abs(number := int(digits)) > _LARGEST:
        raise ValueError(f"the number {digits[:12]}... of {len(digits)} digits is beyond 64 bits")
    return number


_LOADING = threading.RLock()


def load_tensors(file: Path, *, places: str | dict[str, str] = "cpu", known: Iterable[type] = ()) -> object:
    """Return tensors, plain values and objects of the classes in `known` from a file of torch.save; no code runs.
    places: as map_location. Raises any error of torch.load."""
    import torch

    with _LOADING:  # allowed classes are global to the process
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()  # PyG allows ClusterData, which loads files that its arguments name
        try:
            torch.serialization.add_safe_globals(list(known))
            checked = torch.sparse.check_sparse_tensor_invariants(True)  # invalid indices would write out of bounds
            with checked, file.open("rb") as content:  # torch opens only names in UTF-8
                return torch.load(content, map_location=places, weights_only=True)
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def write_checked_json(file: Path, data: JsonObject) -> None:
    """Write JSON with a checksum of itself, with fsync. Raises WriteError."""
    write_json_atomic(file, {**data, "checksum": checksum(data)}, sync=True)


def read_checked_json(file: Path) -> JsonDict:
    """Read JSON of `write_checked_json`. Raise OSError, and ValueError for a wrong checksum."""
    data = read_json(file)
    if data.pop("checksum", None) != checksum(data):
        raise ValueError("its checksum is wrong")
    return data


def file_hash(file: Path) -> str:
    """Return the sha256 of a file's bytes. Raises OSError."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def checksum(data: JsonObject) -> str:
    """Return the sha256 of plain data, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def sync_folder(folder: Path) -> None:
    """Call fsync on a directory, so that its new names are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class FolderInUse(ValueError):
    """Another process works in the folder: one line with its pid and host, and a remedy."""


@contextmanager
def working_in(folder: Path, *, remedy: str, say: Callable[[str], None]) -> Iterator[None]:
    """Make a folder and lock it for this process: the operating system releases the lock when the process ends.

    remedy: alternative for the message of FolderInUse. say: called if an earlier process did not release the lock.
    Raises WriteError if the folder cannot be written.
    """
    from filelock import FileLock, Timeout  # takes 0.1 s to import

    file = folder / LOCK
    lock = FileLock(file, timeout=0, thread_local=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        before = _read(file)
        file.write_text(f"process {os.getpid()} of {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
    except Timeout as error:
        owner = _read(file) or "another process"
        raise FolderInUse(f"{folder} is in use by {owner}: wait for it, or {remedy}") from error
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(folder)) from error
    if before:
        say(f"{folder} was in use by {before}, which has ended: taken over")
    try:
        yield
    finally:
        with suppress(OSError):
            file.write_text("")  # a removed file could be locked twice, by its name and by its handle
        lock.release()


def _read(file: Path) -> str:
    """Return the line in a lock file; '' if there is none, or if it is not printable."""
    with suppress(OSError):
        line = file.read_bytes()[:200].decode(errors="replace")
        return line if line.isprintable() else ""
    return ""


def numbered(folder: Path) -> Iterator[Path]:
    """Yield the folder, then its name with -2, -3, ..., to take the first that is free."""
    yield folder
    yield from (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))


def process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has ended, or outside Linux."""
    if sys.platform != "linux":
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name may contain spaces
    return None if fields[0] in "ZX" else int(fields[19])


def memory_bytes() -> int:
    """Return the memory of the machine, or of the container of this process."""
    total = psutil.virtual_memory().total
    limit = _CGROUP.read_text(encoding="ascii").strip() if _CGROUP.exists() else ""
    return min(total, int(limit)) if limit.isdigit() else total


def require_disk(nbytes: float, folder: Path, what: str, change: str) -> None:
    """Raise ValueError if `what` needs at least `nbytes` and the disk of `folder` has less free."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ValueError(
            f"{what} needs {nbytes / 2**30:,.1f} GiB of disk at least, {folder} has {free / 2**30:,.1f} free: {change}"
        )


def require_memory(nbytes: float, what: str, change: str) -> None:
    """Raise ValueError if `what` needs at least `nbytes` and the machine has less memory. change: the remedy."""
    there = memory_bytes()
    if nbytes > there:
        raise ValueError(
            f"{what} needs {nbytes / 2**30:,.0f} GiB at least, this machine has {there / 2**30:.0f}: {change}"
        )


def require_files(count: int, what: str, change: str) -> None:
    """Raise the limit of open files to `count`, also for processes started later. ValueError if that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count and hard != resource.RLIM_INFINITY:
        raise ValueError(
            f"{what} has {count:,} files open at once, and the limit is {hard:,}: raise it (ulimit -n), or {change}"
        )
    if soft < count and soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
