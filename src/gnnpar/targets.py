"""The classes that `_target_` names: finding one, and which of them a file may name.

Files are data: a plan, a checkpoint, shards or a sweep that somebody passed on runs no code of its own. It names
dataclasses of gnnpar and of installed plugins; any other class has to be named by the user (docs/adr/0034).
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from gnnpar.paths import conf_dir, installed_confs, own_cache, plugin_packages
from gnnpar.track.text import printable

TRUST = "GNNPAR_TRUST"
"""The environment variable that --trust sets for every process of the command: 1 lets files name any class."""

FENCE = "GNNPAR_CLASSES"
"""The environment variable that every command sets: the classes, with colons between them, that it, its jobs and their
ranks may import beside those of gnnpar and of plugins. It begins with ! where a file lists the jobs. Not set, as in a
script of the user's own: any that is named."""


def locate(target: str) -> object:
    """What a `_target_` names. Raises ImportError, AttributeError or ValueError where there is no such thing, or where
    it is beyond the fence.

    A module of the user's own is looked up in the working directory, after everything that is installed.
    """
    if FENCE in os.environ and target not in _within() and not _is_trusted(target):
        raise ValueError("a file names it, and is no class of gnnpar or of a plugin: name it yourself, or --trust")
    if _NAME.fullmatch(target) is None:
        raise ValueError("that is no name of a class in a module")
    module, _, name = target.rpartition(".")
    there = _imported(module)
    try:
        return getattr(there, name)  # by name: that is what a _target_ is
    except AttributeError as error:
        near = difflib.get_close_matches(name, [each for each in vars(there) if not each.startswith("_")], n=1)
        raise AttributeError(f"{error}{f', did you mean {near[0]}?' if near else ''}") from error


_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


@contextmanager
def fenced(*, of_file: bool = False) -> Iterator[None]:
    """Inside, and in processes that are started there, a class has to be trusted, or let in by `let_in`, before it is
    imported, whichever way its name has come. With --trust nothing is different. `of_file`: a file lists the jobs."""
    if os.environ.get(TRUST) == "1":
        yield
        return
    before = os.environ.get(FENCE)
    os.environ[FENCE] = "!" * of_file + (before or "").lstrip("!")
    try:
        yield
    finally:
        os.environ.pop(FENCE)
        os.environ.update({} if before is None else {FENCE: before})


def let_in(named: object, *, checked: bool = False) -> None:
    """The classes that a configuration names may be imported in spite of the fence: the user has chosen it. Not where a
    file lists the jobs, unless what it names is `checked`."""
    within = os.environ.get(FENCE)
    if within is not None and (checked or not within.startswith("!")):
        kind = "!" * within.startswith("!")
        os.environ[FENCE] = kind + ":".join(dict.fromkeys([*_within(), *classes_in(named)]))


def _within() -> list[str]:
    return [name for name in os.environ.get(FENCE, "").lstrip("!").split(":") if name]


def is_own(target: str) -> bool:
    """Of gnnpar, where only classes are configurations."""
    return target.partition(".")[0] == "gnnpar"


def note_named(tree: object) -> None:
    """Note in this user's cache which classes of its own a configuration trains with, with which arguments and in which
    working directory: `refuse_foreign` lets them in again there. Not with --trust, whose classes a file may name."""
    for path, node in _nodes(tree) if os.environ.get(TRUST) != "1" else ():
        if any(not _is_trusted(name) for _, name in _classes(node)):
            with suppress(OSError, ValueError):  # without a home, --trust is asked for
                note = _note(tree, path, node)
                note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                note.touch(mode=0o600)


def _note(tree: object, path: Sequence[object], node: Mapping[str, object]) -> Path:
    named = [os.getcwd(), path, dict(_arguments(tree, path, node))]
    text = json.dumps(named, sort_keys=True, default=str)
    return own_cache() / "named" / hashlib.sha256(text.encode()).hexdigest()


def _is_noted(tree: object, path: Sequence[object], node: Mapping[str, object]) -> bool:
    with suppress(OSError, ValueError):
        return _note(tree, path, node).exists()
    return False


def refuse_foreign(
    tree: object, source: str, *, remedy: str, named: object = None, trust: bool = False, noted: bool = False
) -> None:
    """Refuse, before it is imported, a class that the tree of a file names and that its reader has not named.

    `source`: the file, for messages. `remedy`: what to do instead. `named`: configuration that the user has chosen
    himself, by the command line and by YAML, laid out as `tree`: where it has a class, the file may have it, too, and
    call it with the same arguments, with numbers and with words: what a class of the user's does with the name of a
    file, gnnpar does not know. `trust`, or --trust: any class is allowed, and a line on stderr says so. `noted`: what
    this user has trained with in this working directory is allowed as well (`note_named`). ValueError.
    """
    trusted = trust or os.environ.get(TRUST) == "1"
    told: set[str] = set()
    for path, node in _nodes(tree):
        foreign = {key: name for key, name in _classes(node) if not _is_trusted(name)}
        if foreign and noted and _is_noted(tree, path, node):
            continue
        twin = _at(named, path) if foreign else {}
        theirs = dict(_classes(twin))
        for key, target in foreign.items():
            if key in theirs and target == theirs[key]:
                continue
            shown = _short(target)
            if not trusted:
                line = f"{source} names {shown}, which is no class of gnnpar or of an installed plugin: {remedy}"
                raise ValueError(line)
            if target not in told:
                sys.stderr.write(f"gnnpar: {printable(source)} names {shown}; it is trusted, and its code runs\n")
            told.add(target)
        for key, value in _arguments(tree, path, node) if foreign and not trusted else ():
            had = named.get("data_dir") if key == "data_dir" and isinstance(named, Mapping) else twin.get(key)
            if key not in (*foreign, "_target_") and not _may_set(value, had):
                setting = f"{_short(str(key))}={_short(str(value))} of {_short(next(iter(foreign.values())))}"
                raise ValueError(f"{source} sets {setting}, which may name a file: {remedy}")


def _arguments(tree: object, path: Sequence[object], node: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """What an object of a configuration is made with; a dataset reads its files from the configuration's data_dir."""
    yield from node.items()
    if tuple(path[:1]) == ("dataset",) and isinstance(tree, Mapping) and "data_dir" in tree:
        yield "data_dir", tree["data_dir"]


def _short(text: str) -> str:
    return printable(text if len(text) <= 100 else text[:97] + "...")


def _may_set(value: object, had: object) -> bool:
    """Whether a value is what the user `had`, or numbers and words that name no file; a class in it is
    looked at by itself, what it is made with here, too."""
    if isinstance(value, Mapping):
        own = had if isinstance(had, Mapping) else {}
        return all(
            (key in own or _may_set(key, None)) and (key == "_target_" or _may_set(each, own.get(key)))
            for key, each in value.items()
        )
    if isinstance(value, (list, tuple)):
        own = had if isinstance(had, (list, tuple)) and len(had) == len(value) else [None] * len(value)
        return all(map(_may_set, value, own))
    return value == had or is_word(value)


def is_word(value: object) -> bool:
    """A number, or numbers and letters, that name nothing which lies in the working directory, as a folder that was
    unpacked: a class may read what is called so, or so with an ending. Not the empty word, which is that directory
    itself."""
    word = str(value)
    plain = not isinstance(value, str) or PLAIN.fullmatch(word) is not None
    return plain and not os.path.lexists(word) and word not in _beginnings(*_working_directory())


def _working_directory() -> tuple[str, int]:
    """With its time, by which what it holds is known; none: it has been removed."""
    with suppress(OSError):
        return os.getcwd(), Path().stat().st_mtime_ns
    return "", 0


@functools.lru_cache(maxsize=1)
def _beginnings(folder: str, _time: int) -> frozenset[str]:
    """Of the names in a folder: each up to any of its dots."""
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(folder or ".")
    return frozenset(name[:end] for name in names for end, letter in enumerate(name) if letter == ".")


PLAIN = re.compile(r"[\w-]+|[+-]?\d+\.\d*(e[+-]?\d+)?", re.ASCII)


def _at(tree: object, path: Sequence[object]) -> Mapping[str, object]:
    """The mapping there; empty: there is none."""
    for key in path:
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        elif isinstance(tree, (list, tuple)) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        else:
            return {}
    return tree if isinstance(tree, Mapping) else {}


@functools.cache
def _configurations(folders: tuple[Path, ...]) -> frozenset[str]:
    """The classes that the YAML of these folders names: other classes may do something when they are made, and other
    modules when they are imported."""
    files = (file for folder in folders for file in folder.rglob("*.yaml"))
    return frozenset(name for file in files for name in _IN_YAML.findall(file.read_text(encoding="utf-8")))


_IN_YAML = re.compile(r"""_target_['"]?: *['"]?([\w.]+)""")


def _is_trusted(target: str) -> bool:
    """A class that the YAML of gnnpar names, or that of the plugin which it is of. Nothing is imported."""
    if is_own(target):
        return target in _configurations((conf_dir(),))
    return target.partition(".")[0] in plugin_packages() and target in _configurations(tuple(installed_confs()))


def classes_in(tree: object) -> Iterator[str]:
    """The classes that a configuration names."""
    for _, node in _nodes(tree):
        for _, target in _classes(node):
            yield target


def given_to_own_classes(tree: object) -> Iterator[tuple[str, str]]:
    """(dotted key, text) of the arguments of objects whose classes are not gnnpar's, and of objects below these."""
    for path, node in _nodes(tree):
        if any(not is_own(target) for _, target in _classes(node)):
            for at, value in _values(node):
                if isinstance(value, str) and at[-1] not in ("_target_", "target"):
                    yield ".".join(map(str, (*path, *at))), value


def _classes(node: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """(key, class) of what a configuration names."""
    if "_target_" in node:
        yield "_target_", str(node["_target_"])
        if isinstance(target := node.get("target"), str):  # of a PyG model: its class is imported, too
            yield "target", target
        if node["_target_"] == "gnnpar.data.tasks.Labels":  # and functions of the user's own
            for path, name in _values({key: node.get(key) for key in ("loss", "metrics")}):
                if isinstance(name, str) and re.search("[.:]", name):
                    yield ".".join(map(str, path)), name.replace(":", ".")


def _nodes(tree: object) -> Iterator[tuple[tuple[object, ...], Mapping[str, object]]]:
    """(path, node) of every mapping."""
    return ((path, value) for path, value in _values(tree) if isinstance(value, Mapping))


def _values(tree: object) -> Iterator[tuple[tuple[object, ...], object]]:
    """(path, value) of the tree and of everything in it."""
    pending: list[tuple[tuple[object, ...], object]] = [((), tree)]  # no recursion: a file may be nested deeply
    while pending:
        path, node = pending.pop()
        yield path, node
        if isinstance(node, Mapping):
            pending += (((*path, key), value) for key, value in node.items())
        elif isinstance(node, (list, tuple)):
            pending += (((*path, at), value) for at, value in enumerate(node))


def _imported(module: str) -> ModuleType:
    """Import a module; the working directory comes after everything that is installed."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
        importlib.invalidate_caches()
    before, sys.argv = sys.argv, [f"{module.replace('.', os.sep)}.py"]  # a script may parse them when it is imported
    try:
        return importlib.import_module(module)
    except SystemExit as error:
        raise ImportError(f"{module} ends the program when it is imported (exit code {error.code})") from error
    finally:
        sys.argv = before
