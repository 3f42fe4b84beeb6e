"""The checks of the first hour on a GPU, rehearsed: limits hold, what passed is not run again, all is written."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "kernels"))

from bench import first_hour
from bench.first_hour import STAGES, Check, Stage, main, run_stage, write_summary

SLEEPS = '-c "import time; time.sleep(600)"'
FINE = "-c \"print('one'); print('two')\""


def _stage(*checks, seconds=60.0):
    return Stage("trial", seconds, checks)


def _run(stage, out, **options):
    return run_stage(stage, out, rehearse=True, **options)


def test_a_check_that_hangs_ends_at_its_limit_and_the_next_one_runs(tmp_path, capsys):
    stage = _stage(Check("hangs", SLEEPS, 1.0, SLEEPS), Check("fine", FINE, 20, FINE))
    began = time.monotonic()
    hangs, fine = _run(stage, tmp_path)
    assert time.monotonic() - began < 15
    assert (hangs.state, fine.state, fine.detail) == ("TIMED OUT", "passed", "two")
    assert "trial/hangs: ended after 1 s" in capsys.readouterr().out


def test_a_child_that_keeps_the_output_open_ends_too(tmp_path):
    program = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    forks = f'-c "{program}"'
    record = _run(_stage(Check("forks", forks, 10, forks)), tmp_path)[0]
    assert record.state == "passed"
    assert record.seconds < 9


def test_a_stage_that_is_over_starts_nothing_more(tmp_path):
    checks = [Check(name, SLEEPS, 50, SLEEPS) for name in ("first", "second")]
    first, second = _run(_stage(*checks, seconds=1.0), tmp_path)
    assert (first.state, second.state) == ("TIMED OUT", "not run")
    assert second.detail == "the stage's 1 s are spent: call it again to go on"


def test_what_passed_is_not_run_again_and_what_failed_is(tmp_path):
    counts = f"-c \"open('{tmp_path}/count', 'a').write('x')\""
    fails = f"-c \"open('{tmp_path}/fails', 'a').write('x'); raise SystemExit(3)\""
    stage = _stage(Check("counts", counts, 20, counts), Check("fails", fails, 20, fails))
    _run(stage, tmp_path)
    records = _run(stage, tmp_path)
    assert [record.state for record in records] == ["passed", "FAILED"]
    assert ((tmp_path / "count").read_text(), (tmp_path / "fails").read_text()) == ("x", "xx")
    _run(stage, tmp_path, again=True)
    assert (tmp_path / "count").read_text() == "xx"
    written = json.loads((tmp_path / "trial" / "fails.json").read_text())
    assert written["state"] == "FAILED"
    assert written["detail"].startswith("exit code 3")


def test_the_summary_has_one_line_a_check(tmp_path):
    stage = _stage(Check("fine", FINE, 20, FINE), Check("gpu", FINE, 20))
    _run(stage, tmp_path)
    write_summary(tmp_path, [stage])
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert [line.partition("s  ")[2] for line in lines[:2]] == ["trial/fine: two", "trial/gpu: needs a GPU"]
    assert lines[2] == "1 passed, 1 not run"


def test_hanging_a_stage_of_the_program_shows_that_limits_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(first_hour, "STAGES", (Stage("smoke", 4.0, (Check("fine", FINE, 20, FINE),)),))
    began = time.monotonic()
    assert main(["smoke", "--rehearse", "--hang", "smoke", "--out", str(tmp_path)]) == 1
    assert time.monotonic() - began < 20
    assert "TIMED OUT" in (tmp_path / "summary.txt").read_text()


def test_stages_fit_the_time_that_a_machine_is_lent():
    assert [stage.name for stage in STAGES] == ["smoke", "prove", "tune", "bench", "e2e", "profile", "attention"]
    assert all(stage.seconds <= 600 for stage in STAGES), "a command may take ten minutes"
    assert sum(stage.seconds for stage in STAGES if not stage.named) <= 1800
    assert sum(check.seconds for check in STAGES[-1].checks) <= STAGES[-1].seconds == 480, "eight minutes"
    names = [(stage.name, check.name) for stage in STAGES for check in stage.checks]
    assert len(names) == len(set(names))
    unrehearsed = {check.name for stage in STAGES for check in stage.checks if not check.rehearsal}
    assert unrehearsed == {"sanitizer", "ncu"}, "programs that read what a GPU did"


def test_checks_of_attention_are_told_where_anemoi_core_is(tmp_path, monkeypatch):
    monkeypatch.setenv(first_hour.ANEMOI, "/a b")
    lines = [first_hour._command(check, STAGES[-1], tmp_path, rehearse=False) for check in STAGES[-1].checks]
    assert [" --anemoi '/a b'" in line for line in lines] == [True, True, False, False]
    monkeypatch.delenv(first_hour.ANEMOI)
    assert "anemoi" not in first_hour._command(STAGES[-1].checks[0], STAGES[-1], tmp_path, rehearse=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_stage_of_attention_runs_rehearsed(tmp_path, capsys):
    assert main(["--stage", "attention", "--rehearse", "--out", str(tmp_path)]) == 0
    assert "4 passed" in capsys.readouterr().out


def test_an_unknown_stage_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["warmup"])
    assert "no stage warmup: choose from smoke, prove" in capsys.readouterr().err


LOCKED = """
import importlib.metadata as metadata, re, runpy, sys

def needed(names):
    found, todo = set(), [name.lower().replace("_", "-") for name in names]
    while todo:
        if (name := todo.pop()) in found:
            continue
        found.add(name)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        todo += [re.match(r"[\\w.-]+", line)[0].lower().replace("_", "-") for line in lines if "extra ==" not in line]
    return found

lock, command = sys.argv[1], sys.argv[2:]
there = {line.partition("==")[0].lower().replace("_", "-") for line in open(lock) if "==" in line and line[0] != "#"}
there |= needed(["torch", "triton", "torch-geometric"]) | {"gnnpar", "pip", "setuptools"}
for module, packages in metadata.packages_distributions().items():
    if not {each.lower().replace("_", "-") for each in packages} & there:
        sys.modules[module] = None  # as if it were not installed
sys.argv = command
if command[0].endswith(".py"):
    runpy.run_path(command[0], run_name="__main__")
else:
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "command",
    [
        ["gnnpar", "train", "dataset=sbm", "epochs=2", "strategy=single", "tracker=jsonl", "hydra.run.dir=run"],
        [f"{first_hour.ROOT}/kernels/bench/proofs.py", "golden", "cpu", "single"],
        [f"{first_hour.ROOT}/kernels/bench/proofs.py", "waits", "cpu", "single"],
    ],
    ids=["train", "golden", "waits"],
)
def test_what_the_lock_lists_is_enough(tmp_path, command):
    """Beyond torch, Triton, PyG and what they need."""
    lock = first_hour.ROOT / "kernels" / "bench" / "requirements-gpu.lock"
    paths = os.pathsep.join(str(first_hour.ROOT / name) for name in ("src", "kernels", "tests"))
    environment = os.environ | {"PYTHONPATH": paths, "HYPOTHESIS_NO_PLUGINS": "1", "WANDB_MODE": "disabled"}
    done = subprocess.run(
        [sys.executable, "-c", LOCKED, str(lock), *command],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]


def test_a_name_of_a_folder_is_no_command(tmp_path):
    (odd := tmp_path / "x$(touch ran) y").mkdir()
    told = '-c "import sys; print(sys.argv[1])" {out}'
    (record,) = _run(_stage(Check("says", told, 20, told)), odd)
    assert (record.state, record.detail) == ("passed", str(odd / "trial"))
    assert not list(tmp_path.rglob("ran")) and not Path("ran").exists()
