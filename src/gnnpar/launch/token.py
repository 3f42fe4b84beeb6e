"""The secret of a run whose ranks others have started: what they prove to each other before anything is read.

It is in GNNPAR_TOKEN, the same text on all hosts, or else in files of rank 0 that only this user can read, in a folder
that the hosts share: one for each rank, which begins with a word that the rank chose for this meeting. No file that was
there before, out of an archive say, whose content others know, does so, by whatever name.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gnnpar.comm.interfaces import MeetingError
from gnnpar.durable import is_mine

VARIABLE = "GNNPAR_TOKEN"
NAME = ".meeting"
_SHORTEST = 32  # who reads the store may try words in peace, as many as he likes
_SECRET = re.compile(rb"[0-9a-f]{64}")
_FILE_SECONDS = 5.0  # until a file system of a network shows a file that is there


def leave(file: Path) -> None:
    """Rank 0: a new secret in a new file, which nobody else can read."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as out:
        out.write(secrets.token_hex(32))


def remove(file: Path) -> None:
    """Rank 0: the file, and every answer beside it."""
    for each in file.parent.glob(f"{file.name}*"):
        each.unlink(missing_ok=True)


def remove_old(folder: Path, seconds: float) -> None:
    """Rank 0: what one that was killed has left there, when ranks that were to meet it wait no more."""
    for each in folder.glob(f"{NAME}-*"):
        with suppress(OSError):
            if (there := each.lstat()) and is_mine(there) and time.time() - there.st_mtime > seconds:
                each.unlink()


def answer(file: Path, chosen: str, secret: bytes) -> Path:
    """Rank 0: the secret once more, beside `file`, for the rank that chose this word; what `file` holds by now may be
    somebody else's. FileExistsError: the name is taken."""
    copy = Path(answer_to(str(file), chosen))
    with os.fdopen(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(chosen.encode() + b" " + secret)
    return copy


def answer_to(file: str, chosen: str) -> str:
    """Where a rank finds it."""
    return f"{file}.{chosen}"


def secret_of(env: Mapping[str, str], file: str, chosen: str = "") -> bytes | None:
    """The secret: of the environment, else of a file of rank 0's, which begins with what this rank has chosen; None
    where there is neither. MeetingError says in one line why one is of no use."""
    if given := env.get(VARIABLE, ""):
        if len(given) < _SHORTEST:
            raise MeetingError(
                f"{VARIABLE} has {len(given)} characters, at least {_SHORTEST} are needed: set it to the output of "
                "`openssl rand -hex 32` on all hosts"
            )
        return os.fsencode(given)
    began = time.monotonic()
    while file and time.monotonic() - began < _FILE_SECONDS:
        try:
            return _read(file, chosen)
        except (FileNotFoundError, NotADirectoryError):
            with suppress(OSError):
                os.listdir(Path(file).parent)  # file systems of networks look again
            time.sleep(0.1)
        except (OSError, ValueError) as error:
            if isinstance(error, MeetingError):
                raise
            return None  # a link, a folder that may not be read, a zero byte: not what rank 0 has written
    return None


def _read(file: str, chosen: str) -> bytes | None:
    """What `leave` wrote, or `answer` for this rank. The name of the file comes from a store that anybody reaches: it
    may be any other file of the user's, whose content others know."""
    if not Path(file).name.startswith(NAME):
        return None
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        facts = os.fstat(opened.fileno())
        if not stat.S_ISREG(facts.st_mode) or not is_mine(facts) or facts.st_mode & 0o077:
            raise MeetingError(f"{file} of rank 0 can be written or read by others: set {VARIABLE} on all hosts")
        word, _, found = opened.read(200).rpartition(b" ")
    return found if _SECRET.fullmatch(found) and word == chosen.encode() else None
