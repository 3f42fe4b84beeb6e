"""The code that computes a run, by its content: hosts that train one model together must have the same."""

from __future__ import annotations

import functools
import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path

from gnnpar.targets import classes_in

_OURS = ("gnnpar", "gnnpar_kernels")


def packages_of(settings: object) -> dict[str, str]:
    """Package -> SHA-256 of its Python files, of gnnpar and of what the classes of resolved settings come from; not of
    modules of the working directory, which `own_modules.hashes` has."""
    tops = {name.partition(".")[0] for name in classes_in(settings)}
    folders = {name: _folder(name) for name in sorted({*_OURS, *tops})}
    return {name: _hash(folder) for name, folder in folders.items() if folder is not None}


def _folder(package: str) -> Path | None:
    """Where an installed package lies; None for a single module, and for what is not there."""
    found = vars(sys.modules[package]).get("__spec__") if package in sys.modules else find_spec(package)
    places = list(found.submodule_search_locations or ()) if found is not None else []
    return Path(places[0]) if places else None


@functools.cache
def _hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
