"""Files that are whole or not there: checksums, and writing through to the disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BLOCK = 1 << 22


def file_hash(file: Path) -> str:
    """sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with file.open("rb") as data:
        while block := data.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_json_through(file: Path, data: Mapping[str, Any]) -> None:
    """JSON with a checksum of itself, written through to the disk."""
    body = {**data, "checksum": checksum(data)}
    with file.open("w", encoding="utf-8") as out:
        out.write(json.dumps(body, indent=1) + "\n")
        out.flush()
        os.fsync(out.fileno())


def read_checked_json(file: Path) -> dict[str, Any]:
    """ValueError where it is not what `write_json_through` wrote."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(data, dict) or data.pop("checksum", None) != checksum(data):
        raise ValueError("its checksum is wrong")
    return data


def sync_folder(folder: Path) -> None:
    """Names in a folder reach the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(data: Mapping[str, Any]) -> str:
    """sha256 of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
