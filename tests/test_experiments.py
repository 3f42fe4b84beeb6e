"""A report rebuilds what its README shows, from the raw lines that lie beside it."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from conftest import ROOT, environment

EXPERIMENTS = ROOT / "experiments"


def loaded(name: str) -> Any:
    """A module that lies beside the experiments."""
    spec = importlib.util.spec_from_file_location(f"experiments_{name}", EXPERIMENTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MEASURED = sorted(
    file.parent for file in EXPERIMENTS.glob("*/report.py") if list(file.parent.glob("*.jsonl")) or "epoch" in str(file)
)

expected = loaded("expected")


def rebuilt(folder: Path, tmp_path: Path) -> tuple[str, Path]:
    """What the report prints, and the figure it draws, if it draws one."""
    figure = tmp_path / "figure.svg"
    draws = ["--figure", str(figure)] if (folder / "figure.svg").exists() else []
    done = subprocess.run(
        [sys.executable, str(folder / "report.py"), *draws], cwd=tmp_path, env=environment(), capture_output=True,
        text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, figure


def maker(svg: str) -> str:
    """The matplotlib that drew it: another one draws other paths."""
    found = re.search(r"Matplotlib v([\d.]+)", svg)
    return found[1] if found else ""


@pytest.mark.parametrize("folder", MEASURED, ids=lambda folder: folder.name)
def test_the_report_says_what_the_readme_shows(folder: Path, tmp_path: Path) -> None:
    said, figure = rebuilt(folder, tmp_path)
    lines = [line for line in said.splitlines() if line.startswith("|")]
    shown = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 2
    assert [line for line in lines if line not in shown] == []
    assert [line for inside, line in expected.verdicts(folder.name, said) if not inside] == []
    if figure.exists():
        drawn, kept = (file.read_text(encoding="utf-8") for file in (figure, folder / "figure.svg"))
        if maker(drawn) == maker(kept):
            assert drawn == kept


def test_every_experiment_says_how_it_was_made() -> None:
    for folder in (file.parent for file in EXPERIMENTS.glob("*/report.py")):
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert "**Question.**" in text, folder
        assert re.search(r"\*\*Command", text), folder


def test_headline_numbers_lie_where_a_re_run_is_expected() -> None:
    ranges = tomllib.loads(expected.FILE.read_text(encoding="utf-8"))
    assert {folder.name for folder in MEASURED} - ranges.keys() == set(), "headline numbers go to expected.toml"
    for name, entries in ranges.items():
        assert 2 <= len(entries) <= 4, name
        text = (EXPERIMENTS / name / "README.md").read_text(encoding="utf-8")
        assert [line for inside, line in expected.verdicts(name, text) if not inside] == []


def test_a_number_outside_or_missing_is_told() -> None:
    text = (EXPERIMENTS / "sar_memory" / "README.md").read_text(encoding="utf-8")
    moved = text.replace("| 19.1 | 6.9x | 0.38 |", "| 19.1 | 6.9x | 0.45 |")
    assert moved != text
    assert expected.verdicts("sar_memory", moved)[0] == (
        False, "OUTSIDE 0.36 to 0.4: 0.45 (GAT, random cut, 8 ranks: SAR of graph parallelism)",
    )  # fmt: skip
    gone = "\n".join(line for line in text.splitlines() if "| gat | random | sar, prefetch 0 |" not in line)
    assert [(inside, line[:8]) for inside, line in expected.verdicts("sar_memory", gone)] == [(False, "missing:")] * 3
    assert expected.verdicts("nothing", text) == []


def test_the_lock_file_is_within_what_the_package_asks_for() -> None:
    lines = (EXPERIMENTS / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["dev"])]
    assert [str(r) for r in asked if not r.specifier.contains(pins.get(canonicalize_name(r.name), "0"))] == []
