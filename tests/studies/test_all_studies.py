"""make compare runs what the decision table rests on, make studies all else; what has ended is not run again."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conftest import ROOT
from gnnpar.config.study import read_study

EXPERIMENTS = ROOT / "experiments"


@pytest.fixture
def suite(module: Callable[..., Any]) -> Any:
    return module("all_studies")


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
    assert {study.where for study in suite.COMPARE} == rested_on()
    assert sum(study.minutes for study in suite.COMPARE) < 12 * 60


def test_every_study_is_in_one_of_the_two(suite: Any) -> None:
    names = [study.name for study in (*suite.COMPARE, *suite.REST)]
    assert len(names) == len(set(names))
    folders = {file.parent.name for file in EXPERIMENTS.glob("*/README.md")}
    assert {study.where for study in (*suite.COMPARE, *suite.REST)} | set(suite.ELSEWHERE) == folders
    for study in (*suite.COMPARE, *suite.REST):
        folder = EXPERIMENTS / study.where
        if not (folder / "run.py").exists() and "--of" not in study.runs[0]:
            made = [read_study(file) for file in folder.glob("*.yaml") if file.stem in (study.runs[0] or file.stem)]
            needs = {need for part in made for need in part.needs}
            assert study.minutes == sum(part.minutes for part in made), study.name
            assert (study.root, study.quiet) == ("root" in needs, "quiet" in needs), study.name


def test_all_of_compare_all_is_run(suite: Any) -> None:
    names = (*suite.TIMED, *suite.TRAINED, *suite.BESIDE)
    stated = [read_study(EXPERIMENTS / "compare_all" / f"{name}.yaml").minutes for name in names]
    minutes = sum(study.minutes for study in (*suite.COMPARE, *suite.REST) if study.where == "compare_all")
    assert minutes == pytest.approx(sum(stated), abs=15)


def test_the_copy_has_no_lines_and_what_ended_is_not_run_again(
    suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "experiments"
    (here / "good").mkdir(parents=True)
    (here / "bad").mkdir()
    for name in ("all_studies.py", "check.py", "records.py"):
        shutil.copy(EXPERIMENTS / name, here)
    (here / "expected.toml").write_text("", encoding="utf-8")
    (here / "good" / "results.jsonl.1.xz").write_bytes(b"committed")
    (here / "good" / "run.py").write_text(
        "from pathlib import Path\nout = Path(__file__).with_name('results.jsonl')\n"
        "assert not Path(__file__).with_name('results.jsonl.1.xz').exists()\nout.open('a').write('{}\\n')\n",
        encoding="utf-8",
    )
    (here / "good" / "report.py").write_text("print('| a |')\n", encoding="utf-8")
    (here / "bad" / "run.py").write_text("raise SystemExit('no')\n", encoding="utf-8")
    monkeypatch.setattr(suite, "HERE", here)
    lists = {"compare": [suite.Study(name="bad", minutes=2), suite.Study(name="good", minutes=3)]}
    monkeypatch.setattr(suite, "LISTS", lists)
    monkeypatch.setattr(sys, "argv", ["all_studies.py", "compare", "--out", str(tmp_path / "out")])
    for _ in range(2):
        with pytest.raises(SystemExit, match="not whole: bad; the same command goes on"):
            suite.main()
    copy = tmp_path / "out" / "experiments" / "good"
    assert (copy / "results.jsonl").read_text(encoding="utf-8") == "{}\n"
    assert (copy / "report.md").read_text(encoding="utf-8") == "| a |\n"
    assert (here / "good" / "results.jsonl.1.xz").read_bytes() == b"committed"
    assert not (here / "good" / "results.jsonl").exists()
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--list"])
    suite.main()
    assert "good: 3 minutes, needs a quiet machine, done\n0.1 hours in all" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["all_studies.py", "nothing"])
    with pytest.raises(SystemExit, match="there is no study nothing"):
        suite.main()


def test_the_copy_keeps_lines_that_are_there(suite: ModuleType, tmp_path: Path) -> None:
    (folder := tmp_path / "experiments" / "scale").mkdir(parents=True)
    (folder / "results.jsonl").write_text("{}\n")
    assert (suite.copied(tmp_path) / "scale" / "run.py").exists()
    assert (folder / "results.jsonl").read_text() == "{}\n"


@pytest.fixture
def bench(module: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("GNNPAR_DATA", "data")  # which is not there
    return module("run", "bench_peers")


def test_a_go_measures_continues_and_begins_anew(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.OUT == ROOT / "outputs" / "bench_peers" / "results.jsonl"
    calls: list[str] = []

    def measure(name: str, *_: object) -> list[dict[str, Any]]:
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return [{"cell": name, "go": len(calls)}]

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "has", lambda *_: True)
    monkeypatch.chdir(tmp_path)  # without data/debian
    out, cells = tmp_path / "new" / "lines.jsonl", ["gcn | 1 thread", "gcn | rmat"]
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(out), "--cells", *cells, "gat | debian"])
    with pytest.raises(KeyboardInterrupt):
        bench.main()
    bench.main()
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"cell": cells[0], "go": 1},
        {"cell": cells[1], "go": 3},
    ]
    bench.main()
    assert calls == [*cells, cells[1], *cells]
    said = capsys.readouterr().out
    assert f"2 of 2 cells are measured now -> {out}" in said and "1 of 2 cells are measured now" in said
    assert "data/debian/debian.npz is not there: the cells of debian are left out" in said
