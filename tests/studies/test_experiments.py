"""Pages hold what raw lines say: tables, figures, quoted and headline numbers; new lines are taken."""

import io
import json
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


WITH_LINES = {file.parent.name for kind in ("jsonl", "csv") for file in EXPERIMENTS.glob(f"*/results.{kind}")}
REPORT = """
import json, lzma
from pathlib import Path
packed = Path(__file__).with_name("results.jsonl.1.xz").read_bytes()
rows = [json.loads(line) for line in lzma.decompress(packed).splitlines()]
print("| job | seconds |", "|---|---|", *(f"| {row['job']} | {row['s']} |" for row in rows), sep="\\n")
"""
PAGE = """# A study

Words.

<!-- table 1 -->

| job | seconds |
|---|---|
| a | 1.5 |
| b | 2 |

b took 2.00 s.
"""
QUOTED = """
[[quoted]]
in = "experiments/good/README.md"
text = "b took {2.00} s"
of = [{ study = "good", row = { job = "b" }, column = "seconds" }]
"""


def page_of(study: str) -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in (EXPERIMENTS / study).glob("*.md"))


@pytest.fixture
def called(check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """called(*arguments, given=...): exit code and lines of experiments/check.py with `given` on stdin."""

    def call(*arguments: str, given: str = "") -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["check.py", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        code = check.main()
        return code, capsys.readouterr().out.splitlines()

    return call


def test_every_quoted_number_is_its_cell(check: ModuleType) -> None:
    """Of the tables in README.md or in a page beside it, which are held to the lines by test_experiments.py."""
    every = check.quoted()
    assert len(every) > 100
    tables = {study: check.lines_of(page_of(study)) for study in {quote.cell["study"] for quote in every}}
    problems = [(quote, check.difference(quote, tables[quote.cell["study"]])) for quote in every]
    assert [(quote, problem) for quote, problem in problems if problem is not None] == []


def test_numbers_drawn_at_random_are_recomputed_from_the_lines(called: Any) -> None:
    code, lines = called("quoted", "--count", "3")
    assert (code, lines[-1]) == (0, "3 of 3 match"), lines


def test_a_number_that_is_not_its_cell_is_wrong(check: ModuleType) -> None:
    quote = next(quote for quote in check.quoted() if quote.cell["study"] == "sar_memory")
    tables = check.lines_of((EXPERIMENTS / "sar_memory" / "README.md").read_text(encoding="utf-8"))
    assert check.difference(quote, tables) is None
    assert check.difference(quote._replace(shown="0.39"), tables) == "the lines have 0.53"
    elsewhere = quote._replace(cell={**quote.cell, "row": {"model": "none"}})
    assert check.difference(elsewhere, tables).startswith("0 lines are")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('in = "README.md"\ntext = "a sentence {1.0} that is not there"\nof = [{}]', "README.md does not say"),
        ('in = "README.md"\ntext = "b {0.36} GiB ({6.92} without)"\nof = [{}]', "2 numbers and 1 cells"),
    ],
)
def test_a_text_that_has_changed_is_told(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, message: str
) -> None:
    (here := tmp_path / "experiments").mkdir()
    (here / "quoted.toml").write_text(f"[[quoted]]\n{entry}\n", encoding="utf-8")
    (tmp_path / "README.md").write_text("b 0.36 GiB (6.92 without)", encoding="utf-8")
    monkeypatch.setattr(check, "HERE", here)
    with pytest.raises(ValueError, match=message):
        check.quoted()


def test_headline_numbers_lie_where_a_re_run_is_expected(check: ModuleType) -> None:
    ranges = tomllib.loads((EXPERIMENTS / check.EXPECTED).read_text(encoding="utf-8"))
    assert WITH_LINES - ranges.keys() == set(), "headline numbers go to expected.toml"
    for name, entries in ranges.items():
        assert 2 <= len(entries) <= 4, name
        assert [line for inside, line in check.verdicts(name, page_of(name)) if not inside] == []


def test_a_number_outside_or_missing_is_told(check: ModuleType) -> None:
    text = page_of("sar_memory")
    moved = text.replace("| 19.1 | 6.9x | 0.38 |", "| 19.1 | 6.9x | 0.45 |")
    assert moved != text
    assert check.verdicts("sar_memory", moved)[0] == (
        False,
        "OUTSIDE 0.36 to 0.4: 0.45 (GAT, random cut, 8 ranks: SAR of graph parallelism)",
    )
    gone = "\n".join(line for line in text.splitlines() if "| gat | random | sar, prefetch 0 |" not in line)
    assert [(inside, line[:8]) for inside, line in check.verdicts("sar_memory", gone)] == [(False, "missing:")] * 3
    assert check.verdicts("nothing", text) == []


def test_what_a_report_prints_is_judged_and_what_is_expected_is_listed(called: Any) -> None:
    """As reproduce.sh calls it."""
    report = page_of("sar_memory")
    for text, expected in ((report, 0), (report.replace("| 0.38 |", "| 0.48 |"), 1)):
        code, lines = called("expected", "sar_memory", given=text)
        assert (code, len(lines)) == (expected, 3)
    assert any(
        "0.36 to 0.4: GAT, random cut, 8 ranks" in line for line in called("expected", "--list", "sar_memory")[1]
    )


def test_pages_take_the_tables_figures_and_numbers_of_new_lines(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, copy = tmp_path / "experiments", tmp_path / "out" / "experiments" / "good"
    (here / "good").mkdir(parents=True)
    copy.mkdir(parents=True)
    (here / "good" / "report.py").write_text(REPORT, encoding="utf-8")
    (here / "good" / "README.md").write_text(PAGE, encoding="utf-8")
    (here / "quoted.toml").write_text(QUOTED, encoding="utf-8")
    monkeypatch.setattr(check, "HERE", here)
    parts = [check.all_studies.Study(name=name, minutes=1, folder="good") for name in ("good", "good_half")]
    monkeypatch.setattr(check.all_studies, "LISTS", {"compare": parts})
    plain = here / "good" / "results.jsonl"
    plain.write_text("".join(json.dumps(row) + "\n" for row in [{"job": "a", "s": 1.5}, {"job": "b", "s": 2}]))
    check.records.pack(plain)
    (here / "README.md").write_text(check.where_and_when(), encoding="utf-8")
    assert check.misplaced("good", check.report_of("good")) == []

    new = [{"job": "a", "s": 1.5}, {"job": "b", "s": 2.468, "commit": "abc"}, {"job": "c", "s": 7}]
    (copy / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in new), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["check.py", "renew", str(tmp_path / "out")])
    check.main()
    assert (here / "good" / "README.md").read_text(encoding="utf-8") == PAGE  # the study has not ended there
    (copy / "ended.good").touch()
    check.main()
    assert (here / "good" / "README.md").read_text(encoding="utf-8") == PAGE  # nor all of it
    (copy / "ended.good_half").touch()
    check.main()
    page = (here / "good" / "README.md").read_text(encoding="utf-8")
    assert page == PAGE.replace("| b | 2 |", "| b | 2.468 |\n| c | 7 |").replace("2.00 s", "2.47 s")
    assert "{2.47}" in (here / "quoted.toml").read_text(encoding="utf-8")
    assert "| 3 |" in (here / "README.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.splitlines()[-1] == "1 studies, 0 lines to be placed by hand"


def test_a_table_that_a_page_lacks_or_holds_otherwise_is_told(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "HERE", tmp_path)
    (page := tmp_path / "good" / "README.md").parent.mkdir()
    page.write_text(PAGE + "\n<!-- table 3 -->\n\n| x |\n|---|\n", encoding="utf-8")
    report = "### a\n\n| job | seconds |\n|---|---|\n| a | 1 |\n\n| y |\n|---|\n"
    assert check.misplaced("good", report) == [
        "good: no page has <!-- table 2 -->",
        "good: table 1 of a page is another one",
        "good: table 3 of a page is another one",
    ]
    text = check.placed(page.read_text(encoding="utf-8"), check.tables_of(report))
    assert text == page.read_text(encoding="utf-8").replace("| a | 1.5 |\n| b | 2 |\n", "| a | 1 |\n")


def test_where_and_when_is_what_the_lines_say(check: ModuleType) -> None:
    table = check.where_and_when()
    assert len(table.splitlines()) > 20
    assert table in (EXPERIMENTS / "README.md").read_text(encoding="utf-8")


def test_the_lock_file_of_the_gpu_machine_has_hashes() -> None:
    lines = (ROOT / "kernels" / "bench" / "requirements-gpu.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[\w-]+==\S+ --hash=sha256:[0-9a-f]{64}", line)] == []
    assert len(pins) > 20


def test_the_lock_file_is_within_what_the_package_asks_for() -> None:
    text = (EXPERIMENTS / "requirements.lock").read_text(encoding="utf-8")
    hashed = dict(re.findall(r"^([\w.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE))
    assert len(hashed) == sum(not line.startswith("#") for line in text.splitlines()), "a line without a hash"
    pins = hashed | dict(re.findall(r"pip install (torch)==(\S+)$", text, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["dev"])]
    assert [str(r) for r in asked if not r.specifier.contains(pins.get(canonicalize_name(r.name), "0"))] == []
