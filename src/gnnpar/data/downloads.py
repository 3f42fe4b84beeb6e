"""Download files of datasets over verified TLS.

PyG's own downloads do not verify TLS, and its constructors unpickle Planetoid's files right after the download.
"""

from __future__ import annotations

import logging
import shutil
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path

from gnnpar.files import open_atomic

_LOG = logging.getLogger(__name__)
_SECONDS = 30.0  # time-out without a byte


def fetch(addresses: Mapping[str, str], folder: Path) -> None:
    """Download files into a folder. Raises ValueError, OSError and HTTPException. addresses: file -> URL; for a file in
    a zip archive, URL#MEMBER."""
    archive = folder / "archive.zip"
    for name, address in addresses.items():
        file, (url, _, member) = folder / name, address.partition("#")
        file.parent.mkdir(parents=True, exist_ok=True)
        if not member:
            _fetch(url, file)
            continue
        if not archive.exists():
            _fetch(url, archive)
        with zipfile.ZipFile(archive) as inside, inside.open(member) as source, open_atomic(file) as out:
            shutil.copyfileobj(source, out)
    archive.unlink(missing_ok=True)


def _fetch(url: str, file: Path) -> None:
    _LOG.info("downloading %s into %s", url, file.parent)
    request = urllib.request.Request(url, headers={"User-Agent": "gnnpar"})  # noqa: S310  # https
    with urllib.request.urlopen(request, timeout=_SECONDS) as source, open_atomic(file) as out:  # noqa: S310
        shutil.copyfileobj(source, out)
        told = source.headers.get("Content-Length")
        if told is not None and out.tell() != int(told):
            raise ValueError(f"{file.name} is incomplete: {out.tell()} of {told} bytes were received; try again")
