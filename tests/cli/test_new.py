"""`gnnpar new`: what it writes works at once, where it writes, and what it refuses."""

import importlib
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, Refused, Run, environment
from engines import open_rank
from gnnpar.cli import check, new
from gnnpar.cli.new import next_steps
from gnnpar.codecs.uniform import Uniform
from gnnpar.comm import Communicator, ThreadWorld
from gnnpar.models.gcn import GCN
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.strategy import Strategy
from gnnpar.settings import ConfigError
from gnnpar.verify.conformance import make_job, small_graph


@pytest.mark.slow
def test_new_files_pass_their_tests_and_lint(run_python: Run, tmp_path: Path) -> None:
    """The tests hold conformance, bytes, the model's formula and the codec's laws."""
    for kind in new.KINDS:
        files = new.write(kind, f"my_{kind}", tmp_path)
        names = [file.relative_to(tmp_path).as_posix() for file in files]
        assert names == [f"my_{kind}.py", f"{kind}/my_{kind}.yaml", f"test_my_{kind}.py"]
        assert sum(len(file.read_text().splitlines()) for file in files[:2]) < 150
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", ".")
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout
    config = ("--config", str(ROOT / "pyproject.toml"), "--no-cache", ".")
    for look in (("check", "--ignore", "I001"), ("format", "--check")):  # what is first party differs out there
        done = run_python("-m", "ruff", *look, *config)
        assert done.returncode == 0, done.stdout


def test_new_in_the_repository_uses_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new, "checkout_dir", lambda: tmp_path)
    for kind, package in new.KINDS.items():
        module, config, test = new.write(kind, "mine", tmp_path)
        assert (ROOT / "src" / "gnnpar" / package).is_dir()
        method = kind == "strategy"
        assert module == tmp_path / "src" / "gnnpar" / package / ("mine/strategy.py" if method else "mine.py")
        assert module.with_name("__init__.py").exists() == method
        assert config.read_text().startswith(f"_target_: gnnpar.{package}.mine.{'strategy.' if method else ''}Mine\n")
        assert config.parent == tmp_path / "conf" / kind
        assert test.parent.parent == tmp_path / "tests"
        assert (ROOT / test.parent.relative_to(tmp_path)).is_dir()
        if kind != "strategy":
            assert f"from gnnpar.{package}.mine import" in test.read_text()
    steps = new.next_steps("strategy", "mine", tmp_path)
    (golden,) = (step.split() for step in steps if "golden" in step)
    assert golden[:3] == ["python", "tests/golden/make.py", "mine"] and (ROOT / golden[1]).exists()


def test_new_over_an_existing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("mine\n")
    with pytest.raises(ConfigError, match=r"model/mine\.yaml is there already"):
        new.write("model", "mine", tmp_path)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["mine.yaml"]


def test_new_beside_a_folder_of_the_same_name_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert new.write("codec", "runs", tmp_path)[0] == tmp_path / "runs.py"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("My-Own", "My-Own cannot name a strategy; use lower-case letters, digits and _, a letter first"),
        ("class", "class is a word of Python; choose another name"),
        ("json", "the Python module json would be imported instead of json.py; choose another name"),
        ("sar", "strategy=sar is in gnnpar already; choose another name"),
    ],
)
def test_bad_name_of_new_is_one_line(tmp_path: Path, name: str, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        new.write("strategy", name, tmp_path)
    assert not list(tmp_path.iterdir())


def packaged(kind: str, name: str, site: Path) -> None:
    """A package NAME_kit in `site` as pip leaves it: module, YAML in its conf/, and the entry point."""
    module, config, _ = new.write(kind, name, site)
    kit, info = site / f"{name}_kit", site / f"{name}_kit-1.0.dist-info"
    (kit / "conf" / kind).mkdir(parents=True)
    info.mkdir()
    (kit / "__init__.py").touch()
    module.rename(kit / module.name)
    yaml = config.read_text().replace("_target_: ", f"_target_: {name}_kit.")
    (kit / "conf" / kind / config.name).write_text(yaml)
    config.unlink()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}_kit\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[gnnpar.conf]\n{name} = {name}_kit.conf\n")


@pytest.mark.slow  # processes that start: 15 s
def test_yaml_of_an_installed_package_is_found_anywhere(run_cli: Run, run_here: Run, tmp_path: Path) -> None:
    """By its entry point, in checks, among the names of all models, and in a run of two processes."""
    site, away = tmp_path / "site", tmp_path / "away"
    for folder in (site, away):
        folder.mkdir()
    packaged("strategy", "theirs", site)
    packaged("model", "gated", site)
    sys.path.append(str(site))  # run_here puts it back
    done = run_here("check", "strategy=theirs", "--worlds", "2", "model=gated", cwd=away)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 of 1 cases pass" in done.stdout
    assert {"gated", "gcn"} <= set(check.model_names())
    paths = {"PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], str(site)])}
    done = run_cli("train", "strategy=theirs", "debug=tiny", cwd=away, **paths)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(site / "theirs_kit")
    done = run_cli("train", "strategy=theirs", "debug=tiny", cwd=away, **paths)
    line = "theirs = theirs_kit.conf of gnnpar.conf names no package that is installed; install theirs_kit"
    assert (done.returncode, done.stderr.count("\n"), line in done.stderr) == (2, 1, True)


def test_check_of_a_wrong_gradient_names_the_parameter(run_here: Run, tmp_path: Path) -> None:
    module = new.write("strategy", "wrong_sign", tmp_path)[0]
    text = module.read_text()
    assert text.count("shard.boundary[p], g)") == 1
    module.write_text(text.replace("shard.boundary[p], g)", "shard.boundary[p], -g)"))
    done = run_here("check", "strategy=wrong_sign", "model=gcn", "--worlds", "1,2")
    assert done.returncode == 1
    assert "1 of 2 cases pass" in done.stdout
    assert "FAILED worst: layers." in done.stdout


def test_command_new_writes_once_and_says_what_comes_next(run_here: Run, refused: Refused, tmp_path: Path):
    into = str(tmp_path / "own")
    done = run_here("new", "codec", "mine", "--into", into)
    assert (done.returncode, done.stderr) == (0, "")
    assert "wrote codec/mine.yaml" in done.stdout
    assert f"cd {into}\n  gnnpar check codec=mine" in done.stdout
    refused("is there already", "new", "codec", "mine", "--into", into)
    done = run_here("new", "layer", "mine")
    assert done.returncode == 2
    assert "choose from" in done.stderr


def test_new_strategy_counts_metadata_and_encode_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends the bytes of graph parallelism when it quantizes, scales and zero points included."""
    new.write("strategy", "counted", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    mine: Any = importlib.import_module("counted").Counted(codec=Uniform(bits=4))
    written, known = (_traffic(strategy) for strategy in (mine, GraphParallel(codec=Uniform(bits=4), overlap="none")))
    assert [epochs for epochs, _ in written] == [epochs for epochs, _ in known]
    assert all(metadata > 0 for epochs, _ in written for _, metadata in epochs)
    assert all(seconds > 0 for _, encode in (*written, *known) for seconds in encode)


def _traffic(strategy: Strategy) -> list[tuple[list[tuple[dict[str, int], int]], list[float]]]:
    """Of each rank: (bytes by phase, metadata) and seconds of encoding, by epoch."""
    job = make_job(strategy, GCN(hidden=8), small_graph(), world=3)

    def body(comm: Communicator) -> tuple[list[tuple[dict[str, int], int]], list[float]]:
        engine, optimizer, *_ = open_rank(job, comm)
        comm.ledger.drain()
        epochs, seconds = [], []
        for epoch in range(2):
            comm.clock.start()
            engine.train_epoch(epoch, optimizer)
            seconds.append(comm.clock.drain()["encode"])
            traffic = comm.ledger.drain()
            epochs.append((dict(traffic.bytes), traffic.metadata))
        return epochs, seconds

    return ThreadWorld(3).run(body)


def test_printed_commands_quote_folder_names() -> None:
    assert next_steps("model", "mine", Path("/tmp/my lab"))[1].strip() == "cd '/tmp/my lab'"


TRAIN, CHECK = "train comm=threads world_size=2 epochs=1", "check --worlds=2 model=gcn"
CAPABLE = "Capabilities(cached_first_layer=False)"
EXACT_LIMIT = "    def exact_limit(self):\n        return self\n\n    def build("


@pytest.mark.parametrize(
    ("name", "before", "after", "command", "line"),
    [
        ("lacks_a", "def build", "def told", TRAIN, "strategy=lacks_a: lacks_a.LacksA has no build"),
        ("lacks_b", "def build", "def told", CHECK, "strategy=lacks_b: lacks_b.LacksB has no build"),
        ("lacks_c", "def build", "def told", "estimate", "strategy=lacks_c: lacks_c.LacksC has no build"),
        ("unknown", CAPABLE, "Capabilities(max_rank=2)", TRAIN, "unexpected keyword argument 'max_rank'"),
        ("inexact", "    def build(", EXACT_LIMIT, f"{CHECK} codec=bf16", "exact_limit() of Inexact is rounded"),
    ],
)
def test_own_strategy_that_is_none_is_refused_at_start_up(
    refused: Refused, tmp_path: Path, name: str, before: str, after: str, command: str, line: str
) -> None:
    """The scaffold, one line of it changed."""
    module = new.write("strategy", name, tmp_path)[0]
    text = module.read_text()
    assert before in text
    module.write_text(text.replace(before, after))
    refused(line, *command.split(), f"strategy={name}")
    assert not list(tmp_path.rglob("result.json"))  # no rank has started
