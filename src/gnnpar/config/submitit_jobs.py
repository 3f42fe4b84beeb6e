"""Jobs of submitit, which writes scripts and unpickles what they leave: where those lie, and what the scripts know."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from gnnpar.durable import JsonDict, refuse_link_of_others, refuse_others
from gnnpar.paths import own_cache
from gnnpar.settings import ConfigError, show
from gnnpar.targets import TRUST

_IN_A_SCRIPT = frozenset("%\\'\"`$")
_GUARDS = ("PYTHONSAFEPATH", TRUST)
_LOOK = """
import pathlib, sys
from gnnpar.durable import refuse_others, refuse_planted, refuse_to_work_here
try:
    refuse_to_work_here()
    refuse_planted(pathlib.Path.cwd())
    refuse_others(pathlib.Path(sys.argv[1]))
except OSError as error:
    sys.exit(f"gnnpar: on this node {error}; work, and set hydra.launcher.submitit_folder, in folders that nodes share")
"""
"""On a node these folders may be others, of another user's: submitit unpickles what lies in the one, and jobs are
composed of YAML in the other."""


class Launcher(Protocol):
    """Of submitit: what a job is asked for with."""

    params: JsonDict


def is_submitit(launcher: object) -> bool:
    return "submitit" in type(launcher).__module__


def place_of_results(launcher: Launcher, folder: Path) -> Path:
    """Where submitit may leave what it unpickles, by a name that it writes into scripts: in the user's cache, or the
    `submitit_folder` that he names, not in the sweep's folder, which somebody else may have packed, or shares.
    WriteError and ConfigError where that is no place of this user alone, or no name for a script."""
    named = Path(str(launcher.params["submitit_folder"]).removesuffix("%j"))
    try:
        place = own_cache() / "submitit" if named.parent == folder else named
    except ValueError as error:
        raise ConfigError(str(error)) from error
    refuse_link_of_others(place)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = place.resolve()
    if not (str(place).isprintable() and _IN_A_SCRIPT.isdisjoint(str(place))):
        raise ConfigError(f"{show(str(place))} would stand in scripts; set hydra.launcher.submitit_folder=FOLDER")
    refuse_others(place)
    return place


@contextmanager
def results_apart(launcher: Launcher, folder: Path, *, known: Sequence[str]) -> Iterator[None]:
    """Jobs of submitit leave their results in a new folder, this start's alone, gone afterwards unless a job was lost:
    its log lies there. They know what this process has set of `known`, and what guards it, whatever a cluster hands on.
    """
    if not is_submitit(launcher):
        yield
        return
    own = tempfile.mkdtemp(prefix="jobs-", dir=place_of_results(launcher, folder))
    params = launcher.params
    before, params["submitit_folder"] = params["submitit_folder"], f"{own}/%j"
    setup = params.get("setup") or []
    if "setup" in params:  # of Slurm alone
        given = {name: os.environ[name] for name in (*_GUARDS, *known) if name in os.environ}
        exported = given | {"SLURM_EXPORT_ENV": "ALL"}
        exports = (f"export {name}={shlex.quote(value)}" for name, value in exported.items())
        here = f"cd -- {shlex.quote(os.getcwd())} || exit 1"  # where a node has no such folder, Slurm begins in /tmp
        look = shlex.join([sys.executable, "-P", "-c", _LOOK, own])
        params["setup"] = [here, *exports, f"{look} || exit 1", *setup]
    try:
        yield
        shutil.rmtree(own, ignore_errors=True)
    finally:
        params["submitit_folder"] = before
        if "setup" in params:
            params["setup"] = setup
