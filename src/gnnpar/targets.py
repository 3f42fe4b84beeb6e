"""Check the classes that the `_target_` of a file may name. A plan, a checkpoint, shards or a sweep contains no code:
it names classes in the YAML of gnnpar and of installed plugins; the user must name any other class (docs/adr/0034)."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from gnnpar.paths import conf_dir, installed_confs, own_cache, plugin_packages
from gnnpar.track.text import printable

TRUST = "GNNPAR_TRUST"
"""Environment variable that --trust sets for every process of the command: 1 lets files name any class."""


def is_own(target: str) -> bool:
    """Return True for a name in gnnpar, where only classes are configurations."""
    return target.partition(".")[0] == "gnnpar"


def note_named(tree: object) -> None:
    """Record in the user's cache the classes used for training in this working directory. `refuse_foreign` allows them
    in files opened there. Nothing is recorded with --trust: a file may have named them."""
    for name in foreign_in(tree) if os.environ.get(TRUST) != "1" else ():
        with suppress(OSError, ValueError):  # without a home, --trust is required
            note = _note(name)
            note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            note.touch()


def _note(name: str) -> Path:
    return own_cache() / "named" / hashlib.sha256(f"{os.getcwd()}\n{name}".encode()).hexdigest()


def _is_noted(name: str) -> bool:
    with suppress(OSError, ValueError):
        return _note(name).exists()
    return False


def refuse_foreign(
    tree: object, source: str, *, remedy: str, named: object = None, trust: bool = False, noted: bool = False
) -> None:
    """Raise ValueError if the tree of a file names a class that is not allowed. Nothing is imported.

    Allowed: classes in the YAML of gnnpar and of installed plugins, in `named` (the user's configuration) and, with
    `noted`, recorded by `note_named`. trust, or --trust: any, with a line on stderr. source: the file, for messages.
    remedy: advice in the error.
    """
    allowed = set(classes_in(named))
    for name in foreign_in(tree):
        if name in allowed or (noted and _is_noted(name)):
            continue
        shown = printable(name if len(name) <= 100 else name[:97] + "...")
        if not (trust or os.environ.get(TRUST) == "1"):
            raise ValueError(f"{source} names {shown}, which is no class of gnnpar or of an installed plugin: {remedy}")
        sys.stderr.write(f"gnnpar: {printable(source)} names {shown}; it is trusted, and its code runs\n")


@functools.cache
def _configurations(folders: tuple[Path, ...]) -> frozenset[str]:
    """Return the classes that the YAML of these folders names."""
    files = (file for folder in folders for file in folder.rglob("*.yaml"))
    return frozenset(name for file in files for name in _IN_YAML.findall(file.read_text(encoding="utf-8")))


_IN_YAML = re.compile(r"""_target_['"]?: *['"]?([\w.]+)""")


def _is_trusted(target: str) -> bool:
    """Return True for a class in the YAML of gnnpar, or in its own plugin's YAML. Nothing is imported."""
    if is_own(target):
        return target in _configurations((conf_dir(),))
    return target.partition(".")[0] in plugin_packages() and target in _configurations(tuple(installed_confs()))


def foreign_in(tree: object) -> list[str]:
    """Return the classes in a configuration that the YAML of gnnpar and of installed plugins does not name."""
    return [name for name in dict.fromkeys(classes_in(tree)) if not _is_trusted(name)]


def classes_in(tree: object) -> Iterator[str]:
    """Yield the classes that a configuration names."""
    for node in values_in(tree):
        if isinstance(node, Mapping) and "_target_" in node:
            yield str(node["_target_"])
            if isinstance(target := node.get("target"), str):  # a PyG model's class is imported, too
                yield target
            if node["_target_"] == "gnnpar.data.tasks.Labels":  # the user's functions, too
                for name in values_in([node.get("loss"), node.get("metrics")]):
                    if isinstance(name, str) and re.search("[.:]", name):
                        yield name.replace(":", ".")


def values_in(tree: object) -> Iterator[object]:
    """Yield a tree and everything in it."""
    pending = [tree]  # no recursion: a file may be nested deeply
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, Mapping):
            pending += node.values()
        elif isinstance(node, (list, tuple)):
            pending += node
