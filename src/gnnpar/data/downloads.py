"""Files of datasets from where their authors keep them: over TLS that is verified, to names that are fixed here.

PyG's own downloads verify nothing, or take links out of what a server answers for names of files to write.
"""

from __future__ import annotations

import os
import time
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO

from gnnpar.capacity import require_disk
from gnnpar.data.files import open_archive
from gnnpar.deadline import within
from gnnpar.durable import open_whole
from gnnpar.track.text import one_line

_GITHUB = "https://github.com"
_SEEDS = f"{_GITHUB}/kimiyoung/planetoid/raw/master/data/"
_BENCHMARK = f"{_GITHUB}/shchur/gnn-benchmark/raw/master/data/npz/"
_DRIVE = "https://drive.usercontent.google.com/download?confirm=t&id="

IN_FOLDER = {
    "cora": _SEEDS,
    "citeseer": _SEEDS,
    "pubmed": _SEEDS,
    "computers": _BENCHMARK,
    "photo": _BENCHMARK,
    "cs": _BENCHMARK,
    "physics": _BENCHMARK,
    "tolokers": f"{_GITHUB}/yandex-research/heterophilous-graphs/raw/main/data/",
}
"""Dataset -> the address below which its files have their own names."""
BY_NUMBER: Mapping[str, Mapping[str, str]] = {
    "flickr": {
        "adj_full.npz": "1crmsTbd1-2sEXsGwa2IKnIB7Zd3TmUsy",
        "feats.npy": "1join-XdvX3anJU_MLVtick7MgeAQiWIZ",
        "class_map.json": "1uxIkbtg5drHTsKt-PAsZZ4_yJmgFmle9",
        "role.json": "1htXCtuktuCW8TR8KiKfrFDAxUgekQoV7",
    },
    "yelp": {
        "adj_full.npz": "1Juwx8HtDwSzmVIJ31ooVa1WljI4U5JnA",
        "feats.npy": "1Zy6BZH_zLEjKlEFSduKE5tV9qqA_8VtM",
        "class_map.json": "1VUcBGr0T0-klqerjAjxRmAqFuld_SMWU",
        "role.json": "1NI5pa5Chpd-52eSmLW60OnB3WS5ikxq_",
    },
    "amazon_products": {
        "adj_full.npz": "17qhNA8H1IpbkkR-T2BmPQm8QNW5do-aa",
        "feats.npy": "10SW8lCvAj-kb6ckkfTOC5y0l8XXdtMxj",
        "class_map.json": "1LIl4kimLfftj4-7NmValuWyCQE8AaE7P",
        "role.json": "1npK9xlmbnjNkV80hK2Q68wTEVOFjnt4K",
    },
}
"""Dataset -> file -> its number on Google Drive."""
ARCHIVES = {
    "reddit": ("https://data.dgl.ai/dataset/reddit.zip", ""),
    "ogbn_arxiv": ("https://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip", "arxiv/"),
}
"""Dataset -> the zip file that holds its files, and the folder in it."""
MOST_BYTES = 1 << 33
_PIECE = 1 << 16
_SECONDS, _LEAST_RATE = 60.0, 1 << 12
"""A server has so many seconds to answer and to send anything at all; after them, a mean rate of so many bytes/s."""


def server_of(name: str) -> str:
    """Where a dataset is kept: scheme and host."""
    return "/".join(_address(name, "").split("/")[:3])


def fetch(name: str, files: tuple[str, ...], folder: Path) -> None:
    """The files of a dataset into a folder. ValueError and OSError where they do not come, or are too large."""
    folder.mkdir(parents=True, exist_ok=True)
    if name in ARCHIVES:
        archive = folder / "archive.zip"
        address, part = ARCHIVES[name]
        _fetch(address, archive)
        with open_archive(archive) as inside:
            _refuse_large([inside.getinfo(part + file) for file in files], folder)
            for file in files:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                with inside.open(part + file) as source, open_whole(folder / file) as out:
                    _copy(source, out, file)
        archive.unlink()
        return
    for file in files:
        _fetch(_address(name, file), folder / file)


def _refuse_large(members: Sequence[zipfile.ZipInfo], folder: Path) -> None:
    """ValueError where files of an archive are larger together than any dataset's, or than the disk, or packed so that
    a few bytes could be all of that."""
    needed = sum(each.file_size for each in members)
    if any(each.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for each in members):
        raise ValueError("the archive is packed by another method than deflate")
    if needed > MOST_BYTES:
        raise ValueError(f"its files have {needed} bytes, more than {MOST_BYTES}")
    require_disk(needed, folder, "its files, unpacked,", "make room, or set GNNPAR_CACHE")


def _address(name: str, file: str) -> str:
    if name in ARCHIVES:
        return ARCHIVES[name][0]
    return _DRIVE + BY_NUMBER[name].get(file, "") if name in BY_NUMBER else IN_FOLDER[name] + file


def _fetch(address: str, file: Path) -> None:
    request = urllib.request.Request(address, headers={"User-Agent": "gnnpar"})  # noqa: S310  # https, above
    opened = within(2 * _SECONDS, lambda: _https.open(request, timeout=_SECONDS), name="download")
    with open_whole(file) as out:  # closing what a thread still reads from would wait for that
        told = opened.headers.get("Content-Length")
        if told is None and opened.headers.get("Transfer-Encoding") != "chunked":
            raise ValueError(f"the server does not say how long {file.name} is: what is cut off would not be seen")
        began = time.monotonic()

        def comes() -> bool:
            return os.fstat(out.fileno()).st_size >= _LEAST_RATE * (time.monotonic() - began)

        try:
            done = within(_SECONDS, lambda: _copy(opened, out, file.name), name="download", more=comes)
        except TimeoutError as error:
            line = f"{file.name} comes at less than {_LEAST_RATE} bytes/s: try again, or put it into data_dir yourself"
            raise ValueError(line) from error
        except HTTPException as error:
            raise ValueError(f"{file.name} is incomplete ({one_line(error)}); try again") from error
        if told is not None and str(done) != told.strip():
            raise ValueError(f"{file.name} is incomplete: {done} of {told[:20]} bytes were received; try again")
    opened.close()


def _copy(source: IO[bytes] | HTTPResponse, out: IO[bytes], name: str) -> int:
    """How many bytes were copied."""
    done = 0
    while piece := source.read(_PIECE):
        done += len(piece)
        if done > MOST_BYTES:
            raise ValueError(f"{name} has more than {MOST_BYTES} bytes")
        out.write(piece)
    return done


class _StaysSecure(urllib.request.HTTPRedirectHandler):
    """A server may send on to another one, by https alone."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        if not newurl.startswith("https://"):
            raise ValueError(f"the server sends on to {newurl[:200]}, which is not by https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def http_error_302(self, req, fp, code, msg, headers):
        fp.close()  # Python's reads the body of a redirect to its end, and a server may send one without
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


_https = urllib.request.build_opener(_StaysSecure)
