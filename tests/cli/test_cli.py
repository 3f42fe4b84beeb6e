"""The command line itself, `doctor` and `check`."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import startup
from conftest import Run, environment
from gnnpar.cli import check, doctor, estimate, partition, plan, predict
from gnnpar.cli.main import COMMANDS, refuse, run
from gnnpar.cli.train import check_world
from gnnpar.config.compose import compose, train_help
from gnnpar.models.gcn import GCN
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.settings import ConfigError
from gnnpar.verify import conformance
from gnnpar.verify.conformance import Case


def test_help_and_version_are_shown(run_cli: Run, run_here: Run) -> None:
    done = run_cli("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "gnnpar compare FOLDER" in done.stdout
    assert run_here("--version").stdout.startswith("gnnpar 0.")
    assert (COMMANDS[:3], COMMANDS[-2:]) == (("train", "partition", "plan"), ("export", "predict"))


def test_train_help_and_cfg_show_groups_and_keys(run_here: Run, tmp_path: Path) -> None:
    done = run_here("train", "--help")
    assert done.returncode == 0
    assert re.search(r"^strategy: .*\bgraph_parallel\b.*\bsar\b", done.stdout, re.MULTILINE)
    assert "eval_every: 5" in done.stdout
    assert not any(line.startswith("hydra") for line in done.stdout.splitlines())
    done = run_here("train", "--cfg", "job", "model=gat", "codec=drop")
    assert "_target_: gnnpar.models.gat.GAT" in done.stdout
    assert not list(tmp_path.iterdir())


IMPORTS = """
import sys
from gnnpar.__main__ import main
from gnnpar.cli.main import COMMANDS
for command in COMMANDS:
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert not end.code
    heavy = ("torch", "scipy.stats", "pandas", "matplotlib")
    print("HEAVY", command, [name for name in heavy if name in sys.modules])
"""


def test_help_of_a_command_imports_nothing_heavy(run_python: Run) -> None:
    """What makes it take seconds; how many is in docs/guide/train.md."""
    done = run_python("-c", IMPORTS)
    assert done.returncode == 0, done.stderr
    heavy = [line.removeprefix("HEAVY ") for line in done.stdout.splitlines() if line.startswith("HEAVY")]
    assert heavy == [f"{command} []" for command in COMMANDS]
    assert done.stdout.count("usage: gnnpar") == len(COMMANDS) - 1 and "Groups (group=option)" in done.stdout


def test_codec_of_the_top_level_reaches_the_strategy() -> None:
    settings = compose(["strategy=graph_parallel", "codec=drop"])
    assert isinstance(settings.strategy, GraphParallel)
    assert settings.strategy.codec == settings.codec
    assert settings.strategy.exactness == {"sampled"}


def test_doctor(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.run(["--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {"versions", "devices", "backends", "launch", "kernels", "extras"}
    assert facts["backends"]["gloo"] == "yes"
    assert "spmm" in facts["kernels"]
    assert facts["launch"]["paced"].startswith(("yes; at 1 Gbit/s a link carried ", "no: "))
    assert doctor.run([]) == 0
    assert "[sparse]" in capsys.readouterr().out or facts["extras"]["torch_sparse"][0].isdigit()
    monkeypatch.setenv("GNNPAR_KERNELS", "fast")
    assert "fast is not one of" in doctor.kernels()["error"]


def test_check_passes_for_the_projects_strategy(capsys: pytest.CaptureFixture) -> None:
    assert check.run(["strategy=graph_parallel", "model=gcn,gin", "--worlds", "1,2"]) == 0
    assert "4 of 4 cases pass" in capsys.readouterr().out


@pytest.mark.slow
def test_check_covers_every_model_and_what_the_strategy_can_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict = {}

    def fake(strategy, models, *, worlds, dataset, as_it_is, **further):
        assert dataset is None and not as_it_is
        asked.update(strategy=strategy, models=models, worlds=worlds)
        return [Case("x", 1, 1.0, 0.0, "", 0.0, error="no")]

    monkeypatch.setattr("gnnpar.verify.conformance.check", fake)
    assert check.run(["strategy=gnnpipe"]) == 1
    assert set(check.model_names()) - set(asked["models"]) == {"sgformer", "polynormer"}
    assert check.run(["strategy=single"]) == 1
    assert set(asked["models"]) == set(check.model_names())
    assert asked["worlds"] == (1, 2, 3, 4)
    assert not any(conformance.runs_on(asked["strategy"], world, GCN(hidden=8)) for world in asked["worlds"][1:])
    plan = tmp_path / "plan.json"
    plan.write_text(
        '{"strategy": {"name": "gnnpipe", "_target_": "gnnpar.parallel.pipeline.strategy.GNNPipe", "chunks": 3}}'
    )
    assert check.run([f"plan={plan}", "model=gcn"]) == 1
    assert type(asked["strategy"]).__name__ == "GNNPipe" and asked["strategy"].chunks == 3
    with pytest.raises(ConfigError, match="--worlds=0,1 must be"):
        check.run(["--worlds", "0,1"])


WRONG = """
from dataclasses import dataclass
from gnnpar.parallel.halo.strategy import GraphParallel
@dataclass(frozen=True, kw_only=True)
class Wrong(GraphParallel):
    exactness = frozenset({'exact'})
    def exact_limit(self):
        return self
"""


def test_check_of_a_wrong_own_strategy_fails(run_here: Run, tmp_path: Path) -> None:
    """A strategy that calls itself exact but drops its halos does not pass."""
    (tmp_path / "own_wrong.py").write_text(WRONG)
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "wrong.yaml").write_text("_target_: own_wrong.Wrong\ncodec: ${codec}\n")
    done = run_here("check", "strategy=wrong", "codec=drop", "model=gcn", "--worlds", "1,2")
    assert done.returncode == 1, done.stderr
    assert "1 of 2 cases pass" in done.stdout
    assert run_here("check", "strategy=wrong", "codec=identity", "model=gcn", "--worlds", "2").returncode == 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("flag", ["--cfg job", "-m"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_flags_may_stand_anywhere_among_overrides(run_here: Run, flag: str, at: int) -> None:
    words = ["epochs=1", "strategy=single"]
    tiny = ["comm=threads", "tracker=jsonl", "dataset.num_nodes=200", "dataset.avg_degree=6"]
    done = run_here("train", *words[:at], *flag.split(), *words[at:], *tiny)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("epochs: 1\n" if flag == "--cfg job" else "sweep: 1 of 1 done") in done.stdout


@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_signal_of_a_lost_terminal_ends_a_run_in_order(tmp_path: Path, number: signal.Signals) -> None:
    few = ["dataset=sbm", "dataset.num_nodes=60", "epochs=1000000", "threads_per_rank=1", "strategy=single"]
    heard = ["env", "--default-signal", sys.executable]  # also where tests run under nohup
    command = [*heard, "-m", "gnnpar", "train", *few, "hydra.run.dir=run"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL) as process:
        rows = tmp_path / "run" / "metrics.jsonl"
        for _ in range(600):
            if rows.exists() and rows.stat().st_size:
                break
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(60) == 1
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "interrupted"


SMALL = ["dataset=sbm", "dataset.num_nodes=60"]


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_key_with_a_plus_is_refused_as_without(plus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="gnnpar plan chooses the strategy"):
        plan.run([*SMALL, f"{plus}strategy.chunks=2"])
    with pytest.raises(ConfigError, match="gnnpar partition takes out=FOLDER"):
        partition.run([f"{plus}shards.folder=s", f"out={tmp_path}/out"])
    with pytest.raises(ConfigError, match="leave plan= out"):
        estimate.run([f"{plus}plan=plan.json"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="leave world_size out"):
        check_world(compose([*SMALL, "world_size=3"]), [f"{plus}world_size=3"])


@pytest.mark.parametrize("python", [["-m", "gnnpar"], ["-P", "-m", "gnnpar"]])
def test_removed_working_directory_is_one_line(tmp_path: Path, python: list[str]) -> None:
    (gone := tmp_path / "gone").mkdir()
    script = f"cd {gone} && rmdir {gone} && exec {shlex.join([sys.executable, *python, 'doctor'])}"
    done = subprocess.run(["/bin/sh", "-c", script], env=environment(), capture_output=True, text=True, check=False)
    line = "gnnpar: the working directory has been removed; change into another one\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_memory_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ends(argv: list[str]) -> int:
        raise MemoryError

    monkeypatch.setattr(predict, "run", ends)
    assert run("predict", []) == 1
    assert capsys.readouterr().err.startswith("gnnpar: this process may take no more memory")


def test_control_characters_of_errors_are_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert str(ConfigError("a\x1b[31mb")) == "a\\x1b[31mb"
    monkeypatch.setenv("GNNPAR_TRACEBACK", "1")
    refuse(ValueError("a\x1b[31mb"))
    said = capsys.readouterr().err
    assert "\x1b" not in said and said.count("\\x1b[31m") == 2 and "ValueError: a" in said


def test_help_with_a_template_of_the_user_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_help(['hydra.help.template="$FOO $"']).strip() == "$FOO $"


def test_output_in_ascii_is_escaped(run_python: Run) -> None:
    code = "from gnnpar.__main__ import main; import sys; sys.argv = ['gnnpar', '--version']; main(); print('é')"
    done = run_python("-c", code, PYTHONIOENCODING="ascii:strict")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "\\xe9")


def test_startup_of_a_failing_command_raises(capsys: pytest.CaptureFixture[str]) -> None:
    startup.main(["--runs", "1", "--only", "`gnnpar --help`"])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| `gnnpar --help` | 0.1 | 0.") and row.count("|") == 5
    with pytest.raises(RuntimeError, match="gnnpar nonsense: exit code 2"):
        startup.cpu_seconds(("nonsense",), None, startup.ROOT)
