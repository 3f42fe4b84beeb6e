"""Studies of factors, and of cells and methods: a file is checked before anything runs, and has its tables."""

import json
import math
import re
import shutil
import statistics
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest

from conftest import ROOT, Refused, Run
from gnnpar.cli import study as command
from gnnpar.config.study import Study, Variant, job_overrides, listed, read_study
from gnnpar.files import working_in
from gnnpar.report.columns import Runs
from gnnpar.report.study import as_json, as_markdown, check, tables
from gnnpar.settings import ConfigError
from gnnpar.training.result.result import epoch_time

BASE = "base: [strategy=graph_parallel, comm=threads, world_size=2, debug=tiny, threads_per_rank=1, epochs=4]\n"
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


def test_study_of_methods_runs_resumes_and_reports(run_here: Run, tmp_path: Path) -> None:
    study(tmp_path, FILE)
    runs = tmp_path / "multirun" / "mine"
    done = run_here("study", "mine.yaml", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["cell"], row["method"]) for row in rows] == [("gcn", "vanilla"), ("gcn", "sar"), ("sage", "vanilla")]
    assert rows[0]["times(vanilla)"]["value"] == 1 and rows[1]["times(vanilla)"]["n"] == 3
    for folder in runs.glob("[78]"):
        shutil.rmtree(folder)
    shown = run_here("study", "mine.yaml").stdout
    assert "\nsar sends 1.0 of vanilla\n" in shown and shown.endswith("\n\nthe next command\n")
    page = (runs / "report.html").read_text(encoding="utf-8")
    assert "<h1>sar sends 1.0 of vanilla</h1>" in page and "9 runs of 3 configurations" in page
    assert "resuming: 7 of 9 jobs are done, 2 to run" in shown
    heads = "| cell | method | epoch_ms | times(vanilla) | sent_mib | points |\n|---|"
    assert (runs / "report.md").read_text(encoding="utf-8").startswith(f"sar sends 1.0 of vanilla\n\n{heads}")
    assert r"\begin{tabular}" in (runs / "table.tex").read_text(encoding="utf-8")
    assert "<svg" in (runs / "figure.svg").read_text(encoding="utf-8")


@pytest.mark.quick(6)
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
        ("factors: {x: [codec=bf16]}\nmodus: grid", "unknown key modus=grid, did you mean mode?; there are also"),
        ("factors: {x: [codec=bf16]}\nmode: gird", "mode=gird must be one of grid, one_at_a_time, leave_one_out, did"),
        ("factors: {x: [codec=bf16]}\nblocks: 0", "blocks=0 must be a whole number >= 1"),
        ("factors: {x: [codec=bf16]}\nseeds: [1, 1]", "seeds=[1, 1] must be a list of different seeds"),
        ("factors: {x: codec=bf16}", "factors.x=codec=bf16 must be a list of overrides"),
        ("factors: {x: []}", "factors.x is empty"),
        ("factors: {}", "factors is empty; name at least one"),
        ("factor: {x: [codec=bf16]}", "factors is missing; it maps names to lists of overrides; rename factor"),
        ("factors: {x: [bf16]}", "factors.x[0]=bf16 is no override"),
        ("factors: {x: [seed=1]}", "factors.x[0]=seed=1: the study sets it; use its key seeds"),
        ("base: [hydra.sweep.dir=a]\nfactors: {x: [codec=bf16]}", "base[0]=hydra.sweep.dir=a is for the command line"),
        ("factors: {x: [codec=bf17]}", "factors.x[0]: codec=bf17 does not exist, did you mean bf16?"),
        ("base: [epohs=3]\nfactors: {x: [codec=bf16]}", "base: unknown key epohs=3, did you mean epochs?"),
        ("factors: {x: [codec=bf16], y: [codec=identity]}", "factors.y[0] (codec=identity) is the same run as"),
        ("a: [", "is no YAML"),
        ("- a", "must hold keys"),
        ("factors: {x: [codec=bf16]}\nseeds: 2020-01-01", "seeds=2020-01-01 must be"),
        ("factors: {x: [codec=bf16]}\nblocks: !!binary aaaa", "blocks="),
        ("base: !!set {a}\nfactors: {x: [codec=bf16]}", "base="),
    ],
)
def test_wrong_study_is_one_line_with_the_key(
    refused: Refused, tmp_path: Path, change: str | tuple[str, str], line: str
) -> None:
    """Text of factors, or a change of FILE."""
    file = study(tmp_path, change if isinstance(change, str) else FILE.replace(*change))
    command = "ablate" if isinstance(change, str) else "study"
    assert refused(line, command, str(file), "--folder", "runs").startswith(f"gnnpar: {file}")
    assert not (tmp_path / "runs").exists()


def hand_made(
    epoch: float, test: float, *, sent: int = 2**21, peak: Any = (2**20,), cosine: float | None = None
) -> Any:
    return {
        "status": "completed",
        "oversubscribed": False,
        "provenance": "measured",
        "session": None,
        "epoch_seconds": {"mean": epoch, "median": epoch},
        "breakdown_seconds": dict.fromkeys(("exposed_wire", "exposed_skew", "reduce"), 0.0),
        "bytes_per_epoch": {"total": sent},
        "memory_bytes": {"peak": peak},
        "metric": {"test_at_best_val": test, "test": test},
        "loss": {"last": epoch / 2},
        "settings": {"size": 40},
        "fidelity": None if cosine is None else {"cosine": {"mean": cosine}},
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
    exact = {(seed, block): hand_made(0.4, 0.8) for seed in range(5) for block in range(3)}
    fast = {(seed, block): hand_made(0.2, 0.8 + seed / 1000) for seed in range(5) for block in range(3)}
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
    one: Runs = {(name,): {(s, 0): hand_made(1 + (name == "a"), 0.5) for s in range(5)} for name in "ab"}
    ((_, table),) = tables(Study(methods={"a": [], "b": []}, seeds=5, table=["times(a)"]), one)
    assert table.lines == [["a", "1"], ["b", "2.00"]]  # a seed is a block
    Path("demo").write_text("of the user", encoding="utf-8")
    assert command.file_of(Path("demo")) == Path("demo")


def test_failed_study_says_that_the_same_command_goes_on(run_here: Run, tmp_path: Path) -> None:
    study(tmp_path, "methods: {a: [strategy=single, dataset=npz, dataset.path=there.npz]}\ntable: [epoch_ms]\n")
    done = run_here("study", "mine.yaml")
    assert done.returncode > 0
    assert "  the same command again runs what is missing\n" in done.stdout


def test_study_without_a_table_has_one(tmp_path: Path) -> None:
    made = Study(methods={"a": [], "b": []}, blocks=3)
    ((_, table),) = tables(made, {("a",): {(0, 0): hand_made(0.1, 0.5)}})
    assert table.headings == ["method", "epoch_ms", "times('a')", "share", "peak_mib", "sent_mib"]
    assert table.lines == [["a", "100", "1", "0%", "1", "2.0"]]


@pytest.mark.parametrize("number", [0, 1])
def test_examples_of_the_guide_are_studies(tmp_path: Path, number: int) -> None:
    guide = (ROOT / "docs" / "guide" / "studies.md").read_text(encoding="utf-8")
    made = read_study(study(tmp_path, re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)[number]))
    check(made)
    assert len(made.variants()) == (10, 4)[number]


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("one_at_a_time", ["", "a=1", "a=2 b=2", "c=3"]),
        ("grid", ["", "c=3", "a=1", "a=1 c=3", "a=2 b=2", "a=2 b=2 c=3"]),
        ("leave_one_out", ["", "without x", "without y"]),
    ],
)
def test_variants_of_every_mode(tmp_path: Path, mode: str, names: list[str]) -> None:
    text = f"base: [a=0, d=4]\nfactors: {{x: [a=1, [a=2, b=2]], y: [c=3]}}\nmode: {mode}\n"
    variants = read_study(study(tmp_path, text)).variants()
    assert [v.name for v in variants] == names
    found = {v.name: set(v.overrides) for v in variants}
    if mode == "leave_one_out":
        assert found[""] == {"a=2", "b=2", "c=3", "d=4"}
        assert (found["without x"], found["without y"]) == ({"a=0", "c=3", "d=4"}, {"a=2", "b=2", "d=4"})
    else:
        assert found[""] == {"a=0", "d=4"}
        assert found["a=2 b=2"] == {"a=2", "b=2", "d=4"}


def test_blocks_hold_every_run_once_in_orders_of_their_own(tmp_path: Path) -> None:
    text = "factors: {x: [a=1, a=2, a=3]}\nseeds: [4, 7]\nblocks: 3\n"
    made = read_study(study(tmp_path, text))
    jobs = made.jobs(made.variants())
    assert len(jobs) == len(set(jobs)) == 3 * 2 * 4
    orders = [[(v.name, seed) for v, seed, b in jobs if b == block] for block in range(3)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2]
    assert jobs == made.jobs(made.variants())  # the same when it is started again
    assert job_overrides(made.variants()[1], 7, 2) == ["a=1", "tracker=jsonl", "seed=7", "block=2"]


def test_second_study_of_a_running_folder_keeps_its_study_file(refused: Refused, tmp_path: Path) -> None:
    study(tmp_path, BASE + "factors: {x: [epochs=2]}\n")
    with working_in(tmp_path / "multirun" / "mine", remedy="wait", say=print):
        (tmp_path / "multirun/mine/study.yaml").write_text("of the first")
        refused("multirun/mine is in use", "ablate", "mine.yaml")
    assert (tmp_path / "multirun/mine/study.yaml").read_text() == "of the first"


@pytest.mark.slow
def test_table_of_ablate_equals_the_results(run_here: Run, tmp_path: Path) -> None:
    """Two seeds in two blocks: time ratios inside blocks, the rest paired by seed; a second start runs nothing."""
    study(tmp_path, BASE + "factors: {codec: [codec=drop]}\nseeds: 2\nblocks: 2\nshared_cores: true\n")
    done = run_here("ablate", "mine.yaml", "--json")
    assert done.returncode == 0, done.stderr
    base, row = json.loads(done.stdout)
    files = [*(tmp_path / "multirun" / "mine").rglob("result.json")]
    results = [json.loads(path.read_text()) for path in files]
    assert len(results) == 8
    of = {(tuple(r["exactness"]), r["seed"], r["block"]): r for r in results}
    assert {key[1:] for key in of} == {(0, 0), (0, 1), (1, 0), (1, 1)}

    def pair(seed: int, block: int) -> tuple[dict[str, Any], dict[str, Any]]:
        drop = next(r for (kind, s, b), r in of.items() if (s, b) == (seed, block) and kind != ("exact",))
        return drop, of[("exact",), seed, block]

    assert (base["variant"], row["variant"], row["runs()"]) == ("base", "codec=drop", "4")
    pairs = {key: pair(*key) for key in product((0, 1), (0, 1))}
    ratios = [math.log(cast("float", epoch_time(a)) / cast("float", epoch_time(b))) for a, b in pairs.values()]
    assert row["epoch / epoch(base)"]["value"] == pytest.approx(math.exp(statistics.fmean(ratios)))
    assert (row["epoch / epoch(base)"]["n"], row["points - points(base)"]["n"]) == (2, 2)
    sent = [a["bytes_per_epoch"]["total"] - b["bytes_per_epoch"]["total"] for a, b in (pair(0, 0), pair(1, 0))]
    assert row["sent_mib - sent_mib(base)"]["value"] == pytest.approx(statistics.fmean(sent) / 2**20)
    assert sent[0] < 0
    tests = [[100 * r["metric"]["test_at_best_val"] for r in both] for both in pairs.values()]
    points = statistics.fmean(a - b for a, b in tests)
    assert row["points - points(base)"]["value"] == pytest.approx(points, abs=1e-9)
    assert row["points - points(base)"]["high"] is row["epoch / epoch(base)"]["high"] is None  # of two seeds and blocks
    assert row["peak_mib - peak_mib(base)"] is None  # threads: nobody's own
    written = [path.stat().st_mtime_ns for path in files]
    shown = run_here("ablate", "mine.yaml").stdout
    assert "resuming: 8 of 8 jobs are done, 0 to run" in shown
    assert "codec=drop" in shown.rpartition("points - points(base)")[2]
    assert written == [path.stat().st_mtime_ns for path in files]


def test_table_of_hand_made_runs_is_paired_by_seed_and_block() -> None:
    factors = Study(factors={"x": ["x=1"]})
    runs: Any = {
        ("base",): {(0, block): hand_made(1.0 + block, 0.5, sent=100, peak=[5, 7]) for block in (0, 1)},
        ("x=1",): {
            (0, 0): hand_made(2.0, 0.6, sent=60, peak=[9, 1], cosine=0.5),
            (0, 1): hand_made(1.0, 0.7, sent=60, peak=None, cosine=1.0),
            (1, 0): hand_made(9.0, 0.9, sent=9, peak=[1, 1], cosine=0.75),
        },
    }
    row: Any = as_json(factors, runs)[1]
    assert row["epoch / epoch(base)"] == {"value": pytest.approx(1.0), "low": None, "high": None, "n": 2}
    sent = row["sent_mib - sent_mib(base)"]
    assert (sent["value"] * 2**20, sent["n"]) == (pytest.approx(-40), 1)
    assert row["peak_mib - peak_mib(base)"]["value"] * 2**20 == pytest.approx(2)
    assert row["points - points(base)"]["value"] == pytest.approx(15)
    assert row["cosine"]["value"] == pytest.approx(0.75)
    for (place,), results in runs.items():
        for (_, block), each in results.items():
            each["session"] = "a" if place == "x=1" or block else "b"
    resumed: Any = as_json(factors, runs)[1]  # block 0 was begun in one session and ended in another
    assert (resumed["epoch / epoch(base)"]["value"], resumed["epoch / epoch(base)"]["n"]) == (pytest.approx(0.5), 1)
    gone: Any = as_json(factors, {("base",): runs["base",], ("x=1",): {}})[1]
    assert gone["epoch / epoch(base)"] is None


def test_example_study_composes() -> None:
    file = Path(__file__).parents[2] / "experiments" / "ablation" / "study.yaml"
    variants = read_study(file).variants()
    command.check(file, variants)
    assert [v.name for v in variants] == ["", "codec=bf16", "codec=drop", "strategy.overlap=none", "first_layer=cached"]
    assert listed("a") == ("a",)


def test_variant_name_is_shown_without_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "dataset.name=\x1b]0;title\x07"
    runs: Any = {(name,): {(0, 0): hand_made(1.0, 1.0)}}
    command.report(Study(factors={"x": [name]}), runs, tmp_path, shown=True)
    said = capsys.readouterr().out
    assert "\\x1b" in said and "\x1b]0" not in said


def test_study_with_changed_data_is_refused(template: dict[str, Any], tmp_path: Path) -> None:
    other = {**template, "hashes": {**template["hashes"], "graph": "0" * 64}}
    base, other_one = (Variant(name, ()) for name in ("", "a"))
    command.refuse_other_data({(base, 0, 0): template, (other_one, 0, 0): template}, tmp_path)
    with pytest.raises(ConfigError, match="its data has changed between two starts"):
        command.refuse_other_data({(base, 0, 0): template, (other_one, 0, 0): other}, tmp_path)
