"""Modules of the working directory, imported by who may, and not because the folder is on Python's path: it never is.

Who may: who looks up a class that the user has named (`targets.locate`), modules of that folder, and what unpickles
for processes of gnnpar. A library that looks for an optional module, or for distributions, does not find them there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType

FOLDER = "GNNPAR_OWN_MODULES"
"""The environment variable that names the folder for processes that this one starts."""

_IMPORTING = ("importlib", "_frozen_importlib", "_frozen_importlib_external")
_MAY = ("gnnpar.targets", "gnnpar.own_modules", "gnnpar.comm.authentication", "multiprocessing")
_MAY += ("joblib.externals.loky", "joblib.externals.cloudpickle", "cloudpickle", "submitit")


class _Finder:
    """The last on sys.meta_path: asked for what is found nowhere else."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.found: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self.folder is None or path is not None or not self._may_import(sys._getframe(1)):
            return None
        if (spec := PathFinder.find_spec(name, [self.folder], target)) is not None:
            self.found.add(name)
        return spec

    def _may_import(self, frame: FrameType | None) -> bool:
        """Whether the code that asks for a module, below the frames of the import itself, is among those that may."""
        while frame is not None:
            who = str(frame.f_globals.get("__name__", ""))
            top = who.partition(".")[0]
            if top not in _IMPORTING:
                return top in self.found or any(who == each or who.startswith(f"{each}.") for each in _MAY)
            frame = frame.f_back
        return False


_FINDER = _Finder()


def look_in(folder: str) -> None:
    """Modules that are nowhere else are found in a folder from now on, here and in processes that are started."""
    _FINDER.folder = os.environ[FOLDER] = folder
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)


def lies_in(module: str, folder: str) -> bool:
    """Whether the module, or the package at its top, is in the folder, and neither imported nor installed."""
    top = module.partition(".")[0]
    if top in sys.modules or PathFinder.find_spec(top) is not None:
        return False
    return PathFinder.find_spec(top, [folder]) is not None
