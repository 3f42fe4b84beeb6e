"""Modules of the working directory, imported by name, and not because the folder is on Python's path: it never is.

By name: those of classes that the user has named (`targets.locate`), and what modules of the folder import themselves.
A library that looks for an optional module, or for distributions, does not find them there.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType

VARIABLE = "GNNPAR_OWN_MODULES"
"""The environment variable that names them to processes that this one starts: 'mine,beside:/the/folder'."""

_IMPORTING = ("importlib", "_frozen_importlib", "_frozen_importlib_external")


class _Finder:
    """The last on sys.meta_path: asked for what is found nowhere else."""

    def __init__(self) -> None:
        self.folder = ""
        self.names: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self.folder or path is not None:
            return None
        if name not in self.names and not self._asked_by_its_own(sys._getframe(1)):
            return None
        if (spec := PathFinder.find_spec(name, [self.folder], target)) is not None:
            self.add(name)
        return spec

    def add(self, name: str) -> None:
        self.names.add(name)
        os.environ[VARIABLE] = f"{','.join(sorted(self.names))}:{self.folder}"

    def _asked_by_its_own(self, frame: FrameType | None) -> bool:
        """Whether the code below the frames of the import itself is that of a module of the folder."""
        while frame is not None:
            top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if top not in _IMPORTING:  # an installed package may have the name of a folder here
                return top in self.names and str(frame.f_globals.get("__file__")).startswith(self.folder + os.sep)
            frame = frame.f_back
        return False


_FINDER = _Finder()


def look_in(folder: str, *names: str) -> None:
    """Modules of these names that are nowhere else are found in a folder from now on, and what they import; here and in
    processes that are started."""
    if _FINDER.folder != folder:
        _FINDER.folder, _FINDER.names = folder, set()
    for name in filter(str.isidentifier, names):
        _FINDER.add(name)
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)


def inherit() -> None:
    """What the process that started this one looks for."""
    names, _, folder = os.environ[VARIABLE].partition(":")
    look_in(folder, *names.split(","))


def hashes() -> dict[str, str]:
    """Module -> SHA-256 of its file, of those in the folder that are imported."""
    files = {
        name: vars(module).get("__file__")
        for name, module in sys.modules.items()
        if name.partition(".")[0] in _FINDER.names
    }
    return {
        name: hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for name, file in sorted(files.items())
        if isinstance(file, str) and os.path.isfile(file)
    }


def lies_in(module: str, folder: str) -> bool:
    """Whether the module, or the package at its top, is in the folder, and neither imported nor installed."""
    top = module.partition(".")[0]
    installed = (finder for finder in sys.meta_path if finder is not _FINDER)  # not on sys.path alone: pip install -e
    if top in sys.modules or any(finder.find_spec(top, None) is not None for finder in installed):
        return False
    return PathFinder.find_spec(top, [folder]) is not None
