"""Folders for temporary files: of this user alone, gone afterwards, also those of processes that were killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from gnnpar.folder_lock import FILE, FolderInUse, working_in

_PREFIX = "gnnpar-scratch-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder of mode 0700, gone afterwards; so is what processes left that were killed, who could not remove
    theirs."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{FILE}"):
        with suppress(FolderInUse, OSError):
            if left.parent.lstat().st_uid == os.getuid():
                with _working_in(left.parent):
                    shutil.rmtree(left.parent)
    scratch = Path(tempfile.mkdtemp(prefix=_PREFIX))
    _made.append(scratch)
    try:
        with _working_in(scratch):
            yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        _made.remove(scratch)


_made: list[Path] = []


def remove_all() -> None:
    """Before a process ends without leaving its blocks (os._exit)."""
    for scratch in _made:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def own_temporary_files() -> Iterator[None]:
    """Temporary files of this process, and of those that it starts, lie in a scratch folder: libraries give some of
    theirs names that other users of the host can foresee and take before. Where none can be made all stays as it is:
    who needs one says so."""
    with ExitStack() as stack:
        with suppress(OSError):
            _move_temporary_files(stack, stack.enter_context(scratch_folder()))
        yield


def give_back_environment() -> None:
    """Jobs that a scheduler starts later, or on another host, get TMPDIR as this process got it."""
    if _given:
        _set_tmpdir(_given[-1])


_given: list[str | None] = []  # TMPDIR before, of each `own_temporary_files` that lasts


def _move_temporary_files(stack: ExitStack, folder: Path) -> None:
    before, found = os.environ.get("TMPDIR"), tempfile.tempdir
    _given.append(before)
    _set_tmpdir(str(folder))
    tempfile.tempdir = None  # it looks once more

    @stack.callback
    def back() -> None:
        _given.pop()
        _set_tmpdir(before)
        tempfile.tempdir = found


def _set_tmpdir(value: str | None) -> None:
    if value is None:
        os.environ.pop("TMPDIR", None)
    else:
        os.environ["TMPDIR"] = value


def _working_in(folder: Path) -> AbstractContextManager[None]:
    return working_in(folder, otherwise="", say=lambda line: None)
