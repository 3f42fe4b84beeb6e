"""One process works in a folder at a time: `.gnnpar.lock` in it says which one, on which host, since when.

The owner holds a lock of the operating system on that file (flock), which ends with the process, whatever ends it. What
the file says decides where a file system has no such locks, or every host its own: an owner of this host whose process
is gone has left the folder; one of another host may be there, and only a person can know better.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import itertools
import json
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gnnpar.durable import WriteError, make_folder_for_work, refuse_link_of_others, refuse_links

FILE = ".gnnpar.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # flock's where the file system has none
_LONGEST_HOST = 255
_SETTLE_SECONDS = 0.3  # there: until two that wrote at once have both written
_held: set[Lock] = set()


class FolderInUse(ValueError):
    """Another process works in the folder: one line with who, and what to do."""


@dataclass(frozen=True)
class Owner:
    """A process that works in a folder. born: its start, in clock ticks since boot, by which it differs from a later
    process of the same pid. job, restart: of Slurm, which ends one before it begins the next; torchrun's id and count
    do not tell, as two starts may have one id. space: in which its pid is one; hosts may have several (containers).
    machine: `own_machine`, as hosts may share a name."""

    pid: int
    host: str
    born: int | None
    since: float
    job: str = ""
    restart: int = 0
    space: str = ""
    machine: str = ""

    @staticmethod
    def this(env: Mapping[str, str]) -> Owner:
        """This process."""
        pid = os.getpid()
        place = own_space(), own_machine()
        return Owner(pid, socket.gethostname(), started(pid), time.time(), *_scheduled(env), *place)

    def has_left(self, me: Owner, *, locks: bool) -> bool:
        """Whether its process is surely gone: it is not on this host any more, or it was an earlier start of the same
        job of Slurm, which ended that before this one began. `locks`: the file system has some, and it holds none."""
        if self.is_here(me):
            if not locks and self.space not in ("", me.space):
                return False
            return self.born is None or started(self.pid) != self.born
        return bool(me.job) and self.job == me.job and self.restart < me.restart

    def is_here(self, me: Owner) -> bool:
        """Whether it is of my host; others may have its name."""
        return self.host == me.host and self.machine in ("", me.machine)

    def describe(self, me: Owner) -> str:
        if self.is_here(me):
            return f"process {self.pid} of this host"
        return f"process {self.pid} of {self.host}" + ", another host of this name" * (self.host == me.host)


def own_space() -> str:
    """The namespace in which this process's pid is one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


@functools.cache
def own_machine() -> str:
    """What tells this host from others of its name: its installation's id, else that of its kernel's start."""
    for file in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with suppress(OSError):
            if found := Path(file).read_text(encoding="utf-8", errors="replace").strip():
                return hashlib.sha256(f"gnnpar {found}".encode()).hexdigest()[:16]  # an id is not to be passed on
    return ""


def _scheduled(env: Mapping[str, str]) -> tuple[str, int]:
    """The job of Slurm that this process belongs to, and how often that has been started again."""
    count = env.get("SLURM_RESTART_COUNT", "")
    return env.get("SLURM_JOB_ID", ""), int(count) if re.fullmatch("[0-9]{1,9}", count) else 0


def started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None: it is no more, or this is not Linux. Two processes of
    one boot never share both."""
    if sys.platform != "linux":
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may hold spaces
    return None if fields[0] in "ZX" else int(fields[19])


class Lock:
    """On a folder, held by this process."""

    def __init__(self, file: Path, handle: int, owner: Owner) -> None:
        self._file, self._handle, self._owner = file, handle, owner

    @staticmethod
    def take(folder: Path, *, otherwise: str, say: Callable[[str], None]) -> Lock:
        """The folder is made where there is none. An owner that has left is replaced, and `say` gets the line.

        `otherwise`: what else one can choose, at the end of the line of FolderInUse. WriteError where the folder
        cannot be written, another user has made it in a folder of all, others can add files to it, or it holds links by
        which what is written below it would lie elsewhere.
        """
        file, me = folder / FILE, Owner.this(os.environ)
        try:
            make_folder_for_work(folder)
            refuse_links(folder)
            while True:
                handle, made = _open(file)
                alone = _flock(handle)
                owner = _read(handle)
                if owner is None and not made:  # another host, whose locks are its own, may be about to write
                    owner = _read(handle, after=_SETTLE_SECONDS)
                if alone and not _is_still(file, handle):  # its owner removed it after it was opened here
                    os.close(handle)
                    continue
                if alone is False or (owner is not None and not owner.has_left(me, locks=bool(alone))):
                    os.close(handle)
                    raise FolderInUse(_refusal(folder, owner, me, otherwise, locked=alone is False))
                _write(handle, me)
                if alone or _read(handle, after=_SETTLE_SECONDS) == me:
                    break
                os.close(handle)
        except WriteError:
            raise
        except OSError as error:
            raise WriteError(error.errno, error.strerror or str(error), str(folder)) from error
        if owner is not None:
            say(f"{folder} was in use by {owner.describe(me)}, which has ended: taken over")
        lock = Lock(file, handle, me)
        _held.add(lock)
        return lock

    def release(self) -> None:
        """The folder is free; a file that says otherwise is somebody else's."""
        if self not in _held:
            return
        with suppress(OSError):
            if _is_still(self._file, self._handle) and _read(self._handle) == self._owner:
                self._file.unlink()
        _held.discard(self)  # last: where Ctrl-C comes before, `release_all` does it again
        self.forget()

    def forget(self) -> None:
        """The lock itself stays with other processes that have the file open."""
        os.close(self._handle)


@contextmanager
def working_in(folder: Path, *, otherwise: str, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, the folder is this process's alone. Raises what `Lock.take` raises; WriteError where a link of another
    user leads there."""
    refuse_link_of_others(folder)
    lock = Lock.take(folder, otherwise=otherwise, say=say)
    try:
        yield
    finally:
        lock.release()


def numbered(folder: Path) -> Iterator[Path]:
    """Itself, and then its name with -2, -3 and so on: for who takes the first that is free."""
    yield folder
    yield from (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))


def _leave_to_parent() -> None:
    """In a forked process: the folders are its parent's, and are free when that has ended."""
    for lock in _held:
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def release_all() -> None:
    """Before a process ends without leaving its blocks (os._exit)."""
    for lock in list(_held):
        lock.release()


def _open(file: Path) -> tuple[int, bool]:
    """A handle, and whether the file is new. WriteError where it is a device, a pipe or another name of a file: in a
    folder of somebody else's it may be, and it is written in place."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    try:
        return os.open(file, flags | os.O_EXCL, 0o600), True  # who may read a file may lock it
    except FileExistsError:
        _require_own(file, os.lstat(file))
    handle = os.open(file, flags, 0o600)
    try:
        _require_own(file, os.fstat(handle))
    except WriteError:
        os.close(handle)
        raise
    return handle, False


def _require_own(file: Path, facts: os.stat_result) -> None:
    if stat.S_ISLNK(facts.st_mode):
        raise WriteError(errno.ELOOP, os.strerror(errno.ELOOP), str(file))
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        raise WriteError(errno.EEXIST, "it is no file of one name, as gnnpar writes it; remove it", str(file))


def _flock(handle: int) -> bool | None:
    """Whether this process alone has the file locked; None: this file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _is_still(file: Path, handle: int) -> bool:
    """Whether the file of that name is the one that was opened."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(handle))
    except FileNotFoundError:
        return False


def _read(handle: int, *, after: float = 0.0) -> Owner | None:
    """Who works there; None: nobody has written it, or not whole."""
    time.sleep(after)
    try:
        data = json.loads(os.pread(handle, 1 << 16, 0))
        return Owner(
            pid=int(data["pid"]),
            host=str(data["host"])[:_LONGEST_HOST],
            born=None if data["born"] is None else int(data["born"]),
            since=float(data["since"]),
            job=str(data["job"]),
            restart=int(data.get("restart", 0)),
            space=str(data.get("space", "")),
            machine=str(data.get("machine", "")),
        )
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None


def _write(handle: int, owner: Owner) -> None:
    data = json.dumps(asdict(owner)).encode()
    os.pwrite(handle, data, 0)
    os.ftruncate(handle, len(data))
    os.fsync(handle)


def _refusal(folder: Path, owner: Owner | None, me: Owner, otherwise: str, *, locked: bool) -> str:
    if owner is None:
        return f"{folder} is in use by another process: wait for it, or {otherwise}"
    since = "an unknown time"
    with suppress(ValueError, OverflowError, OSError):  # of a file that anybody may have written
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since))
    remedy = f"wait for it, or {otherwise}"
    if not owner.is_here(me):
        remedy += f"; if that process has ended, remove {folder / FILE}"
    elif not locked:  # the file may be somebody else's word
        remedy += f"; if that process is none of gnnpar's, remove {folder / FILE}"
    return f"{folder} is in use by {owner.describe(me)} since {since}: {remedy}"
