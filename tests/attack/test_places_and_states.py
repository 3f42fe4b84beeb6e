"""What a twenty-second attack found, on the mends of the twenty-first: places that are full, links in folders of
libraries, states of the program around."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportArgumentType=false

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, tzinfo
from pathlib import Path

import pytest
import torch

import gnnpar
from checkpoints import SMALL
from conftest import environment
from gnnpar import api
from gnnpar.cli.main import refuse, run
from gnnpar.comm import Communicator, ThreadWorld, world
from gnnpar.comm.world import torch_given_back
from gnnpar.config.compose import compose
from gnnpar.files import working_in
from gnnpar.launch.launch import world_of
from gnnpar.report import figures
from gnnpar.settings import ConfigError
from gnnpar.training import predict

TINY = ("dataset=sbm", "dataset.num_nodes=60", "strategy=single", "epochs=1", "threads_per_rank=1")
OTHER = 4242
"""The number of another user."""


# --- what another user has put into a folder of all


class Launcher:
    """One of submitit, by its module."""

    __module__ = "hydra_plugins.hydra_submitit_launcher.launcher"

    def __init__(self, folder: str) -> None:
        self.params: dict[str, object] = {"submitit_folder": folder, "setup": ["module load cuda"]}


# --- wandb's process


# --- checkpoints that lie elsewhere


# --- the program around


def test_a_run_that_goes_on_moves_no_random_numbers_of_the_program(tmp_path: Path) -> None:
    """Each of four folds drew the same permutation after it had trained from one checkpoint."""
    small = {"dataset.num_nodes": 60, "strategy": "single", "threads_per_rank": 1}
    gnnpar.train("gcn", "sbm", epochs=1, folder=tmp_path / "first", **small)
    torch.randperm(10)
    before = torch.get_rng_state()
    gnnpar.train("gcn", "sbm", epochs=2, folder=tmp_path / "second", resume=str(tmp_path / "first"), **small)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_traceback_obeys_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GNNPAR_TRACEBACK", "1")
    refuse(ValueError("a\x1b[31mb"))
    said = capsys.readouterr().err
    assert "\x1b" not in said and said.count("\\x1b[31m") == 2 and "ValueError: a" in said


ODD = """
import sys, threading, torch
real = sys.stdout
class Tee:
    def write(self, text):
        real.write(text)
    def flush(self):
        real.flush()
sys.stdout = Tee()
torch.set_default_dtype(torch.float64)
import gnnpar
small = {"dataset.num_nodes": 60}
with torch.no_grad():
    gnnpar.train("gcn", "sbm", strategy="single", epochs=1, folder="run", **small)
    assert all(case.passed for case in gnnpar.check("gcn", strategy="single", worlds=(1,)))
    gnnpar.plan("gcn", "sbm", "two_nodes", world_size=2, out="plan.json", **small)
before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
with gnnpar.distribute("gcn", "sbm", strategy="single", folder="mine", threads_per_rank=1, **small) as session:
    session.train_epoch()
assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before
assert torch.get_default_dtype() == torch.float64
print("all of it")
"""


def test_a_program_of_other_settings_and_streams_is_served_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ODD)
    line = [sys.executable, "program.py"]
    done = subprocess.run(
        line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["all of it"], done.stderr


def test_no_name_is_tex_whatever_the_users_matplotlibrc_says() -> None:
    assert figures._STYLE["text.usetex"] is False


# --- what the twenty-third found: the mends of the twenty-second


def test_ranks_score_the_same_pairs() -> None:
    """Each read the file of its own host, as /tmp/pairs.npy, which another user may have put there."""

    def body(comm: Communicator) -> str:
        with pytest.raises(ValueError, match=r"rank 1 has another content of pairs\.npy than rank 0") as refused:
            predict._refuse_unlike(f"hash {comm.rank}", "content of pairs.npy", comm)
        return str(refused.value)

    assert len(set(ThreadWorld(2).run(body))) == 1


def test_runs_of_one_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api.time, "strftime", lambda form: "2026-01-01/12-00-00")
    folders = [api._run_folder(None) for _ in range(3)]
    assert [folder.name for folder in folders] == ["12-00-00", "12-00-00-2", "12-00-00-3"]


def test_the_callers_precision_of_products_decides_no_numbers() -> None:
    """Ranks multiplied in bf16 on CPUs that can, and the caller's own switch raised afterwards."""
    switches = world._matmul_switches()
    torch.set_float32_matmul_precision("medium")
    try:
        before = [each.fp32_precision for each in switches]
        with torch_given_back():
            world_of(compose([*SMALL, "strategy=single", "threads_per_rank=1"])).prepare()
            assert [each.fp32_precision for each in switches] == ["ieee", "ieee"]
        assert torch.get_float32_matmul_precision() == "medium"
        assert [each.fp32_precision for each in switches] == before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_errors_of_python_show_control_characters_escaped() -> None:
    assert str(ConfigError("a\x1b[31mb")) == "a\\x1b[31mb"


def test_runs_without_a_named_folder_that_begin_in_one_second_take_one_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of commands that a loop of the shell started, all but one were refused; after the clock had gone back, a run
    wrote over a completed one."""

    class Still(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Still:
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr("hydra.core.utils.datetime", Still)
    monkeypatch.chdir(tmp_path)
    day = Path("outputs/2026-01-02")
    for seed in range(2):
        assert run("train", [*TINY, f"seed={seed}"]) == 0
    first = (day / "03-04-05" / "result.json").read_bytes()
    with working_in(day / "03-04-05-3", otherwise="wait", say=print):
        assert run("train", [*TINY, "seed=2"]) == 0
    seeds = [json.loads((folder / "result.json").read_text())["seed"] for folder in map(day.joinpath, NUMBERED)]
    assert seeds == [0, 1, 2]
    assert (day / "03-04-05" / "result.json").read_bytes() == first
    named = [*TINY, f"hydra.run.dir={day}/03-04-05-3"]
    with working_in(day / "03-04-05-3", otherwise="wait", say=print):
        assert run("train", named) == 2
    assert "is in use" in capsys.readouterr().err


NUMBERED = ("03-04-05", "03-04-05-2", "03-04-05-4")
