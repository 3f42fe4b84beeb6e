"""Pages take the figures of new lines: rows, quoted numbers, the table of studies; what has no place is reported."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from conftest import ROOT

EXPERIMENTS = ROOT / "experiments"
REPORT = """
import json, lzma
from pathlib import Path
packed = Path(__file__).with_name("results.jsonl.1.xz").read_bytes()
rows = [json.loads(line) for line in lzma.decompress(packed).splitlines()]
print("| job | seconds |", "|---|---|", *(f"| {row['job']} | {row['s']} |" for row in rows), sep="\\n")
"""
PAGE = "# A study\n\nWords.\n\n| job | seconds |\n|---|---|\n| a | 1.5 |\n| b | 2 |\n\nb took 2.00 s.\n"
QUOTED = """
[[quoted]]
in = "{name}/README.md"
text = "b took {{2.00}} s"
of = [{{ study = "good", row = {{ job = "b" }}, column = "seconds" }}]
"""


@pytest.fixture
def renew(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    before = set(sys.modules)
    yield import_module("renew")
    for name in (set(sys.modules) - before) & {file.stem for file in EXPERIMENTS.glob("*.py")}:
        del sys.modules[name]


def test_rows_and_quoted_numbers_are_those_of_the_new_lines(
    renew: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, copy = tmp_path / "experiments", tmp_path / "out" / "experiments" / "good"
    (here / "good").mkdir(parents=True)
    copy.mkdir(parents=True)
    (here / "good" / "report.py").write_text(REPORT, encoding="utf-8")
    (here / "good" / "README.md").write_text(PAGE, encoding="utf-8")
    (here / "README.md").write_text("", encoding="utf-8")
    (here / "quoted.toml").write_text(QUOTED.format(name="experiments/good"), encoding="utf-8")
    monkeypatch.setattr(renew, "HERE", here)
    monkeypatch.setattr(renew.audit, "HERE", here)
    monkeypatch.setattr(renew.audit, "FILE", here / "quoted.toml")
    monkeypatch.setattr(renew.measured, "HERE", here)
    parts = [renew.all_studies.Study(name=name, minutes=1, folder="good") for name in ("good", "good_half")]
    monkeypatch.setattr(renew.all_studies, "LISTS", {"compare": parts})
    plain = here / "good" / "results.jsonl"
    plain.write_text("".join(json.dumps(row) + "\n" for row in [{"job": "a", "s": 1.5}, {"job": "b", "s": 2}]))
    renew.records.pack(plain)
    (here / "README.md").write_text("\n".join(renew.measured.table()) + "\n", encoding="utf-8")

    new = [{"job": "a", "s": 1.5}, {"job": "b", "s": 2.468, "commit": "abc"}, {"job": "c", "s": 7}]
    (copy / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in new), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["renew.py", str(tmp_path / "out")])
    renew.main()
    assert (here / "good" / "README.md").read_text(encoding="utf-8") == PAGE  # the study has not ended there
    (copy / "ended.good").touch()
    renew.main()
    assert (here / "good" / "README.md").read_text(encoding="utf-8") == PAGE  # nor all of it
    (copy / "ended.good_half").touch()
    renew.main()
    page = (here / "good" / "README.md").read_text(encoding="utf-8")
    assert page == PAGE.replace("| b | 2 |", "| b | 2.468 |\n| c | 7 |").replace("2.00 s", "2.47 s")
    assert "{2.47}" in (here / "quoted.toml").read_text(encoding="utf-8")
    assert "| 3 |" in (here / "README.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.splitlines()[-1] == "1 studies, 0 lines to be placed by hand"


def test_what_no_page_shows_is_said(renew: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("| a | 1 |\n| a | 1 |\n| b | 2 |\n", encoding="utf-8")
    old, new = (
        ["| a | 1 |", "| a | 1 |", "| x | 5 |", "| b | 2 |"],
        ["| a | 3 |", "| a | 4 |", "| x | 6 |", "| b | 2 |"],
    )
    assert renew.rewrite([page], old, new) == ["- | x | 5 |", "+ | x | 6 |"]
    assert page.read_text(encoding="utf-8") == "| a | 3 |\n| a | 4 |\n| b | 2 |\n"
