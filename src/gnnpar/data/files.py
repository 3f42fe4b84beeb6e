"""Raw files in `data_dir`, which may be read-only, downloads over verified TLS, and derived files in a cache folder.

Cache folders are in `GNNPAR_CACHE` (default: gnnpar in the user's cache folder). They are built in a temporary folder
and renamed, so that concurrent or killed runs never leave or see an incomplete one.
"""

import contextlib
import glob
import hashlib
import io
import logging
import os
import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from gnnpar.files import open_atomic
from gnnpar.paths import expanded, own_cache
from gnnpar.track.console import complain

_LOG = logging.getLogger(__name__)
_SECONDS = 10.0  # time-out of a download, to connect and without a byte
Content = TypeVar("Content")


def cache_root() -> Path:
    """Return the folder for derived files: GNNPAR_CACHE, else gnnpar in XDG_CACHE_HOME or ~/.cache."""
    named = os.environ.get("GNNPAR_CACHE")
    return expanded(named) if named else own_cache()


def find_path(
    name: str, path: str | None, data_dir: Path | None, *, example: str, kind: Literal["file", "folder"] = "file"
) -> Path:
    """Return the file or folder of a dataset, in the working folder or in data_dir. example: override with its path.
    Raises ValueError if neither has it, or if they have different ones."""
    if not path:
        raise ValueError(f"dataset.path is not set; name the {kind}, e.g. {example}.")
    given = expanded(path)
    places = [given] if data_dir is None else [given, expanded(data_dir) / given]
    found = [place for place in places if (place.is_dir() if kind == "folder" else place.is_file())]
    if len(found) == 2 and not os.path.samefile(*found):
        raise ValueError(
            f"dataset {name}: there are two {kind}s {path}, {found[0].absolute()} and {found[1].absolute()}; say by "
            "dataset.path, whole, which one."
        )
    if not found:
        tried = " nor ".join(dict.fromkeys(str(place.absolute()) for place in places))
        raise ValueError(f"dataset {name}: there is no {kind} {tried}; put it there or set dataset.path.")
    return found[0]


def find_folder(data_dir: Path | None, name: str) -> Path | None:
    """Return the folder `name` in data_dir: an exact match, else one that differs in case, - and _ only.

    Raises ValueError for several of these.
    """
    if data_dir is None or not data_dir.is_dir():
        return None
    if (data_dir / name).is_dir():
        return data_dir / name
    wanted = _plain(name)
    found = [entry for entry in sorted(data_dir.iterdir()) if entry.is_dir() and _plain(entry.name) == wanted]
    if len(found) > 1:
        both = " and ".join(entry.name for entry in found)
        raise ValueError(f"dataset {name}: {data_dir} has {both}; rename the one that is to be read to {name}.")
    return found[0] if found else None


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def fingerprint(folder: Path, files: Sequence[str]) -> str:
    """Return a short hash of paths, sizes, times and inodes, the cache key of raw files.

    tar and rsync keep the mtime of a file that they replace, but neither its ctime nor its inode.
    """
    digest = hashlib.sha256()
    for name in files:
        stat = (folder / name).stat()
        same = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
        digest.update(f"{(folder / name).resolve()}|{same}\n".encode())
    return digest.hexdigest()[:16]


def link_files(source: Path, target: Path, files: Sequence[str]) -> None:
    """Make the files visible in `target`: by symlink, or by copy if links are not allowed."""
    target.mkdir(parents=True, exist_ok=True)
    for name in files:
        try:
            os.symlink((source / name).resolve(), target / name)
        except OSError:
            shutil.copy2(source / name, target / name)


def cached_folder(key: str, build: Callable[[Path], None]) -> Path:
    """Return the cache folder `key`, built by `build(temporary folder)` if missing. Safe for concurrent runs."""
    from filelock import FileLock, Timeout

    final = cache_root() / key
    if final.is_dir():
        return final
    lock = FileLock(final.parent / f".{final.name}.lock", thread_local=False)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            complain(f"{final} is being made by another process: waiting for it")
            held = lock.acquire()
    except OSError as error:
        raise ValueError(
            f"cannot write to the cache folder {cache_root()} ({error.strerror}); set GNNPAR_CACHE to one."
        ) from None
    with held:
        if final.is_dir():
            return final
        for left in final.parent.glob(f".{glob.escape(final.name)}.*.partial"):  # left by a killed process
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{final.name}.", suffix=".partial") as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            build(made)
            try:
                made.rename(final)
            except OSError:
                if not final.is_dir():  # a host that does not see the lock may have been first
                    raise
    return final


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries that read and process datasets."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def fetch(addresses: Mapping[str, str], folder: Path) -> None:
    """Download files into a folder. Raises ValueError, OSError and HTTPException. addresses: file -> URL; for a file in
    a zip archive, URL#MEMBER. PyG's own downloads do not verify TLS, and unpickle Planetoid's files at once."""
    archive = folder / "archive.zip"
    for name, address in addresses.items():
        file, (url, _, member) = folder / name, address.partition("#")
        file.parent.mkdir(parents=True, exist_ok=True)
        if not member:
            _download(url, file)
            continue
        if not archive.exists():
            _download(url, archive)
        with zipfile.ZipFile(archive) as inside, inside.open(member) as source, open_atomic(file) as out:
            shutil.copyfileobj(source, out)
    archive.unlink(missing_ok=True)


def _download(url: str, file: Path) -> None:
    _LOG.info("downloading %s into %s", url, file.parent)
    request = urllib.request.Request(url, headers={"User-Agent": "gnnpar"})
    with urllib.request.urlopen(request, timeout=_SECONDS) as source, open_atomic(file) as out:
        shutil.copyfileobj(source, out)
        told = source.headers.get("Content-Length")
        if told is not None and out.tell() != int(told):
            raise ValueError(f"{file.name} is incomplete: {out.tell()} of {told} bytes were received; try again")


@dataclass(frozen=True)
class RawFiles:
    """Raw files of a dataset: `files` in the folder `inside` of data_dir/`folder`. addresses: their URLs, as for
    `fetch`; empty: too large to download automatically."""

    name: str
    folder: str
    files: tuple[str, ...]
    inside: str = "."
    addresses: Callable[[], Mapping[str, str]] = dict


def from_cache(
    raw: RawFiles,
    data_dir: Path | None,
    kind: str,
    *,
    make: Callable[[Path, Path], None],
    read: Callable[[Path], Content],
) -> Content:
    """Return `read(folder)` of a cache folder made by `make(raw files, folder)` from data_dir, else from a download.

    Downloaded raw files are in `folder`/fetched. Raises ValueError.
    """
    data_dir = None if data_dir is None else expanded(data_dir)
    found = find_folder(data_dir, raw.folder)
    there = None if found is None else found / raw.inside
    missing = [name for name in raw.files if there is None or not (there / name).is_file()]
    whole = there if not missing else None  # the folder with all files

    def build(root: Path) -> None:
        addresses = raw.addresses() if whole is None else {}
        if whole is None and not addresses:
            raise _not_found(raw, data_dir, missing, "it is larger than 1 GB, which is not downloaded unasked")
        try:
            with quiet():
                fetch(addresses, root / "fetched")
                make(whole or root / "fetched", root)
        except Exception as error:  # libraries raise errors of all kinds
            if whole is None:
                raise _not_found(raw, data_dir, missing, _failure(error, addresses)) from error
            raise ValueError(
                f"dataset {raw.name}: the files in {whole} cannot be read ({one_line(error)}); "
                "compare their checksums or fetch them again."
            ) from error
        shutil.rmtree(root / "fetched", ignore_errors=True)

    root = cached_folder(f"{kind}/{raw.name}-{'downloaded' if whole is None else fingerprint(whole, raw.files)}", build)
    try:
        with quiet():
            return read(root)
    except Exception as error:  # a damaged cache, or one of another version of PyG
        raise ValueError(
            f"dataset {raw.name}: {root} of the cache cannot be read ({one_line(error)}); remove that folder, or set "
            "GNNPAR_CACHE to one of your own."
        ) from error


def _failure(error: Exception, addresses: Mapping[str, str]) -> str:
    if type(error) is urllib.error.URLError:  # without an answer; HTTPError is a subclass
        return f"{'/'.join(next(iter(addresses.values())).split('/')[:3])} cannot be reached"
    return f"the download failed ({one_line(error)})"


def _not_found(raw: RawFiles, data_dir: Path | None, missing: Sequence[str], why: str) -> ValueError:
    place = "data_dir is not set" if data_dir is None else f"not in data_dir={data_dir.absolute()}"
    target = Path("DATA_DIR" if data_dir is None else data_dir.absolute()) / raw.folder / raw.inside
    shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return ValueError(
        f"dataset {raw.name}: {shown}: {place} and {why}; put {'it' if len(missing) == 1 else 'them'} into {target}/."
    )


def one_line(error: BaseException) -> str:
    """Return an exception as part of a one-line message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
