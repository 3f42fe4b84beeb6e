"""compare_all: its studies compose, a stopped one goes on, its tables say what the rows say, its pages lead on."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, environment
from gnnpar.config.compose import compose

FOLDER = ROOT / "experiments" / "compare_all"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """module(name): one of the study's or beside its folder."""
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    beside = {file.stem for file in FOLDER.parent.glob("*.py")}
    before = set(sys.modules)
    yield lambda name: importlib.import_module(name if name in beside else f"compare_all.{name}")
    for name in (name for name in set(sys.modules) - before if name in beside or name.startswith("compare_all.")):
        del sys.modules[name]


def row(job: str, *, model: str = "gcn", seed: int = 0, block: int = 0, seconds: float = 1.0, test: float = 0.8) -> Any:
    metric = {"test_at_best_val": test}
    epoch = {"mean": seconds}
    result = {"status": "completed", "model": model, "seed": seed, "metric": metric, "epoch_seconds": epoch}
    return {"block": block, "job": job, "result": result}


def test_every_study_and_every_method_composes(module: Any) -> None:
    """Each study once, and each method once: a composition takes 0.1 s."""
    studies, todo = module("run"), dict[tuple[str, ...], list[str]]()
    for study in (*studies.STUDIES.values(), *studies.QUICK.values()):
        jobs = {each.place[-1]: each for each in study.variants()}
        methods = {tuple(o for o in study.methods[name]): list(each.overrides) for name, each in jobs.items()}
        new = [method for method in methods if method not in todo]
        compose([*methods[new[0] if new else next(iter(methods))], "block=1"])
        todo |= {method: [] if i == 0 else methods[method] for i, method in enumerate(new)}
    for overrides in filter(None, todo.values()):
        compose([*overrides, "block=1"])
    assert len(todo) >= 20


def test_every_strategy_is_in_the_rehearsal_and_in_the_studies(module: Any) -> None:
    studies = module("run")
    there = {file.stem for file in (ROOT / "conf" / "strategy").glob("*.yaml")}
    for some in (studies.QUICK, studies.STUDIES):
        jobs = [job for study in some.values() for job in study.variants()]
        named = {o for job in jobs for o in job.overrides if o.startswith("strategy=")}
        assert there == {o.removeprefix("strategy=") for o in named}
    assert studies.QUICK.keys().isdisjoint(studies.STUDIES)
    assert sum(study.minutes for study in studies.QUICK.values()) <= 10


def test_every_study_has_its_baselines_and_its_control(module: Any) -> None:
    """Protocol, rule 2."""
    studies = module("run")
    for name, study in studies.STUDIES.items():
        asked = {"single", "graph_parallel", "graph_parallel bf16", "minibatch", "control"}
        asked |= {"vanilla", "single, all threads"} if "quiet" in study.needs else set()
        asked |= {each for each in studies.METHODS if "cached" in each} if name in ("speed", "paced") else set()
        assert asked <= study.methods.keys(), name


def test_measured_lines_belong_to_their_studies(module: Any) -> None:
    studies = module("run")
    for name, study in studies.STUDIES.items():
        jobs = {row["job"] for row in module("records").read(FOLDER / f"{name}.jsonl")}
        assert jobs - {*studies.listed(name), *(study.methods if name == "accuracy" else ())} == set(), name


def test_a_stopped_block_begins_again_and_the_others_stay(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks, records = module("blocks"), module("records")
    trained: list[str] = []

    def train(overrides: list[str], *, failures: bool) -> Any:
        if len(trained) == 5:
            raise KeyboardInterrupt
        trained.append(f"{overrides[-1]} {overrides[0]}")
        return {"result": {"epoch_seconds": {"mean": 0.5}}, "start": len(trained)}

    monkeypatch.setattr(blocks, "train", train)
    study = {"jobs": {name: [name] for name in "abc"}, "blocks": range(2), "out": tmp_path / "s.jsonl"}
    with pytest.raises(KeyboardInterrupt):
        blocks.run(**study)
    assert [r["block"] for r in records.read(study["out"])] == [0, 0, 0, 1, 1]
    trained[:] = ["again"]
    blocks.run(**study)
    rows = records.read(study["out"])
    assert [(r["block"], r["start"]) for r in rows] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (1, 4)]
    said = capsys.readouterr().out
    assert "blocks 1 lack runs and begin again" in said
    assert "5/6 block 1" in said and "3/3 block 1" in said and "0 s left" in said
    trained[:] = []
    blocks.run(**study)
    assert trained == []
    blocks.run({"d": ["d"]}, blocks=range(1), out=study["out"])  # another part of the same file
    blocks.run(**study)
    assert trained == ["block=0 d"]
    assert len(records.read(study["out"])) == 7


def test_runs_over_seeds_train_side_by_side_and_tables_list_them_in_one_order(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocks, report, asked = module("blocks"), module("report"), []
    monkeypatch.setattr(blocks, "call", lambda arguments, **_: asked.append(arguments[:-1]))
    blocks.seeded({"a": ["x=1"]}, seeds=[0, 1], out=tmp_path / "s.jsonl")
    blocks.seeded({"a": ["x=1"]}, seeds=[0, 1], out=tmp_path / "s.jsonl", at_once=2)
    assert asked == [
        ["-m", "x=1", "seed=0"],
        ["-m", "x=1", "seed=1"],
        ["-m", "hydra/launcher=parallel", "hydra.launcher.n_jobs=2", "x=1", "seed=0,1"],
    ]
    first, second = (variant.name for variant in module("run").STUDIES["tuned"].variants()[:2])
    rows = [row(second), row(f"{first}, tuned", block=1), row(f"{first}, tuned"), row(first)]
    found = [(r["job"], r["block"]) for r in report.in_order("tuned", rows)]
    assert found == [(first, 0), (f"{first}, tuned", 0), (f"{first}, tuned", 1), (second, 0)]


def test_a_failed_run_is_a_row_and_a_wrong_configuration_ends_the_study(module: Any, monkeypatch: Any) -> None:
    blocks = module("blocks")
    ends = ["failed"]

    def train(command: list[str], **_: Any) -> Any:
        folder = Path(command[-2].partition("=")[2])
        for status in ends:
            (folder / "result.json").write_text(json.dumps({"status": status}), encoding="utf-8")
        return subprocess.CompletedProcess(command, 1, "", "no memory")

    monkeypatch.setattr(blocks.subprocess, "run", train)
    assert blocks.train([], failures=True) == {"result": {"status": "failed"}, "curve": []}
    for ends[:], failures in ((["failed"], False), (["interrupted"], True), ([], True)):
        with pytest.raises(SystemExit, match="no memory"):
            blocks.train([], failures=failures)


def test_a_tuned_job_is_the_job_and_what_its_trials_chose(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = module("run")
    study = run.STUDIES["tuned"]
    asked: list[Any] = []

    def tuned(job: list[str], *, space: str, trials: int, seed: int, out: Path) -> list[str]:
        asked.append((job, space, trials))
        return ["optim.lr=0.003"] if "strategy=single" in job else []

    monkeypatch.setattr(run, "tuned", tuned)
    files = module("records").Files(tmp_path)
    jobs = {each.name: each.overrides for each in run.variants(files, "tuned", study.variants())}
    assert run.variants(files, "speed", study.variants()) == study.variants()
    assert len(jobs) == 2 * len(study.variants()) == 2 * len(asked)
    assert {trials for *_, trials in asked} == {16}
    assert jobs["gat single, tuned"] == (*jobs["gat single"], "optim.lr=0.003")
    assert jobs["gcn adaqp, tuned"] == jobs["gcn adaqp"]
    assert all(f"model={space}" in job and "epochs=60" in job for job, space, _ in asked)


def test_ratios_are_formed_in_blocks_against_the_best_exact_baseline(module: Any) -> None:
    cells = module("cells")
    times = {"gcn single, all threads": 1.0, "gcn graph_parallel bf16": 2.0, "gcn control": 0.5, "gcn adaqp": 4.0}
    rows = [row(job, block=b, seconds=s * (b + 1)) for job, s in times.items() for b in (0, 1, 2)]
    found = cells.by_cell({"speed": rows})
    assert cells.best_baseline(found["speed", "gcn"]) == "single, all threads"  # the control is none
    lines = {name: line for name, *line in cells.speedups(found, None)}
    assert lines["adaqp"] == ["0.25 [0.25, 0.25]", "0.25 (1)"]
    assert {name: line for name, *line in cells.speedups(found, "graph_parallel bf16")}["adaqp"][1] == "0.50 (1)"


def test_verdicts_count_cells_and_leave_out_those_whose_control_passes(module: Any) -> None:
    cells = module("cells")

    def study(control: float) -> list[Any]:
        means = {"single": 0.9, "control": control, "adaqp": 0.901}
        return [row(f"gcn {job}", seed=s, test=mean + 1e-4 * s) for job, mean in means.items() for s in range(5)]

    found = cells.by_cell({"deaf": study(0.9), "fit": study(0.7)})
    lines = {name: line for name, *line in cells.verdicts(found)}
    telling = "1 not inferior, 0 inconclusive, 0 inferior"  # `fit`, whose control is inferior
    assert lines["adaqp"] == ["2", "1", "0", "0", "1", "+0.10", "+0.10 (deaf gcn)", telling]
    assert lines["control"][:5] == ["2", "1", "0", "1", "0"]


def test_at_a_glance_a_line_a_strategy(module: Any) -> None:
    """Shares of vanilla over two models of one link, verdicts and the gradient's error over two cells."""
    cells = module("cells")

    def timed(job: str, model: str, *, seconds: float, size: float) -> Any:
        found = row(f"{model} {job}", model=model, seconds=seconds)
        costs = {"bytes_per_epoch": {"total": size}, "memory_bytes": {"peak": [1, size]}, "exactness": ["some"]}
        return found | {"result": found["result"] | costs}

    def trained(job: str, *, test: float, error: float | None, size: float = 0, ranks: int = 2) -> list[Any]:
        rows = [row(f"gcn {job}", seed=s, test=test + 1e-4 * s) for s in range(5)]
        probe = error and {"relative_error": {"mean": error}}
        more = {"fidelity": probe, "exactness": ["some"], "bytes_per_epoch": {"total": size}, "world_size": ranks}
        return [r | {"result": r["result"] | more} for r in rows]

    speed = [timed("vanilla", m, seconds=1.0, size=8) for m in ("gcn", "gat")]
    speed += [timed("adaqp", "gcn", seconds=2.0, size=4), timed("adaqp", "gat", seconds=0.5, size=2)]
    speed += [timed("adaqp cached", "gcn", seconds=1.0, size=1), timed("minibatch", "gcn", seconds=9.0, size=2)]
    study = [("single", 0.9, None), ("control", 0.7, 0.5), ("adaqp", 0.9, 0.01)]
    over_seeds = {
        "one": [r for job, test, error in study for r in trained(job, test=test, error=error)],
        "two": [r for job, test, error in study for r in trained(job, test=test, error=error and 2 * error)],
    }
    over_seeds["two"] += trained("graph_parallel", test=0.9, error=None, size=8)
    over_seeds["two"] += trained("bns", test=0.8, error=0.7, size=2)
    over_seeds["two"] += trained("hybrid 2x2", test=0.8, error=0.3, size=16, ranks=4)
    lines = cells.glance(cells.by_cell({"speed": speed}), cells.by_cell(over_seeds))
    found = {line[0]: dict(zip(cells.GLANCE[1:], line[1:], strict=True)) for line in lines}
    assert set(found) == {"single", "vanilla", "minibatch", "control", "adaqp", "graph_parallel", "bns", "hybrid 2x2"}
    assert [*found["adaqp"].values()] == ["some", "1.00", "-", "0.38", "0.38", "2", "0", "0", "0.01 to 0.02"]
    assert [*found["minibatch"].values()] == ["some", "-", "-", "0.25", "0.25", "-", "-", "-", "-"]
    assert [*found["control"].values()][-4:] == ["0", "0", "2", "0.5 to 1"]
    assert [*found["bns"].values()] == ["some", "-", "-", "0.25", "-", "0", "0", "1", "0.7"]
    assert found["hybrid 2x2"]["sent"] == "-"


def test_tuned_rows_are_held_against_a_tuned_baseline(module: Any) -> None:
    report = module("report")
    means = {"single": 0.80, "single, tuned": 0.85, "adaqp": 0.80, "adaqp, tuned": 0.84}
    rows = [row(f"gcn {job}", seed=s, test=mean + 1e-4 * s) for job, mean in means.items() for s in range(5)]
    assert report.trials(rows).splitlines()[-2:] == [
        "| single | 80.020 ± 0.020 | 85.020 ± 0.020 | +5.000 ± 0.000 | +0.00 ± 0.00 | baseline |",
        "| adaqp | 80.020 ± 0.020 | 84.020 ± 0.020 | +4.000 ± 0.000 | -1.000 ± 0.000 | inferior |",
    ]


def test_pages_lead_to_every_study(module: Any, tmp_path: Path) -> None:
    records = module("records")
    kept = [row for row in records.read(FOLDER / "accuracy.jsonl") if row["job"] in ("single", "control", "adaqp")]
    records.append(tmp_path / "quick_accuracy.jsonl", kept[::5])
    done = subprocess.run(
        [
            *(sys.executable, str(FOLDER.parent / "study.py"), "report", "compare_all", "--quick"),
            *("--folder", str(tmp_path), "--page", str(tmp_path)),
        ],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("A rehearsal")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<a href="quick_accuracy.html">' in page and 'src="figure.svg"' in page
    assert re.search(r"<td>adaqp</td>\s*<td>3</td>", page) and page.count("<table") == page.count("</table>") == 3
    assert "| adaqp | 3 | " in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert {file.name for file in tmp_path.iterdir()} >= {"figure.svg", "quick_accuracy.html"}


def test_figures_hold_every_method_and_every_dataset(module: Any, tmp_path: Path) -> None:
    import matplotlib
    import matplotlib.pyplot as plt

    figures, lines = module("figures"), module("records").read(FOLDER / "accuracy.jsonl")
    rows = [each for each in lines if each["job"] in ("single", "control", "adaqp")]
    gcn = [each for each in rows if each["result"]["model"] == "gcn"]
    with matplotlib.rc_context():
        figures.datasets({"cora": rows[:40], "cs": gcn}, tmp_path / "datasets.svg")
        figures.to_target({"target": gcn}, tmp_path / "target.svg")
    plt.close("all")
    for name, words in (("datasets", ("cora", "cs", "control")), ("target", ("target: validation, %", "adaqp"))):
        drawn = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        assert [word for word in words if f">{word}</text>" not in drawn] == []
    figures.to_target({}, tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()
