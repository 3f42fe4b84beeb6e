"""The command line: help, `doctor`, `check`, `cite`, completion, and what is refused before a rank starts."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import gnnpar
import startup
from composing import configured, names
from conftest import ROOT, Refused, Run, environment
from gnnpar import __version__
from gnnpar.cli import check, cite, completion, doctor, estimate, partition, plan, predict
from gnnpar.cli.main import COMMANDS, refuse, run
from gnnpar.cli.train import check_world
from gnnpar.config.compose import compose, train_help
from gnnpar.models.gcn import GCN
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sequential.strategy import SAR
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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gnnpar st", ["study", "status"]),
        ("gnnpar train model=ga", ["gat", "gatv2"]),
        ("gnnpar train -m model=gcn,gat", ["gat", "gatv2"]),
        ("gnnpar train strategy=sar strategy.log", ["strategy.logical_parts="]),
        ("gnnpar train strategy=single strategy.log", []),
        ("gnnpar train early_stopping.p", ["early_stopping.patience="]),
        ("gnnpar compare --allow", ["--allow-unfair"]),
        ("gnnpar plan --no", ["--no-measure"]),
        ("gnnpar compare out", []),  # folders are the shell's own
        ("gnnpar trian x", []),
    ],
)
def test_last_word_is_completed(line: str, expected: list[str]) -> None:
    assert completion.complete(line) == expected


@pytest.mark.parametrize("word", ["model={}/secret", "../..{}=secret"])
def test_only_files_of_a_group_are_read(tmp_path: Path, word: str) -> None:
    (tmp_path / "secret.yaml").write_text("password: 1\n")
    away = "../" * 20 + str(tmp_path)
    assert "epochs=" in (offered := completion.complete(f"gnnpar train {word.format(away)} "))
    assert not [key for key in offered if "password" in key]


def test_every_command_and_group_is_offered() -> None:
    assert set(COMMANDS) < set(completion.complete("gnnpar "))
    assert {"strategy=", "model=", "epochs=", "optim.lr="} < set(completion.complete("gnnpar train "))


def test_bash_completes(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    script = completion.SCRIPT + f'gnnpar() {{ "{sys.executable}" -m gnnpar "$@"; }}\n'
    script += 'COMP_LINE="gnnpar train model=sa"; COMP_POINT=${#COMP_LINE}; _gnnpar; echo "${COMPREPLY[*]}"\n'
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert done.stdout.split() == ["sage", "sage_max"]


def test_completion_installed_twice_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/bash")
    (tmp_path / ".bashrc").write_text("alias a=b")
    for _ in range(2):
        completion.install(tmp_path)
    script = tmp_path / ".local" / "share" / "gnnpar" / "completion.sh"
    assert script.read_text() == completion.SCRIPT
    assert (tmp_path / ".bashrc").read_text() == f"alias a=b\n. {script}\n"
    monkeypatch.setenv("SHELL", "/bin/fish")
    with pytest.raises(ConfigError, match="for bash and zsh, and SHELL is fish"):
        completion.install(tmp_path)


def test_completion_offers_plain_names_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = completion.complete("gnnpar train model=g")
    (tmp_path / "model").mkdir()
    for name in ("gown", "g$(touch ran)", "g;ls", "g\x1b[2J"):
        (tmp_path / "model" / f"{name}.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert sorted(completion.complete("gnnpar train model=g")) == sorted([*before, "gown"])


@pytest.fixture
def cited(capsys: pytest.CaptureFixture) -> Callable[..., str]:
    def run(*overrides: str) -> str:
        assert cite.run(list(overrides)) == 0
        return capsys.readouterr().out

    return run


def test_gnnpar_alone(cited: Callable[..., str]) -> None:
    text = cited()
    assert text.count("@") == 1
    assert text.startswith("@software{gnnpar,")


PAPERS = {
    **{"sar": "mostafa2022sar", "adaqp": "wan2023adaqp", "gnnpipe": "chen2023gnnpipe", "tag": "zhang2023tag"},
    **{"bns": "wan2022bns", "pipegcn": "wan2022pipegcn", "feature": "ai2024neutrontp", "cofree": "cao2023cofree"},
    **{"digest": "chai2022digest", "cagnet": "tripathy2020cagnet", "sancus": "peng2022sancus"},
    "minibatch": "hamilton2017graphsage",
    "minibatch strategy.sampler=cluster": "chiang2019clustergcn",
    "minibatch strategy.sampler=uniform": "wang2026implicit",
    "minibatch strategy.sampler=saint": "zeng2020graphsaint",
}


@pytest.mark.quick(3)
@pytest.mark.parametrize(("strategy", "key"), PAPERS.items())
def test_a_strategy_cites_its_paper(cited: Callable[..., str], strategy: str, key: str) -> None:
    found = re.findall(r"^@\w+\{([^,]+),", cited(*f"strategy={strategy}".split()), re.MULTILINE)
    assert found == ["gnnpar", key]


def test_every_paper_that_a_strategy_names_is_known_and_every_entry_is_whole() -> None:
    entries = cite.entries()
    known = {cite.number_of(entry) for entry in entries.values()}
    for strategy in names("strategy"):
        assert set(cite.papers_of(configured("strategy", strategy))) <= known, strategy
    for key, entry in entries.items():
        assert all(cite.field(entry, name) for name in ("title", "author", "year")), key
        assert entry.count("{") == entry.count("}"), key


def test_a_strategy_of_ones_own_cites_what_its_docstring_names() -> None:
    class Mine(SAR):
        """After arXiv:1234.56789 (doi:10.1/a-b.2)."""

    assert cite.papers_of(Mine()) == ["1234.56789", "10.1/a-b.2", "2111.06483"]
    assert "url = {https://doi.org/10.1/a-b.2}" in cite.unknown("10.1/a-b.2")
    assert "eprint = {1234.56789}" in cite.unknown("1234.56789")


def test_anything_else_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cite does not know model=gcn; write gnnpar cite strategy=NAME"):
        cite.run(["model=gcn"])
    with pytest.raises(ConfigError, match=r"strategy=sarr does not exist, did you mean sar"):
        cite.run(["strategy=sarr"])


def test_the_citation_file_says_the_same() -> None:
    said = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    entry = cite.entries()["gnnpar"]
    assert said["version"] == cite.field(entry, "version") == __version__
    assert said["title"] == (cite.field(entry, "title") or "").replace("{GNN}", "GNN")
    assert {"cff-version", "message", "authors", "type"} <= set(said)


def test_a_plan_cites_its_strategy(cited: Callable[..., str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"strategy": {"name": "sar", "_target_": "gnnpar.parallel.sequential.strategy.SAR"}}')
    assert cited(f"plan={plan}") == cited("strategy=sar")
    with pytest.raises(ConfigError, match="the plan sets the strategy"):
        cite.run([f"plan={plan}", "strategy=single"])


NO_RESULT = "a job is the same wherever its data lies, and whatever it keeps"
CLUSTERS = "dataset=sbm strategy=minibatch strategy.sampler=cluster strategy.clusters=1000000"
ONE_JOB = "train dataset=sbm strategy=single epochs=1"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("trian", "unknown command trian, did you mean train?; there are train, partition, plan"),
        ("train strategy=singel", "strategy=singel does not exist, did you mean single?; strategy can be"),
        ("train strategy=gnnpipe world_size=4", "2 layers cannot fill 4 stages: use model.num_layers=4 or more"),
        ("train strategy=single strategy.logical_parts=2", "strategy has no keys; it is a key of strategy=sar"),
        ("train strategy=gnnpipe first_layer=cached", "first_layer=cached is for strategies without chunks or batches"),
        (
            f"train {CLUSTERS}",
            "strategy.clusters=1000000, but the graph has 3000 nodes: give at most one cluster a node",
        ),
        ("train debug=null dataset=sbm", "debug=null: a group is chosen by a name"),
        (f"train epochs={'[' * 3000}{']' * 3000}", "nested too deep"),
        ("train resume=nowhere", "resume=nowhere holds no checkpoint; give the folder of a run with checkpoint/"),
        ("train launch.cuda_graph=true device=cpu", "launch.cuda_graph=true replays work of a GPU, and this run is on"),
        ("train model=broken strategy=single", "model/broken.yaml is no YAML: "),
        ("check model=broken", "model/broken.yaml is no YAML: "),
        ("train --resume sweep", "there is no option --resume; gnnpar train has"),
        ("train -m strategy=single,grap_parallel", "grap_parallel does not exist, did you mean graph_parallel?"),
        ("train -m sede=0,1", "unknown key sede=0, did you mean seed?"),
        ("train -m data_dir=a,b", "data_dir=a,b: a job is the same wherever its data lies"),
        (f"{ONE_JOB} -m checkpoint.every=0,1", NO_RESULT),
        (f"{ONE_JOB} -m trace=true,false", NO_RESULT),
        (f"{ONE_JOB} -m tracker=jsonl,console", NO_RESULT),
        ("train -m seed=range(0,10000000)", "the sweep asks for more than 100,000 jobs"),
        (f"{ONE_JOB} -m seed=0,1 hydra.sweep.subdir=same", "hydra.sweep.subdir=same is one folder for several jobs"),
        ("train -m 'model=glob(zzz*)'", "the sweep has no job"),
        ("train -m seed=range(5,1)", "the sweep has no job"),
        ("train -m dataset=sbm hydra.sweeper=null", ""),
        ("train -m dataset=sbm hydra.launcher=null", ""),
        ("train -m dataset=sbm hydra.sweeper._target_=os.system", ""),
        ("train -m dataset=sbm -p", ""),
        (f"train -m dataset=sbm seed={'9' * 5000}", ""),
        ("train -m hydra/sweeper=optuna \"hydra.sweeper.params={seed: 'range(0,2)'}\"", "cannot be used ("),
        ("status .", "no jobs of a sweep below"),
        ("export nowhere", "nowhere has no good checkpoint; give the folder of a run"),
        ("ablate nowhere.yaml", "nowhere.yaml cannot be read: No such file"),
        ("ablate study.yaml epochs=3", "study.yaml sets what is trained; put it into base"),
        ("plan dataset=sbm --out ''", "an argument is empty"),
    ],
    ids=lambda value: value[:50],
)
def test_command_is_refused_in_one_line(refused: Refused, tmp_path: Path, command: str, line: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "broken.yaml").write_text("a: [1\nb: {")
    (tmp_path / "study.yaml").write_text("factors: {x: [codec=bf16]}")
    said = refused(line, *shlex.split(command))
    assert "is no YAML" not in line or "in line 2; correct it" in said
    assert not list(tmp_path.rglob("result.json"))


@pytest.mark.parametrize("key", ["hydra.run.dir=", "hydra.run.dir=''", "cache_dir=", "resume=", "shards=", "plan="])
def test_empty_path_is_refused(refused: Refused, tmp_path: Path, key: str) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    refused("is empty, and names nothing", *ONE_JOB.split(), key)
    assert (tmp_path / "config.yaml").read_text() == "mine"
    with pytest.raises(ValueError, match="folder is empty"):
        gnnpar.train("gcn", "sbm", folder="")


def test_study_under_torchrun_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    refused("a study starts its own ranks and cannot join those of torchrun", "ablate", "study.yaml")
