"""Ablations: the jobs of a study, the table against values computed by hand, and one clear line for a wrong file."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportOperatorIssue=false

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from checkpoints import result, train
from gnnpar.cli import study as command
from gnnpar.cli.main import run
from gnnpar.config.study import Study, Variant, job_overrides, listed, read_study
from gnnpar.files import working_in
from gnnpar.report.study import as_json
from gnnpar.settings import ConfigError
from gnnpar.training.result.result import epoch_time

BASE = "base: [strategy=graph_parallel, comm=threads, world_size=2, debug=tiny, threads_per_rank=1, epochs=4]\n"


def study(folder: Path, text: str) -> Path:
    file = folder / "study.yaml"
    file.write_text(text)
    return file


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


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("text", "line"),
    [
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
    tmp_path: Path, text: str, line: str, capsys: pytest.CaptureFixture
) -> None:
    file = study(tmp_path, text)
    assert run("ablate", [str(file), "--folder", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.startswith(f"gnnpar: {file}")
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_training_overrides_of_ablate_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("ablate", [str(study(tmp_path, "factors: {x: [codec=bf16]}")), "epochs=3"]) == 2
    assert "study.yaml sets what is trained; put it into base" in capsys.readouterr().err
    assert run("ablate", [str(tmp_path / "nowhere.yaml")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_second_study_of_a_running_folder_keeps_its_study_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = study(tmp_path, BASE + "factors: {x: [epochs=2]}\n")
    with working_in(Path("multirun/study"), remedy="wait", say=print):
        Path("multirun/study/study.yaml").write_text("of the first")
        assert run("ablate", [str(file)]) == 2
    assert "multirun/study is in use" in capsys.readouterr().err
    assert Path("multirun/study/study.yaml").read_text() == "of the first"


@pytest.mark.slow
def test_table_of_ablate_equals_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Two seeds in two blocks: time ratios inside blocks, the rest paired by seed; a second start runs nothing."""
    monkeypatch.chdir(tmp_path)
    file = study(tmp_path, BASE + "factors: {codec: [codec=drop]}\nseeds: 2\nblocks: 2\nshared_cores: true\n")
    assert run("ablate", [str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    results = [json.loads(path.read_text()) for path in Path("multirun/study").rglob("result.json")]
    assert len(results) == 8
    of = {(tuple(r["exactness"]), r["seed"], r["block"]): r for r in results}
    assert {key[1:] for key in of} == {(0, 0), (0, 1), (1, 0), (1, 1)}

    def pair(seed: int, block: int) -> tuple[dict[str, Any], dict[str, Any]]:
        drop = next(r for (kind, s, b), r in of.items() if (s, b) == (seed, block) and kind != ("exact",))
        return drop, of[("exact",), seed, block]

    base, row = told
    assert (base["variant"], row["variant"], row["runs()"]) == ("base", "codec=drop", "4")
    logs = []
    for block in (0, 1):
        means = [[epoch_time(r) for r in pair(seed, block)] for seed in (0, 1)]
        ratios = [a / b for a, b in means]
        logs.append(sum(map(math.log, ratios)) / 2)
    assert row["epoch / epoch(base)"]["value"] == pytest.approx(math.exp(sum(logs) / 2))
    assert (row["epoch / epoch(base)"]["n"], row["points - points(base)"]["n"]) == (2, 2)
    sent = [a["bytes_per_epoch"]["total"] - b["bytes_per_epoch"]["total"] for a, b in (pair(0, 0), pair(1, 0))]
    assert row["sent_mib - sent_mib(base)"]["value"] == pytest.approx(statistics.fmean(sent) / 2**20)
    assert sent[0] < 0
    by_seed = []
    for seed in (0, 1):
        tests = [[100 * r["metric"]["test_at_best_val"] for r in pair(seed, block)] for block in (0, 1)]
        by_seed.append(statistics.fmean(a - b for a, b in tests))
    assert row["points - points(base)"]["value"] == pytest.approx(statistics.fmean(by_seed), abs=1e-9)
    assert (
        row["points - points(base)"]["high"] is row["epoch / epoch(base)"]["high"] is None
    )  # of two seeds and two blocks
    assert row["peak_mib - peak_mib(base)"] is None  # threads: nobody's own
    written = {path: path.stat().st_mtime_ns for path in Path("multirun/study").rglob("result.json")}
    assert run("ablate", [str(file)]) == 0
    shown = capsys.readouterr().out
    assert "resuming: 8 of 8 jobs are done, 0 to run" in shown
    assert "codec=drop" in shown.rpartition("points - points(base)")[2]
    assert written == {path: path.stat().st_mtime_ns for path in Path("multirun/study").rglob("result.json")}


def hand_made(epoch: float, sent: int, peak: list[int] | None, test: float, cosine: float | None) -> dict[str, Any]:
    return {
        "status": "completed",
        "oversubscribed": False,
        "provenance": "measured",
        "session": None,
        "epoch_seconds": {"mean": epoch, "median": epoch},
        "bytes_per_epoch": {"total": sent},
        "memory_bytes": {"peak": peak},
        "metric": {"test_at_best_val": None, "test": test},
        "fidelity": None if cosine is None else {"cosine": {"mean": cosine}},
    }


def test_hand_made_rows() -> None:
    factors = Study(factors={"x": ["x=1"]})
    runs = {
        ("base",): {(0, 0): hand_made(1.0, 100, [5, 7], 0.5, None), (0, 1): hand_made(2.0, 100, [5, 7], 0.5, None)},
        ("x=1",): {
            (0, 0): hand_made(2.0, 60, [9, 1], 0.6, 0.5),
            (0, 1): hand_made(1.0, 60, None, 0.7, 1.0),
            (1, 0): hand_made(9.0, 9, [1, 1], 0.9, 0.75),
        },
    }
    row: Any = as_json(factors, runs)[1]
    assert row["epoch / epoch(base)"] == {"value": pytest.approx(1.0), "low": None, "high": None, "n": 2}
    assert (row["sent_mib - sent_mib(base)"]["value"] * 2**20, row["sent_mib - sent_mib(base)"]["n"]) == (
        pytest.approx(-40),
        1,
    )
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
    command.report(
        Study(factors={"x": [name]}), {(name,): {(0, 0): hand_made(1.0, 1, [1], 1.0, 1.0)}}, tmp_path, shown=True
    )
    said = capsys.readouterr().out
    assert "\\x1b" in said and "\x1b]0" not in said


def test_study_with_changed_data_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "run", "strategy=single", "epochs=1")
    mine = result(tmp_path / "run")
    other = {**mine, "hashes": {**mine["hashes"], "graph": "0" * 64}}
    base, other_one = (Variant(name, ()) for name in ("", "a"))
    command.refuse_other_data({(base, 0, 0): mine, (other_one, 0, 0): mine}, tmp_path)
    with pytest.raises(ConfigError, match="its data has changed between two starts"):
        command.refuse_other_data({(base, 0, 0): mine, (other_one, 0, 0): other}, tmp_path)


def test_study_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    assert run("ablate", ["study.yaml"]) == 2
    assert "a study starts its own ranks and cannot join those of torchrun" in capsys.readouterr().err
