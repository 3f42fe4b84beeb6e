"""Find the folders of gnnpar's and plugins' YAML, caches, and user modules."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

GROUP = "gnnpar.conf"


def expanded(path: str | Path) -> Path:
    """Replace ~ by the home folder. Raise ValueError for an unknown user, or one without a home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        own = Path(path).parts[0] == "~"
        why = "this user has no home folder; set HOME, or" if own else "there is no such user;"
        raise ValueError(f"{path}: {why} write the folder out") from error


def own_cache() -> Path:
    """Return gnnpar in XDG_CACHE_HOME or ~/.cache. Raise ValueError if this user has no home."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(home) if os.path.isabs(home) else expanded("~/.cache")) / "gnnpar"  # XDG ignores relative paths
    except ValueError as error:
        raise ValueError("this user has no home folder; set HOME, XDG_CACHE_HOME or GNNPAR_CACHE") from error


def path_of(given: object, name: str) -> Path:
    """Return the path in an argument, with ~ expanded. Raise ValueError for bytes, numbers and open files."""
    if isinstance(given, str | os.PathLike) and isinstance(path := os.fspath(given), str):
        if not path:
            raise ValueError(f"{name} is empty, and names nothing: give . for the working directory")
        try:
            return expanded(path)
        except ValueError as error:
            raise ValueError(f"{name}={error}") from error
    raise ValueError(f"{name}={repr(given)[:80]} is no path: give a str or a pathlib.Path")


def conf_dir() -> Path:
    """Return conf/ inside the wheel, or next to src/ in a checkout."""
    packaged = Path(__file__).with_name("conf")
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "conf"


def installed_confs() -> list[Path]:
    """Return the folders of YAML of installed packages, each named by an entry point of GROUP. Raises ValueError if an
    entry point names no installed package."""
    found = []
    for point in _points(tuple(sys.path)):
        try:
            spec = find_spec(point.value)
        except ModuleNotFoundError:
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                f"the entry point {point.name} = {point.value} of {GROUP} names no package that is installed; "
                f"install {point.dist.name if point.dist else 'its distribution'} again, or remove it"
            )
        found.append(Path(next(iter(spec.submodule_search_locations))))
    return found


@cache
def _points(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of GROUP. `path`: sys.path, the key of the cache."""
    return tuple(entry_points(group=GROUP))


def plugin_packages() -> set[str]:
    """Return the top-level packages that provide YAML through an entry point of GROUP."""
    return {point.value.partition(".")[0] for point in _points(tuple(sys.path))}


def checkout_dir() -> Path | None:
    """Return the git checkout of this package; None for an installed wheel."""
    root = Path(__file__).parents[2]
    return root if (root / ".git").exists() and (root / "src" / "gnnpar").is_dir() else None


def is_installed_group(name: str) -> bool:
    """Return True for a group of gnnpar or of a plugin; folders of the working directory do not count."""
    return any(os.path.isdir(folder / name) for folder in (conf_dir(), *installed_confs()))


def locate(target: str) -> object:
    """Return the object that a `_target_` names. Raise ImportError, AttributeError or ValueError if it does not exist.
    A user's module is looked up in the working directory, after installed packages."""
    if _NAME.fullmatch(target) is None:
        raise ValueError("that is no name of a class in a module")
    module, _, name = target.rpartition(".")
    there = _imported(module)
    try:
        return getattr(there, name)  # a _target_ is a name
    except AttributeError as error:
        near = difflib.get_close_matches(name, [each for each in vars(there) if not each.startswith("_")], n=1)
        raise AttributeError(f"{error}{f', did you mean {near[0]}?' if near else ''}") from error


_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def _imported(module: str) -> ModuleType:
    """Import a module; the working directory comes after installed packages."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
        importlib.invalidate_caches()
    before, sys.argv = sys.argv, [f"{module.replace('.', os.sep)}.py"]  # a script may parse sys.argv on import
    try:
        return importlib.import_module(module)
    except SystemExit as error:
        raise ImportError(f"{module} ends the program when it is imported (exit code {error.code})") from error
    finally:
        sys.argv = before
