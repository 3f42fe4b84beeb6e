"""Hashes of the code that computes a run. Hosts that train one model together must have the same; `compare` and sweeps
name code that was edited between runs; parts of an own partitioner are cached by it."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from gnnpar import own_modules

_OURS = ("gnnpar", "gnnpar_kernels")
_OF_A_START = {"__main__", "__mp_main__", "sitecustomize", "usercustomize"}
_DIGITS = 12
_INSTALLED = {"site-packages", "dist-packages"}
_PYTHON = Path(os.__file__).parent


def hashes_of(classes: Iterable[str]) -> dict[str, str]:
    """Name -> SHA-256: of gnnpar and of the packages and modules that these classes come from, and of every module of
    the working directory that is imported."""
    tops = sorted({*_OURS, *(name.partition(".")[0] for name in classes)})
    found = {name: place for name in tops if (place := _place(name)) is not None}
    return {name: _hash(place) for name, place in found.items()} | own_modules.hashes()


def hashes_of_imported() -> dict[str, str]:
    """Name -> SHA-256: of all that is imported and neither Python's own nor installed, as what lies on PYTHONPATH."""
    tops = {name.partition(".")[0] for name in list(sys.modules)} - {*sys.stdlib_module_names, *_OF_A_START}
    places = {name: place for name in sorted(tops) if not _has_version(name) and (place := _place(name)) is not None}
    return {name: _hash(place) for name, place in places.items()}


def own_code(classes: Iterable[str]) -> dict[str, str]:
    """The user's own of these, and of all that is imported: modules of the working directory, of PYTHONPATH or beside
    a script, and packages that are installed in place (pip install -e). Name -> the first digits of its hash."""
    hashes = hashes_of_imported() | hashes_of(classes)
    own = own_modules.hashes().keys() | {name for name in hashes if not _has_version(name)}
    return {name: hashes[name][:_DIGITS] for name in sorted(own)}


def changed(code: Mapping[str, str]) -> str | None:
    """The first name of `own_code` that is of other content now; what is not there any more is not looked at."""
    for name, before in code.items():
        now = own_modules.hash_below(Path.cwd(), name)
        if now is None and name.isidentifier() and name != "__main__" and not _has_version(name):
            now = _hash(place) if (place := _place(name)) is not None else None
        if now is not None and now[:_DIGITS] != before:
            return name
    return None


def hash_of_class(cls: type) -> str | None:
    """SHA-256 of what it comes from, all that was imported of the working directory included; None: it is of no file,
    as in a notebook."""
    top = cls.__module__.partition(".")[0]
    own = own_modules.hashes()
    if (place := _place(top)) is None and top not in {name.partition(".")[0] for name in own}:
        return None
    text = repr([_hash(place) if place is not None else "", sorted(own.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def _has_version(name: str) -> bool:
    place = _place(name)
    installed = place is None or bool(_INSTALLED & set(place.parts)) or place.is_relative_to(_PYTHON)
    return name in _OURS or installed


def _place(name: str) -> Path | None:
    """The folder of a package, or the file of a module, that is imported or on Python's path; None: there is none."""
    module, spec, file = sys.modules.get(name), None, None
    if module is not None:
        spec, file = map(vars(module).get, ("__spec__", "__file__"))
    else:
        with suppress(ImportError, ValueError):
            spec = find_spec(name)
    if spec is not None:
        if places := list(spec.submodule_search_locations or ()):
            return Path(places[0])
        file = file or spec.origin
    return Path(file) if isinstance(file, str) and file.endswith(".py") and Path(file).is_file() else None


def _hash(place: Path) -> str:
    """Of what has a version, as it was first asked for: a module of the user's may be edited and loaded again."""
    return _cached(place) if _INSTALLED & set(place.parts) else _hashed(place)


def _hashed(place: Path) -> str:
    if place.is_file():
        return hashlib.sha256(place.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for file in sorted(place.rglob("*.py")):
        digest.update(f"{file.relative_to(place)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


_cached = functools.cache(_hashed)
