"""Files that are whole or not there: writing, checksums, and reaching the disk."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
"""What JSON holds, for what is written or handed on."""
JsonObject = Mapping[str, Any]  # Any: the schema of a file says what its keys hold, and is checked where it is read
"""An object of JSON or YAML that is read by its keys: a row of metrics, a result, resolved settings."""
JsonDict = dict[str, Any]  # Any: as above
"""The same while it is made."""

StateDict = dict[Any, Any]  # Any: its owner alone reads it; `Engine.state_dict` says what a tree may hold
"""What a checkpoint has of one object."""

_BLOCK = 1 << 22


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_RESERVED, _RESERVED_BYTES = ".reserved", 1 << 20


def reserve_room(folder: Path) -> None:
    """Keep room for what must be written at the end, also on a disk that fills up meanwhile; where there is none to
    keep, nothing is kept."""
    file = folder / _RESERVED
    try:
        file.write_bytes(os.urandom(_RESERVED_BYTES))  # what compresses would keep less
    except OSError:
        file.unlink(missing_ok=True)


def release_room(folder: Path) -> bool:
    """Give the room back; whether there was any."""
    try:
        (folder / _RESERVED).unlink()
    except OSError:
        return False
    return True


class WriteError(OSError):
    """A file that could not be written: one line with its name and the reason of the operating system."""

    def __str__(self) -> str:
        return f"{self.filename} cannot be written: {self.strerror}"


@contextmanager
def open_whole(file: Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """A new file to write: it takes its name when the block ends, and is removed where the block raises.

    `sync`: its bytes reach the disk before it takes its name. Raises WriteError for every OSError of the writing.
    """
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb+") as out:
            yield out
            out.flush()
            if sync:
                os.fsync(out.fileno())
        partial.replace(file)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise WriteError(error.errno, error.strerror or str(error), str(file)) from error
        raise


def write_text_whole(file: Path, text: str, *, sync: bool = False) -> None:
    """UTF-8. Raises WriteError."""
    with open_whole(file, sync=sync) as out:
        out.write(text.encode())


def write_json_whole(file: Path, data: object, *, indent: int | None = 1, sync: bool = False) -> None:
    """JSON and a line end. Raises WriteError; TypeError for what JSON has no form for."""
    write_text_whole(file, json.dumps(data, indent=indent) + "\n", sync=sync)


def write_checked_json(file: Path, data: JsonObject) -> None:
    """JSON with a checksum of itself, written through to the disk. Raises WriteError."""
    write_json_whole(file, {**data, "checksum": checksum(data)}, sync=True)


def read_checked_json(file: Path) -> JsonDict:
    """ValueError where it is not what `write_checked_json` wrote."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(data, dict) or data.pop("checksum", None) != checksum(data):
        raise ValueError("its checksum is wrong")
    return data


def file_hash(file: Path) -> str:
    """sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with file.open("rb") as data:
        while block := data.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def checksum(data: JsonObject) -> str:
    """sha256 of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def sync_folder(folder: Path) -> None:
    """Names in a folder reach the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
