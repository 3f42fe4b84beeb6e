"""Studies of cells and methods: a file is checked before anything runs, runs, is resumed, and has its tables."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from gnnpar.cli import study as command
from gnnpar.cli.main import run
from gnnpar.config.study import Study, read_study
from gnnpar.report.columns import Runs
from gnnpar.report.study import as_markdown, check, tables
from gnnpar.settings import ConfigError

FILE = """
cells: {gcn: [model=gcn], sage: [model=sage]}
methods: {vanilla: [strategy=graph_parallel, strategy.overlap=none], sar: [strategy=sar]}
common: [comm=threads, world_size=2, debug=tiny, threads_per_rank=1, epochs=4]
run: {blocks: 3, shared_cores: true}
table: [epoch_ms, times(vanilla), sent_mib, points]
headline: "sar sends {sent_mib(gcn, sar) / sent_mib(gcn, vanilla):.1f} of vanilla"
note: the next command
figure: {x: cell, y: times(vanilla), kind: bar}
skip: [sage; sar]
"""


def study(folder: Path, text: str) -> Path:
    file = folder / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_study_of_methods_runs_resumes_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = study(tmp_path, FILE)
    assert run("study", [str(file), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["cell"], row["method"]) for row in rows] == [("gcn", "vanilla"), ("gcn", "sar"), ("sage", "vanilla")]
    assert rows[0]["times(vanilla)"]["value"] == 1 and rows[1]["times(vanilla)"]["n"] == 3
    for folder in Path("multirun/mine").glob("[78]"):
        shutil.rmtree(folder)
    assert run("study", [str(file)]) == 0
    shown = capsys.readouterr().out
    assert "\nsar sends 1.0 of vanilla\n" in shown and shown.endswith("\n\nthe next command\n")
    whole = Path("multirun/mine/report.html").read_text(encoding="utf-8")
    assert "<h1>sar sends 1.0 of vanilla</h1>" in whole and "9 runs of 3 configurations" in whole
    assert "resuming: 7 of 9 jobs are done, 2 to run" in shown
    page = Path("multirun/mine/report.md").read_text(encoding="utf-8")
    assert page.startswith(
        "sar sends 1.0 of vanilla\n\n| cell | method | epoch_ms | times(vanilla) | sent_mib | points |\n|---|"
    )
    assert r"\begin{tabular}" in Path("multirun/mine/table.tex").read_text(encoding="utf-8")
    assert "<svg" in Path("multirun/mine/figure.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("[epoch_ms,", "[epohs_ms,"), "table: epohs_ms is no column, did you mean epoch_ms?"),
        (("times(vanilla),", "times(vanila),"), "table: vanila is no cell or method, did you mean vanilla?"),
        (("times(vanilla),", "times(),"), "table: times needs a base, as times(NAME)"),
        (("blocks: 3", "blocks: 2"), "table: {times(vanilla)}: an interval needs run.blocks=3, not 2"),
        (("sent_mib, points]", "over(vanilla)]"), "table: {over(vanilla)}: an interval needs run.seeds=5, not 1"),
        (("points]", '"epoch_ms +"]'), "table: {epoch_ms +} is no expression: invalid syntax"),
        (
            ("[epoch_ms, times(vanilla), sent_mib, points]", "{ms: '{epoch_ms:zz}'}"),
            "table: {epoch_ms}: Unknown format",
        ),
        (("table: [", "tables: [{title: '{los.last}', columns: [epoch_ms]}]\nsmoke: ["), "tables[0]: los.last is no"),
        (("{sent_mib(gcn, sar)", "{sent_mib(gcn, sra)"), "headline: sra is no cell or method, did you mean sar?"),
        (("sage; sar", "sage; sra"), "skip: sra is no cell or method, did you mean sar?"),
        (("x: cell", "x: cells"), "figure: cells is no axis, did you mean cell?; there are cell, method"),
        (("strategy=sar", "strategy=sra"), "cells.gcn and methods.sar: strategy=sra does not exist, did you mean sar?"),
        (("strategy=sar", "strategy"), "methods.sar[0]=strategy is no override; write key=value or group=option"),
        (("cells:", "cels:"), "unknown key cels="),
    ],
)
def test_wrong_study_of_methods_is_one_line(
    tmp_path: Path, change: tuple[str, str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = study(tmp_path, FILE.replace(*change))
    assert run("study", [str(file), "--folder", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"gnnpar: {file}: ") and line in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def result(epoch: float, test: float) -> dict[str, Any]:
    return {
        "oversubscribed": False,
        "provenance": "measured",
        "epoch_seconds": {"mean": epoch},
        "metric": {"test_at_best_val": test},
        "loss": {"last": epoch / 2},
        "settings": {"size": 40},
    }


def test_columns_pair_by_seed_and_block_and_a_failed_job_says_why(tmp_path: Path) -> None:
    text = """
cells: {model: {gcn: [], gat: []}, rate: {0.1: [], 1: []}}
methods: {exact: [], fast: []}
run: {seeds: 5, blocks: 3}
at_most: {fast; gat: 1}
job: "{rate} {model} {method}"
tables:
  - title: "### {model} of {first(settings.size):.0f} nodes"
    columns:
      link: "{rate}"
      how: "`{method}`"
      times: "{times(exact):.2fx}"
      points: "{over(exact):+±}"
      verdict: "{verdict(exact, 0.3)}"
      loss, ms: "{1000 * loss.last(exact):.1f}"
"""
    made = read_study(study(tmp_path, text))
    check(made)
    assert [variant.name for variant in made.variants()][:2] == ["0.1 gcn exact", "0.1 gcn fast"]
    assert len(made.jobs(made.variants())) == 6 * 15 + 2
    exact = {(seed, block): result(0.4, 0.8) for seed in range(5) for block in range(3)}
    fast = {(seed, block): result(0.2, 0.8 + seed / 1000) for seed in range(5) for block in range(3)}
    failed = {(0, 0): {"status": "failed", "error": "out of\nmemory"}}
    runs: Runs = {("gcn", "0.1", "exact"): exact, ("gcn", "0.1", "fast"): fast, ("gat", "1", "fast"): failed}
    assert as_markdown(tables(made, runs)).splitlines() == [
        "### gcn of 40 nodes",
        "",
        "| link | how | times | points | verdict | loss, ms |",
        "|---|---|---|---|---|---|",
        "| 0.1 | `exact` | 1 | - | - | 200.0 |",
        "| 0.1 | `fast` | 2.00 | +0.20 ± 0.20 | not inferior | 200.0 |",
        "",
        "-",
        "",
        "| link | how | times |",
        "|---|---|---|",
        "| 1 | `fast` | failed: out of memory |",
        "",
    ]


def test_methods_of_another_file_are_named_and_an_unknown_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared.yaml").write_text("methods: {m: [x=1], n: [x=2], o: [x=3]}\n")
    made = read_study(study(tmp_path, "methods_of: shared.yaml\nmethods: [n, m]\n"))
    assert made.methods == {"n": ["x=2"], "m": ["x=1"]}
    for text, error in (("methods: [nn]", "nn is not in shared.yaml"), ("methods: {m: [x=1]}", "be a list of names")):
        with pytest.raises(ConfigError, match=error):
            read_study(study(tmp_path, f"methods_of: shared.yaml\n{text}\n"))


def test_own_study_has_enough_seeds_for_every_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demo = read_study(command.file_of(Path("demo")))
    check(demo)
    assert demo.methods.keys() > {"single", "vanilla", "bf16", "adaqp", "sar", "gnnpipe", "control"}
    jobs = demo.jobs(demo.variants())
    assert [len({seed for _, seed, _ in jobs[at : at + 8]}) for at in range(0, 40, 8)] == [1] * 5  # blocks
    one: Runs = {(name,): {(s, 0): result(1 + (name == "a"), 0.5) for s in range(5)} for name in "ab"}
    ((_, table),) = tables(Study(methods={"a": [], "b": []}, seeds=5, table=["times(a)"]), one)
    assert table.lines == [["a", "1"], ["b", "2.00"]]  # a seed is a block
    Path("demo").write_text("of the user", encoding="utf-8")
    assert command.file_of(Path("demo")) == Path("demo")


def test_failed_study_says_that_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "methods: {a: [strategy=single, dataset=npz, dataset.path=there.npz]}\ntable: [epoch_ms]\n"
    assert run("study", [str(study(tmp_path, text))]) > 0
    assert "  the same command again runs what is missing\n" in capsys.readouterr().out


def test_study_without_a_table_has_one(tmp_path: Path) -> None:
    made = Study(methods={"a": [], "b": []}, blocks=3)
    ((_, table),) = tables(made, {("a",): {(0, 0): result(0.1, 0.5) | _BARE}})
    assert table.headings == ["method", "epoch_ms", "times('a')", "share", "peak_mib", "sent_mib"]
    assert table.lines == [["a", "100", "1", "0%", "1", "2.0"]]


_BARE = {
    "breakdown_seconds": dict.fromkeys(("exposed_wire", "exposed_skew", "reduce"), 0.0),
    "memory_bytes": {"peak": [2**20]},
    "bytes_per_epoch": {"total": 2**21},
}


@pytest.mark.parametrize("number", [0, 1])
def test_examples_of_the_guide_are_studies(tmp_path: Path, number: int) -> None:
    guide = (ROOT / "docs" / "guide" / "studies.md").read_text(encoding="utf-8")
    made = read_study(study(tmp_path, re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)[number]))
    check(made)
    assert len(made.variants()) == (10, 4)[number]
