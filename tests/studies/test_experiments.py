"""A report rebuilds what its README shows, from the raw lines that lie beside it."""

import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import ROOT

EXPERIMENTS = ROOT / "experiments"
READS_RUN_FOLDERS = "accuracy"  # its report has no lines here
PROGRAMS = {file.parent for file in EXPERIMENTS.glob("*/report.py") if file.parent.name != READS_RUN_FOLDERS}
FILES = {file.parent for file in EXPERIMENTS.glob("*/*.yaml") if "\nmethods:" in file.read_text(encoding="utf-8")}
MEASURED = sorted(PROGRAMS | FILES)

NUMBER = re.compile(r"\d+(?:\.\d+)?")

Rebuilt = Callable[[Path], tuple[list[str], Path]]
"""Lines that a report prints, and the figure it draws, if it draws one."""


@pytest.fixture
def rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Rebuilt]:
    """Run a report as a script in this process, which imports torch and matplotlib once for all of them."""
    import matplotlib
    import matplotlib.pyplot as plt

    loaded, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)

    def run(folder: Path) -> tuple[list[str], Path]:
        figure = tmp_path / "figure.svg"
        draws = ["--figure", str(figure)] if (folder / "figure.svg").exists() else []
        program = (
            [str(folder / "report.py")]
            if folder in PROGRAMS
            else [str(EXPERIMENTS / "declared.py"), "report", folder.name]
        )
        monkeypatch.setattr(sys, "argv", [*program, *draws])
        sys.path.insert(0, str(folder))  # as Python does for a script
        runpy.run_path(sys.argv[0], run_name="__main__")
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")], figure

    with matplotlib.rc_context():
        yield run
    plt.close("all")
    sys.path[:] = path
    for name in set(sys.modules) - loaded:  # two studies may have modules of one name
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(EXPERIMENTS)):
            del sys.modules[name]


def maker(svg: str) -> str:
    """The matplotlib that drew it: another one draws other paths."""
    found = re.search(r"Matplotlib v([\d.]+)", svg)
    return found[1] if found else ""


def assert_same_drawing(drawn: Path, kept: Path) -> None:
    """To a hundred-thousandth of a point: the last bits of numpy's logarithms differ with and without AVX-512,
    and matplotlib makes ids of them."""
    pages = [file.read_text(encoding="utf-8") for file in (drawn, kept)]
    if maker(pages[0]) != maker(pages[1]):
        return
    texts, numbers = [], []
    for page in pages:
        ids: dict[str, str] = {}
        text = re.sub(
            r"\b[a-zA-Z][0-9a-f]{10}\b", lambda found, ids=ids: ids.setdefault(found[0], f"id{len(ids)}"), page
        )
        texts.append(NUMBER.sub("#", text))
        numbers.append([float(each) for each in NUMBER.findall(text)])
    assert texts[0] == texts[1]
    assert numbers[0] == pytest.approx(numbers[1], rel=0, abs=1e-5)


@pytest.mark.parametrize("folder", MEASURED, ids=lambda folder: folder.name)
def test_the_report_says_what_the_readme_shows(folder: Path, rebuilt: Rebuilt) -> None:
    """Its lines stand in README.md or in a page beside it, and its figure is the one that lies there."""
    lines, figure = rebuilt(folder)
    shown = {line for page in folder.glob("*.md") for line in page.read_text(encoding="utf-8").splitlines()}
    assert len(lines) > 2
    assert [line for line in lines if line not in shown] == []
    if figure.exists():
        assert_same_drawing(figure, folder / "figure.svg")


def test_the_figure_of_the_decision_table_is_drawn_from_the_lines(tmp_path: Path) -> None:
    """In a process of its own: its neighbours have names of modules that other studies have, too."""
    drawn = tmp_path / "figure.svg"
    subprocess.run([sys.executable, str(EXPERIMENTS / "overview.py"), "--figure", str(drawn)], check=True)
    new = drawn.read_text(encoding="utf-8")
    assert "<svg" in new and len(new) > 20_000
    assert_same_drawing(drawn, EXPERIMENTS / "figure.svg")


def test_every_experiment_says_how_it_was_made() -> None:
    for folder in MEASURED:
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert "**Question.**" in text, folder
        assert re.search(r"\*\*Command", text), folder


def test_where_and_when_is_what_the_lines_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    table = runpy.run_path(str(EXPERIMENTS / "measured.py"))["table"]()
    shown = (EXPERIMENTS / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(table) > 20
    assert [line for line in table if line not in shown] == []
