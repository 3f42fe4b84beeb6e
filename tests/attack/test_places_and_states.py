"""What a twenty-second attack found, on the mends of the twenty-first: places that are full, links in folders of
libraries, states of the program around."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportArgumentType=false

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from datetime import datetime, tzinfo
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import gnnpar
from checkpoints import SMALL, train
from conftest import Run, environment
from gnnpar import api, durable, own_modules
from gnnpar.cli.main import refuse, run
from gnnpar.comm import Communicator, ThreadWorld, world
from gnnpar.comm.world import torch_given_back
from gnnpar.config import submitit_jobs
from gnnpar.config.compose import compose
from gnnpar.data import files
from gnnpar.folder_lock import working_in
from gnnpar.launch import forked, joined, processes, signals
from gnnpar.launch.launch import world_of
from gnnpar.report import figures, sessions
from gnnpar.report.exports import inert
from gnnpar.settings import ConfigError
from gnnpar.targets import locate
from gnnpar.track import jsonl, wandb
from gnnpar.training import predict
from one_layer import NET

TINY = ("dataset=sbm", "dataset.num_nodes=60", "strategy=single", "epochs=1", "threads_per_rank=1")
OTHER = 4242
"""The number of another user."""


def test_wandb_writes_through_no_link(tmp_path: Path, run_cli: Run) -> None:
    """With WANDB_RESUME=auto it notes the id of a run in a file of the run's folder, which was a link."""
    (tmp_path / "run" / "wandb").mkdir(parents=True)
    (precious := tmp_path / "precious").write_text("mine")
    (tmp_path / "run" / "wandb" / "wandb-resume.json").symlink_to(precious)
    offline = ["tracker=wandb", "tracker.mode=offline", f"hydra.run.dir={tmp_path}/run"]
    done = run_cli("train", *TINY, *offline, WANDB_RESUME="auto", WANDB_CONFIG_DIR=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert precious.read_text() == "mine"
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize("hard", [28, 4096])
def test_few_open_files_are_more_or_refused(tmp_path: Path, hard: int) -> None:
    """Ranks ended in tracebacks under ulimit -n 28; a limit that may be raised is."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (28, hard))

    ranks = ("strategy=graph_parallel", "world_size=2")
    done = subprocess.run(
        [sys.executable, "-m", "gnnpar", "train", *TINY, *ranks],
        cwd=tmp_path,
        env=environment(),
        preexec_fn=limit,  # of one thread
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    line = (
        "gnnpar: a rank of 2 has 80 files open at once, and the limit is 28: raise it (ulimit -n), or start fewer ranks"
    )
    assert (done.returncode, line in done.stderr) == ((2, True) if hard == 28 else (0, False)), done.stderr
    assert "Traceback" not in done.stderr


def test_what_torch_cannot_read_of_the_environment_is_one_line(run_cli: Run) -> None:
    done = run_cli("train", *TINY, TORCH_LOGS="garbage")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("gnnpar: TORCH_LOGS=garbage: Invalid log settings: garbage")


# --- what another user has put into a folder of all


@pytest.fixture
def of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory: one as /tmp is, where a scheduler begins on a node that has not the user's."""
    monkeypatch.setattr(own_modules, "_FINDER", own_modules._Finder())
    monkeypatch.setenv(own_modules.VARIABLE, "")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    (folder := tmp_path / "all").mkdir()
    folder.chmod(0o1777)
    monkeypatch.chdir(folder)
    yield folder
    for name in ("planted_net", "helper_of_net"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("mode", [0o1777, 0o1770])
def test_nothing_begins_where_others_can_add_files(of_all: Path, capsys: pytest.CaptureFixture[str], mode: int) -> None:
    """wandb wrote through a link that another user made while it started, and jobs of a sweep composed his YAML."""
    os.chown(of_all, 0, OTHER)
    of_all.chmod(mode)
    said = f"{of_all} cannot be written: others may add files to it, and it is the working directory: change into"
    for command in ("train", "plan", "doctor"):
        assert run(command, ["dataset=sbm"] if command != "doctor" else []) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(durable.WriteError, match="it is the working directory"):
        gnnpar.train("gcn", Data(), epochs=1)
    with pytest.raises(durable.WriteError, match="it is the working directory"):
        gnnpar.distribute(torch.nn.Module, Data(), strategy="single")
    assert not os.listdir(of_all)
    of_all.chmod(mode & ~stat.S_ISVTX)
    assert run("doctor", []) == 0, "whose members a group trusts, or files of mode 0777 on a disk without owners"


def test_a_module_of_another_user_is_not_imported(of_all: Path) -> None:
    """A rank that Slurm had started in /tmp, as its node had no such folder, imported the module that lay there."""
    (file := of_all / "planted_net.py").write_text("open('mark', 'w')\nclass Net: pass\n")
    os.chown(file, OTHER, OTHER)
    with pytest.raises(ValueError, match=r"planted_net\.py: another user has put it into a folder that others may"):
        locate("planted_net.Net")
    assert not (of_all / "mark").exists()
    os.chown(file, os.geteuid(), os.getegid())
    file.write_text("import helper_of_net\nclass Net: pass\n")
    (of_all / "helper_of_net.py").write_text("open('mark', 'w')\n")
    os.chown(of_all / "helper_of_net.py", OTHER, OTHER)
    with pytest.raises(ValueError, match=r"helper_of_net\.py: another user has put it"):
        locate("planted_net.Net")
    assert not (of_all / "mark").exists()
    os.chown(of_all / "helper_of_net.py", os.geteuid(), os.getegid())
    assert isinstance(locate("planted_net.Net"), type), "the user's own"


@pytest.mark.parametrize("of", ["conf", "conf/model", "conf/model/foo.yaml"])
def test_yaml_of_another_user_in_a_search_path_is_not_read(
    of_all: Path, capsys: pytest.CaptureFixture[str], of: str
) -> None:
    """Hydra read `model/foo.yaml` that another user had put into /scratch/conf."""
    os.chdir(of_all.parent)
    (conf := of_all / "conf").mkdir(mode=0o755)
    (conf / "model").mkdir(mode=0o755)
    (conf / "model" / "foo.yaml").write_text("_target_: gnnpar.models.gcn.GCN\n")
    searched = [*TINY, "model=foo", f"hydra.searchpath=[file://{conf}]"]
    assert run("train", searched) == 0
    for folder in (conf, conf / "model"):
        folder.chmod(0o1777)
    assert run("train", searched) == 0, "the user's own, which nobody can exchange there"
    os.chown(of_all / of, OTHER, OTHER)
    capsys.readouterr()
    assert run("train", searched) == 2
    assert f"{of_all / of}: another user has put it into a folder that others may" in capsys.readouterr().err


def test_a_package_in_a_folder_of_another_user_is_not_imported(of_all: Path) -> None:
    (of_all / "planted_net").mkdir()
    (of_all / "planted_net" / "__init__.py").write_text("open('mark', 'w')\nclass Net: pass\n")
    os.chown(of_all / "planted_net", OTHER, OTHER)
    with pytest.raises(ValueError, match="planted_net: another user has put it into a folder that others may"):
        locate("planted_net.Net")
    assert not (of_all / "mark").exists()


@pytest.mark.parametrize("refused", [True, False])
def test_of_a_group_no_member_adds_a_package_where_the_sticky_bit_holds_them_apart(of_all: Path, refused: bool) -> None:
    """In a folder of mode 1770, `planted_net/` of a member goes before the user's `planted_net.py`."""
    os.chown(of_all, 0, OTHER)
    of_all.chmod(0o1770 if refused else 0o770)  # without, members of the group can exchange the user's own
    (of_all / "planted_net").mkdir()
    (of_all / "planted_net" / "__init__.py").write_text("class Net: pass\n")
    os.chown(of_all / "planted_net", OTHER, OTHER)
    if refused:
        with pytest.raises(ValueError, match="planted_net: another user has put it into a folder that others may"):
            locate("planted_net.Net")
    else:
        assert isinstance(locate("planted_net.Net"), type)


def test_yaml_of_another_user_is_not_read(of_all: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job of Slurm that was started in /tmp composed `hydra/sweeper/basic.yaml` of there, which set PYTHONPATH."""
    of_all.chmod(0o777)
    (of_all / "model").mkdir()
    (file := of_all / "model" / "planted.yaml").write_text("_target_: gnnpar.models.gcn.GCN\n")
    assert run("train", [*TINY, "model=planted", "hydra.run.dir=mine"]) == 0
    os.chown(file, OTHER, OTHER)
    assert run("train", [*TINY, "model=planted", "hydra.run.dir=theirs"]) == 0, "he may write to its folder no more"
    os.chown(of_all / "model", OTHER, OTHER)
    capsys.readouterr()
    assert run("train", [*TINY, "model=planted", "hydra.run.dir=theirs"]) == 2
    assert f"{of_all}/model: another user has put it into a folder that others may" in capsys.readouterr().err


@pytest.mark.parametrize("sweep", [False, True])
def test_a_folder_that_another_user_has_made_is_no_runs(
    of_all: Path, capsys: pytest.CaptureFixture[str], sweep: bool
) -> None:
    """He exchanged it for a link to another run, whose result was removed and whose checkpoints were moved."""
    os.chdir(of_all.parent)
    (of_all / "theirs").mkdir()
    os.chown(of_all / "theirs", OTHER, OTHER)
    where = ["-m", "hydra.sweep.dir=all/theirs/mine"] if sweep else ["hydra.run.dir=all/theirs/mine"]
    assert run("train", [*TINY, *where]) == 2
    assert "theirs cannot be written: another user has put it" in capsys.readouterr().err
    assert os.listdir(of_all / "theirs") in ([], ["mine"])
    assert not list((of_all / "theirs").rglob("*.yaml")), "Hydra writes multirun.yaml, maybe through a link"


@pytest.mark.parametrize("sweep", [False, True])
def test_a_folder_that_others_can_add_to_is_no_runs(
    of_all: Path, capsys: pytest.CaptureFixture[str], sweep: bool
) -> None:
    """They made its `checkpoint`, `wandb` and `optimization_results.yaml`, and let them lead elsewhere."""
    os.chdir(of_all.parent)
    where = ["-m", f"hydra.sweep.dir={of_all}"] if sweep else [f"hydra.run.dir={of_all}"]
    assert run("train", [*TINY, *where]) == 2
    assert "others may add files to it; name a folder in it" in capsys.readouterr().err
    assert not os.listdir(of_all), "nor has Hydra written there"
    of_all.chmod(0o755)
    assert run("train", [*TINY, *where]) == 0


def test_programs_are_written_into_no_folder_that_another_user_has_made(of_all: Path) -> None:
    (of_all / "theirs").mkdir()
    os.chown(of_all / "theirs", OTHER, OTHER)
    with pytest.raises(durable.WriteError, match="theirs cannot be written: another user has put it"):
        durable.make_own_folder(of_all / "theirs" / "export")


def test_whom_a_folder_of_all_belongs_to_is_trusted_there(of_all: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a folder of the host that a container mounts; but no number that stands for several users."""
    os.chown(of_all, OTHER, OTHER)
    (of_all / "file").touch()
    os.chown(of_all / "file", OTHER, OTHER)
    assert durable.planted(of_all / "file") is None
    monkeypatch.setattr(durable, "_overflow_uid", lambda: {OTHER})
    assert durable.planted(of_all / "file") == of_all / "file"


def test_a_program_is_nobody_elses_to_write_to_at_any_time(tmp_path: Path) -> None:
    """A list of the folder above let another user open it between its creation and its chmod, or own what lay above."""
    before = os.umask(0)
    try:
        with durable.open_whole(tmp_path / "program", program=True) as out:
            assert os.fstat(out.fileno()).st_mode & 0o777 == 0o600
        durable.make_own_folder(tmp_path / "a" / "b")
        with durable.open_whole(tmp_path / "data") as out:
            assert os.fstat(out.fileno()).st_mode & 0o777 == 0o666, "lists and umask say who shares data"
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("program", "a", "a/b")]
    assert modes == [0o644, 0o755, 0o755]
    assert durable.umask() == before


def test_a_group_of_a_container_is_nobodys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """There root's group may be any of the host's; and a number may have several names, with members of their own."""
    assert durable._is_private(0)
    monkeypatch.setattr(durable, "_overflow", lambda kind: {65_534})
    assert not durable._is_private(0)
    monkeypatch.setattr(durable, "_overflow", lambda kind: set())
    second = types.SimpleNamespace(gr_gid=0, gr_name="team", gr_mem=["somebody"])
    monkeypatch.setattr(durable.grp, "getgrall", lambda: [durable.grp.getgrgid(0), second])
    assert not durable._is_private(0)


class Launcher:
    """One of submitit, by its module."""

    __module__ = "hydra_plugins.hydra_submitit_launcher.launcher"

    def __init__(self, folder: str) -> None:
        self.params: dict[str, object] = {"submitit_folder": folder, "setup": ["module load cuda"]}


def test_a_job_of_slurm_reads_no_results_of_another_user_on_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a cache lies on a disk of the node, he had made its folder there, and submitit unpickled what lay in it;
    where the working directory did, the job was composed of his YAML."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (work := tmp_path / "of the node" / "work").mkdir(parents=True)
    work.parent.chmod(0o1777)
    monkeypatch.chdir(work)
    launcher = Launcher(f"{tmp_path}/sweep/.submitit/%j")
    with submitit_jobs.results_apart(launcher, tmp_path / "sweep", known=()):
        setup = launcher.params["setup"]
        assert isinstance(setup, list)
        (own,) = (tmp_path / "cache" / "gnnpar" / "submitit").iterdir()
        script = "\n".join([*setup[:-1], "echo began"])

        def begun() -> subprocess.CompletedProcess[str]:
            return subprocess.run(["bash", "-c", script], env=environment(), capture_output=True, text=True)

        assert begun().stdout == "began\n"
        for place, why in ((own, "it belongs to another user"), (work, durable.OF_ANOTHER)):
            os.chown(place, OTHER, OTHER)
            done = begun()
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
            assert done.stderr.startswith(f"gnnpar: on this node {place} cannot be written: {why}; ")
            os.chown(place, 0, 0)


def test_a_job_of_slurm_begins_where_the_sweep_did_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder := tmp_path / "it's here").mkdir()
    monkeypatch.chdir(folder)
    launcher = Launcher(f"{tmp_path}/sweep/.submitit/%j")
    with submitit_jobs.results_apart(launcher, tmp_path / "sweep", known=()):
        lines = launcher.params["setup"]
    assert isinstance(lines, list)
    for there, said in ((True, f"{folder}\n"), (False, "")):
        done = subprocess.run(["bash"], input="\n".join([lines[0], "pwd"]), cwd="/", capture_output=True, text=True)
        assert (done.stdout, done.returncode) == (said, int(not there)), done.stderr
        if there:
            monkeypatch.chdir(tmp_path)
            folder.rmdir()


# --- wandb's process


def test_every_start_of_wandbs_process_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a run which is kept offline, as no server answers, was not: it took a port where /tmp was full."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(wandb, "_SOCKETS", {})
    monkeypatch.setattr(wandb, "_LONGEST", 1000)
    monkeypatch.setattr("gnnpar.scratch._LONGEST_OF_SOCKETS", 1000)
    before, places = os.environ.get("TMPDIR"), list[str]()

    def setup(**_: object) -> None:
        places.append(os.environ["TMPDIR"])
        monkeypatch.setenv("WANDB_SERVICE", "3-1-tcp-localhost-4000")

    class Settings(dict[str, object]):
        settings_workspace = ""

    module = types.ModuleType("wandb")
    vars(module).update(Settings=Settings, setup=setup, teardown=lambda: None, init=lambda **_: pytest.fail("it began"))
    with pytest.raises(ValueError, match="it has no folder for its socket, and listens at a port for all users"):
        wandb._begin(module, wandb.Wandb(mode="offline"), tmp_path, "offline", "id", {})
    assert [Path(place).parent for place in places] == [tmp_path / "run"], "which others cannot fill"
    assert os.environ.get("TMPDIR") == before


SETTINGS_AFTER_THE_LOOK = """
from pathlib import Path
from gnnpar.track import wandb as mirror

def looked(folder, *, entity):
    (folder / "wandb").mkdir()
    lines = "[default]", "base_url = http://127.0.0.1:9", "x_files_dir = /elsewhere", ""
    (folder / "wandb" / "settings").write_text("\\n".join(lines))

mirror.refuse_settings_of = looked
wandb = mirror.load(entity=None)
print(wandb.setup().settings.base_url == wandb.Settings().base_url, wandb.setup().settings.x_files_dir)
print(wandb.Settings().settings_workspace == str(Path.cwd() / "wandb" / "settings"))
"""


def test_wandb_reads_no_settings_that_another_user_makes_after_the_look(tmp_path: Path) -> None:
    """In a folder of all he made them while wandb was imported, and his server was sent the key."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", SETTINGS_AFTER_THE_LOOK],
        cwd=tmp_path,
        env=environment() | {"WANDB_CONFIG_DIR": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == ["True None", "True"], done.stderr


def test_wandb_is_left_out_where_others_may_add_files_to_the_run(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    run.chmod(0o1777)
    with pytest.raises(ValueError, match=r"others may add files to .*run, by which it is led elsewhere"):
        wandb._begin(types.ModuleType("wandb"), wandb.Wandb(mode="offline"), run, "offline", "id", {})


# --- checkpoints that lie elsewhere


def test_what_links_in_a_checkpoint_lead_to_is_left_in_no_folder_that_was_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Links to files of another run's checkpoint: its weights came into the folder, exported or trained on."""
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine"
    assert train(mine, "strategy=single", "epochs=1").exit_code == 0
    at = "checkpoint/epoch-000001"
    for name in ("manifest.json", "rank-0.pt", "metrics.jsonl"):
        theirs = tmp_path / f"theirs-{name}"
        shutil.copytree(mine, theirs, ignore=shutil.ignore_patterns(".gnnpar.lock"))
        inside = name if name == "metrics.jsonl" else f"{at}/{name}"
        (theirs / inside).unlink()
        (theirs / inside).symlink_to(mine / inside)
        error = train(theirs, "strategy=single", "epochs=2", "resume=auto").error or ""
        assert f"{name} is a symbolic link, and what it leads to would be left in the folder" in error
        assert not (theirs / "checkpoint" / "epoch-000002").exists()
        if name != "metrics.jsonl":
            for command, given in (("export", theirs), ("predict", theirs), ("predict", theirs / at)):
                assert run(command, [str(given)]) == 2
                assert f"{name} cannot be written: it is a symbolic link; say by --out" in capsys.readouterr().err
    alone = tmp_path / "alone"
    shutil.copytree(tmp_path / "theirs-rank-0.pt" / at, alone, symlinks=True)
    assert run("predict", [str(alone)]) == 2
    assert "rank-0.pt cannot be written: it is a symbolic link" in capsys.readouterr().err


def test_a_folder_of_checkpoints_that_another_user_has_made_is_left_alone(
    of_all: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """He could exchange what is written there for a link, behind which everything was removed."""
    (theirs := of_all / "checkpoint").mkdir(mode=0o777)
    (theirs / "epoch-000002.partial").mkdir()
    (theirs / "epoch-000002.partial" / "precious").touch()
    os.chown(theirs, OTHER, OTHER)
    assert train(of_all, "strategy=single", "epochs=2", "checkpoint.keep=1").exit_code == 0
    said = capsys.readouterr().out
    assert "checkpoint of epoch 2 not written: another user has put it into a folder that others may write to" in said
    assert (theirs / "epoch-000002.partial" / "precious").exists()


# --- files that grow when they are read


def test_rows_beyond_memory_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """30 MB of `{"epoch":0}` took 700 MB, and 1 GB of them an hour."""
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 0}\n' * 100)
    monkeypatch.setattr(jsonl, "memory_bytes", lambda: 50 * 13 * 10)
    assert len(jsonl.read_rows(tmp_path)) == 10
    assert "metrics.jsonl has more rows than memory holds: the first 10 are read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("x;=HYPERLINK(A1)", "x;'=HYPERLINK(A1)"),
        ("x; @y;z", "x;' @y;z"),
        ("\uff1d1+1", "'\uff1d1+1"),
        ("=1", "'=1"),
        ("a=1", "a=1"),
        ("chunks=8;bits=4", "chunks=8;bits=4"),
        ("-1", "'-1"),
        (3, 3),
    ],
)
def test_no_cell_is_a_formula(cell: str | int, shown: str | int) -> None:
    """Some spreadsheets cut cells at a semicolon, and read the wide forms of signs."""
    assert inert(cell) == shown


# --- the program around


def test_programs_that_another_thread_starts_know_nothing_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While gnnpar.train ran, `gnnpar train` of another thread found no class of the working directory."""
    seen: list[set[str]] = []
    wait = processes.first_to_fail

    def waiting(*given: object) -> int | None:
        seen.append(os.environ.keys() & {"GNNPAR_LOOKED_UP", "OMP_NUM_THREADS"})
        return wait(*given)  # pyright: ignore[reportArgumentType]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(processes, "first_to_fail", waiting)
    small = {"dataset.num_nodes": 60, "threads_per_rank": 1}
    gnnpar.train("gcn", "sbm", strategy="graph_parallel", world_size=2, epochs=1, folder=tmp_path / "run", **small)
    assert seen == [set()]


FORKED = """
import os, sys, gnnpar
from concurrent.futures import ProcessPoolExecutor
def train(name):
    small = {"dataset.num_nodes": 2000, "threads_per_rank": 2}
    return gnnpar.train("gcn", "sbm", strategy="single", folder=name, epochs=2, **small).result["loss"]
if __name__ == "__main__":
    mine = train("mine")
    with ProcessPoolExecutor(1) as pool:
        print(list(pool.map(train, ["theirs"])) == [mine])
"""


def test_a_process_that_one_with_threads_has_forked_trains(tmp_path: Path) -> None:
    """It waited for ever for threads of OpenMP that its parent had."""
    (tmp_path / "program.py").write_text(FORKED)
    line = [sys.executable, "program.py"]
    done = subprocess.run(
        line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines()[-1] == "True", done.stderr


def test_a_run_that_goes_on_moves_no_random_numbers_of_the_program(tmp_path: Path) -> None:
    """Each of four folds drew the same permutation after it had trained from one checkpoint."""
    small = {"dataset.num_nodes": 60, "strategy": "single", "threads_per_rank": 1}
    gnnpar.train("gcn", "sbm", epochs=1, folder=tmp_path / "first", **small)
    torch.randperm(10)
    before = torch.get_rng_state()
    gnnpar.train("gcn", "sbm", epochs=2, folder=tmp_path / "second", resume=str(tmp_path / "first"), **small)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sweep_of_another_user_is_not_told_of(tmp_path: Path) -> None:
    """`compare` printed the command to resume whichever sweep.json lay in a folder above two runs."""
    (run_dir := tmp_path / "shared" / "mine" / "run").mkdir(parents=True)
    (tmp_path / "shared" / "sweep.json").write_text("{}")
    assert sessions._sweep_of(run_dir) == tmp_path / "shared"
    os.chown(tmp_path / "shared" / "sweep.json", OTHER, OTHER)
    assert sessions._sweep_of(run_dir) is None


def test_a_traceback_obeys_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GNNPAR_TRACEBACK", "1")
    refuse(ValueError("a\x1b[31mb"))
    said = capsys.readouterr().err
    assert "\x1b" not in said and said.count("\\x1b[31m") == 2 and "ValueError: a" in said


def test_wandb_has_no_socket_where_others_may_take_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of its folder was too long, so that it took /tmp, where others could rename."""
    monkeypatch.setattr(wandb, "_SOCKETS", {os.getpid(): tmp_path / ("x" * 100)})
    asked: list[Path] = []

    def refuse_others(place: Path) -> None:
        asked.append(place)
        raise durable.WriteError(1, "others may rename what lies in it", str(place))

    monkeypatch.setattr(wandb, "refuse_others", refuse_others)
    with pytest.raises(durable.WriteError, match="others may rename"):
        wandb._serve(types.ModuleType("wandb"))
    assert asked == [Path("/tmp")]


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


def test_other_threads_write_while_a_library_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with files.quiet():
        sys.stdout.write("of the library\n")
        other = threading.Thread(target=print, args=["of the program"])
        other.start()
        other.join()
    assert capsys.readouterr().out == "of the program\n"


def test_the_working_directory_is_on_no_path_of_a_command_that_another_module_starts(tmp_path: Path) -> None:
    (tmp_path / "torch_scatter.py").write_text("open('mark', 'w')\n")
    by_c = "import sys; from gnnpar.__main__ import main; sys.argv = ['gnnpar', '--version']; main(); print(sys.path)"
    cora = ("dataset=sbm", "model=pyg", "model.target=torch_geometric.nn.GCN", *TINY[1:])
    for line in (["-c", by_c], ["-m", "cProfile", "-o", "profile", "-m", "gnnpar", "train", *cora]):
        done = subprocess.run(
            [sys.executable, *line], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert "['" + "'" not in done.stdout, "it was first on the path"
    assert not (tmp_path / "mark").exists()


def test_no_name_is_tex_whatever_the_users_matplotlibrc_says() -> None:
    assert figures._STYLE["text.usetex"] is False


# --- what the twenty-third found: the mends of the twenty-second


def test_what_is_not_there_is_nobodys_own(of_all: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that another user hid while it was looked at counted as the user's own; it was back when it was opened."""
    assert durable.planted(of_all / "net.py") == of_all / "net.py"
    (of_all / "planted_net.py").write_text("open('mark', 'w')\nclass Net: pass\n")
    seen, lstat = [], Path.lstat

    def hidden(place: Path) -> os.stat_result:
        if place.name == "planted_net.py":
            seen.append(place)
            raise FileNotFoundError(place)
        return lstat(place)

    monkeypatch.setattr(Path, "lstat", hidden)
    with pytest.raises(ValueError, match=r"planted_net\.py: another user has put it"):
        locate("planted_net.Net")
    assert seen and not (of_all / "mark").exists()


def test_a_folder_that_appears_while_a_program_is_written_is_looked_at(
    of_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user made the one above between the look at it and the making of what lies in it."""
    refuse_link_of_others = durable.refuse_link_of_others

    def made_by_another(folder: Path) -> None:
        refuse_link_of_others(folder)
        (of_all / "demo").mkdir()
        os.chown(of_all / "demo", OTHER, OTHER)

    monkeypatch.setattr(durable, "refuse_link_of_others", made_by_another)
    with pytest.raises(durable.WriteError, match="demo cannot be written: another user has put it"):
        durable.make_own_folder(of_all / "demo" / "export")


def test_a_prediction_is_written_through_no_link(tmp_path: Path) -> None:
    """The folder of a run is somebody else's, who exchanged the new file for a link to one of the user's."""
    (precious := tmp_path / "precious.npy").write_bytes(b"mine")
    (tmp_path / "link.npy").symlink_to(precious)
    mark = bytes(range(16))
    predict.make_array(tmp_path / "new.npy", np.dtype(np.float32), (3, 2), mark)
    assert np.load(tmp_path / "new.npy").tolist() == [[0.0, 0.0]] * 3
    rows = predict._mapped(tmp_path / "new.npy", mark)
    rows[1] = 5.0
    rows.flush()
    assert np.load(tmp_path / "new.npy")[1].tolist() == [5.0, 5.0]
    os.link(tmp_path / "new.npy", tmp_path / "second.npy")
    for name in ("link.npy", "second.npy"):
        with pytest.raises(durable.WriteError, match=f"{name} cannot be written"):
            predict._mapped(tmp_path / name, mark)
        with pytest.raises(durable.WriteError, match=f"{name} cannot be written"):
            predict.make_array(tmp_path / name, np.dtype(np.float32), (3, 2), mark)
    assert precious.read_bytes() == b"mine"


def test_a_rank_writes_its_rows_into_rank_0s_file_alone(tmp_path: Path) -> None:
    """In /tmp of a second host another user had made one of its name: his had the rows, and the result zeros."""
    predict.make_array(tmp_path / "theirs.npy", np.dtype(np.float32), (3, 2), bytes(16))
    with pytest.raises(durable.WriteError, match=r"theirs\.npy cannot be written: it is not rank 0's file"):
        predict._mapped(tmp_path / "theirs.npy", b"a" * 16)


def test_ranks_score_the_same_pairs() -> None:
    """Each read the file of its own host, as /tmp/pairs.npy, which another user may have put there."""

    def body(comm: Communicator) -> str:
        with pytest.raises(ValueError, match=r"rank 1 has another content of pairs\.npy than rank 0") as refused:
            predict._refuse_unlike(f"hash {comm.rank}", "content of pairs.npy", comm)
        return str(refused.value)

    assert len(set(ThreadWorld(2).run(body))) == 1


def test_a_rank_sees_no_folder_that_another_user_has_made(of_all: Path) -> None:
    """On a host that had not rank 0's folder, he made one of that name with the file that ranks look for."""
    (of_all / "run").mkdir()
    (of_all / "run" / ".meeting-x").touch()
    assert joined.sees(of_all / "run" / ".meeting-x")
    (of_all / "run" / "link").symlink_to(of_all / "run" / ".meeting-x")
    assert not joined.sees(of_all / "run" / "link")
    os.chown(of_all / "run", OTHER, OTHER)
    assert not joined.sees(of_all / "run" / ".meeting-x")


def test_a_handler_that_is_no_python_function_stays() -> None:
    """After gnnpar.train SIGUSR1 ended a program that had asked faulthandler to answer it."""
    assert signal.SIGUSR1 in signals._of_python([signal.SIGUSR1])
    faulthandler.register(signal.SIGUSR1, file=2)
    try:
        assert signals._of_python([signal.SIGUSR1, signal.SIGINT]) == [signal.SIGINT]
    finally:
        faulthandler.unregister(signal.SIGUSR1)


def test_a_class_whose_name_is_anothers_by_now_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one was trained, by its name, twice."""
    loaded = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "net_of_two.py").write_text("import torch\nclass Net(torch.nn.Module): pass\n")
        monkeypatch.setattr(sys, "path", [str(tmp_path / name), *sys.path])
        sys.modules.pop("net_of_two", None)
        loaded.append(importlib.import_module("net_of_two").Net)
    assert api._model_node(loaded[1], {})["target"] == "net_of_two.Net"
    with pytest.raises(ConfigError, match=r"net_of_two\.Net is another class by now than the one that is given"):
        api._model_node(loaded[0], {})
    del sys.modules["net_of_two"]


def test_runs_of_one_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api.time, "strftime", lambda form: "2026-01-01/12-00-00")
    folders = [api._run_folder(None) for _ in range(3)]
    assert [folder.name for folder in folders] == ["12-00-00", "12-00-00-2", "12-00-00-3"]


def test_the_callers_precision_of_products_decides_no_numbers() -> None:
    """Ranks multiplied in bf16 on CPUs that can, and the caller's own switch raised afterwards."""
    switches = world._switches()
    torch.set_float32_matmul_precision("medium")
    try:
        before = [each.fp32_precision for each in switches]
        with torch_given_back():
            world_of(compose([*SMALL, "strategy=single", "threads_per_rank=1"])).prepare_torch()
            assert [each.fp32_precision for each in switches] == ["ieee", "ieee"]
        assert torch.get_float32_matmul_precision() == "medium"
        assert [each.fp32_precision for each in switches] == before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_children_that_the_program_has_heard_of_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = os.waitpid

    def gone(child: int, options: int) -> tuple[int, int]:
        wait(child, options)
        raise ChildProcessError(10, "No child processes")

    monkeypatch.setattr(forked.os, "waitpid", gone)
    assert isinstance(forked.has_one_thread(), bool)


IMPORTED = (
    NET
    + """
import tempfile
open("where", "a").write(tempfile.gettempdir() + "\\n")
"""
)
BY_NAME = """
import os, sys, tempfile, gnnpar
small = {"dataset.num_nodes": 60, "model.target": "net_of_pyg.Net"}
if sys.argv[1] == "distribute":
    with gnnpar.distribute("pyg", "sbm", strategy="single", folder="mine", **small) as session:
        session.train_epoch()
else:
    gnnpar.load("run", trust=True)
assert "gnnpar-scratch" not in tempfile.gettempdir()
"""


def test_a_model_is_imported_where_pyg_writes_its_code_apart(tmp_path: Path, run_cli: Run) -> None:
    """gnnpar.distribute and gnnpar.load imported it with /tmp for temporary files, where another user may have made
    the folder of compiled files."""
    (tmp_path / "net_of_pyg.py").write_text(IMPORTED)
    (tmp_path / "program.py").write_text(BY_NAME)
    given = ["model=pyg", "model.target=net_of_pyg.Net", "hydra.run.dir=run", "checkpoint.every=1"]
    assert run_cli("train", *TINY, *given).returncode == 0
    for call in ("distribute", "load"):
        (tmp_path / "where").unlink()
        done = subprocess.run(
            [sys.executable, "program.py", call], cwd=tmp_path, env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        places = (tmp_path / "where").read_text().split()
        assert places and all(Path(place).name.startswith("gnnpar-scratch-") for place in places), places


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
