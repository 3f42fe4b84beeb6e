"""make compare runs what the decision table rests on, make studies all else; what has ended is not run again."""

import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from gnnpar.config.study import read_study

EXPERIMENTS = ROOT / "experiments"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    """study.py as a module."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    before = set(sys.modules)
    yield import_module("study")
    for name in (set(sys.modules) - before) & {file.stem for file in EXPERIMENTS.glob("*.py")}:
        del sys.modules[name]


def rested_on() -> set[str]:
    """Studies that the last column of the decision table names."""
    lines = (EXPERIMENTS / "compare_all" / "decisions.md").read_text(encoding="utf-8").splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("|") and line.endswith("| rests on |"))
    rows = []
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(line)
    assert len(rows) > 8
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[-2])}


def test_compare_is_what_the_decision_table_rests_on(suite: Any) -> None:
    compare = suite.lists()["compare"]
    assert {study.folder for study in compare} == rested_on()
    assert sum(study.minutes for study in compare) < 12 * 60


def test_every_study_is_in_one_of_the_two(suite: Any) -> None:
    lists = suite.lists()
    every = [study for studies in lists.values() for study in studies]
    assert len({study.name for study in every}) == len(every)
    folders = {file.parent.name for file in EXPERIMENTS.glob("*/README.md")}
    elsewhere = suite.yaml.safe_load((EXPERIMENTS / "all.yaml").read_text(encoding="utf-8"))["elsewhere"]
    assert {study.folder for study in every} | set(elsewhere) == folders
    assert [study.name for study in every if not study.minutes] == []


def test_all_of_compare_all_is_run(suite: Any) -> None:
    every = [study for studies in suite.lists().values() for study in studies if study.folder == "compare_all"]
    names = [name for study in every for words in study.run for name in words]
    files = {file.stem for file in (EXPERIMENTS / "compare_all").glob("*.yaml")} - {"methods"}
    assert sorted(names) == sorted(name for name in files if not name.startswith("quick_"))
    stated = sum(read_study(EXPERIMENTS / "compare_all" / f"{name}.yaml").minutes for name in names)
    assert sum(study.minutes for study in every) == pytest.approx(stated, abs=15)


def test_the_copy_has_no_lines_and_what_ended_is_not_run_again(
    suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "experiments"
    (here / "good").mkdir(parents=True)
    (here / "bad").mkdir()
    for file in EXPERIMENTS.glob("*.py"):
        shutil.copy(file, here)
    (here / "expected.toml").write_text("", encoding="utf-8")
    (here / "all.yaml").write_text(
        "compare: {bad: {minutes: 2, needs: []}, good: {minutes: 3, needs: [quiet]}}\n", encoding="utf-8"
    )
    (here / "good" / "results.jsonl.1.xz").write_bytes(b"committed")
    (here / "good" / "run.py").write_text(
        "def run(files):\n    assert not files.folder.joinpath('results.jsonl.1.xz').exists()\n"
        "    files().open('a').write('{}\\n')\n",
        encoding="utf-8",
    )
    (here / "good" / "report.py").write_text("def report(files): print('| a |')\n", encoding="utf-8")
    (here / "bad" / "run.py").write_text("def run(files): raise SystemExit('no')\n", encoding="utf-8")
    monkeypatch.setattr(suite, "HERE", here)
    command = ["all", "compare", "--out", str(tmp_path / "out")]
    for _ in range(2):
        with pytest.raises(SystemExit, match="not whole: bad; the same command goes on"):
            suite.main(command)
    copy = tmp_path / "out" / "experiments" / "good"
    assert (copy / "results.jsonl").read_text(encoding="utf-8") == "{}\n"
    assert (copy / "report.md").read_text(encoding="utf-8") == "| a |\n"
    assert (here / "good" / "results.jsonl.1.xz").read_bytes() == b"committed"
    assert not (here / "good" / "results.jsonl").exists()
    capsys.readouterr()
    suite.main([*command, "--list"])
    assert "good: 3 minutes, needs a quiet machine, done\n0.1 hours in all" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="there is no study nothing"):
        suite.main(["all", "nothing"])


def test_the_copy_keeps_lines_that_are_there(suite: Any, tmp_path: Path) -> None:
    (folder := tmp_path / "experiments" / "scale").mkdir(parents=True)
    (folder / "results.jsonl").write_text("{}\n")
    assert (suite.copied(tmp_path) / "scale" / "run.py").exists()
    assert (folder / "results.jsonl").read_text() == "{}\n"


def test_options_are_the_keywords_of_a_function(suite: Any) -> None:
    def function(files: object, *names: str, several: tuple = (), count: int = 3, scale: float = 1.0, on: bool = False):
        """Words."""

    given = suite.options(function, ["a", "b", "--several", "x", "y", "--count", "4", "--on"], folder="")
    assert given == {"names": ["a", "b"], "several": ["x", "y"], "count": 4, "scale": 1.0, "on": True, "folder": ""}


def test_a_study_says_why_a_job_cannot_run(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = read_study(EXPERIMENTS / "compare_all" / "cora.yaml").variants()[0]
    monkeypatch.setenv("GNNPAR_DATA", str(tmp_path))
    assert suite.lacks(variant) == f"no {tmp_path / 'Cora'}"
    (tmp_path / "Cora").mkdir()
    assert suite.lacks(variant) == ""
    monkeypatch.setattr(suite, "trial", lambda: "no: needs root")
    paced = read_study(EXPERIMENTS / "compare_all" / "paced.yaml").variants()
    assert {suite.lacks(each) for each in paced} == {"", "launch=paced needs root"}
    with pytest.raises(SystemExit, match="there is no part spead; there are accuracy, "):
        suite.main(["run", "compare_all", "spead"])
