"""The wheel and the Makefile: what they build and install, and into which environment."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from conftest import ROOT
from gnnpar import __version__

SOURCES = ("src", "kernels/gnnpar_kernels", "conf", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str | Path, cwd: Path) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GNNPAR_", "RANK", "WORLD_SIZE"))}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: an old build folder of the checkout cannot help it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet")
    run(*pip, "--wheel-dir", out, source, cwd=out)
    (built,) = out.glob(f"gnnpar-{__version__}-*.whl")  # pyproject.toml and the package agree
    return built


def test_it_holds_both_packages_and_the_configuration(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    configuration = {f"gnnpar/conf/{p.relative_to(ROOT / 'conf')}" for p in (ROOT / "conf").rglob("*.yaml")}
    assert configuration <= names
    wanted = {"gnnpar/__main__.py", "gnnpar/py.typed", "gnnpar/training/result/result.schema.json"}
    wanted |= {"gnnpar_kernels/__init__.py"}
    wanted |= {f"gnnpar/report/page/report.{kind}" for kind in ("html.j2", "css", "js")}
    assert wanted <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"gnnpar", "gnnpar_kernels", "hydra_plugins"}


def test_it_trains_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    # a venv cannot see another venv's packages; the wheel must not be found there, so the editable install is left out
    ours = Path(sysconfig.get_path("purelib"))
    (site / "running.pth").write_text(f"{ours}\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet")
    run(*pip, wheel, cwd=tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    find = "from importlib.util import find_spec as f; print(f('gnnpar').origin, f('gnnpar_kernels').origin)"
    where = run(python, "-c", find, cwd=work)
    assert all(str(home) in file for file in where.split())
    run(home / "bin" / "gnnpar", "train", "debug=tiny", "world_size=2", "comm=threads", "hydra.run.dir=run", cwd=work)
    result = json.loads((work / "run" / "result.json").read_text())
    assert (result["status"], result["commit"]) == ("completed", None)


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
    make = ["make", "--no-print-directory", target, f"VENV={venv}", f"PYTHON={sys.executable}"]
    env = os.environ | {"PYTHONPATH": str(venv)}
    done = subprocess.run(make, cwd=here, env=env, capture_output=True, text=True, check=False)
    asked = (venv / "asked").read_text() if (venv / "asked").exists() else ""
    if own:
        assert "pip install --quiet --editable" in asked
        return
    assert done.returncode != 0
    assert asked == ""
    assert done.stdout.splitlines()[-1] == (
        f"VENV={venv} is the environment of {there}, and this checkout is another one: give another VENV"
    )
