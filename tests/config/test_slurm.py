"""What srun tells its tasks becomes a world; what it does not, one line."""

import re
from pathlib import Path

import pytest

from conftest import Refused
from gnnpar.cli.main import run
from gnnpar.comm.world import Outcome
from gnnpar.config.sweep import without_folders
from gnnpar.launch.launch import world_of
from gnnpar.launch.slurm import as_rank, first_host
from gnnpar.settings import ConfigError

STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "7", "SLURM_NTASKS": "7"}
STEP |= {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
STEP |= {"SLURM_STEP_NODELIST": "gpu[07-09],login1", "SLURM_JOB_NODELIST": "gpu[01-09],login1"}


@pytest.fixture(autouse=True)
def _without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnpar.launch.slurm.shutil.which", lambda name: None)


def test_task_of_a_slurm_step_is_a_rank() -> None:
    found = as_rank(STEP)
    met = {"MASTER_ADDR": "gpu07", "MASTER_PORT": str(20000 + (4711 * 31 + 2) % 12000)}
    assert found == {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **met}
    others = [as_rank(STEP | {"SLURM_PROCID": str(i), "SLURM_NODEID": str(i // 2)}) for i in range(7)]
    assert len({(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in others}) == 1
    assert others[6]["LOCAL_WORLD_SIZE"] == "1"
    assert as_rank(STEP | {"SLURM_STEP_ID": "3"})["MASTER_PORT"] != found["MASTER_PORT"]
    given = as_rank(STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("10.0.0.1", "29500")


@pytest.mark.parametrize(
    "env",
    [
        {},
        STEP | {"RANK": "0", "WORLD_SIZE": "2"},  # torchrun inside srun
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},  # one task, which starts its own ranks
        {k: v for k, v in STEP.items() if "STEP" not in k},  # the batch script itself
    ],
)
def test_environment_outside_a_slurm_step_is_kept(env: dict[str, str]) -> None:
    assert as_rank(env) == {}


HOSTS = {"node1": "node1", "b[3,1-2],a1": "b3", "x[001-004]-ib": "x001-ib", "r[1-2]n[05-08]": "r1n05", "a,b": "a"}


@pytest.mark.parametrize(("nodes", "first"), HOSTS.items())
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_scontrol_is_asked_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "scontrol"
    tool.write_text('#!/bin/sh\n[ "$*" = "show hostnames odd{1..3}" ] && printf "odd1\\nodd2\\n"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("gnnpar.launch.slurm.shutil.which", lambda name: str(tool))
    assert first_host("odd{1..3}") == "odd1"


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({"SLURM_PROCID": None}, "SLURM_STEP_NUM_TASKS=7, but Slurm's environment lacks 'SLURM_PROCID'"),
        ({"SLURM_LOCALID": None}, "SLURM_STEP_NUM_TASKS=7, but Slurm's environment lacks 'SLURM_LOCALID'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_TASKS_PER_NODE=two cannot be read"),
        ({"SLURM_STEP_NUM_TASKS": "abc"}, "SLURM_STEP_NUM_TASKS=abc must be a whole number from 1 to 4096"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x99999999999)"}, "SLURM_TASKS_PER_NODE=2(x99999999999) cannot be read"),
        ({"SLURM_NODEID": "-1"}, "SLURM_NODEID=-1 must be a whole number from 0 to 3"),
        ({"SLURM_NODEID": "9"}, "SLURM_NODEID=9 must be a whole number from 0 to 3"),
        ({"SLURM_PROCID": "0_1"}, "SLURM_PROCID=0_1 must be a whole number"),
        ({"SLURM_JOB_ID": "9" * 5000}, "SLURM_JOB_ID=999"),
    ],
)
def test_wrong_slurm_variable_is_one_line(env: dict[str, str | None], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        as_rank({name: value for name, value in (STEP | env).items() if value is not None})


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({"GNNPAR_JOBS_AT_ONCE": "abc"}, "GNNPAR_JOBS_AT_ONCE=abc must be a whole number from 1 to 4096"),
        ({"RANK": "abc", "WORLD_SIZE": "2"}, "RANK=abc must be a whole number from 0 to 4095"),
        ({"RANK": "", "WORLD_SIZE": ""}, "RANK= must be a whole number"),
        ({"RANK": "0"}, "RANK=0 is set, but WORLD_SIZE is not: set both, or neither"),
        ({"RANK": "0", "WORLD_SIZE": "zwei"}, "WORLD_SIZE=zwei must be a whole number from 1 to 4096"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}, "LOCAL_RANK=x must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 must be a whole number from 1"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5: must be below WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a" * 99}, f"MASTER_ADDR={'a' * 99} is no host name ("),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "MASTER_PORT=99999 must be a whole number from 1"),
    ],
)
def test_wrong_rank_variable_is_one_line(
    env: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    refused(f"gnnpar: {line}", "train", "debug=tiny", "strategy=graph_parallel")


def test_train_joins_under_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gnnpar train` in a task: no folder of its own, and the world is the step's."""
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    seen = []

    def launched(settings, run_dir: Path, callbacks: object) -> Outcome:
        seen.append((world_of(settings), run_dir))
        return Outcome("completed")

    monkeypatch.setattr("gnnpar.cli.train.run_training", launched)
    monkeypatch.chdir(tmp_path)
    assert run("train", ["strategy=graph_parallel", "device=cpu"]) == 0
    ((world, folder),) = seen
    assert (world.how, world.size, world.local_size) == ("joined", 7, 2)
    assert folder == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_restart_by_torchrun_keeps_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_folders(["a=1"], rank=0) == ["a=1"]
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    first, again = without_folders(["a=1"], rank=0), without_folders(["a=1"], rank=0)
    assert first == again
    assert first[1].startswith("hydra.run.dir=outputs/20")
    assert without_folders(["hydra.run.dir=x"], rank=0) == ["hydra.run.dir=x"]
    assert without_folders(["hydra.run.dir=x"], rank=3) == ["hydra.run.dir=x", "hydra.run.dir=."]
