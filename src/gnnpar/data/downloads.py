"""Files of datasets from their authors' servers, over verified TLS and to fixed names.

PyG's own downloads do not verify TLS, and its constructors unpickle Planetoid's files as soon as they have come.
"""

from __future__ import annotations

import logging
import shutil
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path

from gnnpar.files import open_whole

_LOG = logging.getLogger(__name__)
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
_SECONDS = 30.0  # without a byte


def server_of(name: str) -> str:
    """Return scheme and host of the server of a dataset."""
    return "/".join(_address(name, "").split("/")[:3])


def fetch(name: str, files: tuple[str, ...], folder: Path) -> None:
    """Download the files of a dataset into a folder. Raises ValueError, OSError and HTTPException."""
    _LOG.info("downloading %s into %s", name, folder)
    folder.mkdir(parents=True, exist_ok=True)
    if name in ARCHIVES:
        archive = folder / "archive.zip"
        address, part = ARCHIVES[name]
        _fetch(address, archive)
        with zipfile.ZipFile(archive) as inside:
            for file in files:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                with inside.open(part + file) as source, open_whole(folder / file) as out:
                    shutil.copyfileobj(source, out)
        archive.unlink()
        return
    for file in files:
        _fetch(_address(name, file), folder / file)


def _address(name: str, file: str) -> str:
    if name in ARCHIVES:
        return ARCHIVES[name][0]
    return _DRIVE + BY_NUMBER[name].get(file, "") if name in BY_NUMBER else IN_FOLDER[name] + file


def _fetch(address: str, file: Path) -> None:
    request = urllib.request.Request(address, headers={"User-Agent": "gnnpar"})  # noqa: S310  # https, above
    with urllib.request.urlopen(request, timeout=_SECONDS) as source, open_whole(file) as out:  # noqa: S310
        shutil.copyfileobj(source, out)
        told = source.headers.get("Content-Length")
        if told is not None and out.tell() != int(told):
            raise ValueError(f"{file.name} is incomplete: {out.tell()} of {told} bytes were received; try again")
