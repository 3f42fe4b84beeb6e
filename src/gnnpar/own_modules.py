"""Modules of the working directory, imported by name, and not because the folder is on Python's path: it never is.

By name: those of classes that the user has named (`targets.locate`), and what modules of the folder import themselves.
A library that looks for an optional module, or for distributions, does not find them there.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType

from gnnpar.durable import OF_ANOTHER, file_hash, planted

VARIABLE = "GNNPAR_OWN_MODULES"
"""The environment variable that names them to processes that this one starts: 'mine,beside:/the/folder'."""

LOOKED_UP = "GNNPAR_LOOKED_UP"
"""The environment variable by which ranks know that who started them has looked up all classes: they look for no
others, as for one that the caller's program has from elsewhere."""

_IMPORTING = ("importlib", "_frozen_importlib", "_frozen_importlib_external")


@contextmanager
def imported_as_program(module: str) -> Iterator[None]:
    """Inside, a module is imported that may read sys.argv, as scripts do: there is no argument. ImportError where it
    ends the program."""
    before, sys.argv = sys.argv, [f"{module.replace('.', os.sep)}.py"]
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            yield
    except SystemExit as error:
        reason = (said.getvalue().strip().splitlines() or [f"exit code {error.code}"])[-1]
        said = io.StringIO()
        raise ImportError(f"{module} ends the program when it is imported ({reason})") from error
    finally:
        sys.argv = before
        sys.stderr.write(said.getvalue())


class _FromSource(SourceFileLoader):
    """Neither reads nor leaves compiled code: `__pycache__` of somebody else's folder may hold another's, which Python
    believes, or be a link to where another user exchanges it."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        _LOADED[fullname] = path, hashlib.sha256(source).hexdigest()
        return self.source_to_code(source, path)

    def exec_module(self, module: ModuleType) -> None:
        with imported_as_program(module.__name__):
            super().exec_module(module)


_LOADED: dict[str, tuple[str, str]] = {}
"""Module -> its file and SHA-256, as they were when it was imported."""


def _own(spec: ModuleSpec) -> ModuleSpec:
    """Without compiled code. ValueError where another user has put the file there: a scheduler may have started this
    process in /tmp."""
    if spec.origin is not None and (place := planted(Path(spec.origin))) is not None:
        raise ValueError(f"{place}: {OF_ANOTHER}, and its code is not yours; copy it into a folder of yours")
    if isinstance(spec.loader, SourceFileLoader):
        spec.loader, spec.cached = _FromSource(spec.loader.name, spec.loader.path), None
    return spec


def _refuse_hidden(folder: str, name: str, spec: ModuleSpec) -> None:
    """ValueError where Python would import a folder, as one that was unpacked beside it, in the place of a file."""
    file = os.path.join(folder, f"{name}.py")
    if spec.origin is not None and spec.origin != file and os.path.lexists(file):
        raise ValueError(f"{file}: Python would import {spec.origin} in its place; rename one of them")


class _Parts:
    """The first on sys.meta_path: modules in packages of the folder, whose names begin with theirs."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if path is None or top not in _FINDER.names or not _FINDER.holds(sys.modules.get(top)):
            return None
        spec = PathFinder.find_spec(name, path, target)
        return None if spec is None else _own(spec)


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
            _refuse_hidden(self.folder, name, spec)
            self.add(name)
            spec = _own(spec)
        return spec

    def holds(self, module: ModuleType | None) -> bool:
        """Whether it is of the folder: an installed package may have the name of a folder here."""
        return module is not None and self._is_below(vars(module))

    def _is_below(self, names: Mapping[str, object]) -> bool:
        path = names.get("__path__")  # of a package, which may have no file
        places = [names.get("__file__"), *(path if isinstance(path, Iterable) else ())]
        return any(str(place).startswith(self.folder + os.sep) for place in places)

    def add(self, name: str) -> None:
        self.names.add(name)
        os.environ[VARIABLE] = f"{','.join(sorted(self.names))}:{self.folder}"

    def _asked_by_its_own(self, frame: FrameType | None) -> bool:
        """Whether the code below the frames of the import itself is that of a module of the folder."""
        while frame is not None:
            top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if top not in _IMPORTING:
                return top in self.names and self._is_below(frame.f_globals)
            frame = frame.f_back
        return False


_FINDER, _PARTS = _Finder(), _Parts()


def look_in(folder: str, *names: str) -> None:
    """Modules of these names that are nowhere else are found in a folder from now on, and what they import; here and in
    processes that are started."""
    if _FINDER.folder != folder:
        _FINDER.folder, _FINDER.names = folder, set()
    for name in filter(str.isidentifier, names):
        _FINDER.add(name)
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
        sys.meta_path.insert(0, _PARTS)


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


def hash_below(folder: Path, module: str) -> str | None:
    """SHA-256 of the file that a module of a folder has; None: it has none there."""
    parts = module.split(".")
    if all(map(str.isidentifier, parts)):
        for file in (folder.joinpath(*parts, "__init__.py"), folder.joinpath(*parts).with_suffix(".py")):
            with suppress(OSError):
                return file_hash(file)
    return None


def refuse_of_another_folder(module: str, folder: str) -> None:
    """ValueError where a module of this name is imported already from the working directory of before, and this one has
    its own: Python would go on with the first."""
    top = module.partition(".")[0]
    of_before = _FINDER.folder not in ("", folder) and _FINDER.holds(sys.modules.get(top))
    if of_before and PathFinder.find_spec(top, [folder]) is not None:
        raise ValueError(
            f"{top} of {_FINDER.folder} is imported already, and {folder} has its own: start a new process"
        )


def refuse_left(classes: Iterable[str]) -> None:
    """ValueError where one of the classes that a configuration names is of a module of the working directory of before:
    here, the same name means nothing, or another class."""
    tops = {each.partition(".")[0] for each in classes}
    for top in sorted(tops) if _FINDER.folder not in ("", os.getcwd()) else ():
        if _FINDER.holds(sys.modules.get(top)):
            raise ValueError(f"{top} is of {_FINDER.folder}, and the working directory is {os.getcwd()}: change back")


def forget() -> None:
    """A command looks in its own working directory, and not in that of a program which has started it."""
    os.environ.pop(VARIABLE, None)
    _FINDER.folder, _FINDER.names = "", set()


def refuse_changed() -> None:
    """ValueError where a module of the folder has been edited since it was imported: this process would go on with what
    it was, and those that it starts with what it is."""
    for name, (path, known) in _LOADED.items():
        if (
            name in sys.modules
            and os.path.isfile(path)
            and hashlib.sha256(Path(path).read_bytes()).hexdigest() != known
        ):
            raise ValueError(f"{path} has changed since this process has imported it: start a new one")


def lies_in(module: str, folder: str) -> bool:
    """Whether the module, or the package at its top, is in the folder, and neither imported nor installed."""
    top = module.partition(".")[0]
    if os.environ.get(LOOKED_UP) == "1":
        return False
    installed = (finder for finder in sys.meta_path if finder not in (_FINDER, _PARTS))  # pip install -e has its own
    if top in sys.modules or any(finder.find_spec(top, None) is not None for finder in installed):
        return False
    return PathFinder.find_spec(top, [folder]) is not None
