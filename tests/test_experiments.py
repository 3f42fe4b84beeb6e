"""A report rebuilds what its README shows, from the raw lines that lie beside it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, environment

EXPERIMENTS = ROOT / "experiments"
MEASURED = sorted(
    file.parent for file in EXPERIMENTS.glob("*/report.py") if list(file.parent.glob("*.jsonl")) or "epoch" in str(file)
)


def rebuilt(folder: Path, tmp_path: Path) -> tuple[list[str], Path]:
    """Lines that the report prints, and the figure it draws, if it draws one."""
    figure = tmp_path / "figure.svg"
    draws = ["--figure", str(figure)] if (folder / "figure.svg").exists() else []
    done = subprocess.run(
        [sys.executable, str(folder / "report.py"), *draws], cwd=tmp_path, env=environment(), capture_output=True,
        text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("|")], figure


def maker(svg: str) -> str:
    """The matplotlib that drew it: another one draws other paths."""
    found = re.search(r"Matplotlib v([\d.]+)", svg)
    return found[1] if found else ""


@pytest.mark.parametrize("folder", MEASURED, ids=lambda folder: folder.name)
def test_the_report_says_what_the_readme_shows(folder: Path, tmp_path: Path) -> None:
    lines, figure = rebuilt(folder, tmp_path)
    shown = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 2
    assert [line for line in lines if line not in shown] == []
    if figure.exists():
        drawn, kept = (file.read_text(encoding="utf-8") for file in (figure, folder / "figure.svg"))
        if maker(drawn) == maker(kept):
            assert drawn == kept


def test_every_experiment_says_how_it_was_made() -> None:
    for folder in (file.parent for file in EXPERIMENTS.glob("*/report.py")):
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert "**Question.**" in text, folder
        assert re.search(r"\*\*Command", text), folder
