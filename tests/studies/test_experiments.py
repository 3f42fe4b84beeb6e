"""A report rebuilds what its README shows, from the raw lines that lie beside it."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from conftest import ROOT

EXPERIMENTS = ROOT / "experiments"
READS_RUN_FOLDERS = "accuracy"  # its report has no lines here
PROGRAMS = {file.parent for file in EXPERIMENTS.glob("*/report.py") if file.parent.name != READS_RUN_FOLDERS}
FILES = {file.parent for file in EXPERIMENTS.glob("*/*.yaml") if "\nmethods:" in file.read_text(encoding="utf-8")}
MEASURED = sorted(PROGRAMS | FILES)

NUMBER = re.compile(r"\d+(?:\.\d+)?")


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
def test_the_report_says_what_the_readme_shows(check: ModuleType, folder: Path, tmp_path: Path) -> None:
    """Its tables stand in README.md or in a page beside it, and its figure is the one that lies there."""
    report = check.report_of(folder.name, figure := tmp_path / "figure.svg")
    assert check.tables_of(report)
    assert check.misplaced(folder.name, report) == []
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


def test_seeds_of_a_file_run_cell_by_cell_and_a_cell_without_its_files_is_skipped(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.HERE == EXPERIMENTS  # declared.py is on the path
    declared = import_module("declared")
    (folder := tmp_path / "mine").mkdir()
    (folder / "study.yaml").write_text(
        "cells: {a: [x=1], b: [x=2]}\nmethods: {m: [y=1], n: [y=2]}\nrun: {seeds: 4}\nat_most: {b; n: 2}\n",
        encoding="utf-8",
    )
    (folder / "own.py").write_text("def lacks(v): return 'no a' if v.place == ('a', 'n') else ''\n", encoding="utf-8")
    asked: list[tuple[list[str], list[int]]] = []
    monkeypatch.setattr(declared, "HERE", tmp_path)
    monkeypatch.setattr(declared.blocks, "seeded", lambda jobs, *, seeds, **_: asked.append(([*jobs], seeds)))
    declared.main(["run", "mine"])
    assert asked == [(["a; m"], [0, 1, 2, 3]), (["b; m"], [0, 1, 2, 3]), (["b; n"], [0, 1])]
    assert capsys.readouterr().out == "skipped: no a\n"
    asked.clear()
    declared.main(["run", "mine", "--of", "b", "--seeds", "1"])
    assert asked == [(["b; m", "b; n"], [0])]
    done = {"error": None, "train_wall_seconds": 3000.0, "cold_start_seconds": {"load": 600.0}}
    declared.records.append(folder / "results.jsonl", [{"job": "b; n", "block": 0, "result": done}])
    capsys.readouterr()
    declared.main(["run", "mine", "--list"])
    assert capsys.readouterr().out.splitlines() == [
        "a: 0 of 8 runs; no line says how long",
        "b: 1 of 6 runs; 5.0 core hours left",
    ]
