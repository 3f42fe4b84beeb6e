"""Where files are: raw files in `data_dir`, derived ones in a cache folder that may be written to.

`data_dir` may be read-only; nothing is ever written there. What a library insists on writing beside the raw files goes
to `GNNPAR_CACHE` (default: gnnpar in the user's cache folder), built in a temporary folder and renamed, so that two
runs at once, or a run killed half way, never see half a cache.
"""

import contextlib
import fcntl
import glob
import gzip
import hashlib
import io
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from traceback import walk_tb
from typing import TextIO

from gnnpar.capacity import memory_bytes, require_memory
from gnnpar.durable import is_mine, is_open_to_others, make_folder, require_file
from gnnpar.paths import expanded, own_cache
from gnnpar.scratch import remove_abandoned
from gnnpar.track.console import complain

_LOG = logging.getLogger(__name__)
_PIECE = 1 << 24  # bytes of a file that are unpacked at once
_PROBE_SECONDS = 4.0
_DOWNLOAD_SECONDS = 30.0  # without a byte, before a download counts as failed


def cache_root() -> Path:
    """The writable folder for derived files: GNNPAR_CACHE, else gnnpar in XDG_CACHE_HOME or ~/.cache."""
    named = os.environ.get("GNNPAR_CACHE")
    if named:
        return expanded(named)
    return own_cache()


def find_file(name: str, path: str | None, data_dir: Path | None, *, example: str) -> Path:
    """The file of a dataset, in the working folder or in data_dir. `example`: of giving its path, for the message.

    ValueError where neither has it, or each has another one."""
    if not path:
        raise ValueError(f"dataset.path is not set; name the file, e.g. {example}.")
    given = expanded(path)
    places = [given] if data_dir is None else [given, expanded(data_dir) / given]
    found = next((place for place in places if place.is_file()), None)
    if all(place.is_file() for place in places) and not os.path.samefile(places[0], places[-1]):
        raise ValueError(
            f"dataset {name}: there are two files {path}, {places[0].absolute()} and {places[-1].absolute()}; say by "
            "dataset.path, whole, which one."
        )
    if found is None:
        tried = " nor ".join(dict.fromkeys(str(place.absolute()) for place in places))
        raise ValueError(f"dataset {name}: there is no file {tried}; put it there or set dataset.path.")
    try:
        require_file(found)
    except OSError as error:
        raise ValueError(f"dataset {name}: {found} cannot be read ({error.strerror}).") from error
    return found


def in_short(error: Exception) -> str:
    """What an error of reading raw files says, or its type alone where a library has raised it, which may quote the
    file: that may be a link to one that others may not read, and results of a sweep that was passed on hold errors."""
    raised_in = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)][-1]
    own = raised_in.startswith(f"{Path(__file__).parents[1]}{os.sep}")
    return one_line(error) if own or isinstance(error, OSError) else type(error).__name__


def find_folder(data_dir: Path | None, name: str) -> Path | None:
    """The folder `name` in data_dir, whatever its case and with - or _; an exact match comes first. ValueError where
    several others match."""
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


def missing_files(folder: Path | None, files: Sequence[str]) -> list[str]:
    """Those of `files` that are not in `folder`. ValueError where one is a pipe or a device, whose end nobody knows."""
    there = [] if folder is None else [name for name in files if (folder / name).exists()]
    for name in there:
        assert folder is not None
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is no file, but a pipe, a device or a folder; put the file there.")
    return [name for name in files if name not in there]


def plain_files(folder: Path) -> list[Path]:
    """All files in and below a folder. ValueError where one is none, but a pipe, a device or a link to a folder: a
    library that reads the folder would wait for an end, or go round. And where a folder cannot be listed: files in it
    may still be opened by their names."""
    found = []
    for at, folders, names in os.walk(folder, onerror=_refuse_unlisted):
        for name in folders:
            if Path(at, name).is_symlink():
                raise ValueError(f"{Path(at, name)} is a link to a folder")
        for name in names:
            if not Path(at, name).is_file():
                raise ValueError(f"{Path(at, name)} is no file, but a pipe, a device or a link to nothing")
            found.append(Path(at, name))
    return sorted(found)


def _refuse_unlisted(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise ValueError(f"{error.filename} cannot be listed ({error.strerror})") from error


_MOST_OF_A_LIST = 1 << 24  # bytes of an archive's list of its files, which takes ten times as much when it is read


_SIZE_OF_LIST = 5  # among the fields of an archive's end record


def open_archive(file: Path) -> zipfile.ZipFile:
    """A .zip to read; ValueError where it lists more files than any dataset has."""
    with file.open("rb") as content:
        # ZipFile finds the list by this function and then reads it whole; a search of our own could find another one
        end = zipfile._EndRecData(content)  # pyright: ignore[reportAttributeAccessIssue]
    size = end[_SIZE_OF_LIST] if end else 0
    if size > _MOST_OF_A_LIST:
        raise ValueError(f"{file.name} lists its files in {size} bytes: no dataset has so many")
    return zipfile.ZipFile(file)


def require_unpacked(*files: Path) -> None:
    """ValueError where .zip, .npz or .gz together unpack to more than this machine's memory; a library would find out
    by filling it. Of a .gz no size is known: it is read, and thrown away, until its end or that bound. Arrays are there
    twice while they are read, and so are numbers that pandas makes of text: 8 bytes of two ("0" and a line end)."""
    size = 0
    for file in files:
        if zipfile.is_zipfile(file):
            with open_archive(file) as archive:
                size += 2 * sum(each.file_size for each in archive.infolist())
        elif file.suffix == ".gz":
            with gzip.open(file) as content:
                while size <= memory_bytes() and (piece := content.read(_PIECE)):
                    size += max(5 * len(piece), 16 * piece.count(b"\n"))
        require_memory(size, f"{file.name}, unpacked,", "store fewer or smaller arrays")


def fingerprint(folder: Path, files: Sequence[str]) -> str:
    """A short hash of where the files are, their sizes, times and inodes: a changed file is a different cache entry.

    Whoever puts another file in its place may keep its time of writing (tar, rsync), but not that of the change, and a
    file that is replaced is another inode.
    """
    digest = hashlib.sha256()
    for name in files:
        stat = (folder / name).stat()
        same = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
        digest.update(f"{(folder / name).resolve()}|{same}\n".encode())
    return digest.hexdigest()[:16]


def link_files(source: Path, target: Path, files: Sequence[str]) -> None:
    """Make the files (or folders) visible in `target`: by symbolic link, by copy where links are not allowed."""
    make_folder(target)
    for name in files:
        make_folder((target / name).parent)
        try:
            os.symlink((source / name).resolve(), target / name)
        except OSError:
            copy = shutil.copytree if (source / name).is_dir() else shutil.copy2
            copy(source / name, target / name)


def cached_folder(key: str, build: Callable[[Path], None]) -> Path:
    """The cache folder `key`, made by `build(temporary folder)` if it is not there; safe against concurrent runs."""
    final = cache_root() / key
    if final.is_dir():
        return final
    try:
        make_folder(final.parent)
        flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no link; no wait
        shared = is_open_to_others(final.parent) or not is_mine(final.parent.stat())
        mode = 0o644 if shared else 0o600  # who may read a file may lock it
        lock = os.fdopen(os.open(final.parent / f".{final.name}.lock", flags, mode), "rb", 0)
    except OSError as error:
        raise ValueError(
            f"cannot write to the cache folder {cache_root()} ({error.strerror}); set GNNPAR_CACHE to one."
        ) from None
    with lock:
        with contextlib.suppress(OSError):  # a file system without locks: both do the work, and one result is kept
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # a second run waits instead of doing the work again
                complain(f"{final} is being made by another process: waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
        if final.is_dir():
            return final
        remove_abandoned(final.parent, f".{glob.escape(final.name)}.*.partial")
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{final.name}.", suffix=".partial") as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            build(made)
            try:
                made.rename(final)
            except OSError:
                if not final.is_dir():  # else another host, whose locks are its own, was first
                    raise
    return final


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallow what libraries print in this thread while they read and process."""
    out, err = _WithoutThread(sys.stdout), _WithoutThread(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


class _WithoutThread(io.TextIOBase):
    """A stream for all threads but this one: a program may write in others."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._quiet = stream, threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() != self._quiet:
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


@contextlib.contextmanager
def downloading(what: str) -> Iterator[None]:
    """A download that gives up when nothing arrives for half a minute."""
    _LOG.info("downloading %s into %s", what, cache_root())
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_DOWNLOAD_SECONDS)
    try:
        with quiet():
            yield
    finally:
        socket.setdefaulttimeout(before)


def reachable(url: str) -> bool:
    """Does the server answer within a few seconds? Asked before any download: no run hangs without a network."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            with _alone.open(urllib.request.Request(url, method="HEAD"), timeout=_PROBE_SECONDS):
                answers.append(True)
        except urllib.error.HTTPError as error:  # an answer, if not a kind one
            error.close()
            answers.append(True)
        except Exception:
            answers.append(False)

    thread = threading.Thread(target=ask, daemon=True)  # name resolution knows no timeout: leave it behind
    thread.start()
    thread.join(_PROBE_SECONDS + 1)
    return bool(answers and answers[0])


class _Alone(urllib.request.HTTPRedirectHandler):
    """A server that sends on to another one has answered."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        return None


_alone = urllib.request.build_opener(_Alone)


def not_found(name: str, *, data_dir: Path | None, folder: str, missing: Sequence[str], why: str) -> ValueError:
    """The one line for a dataset that is neither there nor downloadable."""
    place = "data_dir is not set" if data_dir is None else f"not in data_dir={data_dir.absolute()}"
    target = Path("DATA_DIR") / folder if data_dir is None else data_dir.absolute() / folder
    shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return ValueError(
        f"dataset {name}: {shown}: {place} and {why}; put {'it' if len(missing) == 1 else 'them'} into {target}/."
    )


def one_line(error: BaseException) -> str:
    """An exception as the inside of a one-line message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
