"""The Makefile and the environment that it installs into."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT


@pytest.mark.parametrize("target", ["lint", "docs"])
@pytest.mark.parametrize("own", [True, False])
def test_make_installs_into_the_environment_of_this_checkout_alone(tmp_path: Path, target: str, own: bool) -> None:
    """`bin/python` of the environment is a script that writes down what pip is asked for."""
    here, there, venv = tmp_path / "here", tmp_path / "another one", tmp_path / "venv"
    for folder in (here, there, venv / "bin", venv / "gnnpar-1.dist-info"):
        folder.mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, here)
    installed = {"url": (here if own else there).as_uri(), "dir_info": {"editable": True}}
    (venv / "gnnpar-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: gnnpar\nVersion: 1\n")
    (venv / "gnnpar-1.dist-info" / "direct_url.json").write_text(json.dumps(installed))
    python = venv / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -m ]; then echo "$@" >> {venv}/asked; exit 0; fi\n'
        f'case "$2" in *metadata*) exec {sys.executable} "$@";; *) exit 1;; esac\n'
    )
    python.chmod(0o755)
    if target == "docs":  # its extra is installed also where the stamp is new
        (venv / ".gnnpar").touch()
        os.utime(here / "pyproject.toml", (0, 0))
    done = subprocess.run(
        ["make", "--no-print-directory", target, f"VENV={venv}", f"PYTHON={sys.executable}"],
        cwd=here,
        env=os.environ | {"PYTHONPATH": str(venv)},
        capture_output=True,
        text=True,
        check=False,
    )
    asked = (venv / "asked").read_text() if (venv / "asked").exists() else ""
    if own:
        assert "pip install --quiet --editable" in asked
        return
    assert done.returncode != 0
    assert asked == ""
    assert done.stdout.splitlines()[-1] == (
        f"VENV={venv} is the environment of {there}, and this checkout is another one: give another VENV"
    )
