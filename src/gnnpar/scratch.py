"""Folders for temporary files: of this user alone, gone afterwards, also those of processes that were killed."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import islice
from multiprocessing.util import Finalize
from pathlib import Path

from gnnpar.durable import WriteError, is_mine, open_to, refuse_others
from gnnpar.folder_lock import FILE, FolderInUse, working_in
from gnnpar.locks import ThreadLock

PREFIX = "gnnpar-scratch-"
_MOST_ENTRIES, _MOST_LEFT = 100_000, 1_000  # that are looked at, of all and of those of such a name


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder of mode 0700 in the first of `safe_places` that takes one, gone afterwards; so is what processes
    that were killed have left. WriteError where no place takes it."""
    with ExitStack() as stack:
        yield _begun(stack)


def _begun(stack: ExitStack) -> Path:
    places, said = safe_places(), ""
    for place in places:
        try:
            if (own := _own_part(place)) is None:
                said = f"gnnpar-{os.geteuid()} in {place} is not this user's alone"
                continue
            _remove_left(own)
            return stack.enter_context(_new_folder(own))
        except OSError as error:  # it is full, or only reads
            said = f"{error.strerror} in {place}"
    raise WriteError(errno.ENOSPC, f"no place takes temporary files (last: {said}); set TMPDIR", str(places[0]))


@contextmanager
def _new_folder(place: Path) -> Iterator[Path]:
    scratch = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    scratch.chmod(0o700)  # whatever the umask
    _made[scratch] = (scratch.lstat(), os.getpid())
    try:
        with _kept(scratch), _working_in(scratch):
            yield scratch
    finally:
        made, maker = _made.pop(scratch)
        if maker == os.getpid():  # not in a forked process that unwinds
            remove_made(scratch, made)


@contextmanager
def _kept(folder: Path) -> Iterator[None]:
    """systemd-tmpfiles, which removes old files of /tmp, skips a folder that is locked."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def lasting_scratch() -> Path:
    """A scratch folder that is removed when this process ends, and not when one that it has forked ends."""
    return _lasting_until_the_end(scratch_folder())


def _lasting_until_the_end(folder: AbstractContextManager[Path]) -> Path:
    until_the_end = ExitStack()
    Finalize(None, until_the_end.close, exitpriority=-1)  # also of a process of multiprocessing, and of this one alone
    return until_the_end.enter_context(folder)


def safe_places() -> list[Path]:
    """Those in which others may not rename what is not theirs, of TMPDIR, the user's cache, the folder that the system
    has for him while he is there, and the system's for all. WriteError where there is none."""
    asked, safe = _asked(), []
    for place in (asked, _cache(), os.environ.get("XDG_RUNTIME_DIR"), "/tmp", "/var/tmp"):  # noqa: S108  # looked at
        with suppress(OSError):
            if place and os.access(place, os.W_OK | os.X_OK) and _is_plain(str(place)):
                refuse_others(Path(place))
                safe.append(Path(place))
    if not safe:
        said = "others may rename what lies in it, or nothing can be written, and so in all other places for temporary "
        raise WriteError(errno.EPERM, f"{said}files; set TMPDIR to a folder of yours", str(asked))
    return list(dict.fromkeys(safe))


def _asked() -> Path:
    """TMPDIR, or what Python takes in its place."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # no file can be written where it looks
        return Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108  # `refuse_others` checks who may write there


def _own_part(place: Path) -> Path | None:
    """The place, or a folder of this user alone in it, where others may write: it stays, so that nobody can take the
    name of a scratch folder that is gone, which a process may still know. None: another user has that name, or has
    mounted something there."""
    own = place / f"gnnpar-{os.geteuid()}"
    if not _is_shared(place):
        return place
    if _is_mounted(own):
        return None
    with suppress(FileExistsError):
        own.mkdir(mode=0o700)
        own.chmod(0o700)  # whatever the umask
    there = own.lstat()
    mounted = there.st_dev != place.stat().st_dev  # a mounted file system chooses the owners that it reports
    mine = stat.S_ISDIR(there.st_mode) and is_mine(there) and there.st_mode & 0o777 == 0o700
    return own if mine and not mounted else None


def _is_shared(place: Path) -> bool:
    return bool(place.stat().st_mode & 0o022)


def _is_mounted(place: Path) -> bool:
    """Another user may mount a file system at a name that he takes, and who looks at it may wait for ever."""
    with suppress(OSError):
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape")
        return f" {os.path.join(os.path.realpath(place.parent), place.name).translate(_IN_MOUNTS)} " in mounts
    return False


_IN_MOUNTS = str.maketrans({letter: f"\\{ord(letter):03o}" for letter in " \t\n\\"})


def _is_plain(name: str) -> bool:
    """torch reads what follows # and ? in the name of the file in which ranks meet as no part of it."""
    return name.isprintable() and not {"#", "?"} & set(name)


def _cache() -> Path | None:
    """The user's, made where it is not there yet."""
    try:
        named = os.environ.get("XDG_CACHE_HOME", "")
        place = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
        if not place.is_absolute():  # HOME=., which may be anybody's folder
            return None
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return place


@contextmanager
def folder_beside(out: Path) -> Iterator[Path]:
    """A new folder in that of `out`, of mode 0700, for what is moved to it by `take_name` when it is whole, gone
    afterwards. No other one of its name is: where `out` lies, others may rename folders of this user's, whose names
    they could foresee."""
    remove_abandoned(out.parent, f".{glob.escape(out.name)}.{'?' * 16}.partial")
    folder = out.with_name(f".{out.name}.{secrets.token_hex(8)}.partial")
    folder.mkdir(mode=0o700)
    folder.chmod(0o700)  # whatever the umask, and lists of the folder above
    made = folder.lstat()
    try:
        yield folder
    finally:
        remove_made(folder, made)


def remove_abandoned(place: Path, pattern: str) -> None:
    """Folders and files of this user's that a process which was killed has left: those that are older than a day, as
    another host, whose locks are its own, may be at work in a newer one."""
    for left in place.glob(pattern):
        with suppress(OSError):
            there = left.lstat()
            if is_mine(there) and time.time() - there.st_mtime > _ABANDONED_SECONDS:
                if stat.S_ISDIR(there.st_mode):
                    remove_made(left, there)
                elif stat.S_ISREG(there.st_mode):
                    left.unlink()


_ABANDONED_SECONDS = 24 * 3600


def take_name(folder: Path, out: Path) -> None:
    """A folder of `folder_beside` becomes `out`, for whom the umask says."""
    open_to(folder, 0o777)
    folder.rename(out)


def remove_made(scratch: Path, made: os.stat_result) -> None:
    """Unless another folder has its name: where others may write to TMPDIR, and the sticky bit is not set."""
    with suppress(OSError):
        if os.path.samestat(scratch.lstat(), made):
            shutil.rmtree(scratch, ignore_errors=True)


def _remove_left(place: Path) -> None:
    for left in _left(place):
        with suppress(FolderInUse, OSError), _working_in(left):
            shutil.rmtree(left)


def _left(place: Path) -> list[Path]:
    """Scratch folders of this user in a place of his that a process had taken; not those that one is about to take, nor
    any other folder that somebody has given such a name: only a folder that he may write to can be moved, and theirs he
    may not."""
    found: list[Path] = []
    with suppress(OSError), os.scandir(place) as entries:
        named = (entry for entry in islice(entries, _MOST_ENTRIES) if entry.name.startswith(PREFIX))
        for entry in islice(named, _MOST_LEFT):  # others may have put any number there
            with suppress(OSError):
                if _is_own(folder := Path(entry)):
                    lock = (folder / FILE).lstat()
                    if lock.st_size and is_mine(lock):
                        found.append(folder)
    return found


_made: dict[Path, tuple[os.stat_result, int]] = {}
"""Of every scratch folder: what was made, by which process."""


def remove_all() -> None:
    """Before a process ends without leaving its blocks (os._exit)."""
    for scratch, (made, maker) in _made.items():
        if maker == os.getpid():
            remove_made(scratch, made)


@contextmanager
def own_temporary_files(*, lasting: bool = False) -> Iterator[None]:
    """Temporary files of this process, and of those that it starts, lie in a scratch folder: libraries give some of
    theirs names that other users of the host can foresee and take before. Where they do already, all stays as it is.
    WriteError where no folder can be made that others cannot rename.

    `lasting`: the folder is the same the next time, and gone when the process ends: a library that was imported inside
    may have kept its name. A call in another thread waits: where temporary files lie is one for the process.
    """
    with ONE_AT_A_TIME if lasting else nullcontext(), ExitStack() as stack:
        if not _is_own(_asked()):
            folder = _lasting_folder() if lasting else stack.enter_context(scratch_folder())
            _move_temporary_files(stack, folder)
        yield


ONE_AT_A_TIME = ThreadLock()
"""What changes the environment of a program, and puts it back."""


def _lasting_folder() -> Path:
    """The one of this process; a new one where that was removed or replaced."""
    if (mine := _lasting.get(os.getpid())) is None or not _is_still_there(mine):
        _lasting[os.getpid()] = mine = lasting_scratch()
    return mine


_lasting: dict[int, Path] = {}


def _is_still_there(scratch: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(scratch.lstat(), _made[scratch][0])
    return False


def _is_own(folder: Path) -> bool:
    """Is it a scratch folder of this user, as of the process that has started this one? A cleaner of /tmp may have
    removed it since."""
    try:
        there = folder.lstat()
    except FileNotFoundError:
        return False
    return folder.name.startswith(PREFIX) and is_mine(there) and not there.st_mode & 0o077


def give_back_environment() -> None:
    """Jobs that a scheduler starts later, or on another host, get TMPDIR as this process got it."""
    if _given:
        _set_tmpdir(_given[-1])
        if PREFIX in os.environ.get("JOBLIB_TEMP_FOLDER", ""):
            del os.environ["JOBLIB_TEMP_FOLDER"]


_given: list[str | None] = []  # TMPDIR before, of each `own_temporary_files` that lasts


def _move_temporary_files(stack: ExitStack, folder: Path) -> None:
    before, found = os.environ.get("TMPDIR"), tempfile.tempdir
    _given.append(before)
    _set_tmpdir(str(folder))
    named = os.environ.get("JOBLIB_TEMP_FOLDER")
    joblib_asks = named is None or PREFIX in named  # and would take /dev/shm, or what another process has left
    if joblib_asks:
        os.environ["JOBLIB_TEMP_FOLDER"] = str(folder)
    tempfile.tempdir = None  # it looks once more

    @stack.callback
    def back() -> None:
        _given.pop()
        _set_tmpdir(before)
        if joblib_asks:
            os.environ.pop("JOBLIB_TEMP_FOLDER", None)
        tempfile.tempdir = found


def _set_tmpdir(value: str | None) -> None:
    if value is None:
        os.environ.pop("TMPDIR", None)
    else:
        os.environ["TMPDIR"] = value


def _working_in(folder: Path) -> AbstractContextManager[None]:
    return working_in(folder, otherwise="", say=lambda line: None)
