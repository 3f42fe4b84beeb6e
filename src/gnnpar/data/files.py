"""Where files are: raw files in `data_dir`, derived ones in a cache folder that may be written to.

`data_dir` may be read-only; nothing is ever written there. What a library insists on writing beside the raw files goes
to `GNNPAR_CACHE` (default: gnnpar in the user's cache folder), built in a temporary folder and renamed, so that two
runs at once, or a run killed half way, never see half a cache.
"""

import contextlib
import glob
import hashlib
import io
import os
import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gnnpar.files import require_file, require_memory
from gnnpar.paths import expanded, own_cache
from gnnpar.track.console import complain

_PROBE_SECONDS = 4.0


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
    """Return the names in `files` that `folder` lacks."""
    return [name for name in files if folder is None or not (folder / name).is_file()]


def require_unpacked(file: Path) -> None:
    """Raise ValueError where a .npz unpacks to more than this machine's memory: arrays are there twice meanwhile."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            size = 2 * sum(each.file_size for each in archive.infolist())
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
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.symlink((source / name).resolve(), target / name)
        except OSError:
            copy = shutil.copytree if (source / name).is_dir() else shutil.copy2
            copy(source / name, target / name)


def cached_folder(key: str, build: Callable[[Path], None]) -> Path:
    """Return the cache folder `key`, made by `build(temporary folder)` where missing; safe for concurrent runs."""
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
        for left in final.parent.glob(f".{glob.escape(final.name)}.*.partial"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{final.name}.", suffix=".partial") as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            build(made)
            try:
                made.rename(final)
            except OSError:
                if not final.is_dir():  # another host, whose locks are its own, may have been first
                    raise
    return final


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallow what libraries print while they read and process."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def reachable(url: str) -> bool:
    """Return whether a server answers within a few seconds: asked before any download."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_PROBE_SECONDS):
            return True
    except urllib.error.HTTPError as error:  # an answer, if not a kind one
        error.close()
        return True
    except OSError:
        return False


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
