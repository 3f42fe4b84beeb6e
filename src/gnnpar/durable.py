"""Files that are whole or not there: writing, checksums, reaching the disk, and reading within bounds."""

from __future__ import annotations

import errno
import functools
import grp
import hashlib
import json
import os
import pwd
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
"""What JSON holds, for what is written or handed on."""
JsonObject = Mapping[str, Any]  # Any: the schema of a file says what its keys hold, and is checked where it is read
"""An object of JSON or YAML that is read by its keys: a row of metrics, a result, resolved settings."""
JsonDict = dict[str, Any]  # Any: as above
"""The same while it is made."""

StateDict = dict[Any, Any]  # Any: its owner alone reads it; `Engine.state_dict` says what a tree may hold
"""What a checkpoint has of one object."""

MAX_DEPTH = 64
MAX_BYTES = 1 << 26
_LARGEST = (1 << 63) - 1
_BLOCK = 1 << 22


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_RESERVED, _RESERVED_BYTES = ".reserved", 1 << 20


def reserve_room(folder: Path) -> None:
    """Keep room for what must be written at the end, also on a disk that fills up meanwhile; where there is none to
    keep, nothing is kept."""
    file = folder / _RESERVED
    release_room(folder)
    try:
        with file.open("xb") as out:  # never through a link that somebody left there
            out.write(os.urandom(_RESERVED_BYTES))  # what compresses would keep less
    except OSError:
        release_room(folder)


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


def refuse_links(folder: Path) -> None:
    """WriteError where an entry of a folder that is written into is a link to anything but a file: what is written
    below it would lie elsewhere. Links to files are no harm: `open_whole` replaces them."""
    with os.scandir(folder) as entries:
        links = [Path(entry.path) for entry in entries if entry.is_symlink() and not entry.is_file()]
    if links:
        refuse_link(min(links))


def remove(path: Path) -> None:
    """A folder with all that it holds, or whatever else has its name; what cannot be removed stays. shutil.rmtree of
    a pipe waits for who writes into it."""
    with suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def refuse_link(path: Path) -> None:
    """WriteError where a path is a symbolic link."""
    if path.is_symlink():
        leads = f"it is a symbolic link to {os.readlink(path)}, which nothing is written through; remove the link"
        raise WriteError(errno.ELOOP, leads, str(path))


def refuse_link_of_others(path: Path) -> None:
    """WriteError where a path is, or leads over, a link of another user, who can let it lead elsewhere at any time."""
    for place in _places_on_the_way(path.absolute()):
        with suppress(FileNotFoundError, NotADirectoryError):
            there = place.lstat()
            if stat.S_ISLNK(there.st_mode) and not _is_mine_or_roots(place, there):
                raise WriteError(errno.EPERM, "it is a symbolic link of another user", str(place))


def refuse_link_to_others(path: Path) -> None:
    """WriteError where a path is a link to a folder of another user, as it may be in a project that he has packed."""
    if path.is_symlink() and path.exists() and not _is_mine_or_roots(place := path.resolve(), place.lstat()):
        raise WriteError(errno.EPERM, f"it is a symbolic link to {place}, which belongs to another user", str(path))


def planted(path: Path) -> Path | None:
    """The first part of a path that another user has put into a folder which everybody may write to, as /tmp, or a
    group with the sticky bit: it is neither this user's, root's nor of whom that folder is; or it is not there, and he
    may put it there. With the sticky bit he can exchange none of the others later; without, a group trusts its members.
    """
    for place in _places_on_the_way(path.absolute()):
        try:
            above, there = place.parent.lstat(), place.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return place
        trusted = {0, above.st_uid} - _overflow_uid()
        adds = above.st_mode & stat.S_ISVTX and _is_open_to_others(place.parent, above)
        if (above.st_mode & stat.S_IWOTH or adds) and not is_mine(there) and there.st_uid not in trusted:
            return place
    return None


def refuse_planted(folder: Path) -> None:
    """WriteError where another user has made a folder that is there and is to be written into, or one above it, in the
    way of all: he may exchange it."""
    if (place := planted(folder)) is not None:
        raise WriteError(errno.EPERM, f"{OF_ANOTHER}; name another folder", str(place))


def make_folder_of_results(folder: Path) -> None:
    """As `make_folder`, for what a user names to be written. WriteError as `refuse_planted`: who has made it could let
    it lead elsewhere."""
    refuse_planted(_nearest(folder))
    make_folder(folder)
    refuse_planted(folder)


def _nearest(folder: Path) -> Path:
    """The folder, or that above it, which is there."""
    place = folder.absolute()
    return next(each for each in (place, *place.parents) if os.path.lexists(each))


def make_folder_for_work(folder: Path) -> None:
    """As `make_folder_of_results`, for files of known names that come about over time. WriteError, too, where others
    can add some of those before."""
    make_folder_of_results(folder)
    if _is_added_to(folder):
        raise WriteError(errno.EPERM, "others may add files to it; name a folder in it", str(folder))


def refuse_to_work_here() -> None:
    """WriteError where other users can add files to the working directory, as to /tmp: libraries look there for
    settings, and make files there, by names that these users know."""
    with suppress(FileNotFoundError):  # it is gone
        if _is_added_to(Path()):
            said = "others may add files to it, and it is the working directory: change into a folder of yours"
            raise WriteError(errno.EPERM, said, str(Path.cwd()))


def _is_added_to(folder: Path) -> bool:
    """Whether others can put files into it, and only that: of what is theirs, the sticky bit says."""
    return is_open_to_others(folder) and bool(folder.stat().st_mode & stat.S_ISVTX)


OF_ANOTHER = "another user has put it into a folder that others may write to"


def make_folder(folder: Path) -> None:
    """With those above it, where they are not there. WriteError where a link of another user is on the way."""
    refuse_link_of_others(folder)
    folder.mkdir(parents=True, exist_ok=True)


def make_own_folder(folder: Path) -> None:
    """As `make_folder`, for programs that the user is going to start. WriteError where another user can exchange what
    is written into it: he has made it, or may write to it. New ones, of those above it, too, are not his to write to,
    whatever the umask and lists of what lies above."""
    refuse_link_of_others(folder)
    refuse_planted(_nearest(folder))
    for missing in reversed([place for place in (folder, *folder.parents) if not os.path.lexists(place)]):
        missing.mkdir(mode=0o700)  # a list of the folder above counts no more than this
        with suppress(OSError, AttributeError), _held(missing) as handle:  # a file system, or a system, without lists
            os.removexattr(handle, "system.posix_acl_default")
        open_to(missing, 0o755)
    refuse_planted(folder)
    for link in filter(Path.is_symlink, _places_on_the_way(folder.absolute())):
        refuse_link_to_others(link)
    for there in (folder.lstat(), folder.stat()):  # what has the name, which may be a link of one's own, and the folder
        if not _is_mine_or_roots(folder, there):
            said = "it belongs to another user, who can exchange what is written there"
            raise WriteError(errno.EPERM, said, str(folder))
    if _is_open_to_others(folder, there) and not there.st_mode & stat.S_ISVTX:
        raise WriteError(errno.EPERM, "others can exchange what is written there; chmod go-w", str(folder))


@contextmanager
def _held(folder: Path) -> Iterator[int]:
    """Open, if it is a folder and no link that has taken its name."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


def open_to(folder: Path, mode: int) -> None:
    """A folder's mode, less the umask's; of a link that has taken its name nothing. OSError."""
    with _held(folder) as handle:
        os.fchmod(handle, mode & ~umask())


def is_open_to_others(folder: Path) -> bool:
    """Whether other users can put something into it, whatever the sticky bit then keeps them from."""
    return _is_open_to_others(folder, folder.stat())


def _is_open_to_others(place: Path, there: os.stat_result) -> bool:
    group = there.st_mode & stat.S_IWGRP and (not _is_private(there.st_gid) or _has_list(place))
    return bool(there.st_mode & stat.S_IWOTH or group)


def _is_mine_or_roots(place: Path, there: os.stat_result) -> bool:
    """In a container, root of the host is a user that it does not know, as others are."""
    of_the_system = len(place.parts) <= 2 or str(place) in _OF_THE_SYSTEM
    return there.st_uid == 0 or is_mine(there) or (of_the_system and there.st_uid in _overflow_uid())


def is_mine(there: os.stat_result) -> bool:
    """Where this user has the number as whom a container shows those that it does not know, nothing is."""
    return there.st_uid == os.geteuid() and there.st_uid not in _overflow_uid()


def refuse_links_below(folder: Path, path: str | Path) -> None:
    """WriteError where a path below a folder, or one between both, is a symbolic link."""
    for place in (Path(path), *Path(path).parents):
        if place != Path():
            refuse_link(folder / place)


def refuse_others(folder: Path) -> None:
    """WriteError where another user could put something of his into the place of a folder, or into a file: he owns it,
    or one above it, or others may write to one, who are not held there to what is theirs (the sticky bit)."""
    for place in _places_on_the_way(folder.absolute()):
        there = place.lstat()
        if not _is_mine_or_roots(place, there):
            raise WriteError(errno.EPERM, "it belongs to another user", str(place))
        others = _is_open_to_others(place, there)
        if stat.S_ISDIR(there.st_mode) and others and not there.st_mode & stat.S_ISVTX:
            raise WriteError(errno.EPERM, "others may rename what lies in it; chmod +t, or go-w", str(place))
        if stat.S_ISREG(there.st_mode) and others:
            raise WriteError(errno.EPERM, "others may write to it; chmod go-w", str(place))


def _places_on_the_way(path: Path) -> Iterator[Path]:
    """Every folder and link that is looked at when a path is followed: `resolve` tells where links lead in the end.
    WriteError where they lead in a circle."""
    place, left, links = Path("/"), list(path.parts[1:]), 0
    yield place
    while left:
        name = left.pop(0)
        place = place.parent if name == ".." else place / name
        yield place
        if place.is_symlink():
            if (links := links + 1) > _MOST_LINKS:
                raise WriteError(errno.ELOOP, "its links lead in a circle", str(path))
            target = Path(os.readlink(place))
            place, left = (Path("/") if target.is_absolute() else place.parent), [*target.parts, *left]
            left = left[1:] if target.is_absolute() else left


_MOST_LINKS = 40


def _is_private(group: int) -> bool:
    """Is it the group of this user alone, which has his name, or root's, without other members? Of users whose primary
    group it is, a group's own list says nothing, and a directory service need not list them: so the name counts. Where
    root's is the primary group of this user, or of any other, it is a group as others are."""
    try:
        me, there = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    own = {me.pw_name, "root"}
    entries = [there, *(each for each in grp.getgrall() if each.gr_gid == group)]  # several names may have one number
    if any(set(each.gr_mem) - own for each in entries) or _overflow("gid"):  # or it is a container's name for another
        return False
    shared = any(user.pw_gid == group and user.pw_name not in own for user in pwd.getpwall())
    own_name = there.gr_name == me.pw_name if group == me.pw_gid else group == 0
    return own_name and not shared


def _has_list(place: Path) -> bool:
    """Does a list (ACL) let other users and groups write, too? The bits of its group are then the most that all may."""
    try:
        return "system.posix_acl_access" in os.listxattr(place)
    except (OSError, AttributeError):  # a file system, or a system, without them
        return False


_MOST_USERS, _NOBODY = 2**32 - 1, 65_534
_OF_THE_SYSTEM = ("/var/tmp", "/run/user")  # noqa: S108  # root has made them, as / and what lies in it; nothing is written


def _overflow_uid() -> set[int]:
    """As whom a container shows users that it does not know: root of the host, and every other user, too, so that only
    the places that root alone makes are his. Where all users are known, it is `nobody`, as whom daemons run and file
    servers show whom they do not trust."""
    return _overflow("uid")


def _overflow(kind: Literal["uid", "gid"]) -> set[int]:
    try:
        mapped = Path(f"/proc/self/{kind}_map").read_text(encoding="ascii").split()
        known = mapped[:2] == ["0", "0"] and int(mapped[2]) >= _MOST_USERS
        return set() if known else {int(Path(f"/proc/sys/kernel/overflow{kind}").read_text(encoding="ascii"))}
    except (OSError, ValueError, IndexError):
        return {_NOBODY}


def require_writable(file: Path) -> None:
    """WriteError where a path that a new file shall take is there already and no file, in the place of which
    `open_whole` would put one, or another user's that may not be replaced: before work, whose result would be lost."""
    if file.is_dir():
        raise WriteError(errno.EISDIR, "it is a folder; name a file", str(file))
    if file.exists() and not file.is_file():
        raise WriteError(errno.EEXIST, "it is no file, but a device, pipe or socket; name a file", str(file))
    there = file.parent.stat() if file.exists() else None
    if there and there.st_mode & stat.S_ISVTX and os.geteuid() not in (0, there.st_uid, file.lstat().st_uid):
        raise WriteError(errno.EPERM, "it is another user's, and stays where it is; name another file", str(file))


def umask() -> int:
    """Of this process. Asked of the system, which has no call to read it, it would be another one for a moment."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))
    except (OSError, StopIteration):
        os.umask(found := os.umask(0o077))
        return found


@contextmanager
def open_whole(file: Path, *, sync: bool = False, program: bool = False) -> Iterator[BinaryIO]:
    """A new file to write: it takes its name when the block ends, and is removed where the block raises.

    `sync`: its bytes reach the disk before it takes its name. `program`: nobody else may write to it, whatever the
    umask, for it is going to be run. Raises WriteError for every OSError of the writing.
    """
    partial = file.with_name(f"{file.name}.{threading.get_native_id()}.partial")
    refuse_link_of_others(file.parent)
    try:
        partial.unlink(missing_ok=True)  # of a process that was killed, or a link of somebody else
        mode = 0o600 if program else 0o666  # a list of the folder counts no more than this, from the first moment on
        with os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb+") as out:
            yield out
            if program:
                os.fchmod(out.fileno(), 0o644 & ~umask())
            out.flush()
            if sync:
                os.fsync(out.fileno())
        partial.replace(file)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise WriteError(error.errno, error.strerror or str(error), str(file)) from error
        raise


def write_text_whole(file: Path, text: str, *, sync: bool = False, program: bool = False) -> None:
    """UTF-8. Raises WriteError."""
    with open_whole(file, sync=sync, program=program) as out:
        out.write(text.encode(errors="backslashreplace"))  # of names of files that are not UTF-8


def write_json_whole(file: Path, data: object, *, indent: int | None = 1, sync: bool = False) -> None:
    """JSON and a line end. Raises WriteError; TypeError for what JSON has no form for."""
    write_text_whole(file, json.dumps(data, indent=indent) + "\n", sync=sync)


def require_file(file: Path) -> int:
    """The size of a file; OSError where it is none, but a pipe, a device or one of /proc, whose end a reader might wait
    for."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_dev == _device_of_proc():
        raise OSError(errno.EINVAL, "it is no file", str(file))
    return found.st_size


def is_readable_file(file: Path) -> bool:
    """Whether it is there, and a file in the sense of `require_file`."""
    try:
        require_file(file)
    except (OSError, ValueError):
        return False
    return True


@functools.cache
def _device_of_proc() -> int | None:
    with suppress(OSError):
        return os.stat("/proc/self/stat").st_dev
    return None


def read_json(file: Path) -> JsonDict:
    """The object in a JSON file. Raises OSError, and ValueError where it is none or beyond the bounds of parse_json."""
    if (size := require_file(file)) > MAX_BYTES:
        raise ValueError(f"it is {size} bytes, more than {MAX_BYTES}")
    with open(file, "rb", opener=_without_waiting) as source:
        content: bytes | None = source.read(MAX_BYTES + 1)
    if content is None or len(content) > MAX_BYTES:  # of /proc, whose files have no size and may wait for their writer
        raise ValueError(f"it has no end within {MAX_BYTES} bytes")
    return parse_json(content.decode())


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def parse_json(text: str | bytes) -> JsonDict:
    """An object of JSON of at most MAX_DEPTH levels, whose whole numbers have 64 bits; else ValueError.

    The bounds hold before anything is made of it: code that recurses over what is read cannot run out of stack, and no
    count is beyond what an array can have.
    """
    try:
        data = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}") from None
    if not isinstance(data, dict):
        raise ValueError(f"it is no object but {type(data).__name__}")
    level: list[object] = [data]
    for _ in range(MAX_DEPTH + 1):
        level = [child for node in level for child in _children(node)]
        if not level:
            return data
    raise ValueError(f"it is nested deeper than {MAX_DEPTH}")


def _integer(digits: str) -> int:
    if len(digits) > 20 or abs(number := int(digits)) > _LARGEST:
        raise ValueError(f"the number {digits[:12]}... of {len(digits)} digits is beyond 64 bits")
    return number


def _children(node: object) -> list[object]:
    values = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
    return [value for value in values if isinstance(value, (Mapping, list))]


def write_checked_json(file: Path, data: JsonObject) -> None:
    """JSON with a checksum of itself, written through to the disk. Raises WriteError."""
    write_json_whole(file, {**data, "checksum": checksum(data)}, sync=True)


def read_checked_json(file: Path) -> JsonDict:
    """ValueError where it is not what `write_checked_json` wrote."""
    data = read_json(file)
    if not isinstance(data, dict) or data.pop("checksum", None) != checksum(data):
        raise ValueError("its checksum is wrong")
    return data


def file_hash(file: Path) -> str:
    """sha256 of a file's bytes. OSError where it is none."""
    require_file(file)
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
