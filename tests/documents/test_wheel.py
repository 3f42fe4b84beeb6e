"""The wheel: builds without isolation, holds both packages and conf/, and trains from another folder."""

from __future__ import annotations

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
    wanted = {
        "gnnpar/__main__.py",
        "gnnpar/py.typed",
        "gnnpar/training/result/result.schema.json",
        "gnnpar_kernels/__init__.py",
    }
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
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        wheel,
        cwd=tmp_path,
    )
    work = tmp_path / "work"
    work.mkdir()
    find = "from importlib.util import find_spec as f; print(f('gnnpar').origin, f('gnnpar_kernels').origin)"
    where = run(python, "-c", find, cwd=work)
    assert all(str(home) in file for file in where.split())
    run(home / "bin" / "gnnpar", "train", "debug=tiny", "world_size=2", "comm=threads", "hydra.run.dir=run", cwd=work)
    result = json.loads((work / "run" / "result.json").read_text())
    assert (result["status"], result["commit"]) == ("completed", None)
