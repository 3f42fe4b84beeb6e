"""Run folders and data that somebody else made: no code runs, no file outside is touched, no reader waits for ever."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pickle
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import gnnpar
from checkpoints import train
from composing import settings_of
from conftest import environment
from gnnpar import durable
from gnnpar.api import Run
from gnnpar.cli import completion
from gnnpar.cli.main import run
from gnnpar.cli.predict import checked_pairs
from gnnpar.cli.train import run_training
from gnnpar.config.compose import compose, refuse_led_away
from gnnpar.config.jobs import state_of
from gnnpar.config.replay import resumed
from gnnpar.config.submitit_jobs import place_of_results, results_apart
from gnnpar.config.sweep import OF_JOBS, Resuming
from gnnpar.data import ogb, pyg
from gnnpar.data.columns import Column
from gnnpar.data.files import cached_folder, fingerprint
from gnnpar.data.given import _of_arrays
from gnnpar.data.pyg import PyGDataset
from gnnpar.data.saved import PT
from gnnpar.durable import JsonDict, WriteError, read_checked_json, read_json, refuse_links_below, write_checked_json
from gnnpar.folder_lock import FILE, FolderInUse, Owner, working_in
from gnnpar.folds.edge_data import Schema
from gnnpar.models.pyg.model import PyG
from gnnpar.partition.chunking import Range, chunk
from gnnpar.partition.manifest import read_manifest
from gnnpar.placement import Placement, Plan
from gnnpar.report.comparison import compare
from gnnpar.report.page.page import schedules
from gnnpar.report.runs import collect
from gnnpar.settings import ConfigError
from gnnpar.targets import FENCE
from gnnpar.track import jsonl, keys, wandb
from gnnpar.track.console import say
from gnnpar.track.jsonl import read_rows
from gnnpar.training.checkpoint import files as checkpoint
from gnnpar.training.shards import check_partition

CORA = [f"ind.cora.{part}" for part in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")]
PRECIOUS = "what is outside of the folder"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A folder of the user's, with a file."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "file").write_text(PRECIOUS)
    return folder


def untouched(precious: Path) -> bool:
    return [p.name for p in precious.iterdir()] == ["file"] and (precious / "file").read_text() == PRECIOUS


@pytest.mark.parametrize("name", [".reserved", "metrics.jsonl", "result.json", "plan.json", "config.yaml"])
def test_a_run_writes_through_no_link_of_its_folder(tmp_path: Path, precious: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(precious / "file")
    assert train(tmp_path / "run", "strategy=single", "epochs=1").exit_code == 0
    assert untouched(precious)


def test_a_checkpoint_is_written_into_no_folder_outside(
    tmp_path: Path, precious: Path, capsys: pytest.CaptureFixture
) -> None:
    checkpoints = tmp_path / "run" / "checkpoint"
    checkpoints.mkdir(parents=True)
    (checkpoints / "epoch-000002.partial").symlink_to(precious)
    (checkpoints / "epoch-000004.partial").mkdir()
    (checkpoints / "epoch-000004.partial" / "rank-0.pt").symlink_to(precious / "file")
    assert train(tmp_path / "run", "strategy=single", "epochs=4", "checkpoint.every=2").exit_code == 0
    assert untouched(precious)
    assert "checkpoint of epoch 2 not written: " in capsys.readouterr().out
    assert train(tmp_path / "run", "strategy=single", "epochs=6", "resume=auto").exit_code == 0
    assert not list(checkpoints.glob("*.partial"))
    assert untouched(precious)


def test_checkpoints_are_neither_written_nor_removed_through_a_link(
    tmp_path: Path, precious: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("epoch-000009", "epoch-000002", "epoch-000008.partial"):
        (precious / name).mkdir()
    before = sorted(precious.iterdir())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint").symlink_to(precious)
    assert train(tmp_path / "run", "strategy=single", "epochs=2", "resume=auto", "checkpoint.keep=1").exit_code == 0
    assert sorted(precious.iterdir()) == before
    assert "checkpoint is a symbolic link" in capsys.readouterr().out


def test_a_prediction_is_written_through_no_link(trained: Path, tmp_path: Path, precious: Path) -> None:
    (tmp_path / ".out.npy.partial").symlink_to(precious / "file")
    assert run("predict", [str(trained), "strategy=single", "comm=threads", "--out", str(tmp_path / "out.npy")]) == 0
    assert untouched(precious)
    assert not (tmp_path / "out.npy").is_symlink()


def test_two_predictions_of_a_run_share_no_file(trained: Path, tmp_path: Path) -> None:
    """Both wrote one partial file, and the first to end named a mixture."""
    other = tmp_path / ".out.npy.partial"
    other.write_text("of another prediction")
    assert run("predict", [str(trained), "strategy=single", "comm=threads", "--out", str(tmp_path / "out.npy")]) == 0
    assert other.read_text() == "of another prediction"
    assert {path.name for path in tmp_path.iterdir()} == {other.name, "out.npy"}


def test_an_export_is_written_through_no_link(tmp_path: Path, precious: Path) -> None:
    assert train(tmp_path / "run", "strategy=single", "epochs=1").exit_code == 0
    (tmp_path / "run" / "export").mkdir()
    for name in ("weights.pt", "model.json", "program.pt2", "predict.py"):
        (tmp_path / "run" / "export" / name).symlink_to(precious / "file")
    assert run("export", [str(tmp_path / "run")]) == 0
    assert untouched(precious)


def test_a_file_that_is_being_written_is_no_link(tmp_path: Path, precious: Path) -> None:
    """`result.json.PID.partial` led to any file of the user."""
    file = tmp_path / "result.json"
    file.with_name(f"result.json.{os.getpid()}.partial").symlink_to(precious / "file")
    durable.write_text_whole(file, "{}")
    assert untouched(precious)
    assert not file.is_symlink() and file.read_text() == "{}"


@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl", "plan.json", "a.npy", "data.pt"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    readers: dict[str, Callable[[], object]] = {
        "result.json": lambda: collect([tmp_path]),
        "metrics.jsonl": lambda: pytest.fail("rows of a pipe") if read_rows(tmp_path) else read_json(tmp_path / "none"),
        "plan.json": lambda: Plan.load(tmp_path / name),
        "a.npy": lambda: Column(tmp_path / name),
        "data.pt": lambda: durable.file_hash(tmp_path / name),
    }
    with pytest.raises((ValueError, OSError)):
        readers[name]()


@pytest.mark.parametrize("key", ["data_dir", "tracker", "launch", "cache_dir", "resume"])
def test_a_plan_brings_no_folder_and_no_tracker(tmp_path: Path, key: str) -> None:
    strategy = {"name": "single", "_target_": "gnnpar.parallel.single.strategy.Single"}
    setup = {"names": {}, key: {"_target_": "gnnpar.track.wandb.Wandb"} if key == "tracker" else "/elsewhere"}
    (tmp_path / "plan.json").write_text(json.dumps({"strategy": strategy, "setup": setup}))
    with pytest.raises(ValueError, match=f"nothing reads setup.{key}; remove it"):
        compose([f"plan={tmp_path}/plan.json"])


def test_a_plan_chooses_no_folder_to_write_to(tmp_path: Path) -> None:
    folders = f"strategy.host_dir={tmp_path}"
    assert train(tmp_path / "run", "strategy=sar", "strategy.logical_parts=2", "epochs=1", folders).exit_code == 0
    file = tmp_path / "run" / "plan.json"
    plan = json.loads(file.read_text())
    assert plan["strategy"]["host_dir"] is None, "one of one's own can be given again"
    plan["strategy"]["host_dir"] = "/elsewhere"
    file.write_text(json.dumps(plan))
    with pytest.raises(ValueError, match=r"plan=.* sets strategy.host_dir=/elsewhere, and a plan chooses no folder"):
        compose([f"plan={file}"])


class Code:
    """A pickle of it runs code."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("place", ["data_dir", "cache"])
def test_raw_files_of_a_dataset_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Those of a cache are read where nothing is processed yet."""
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    root = tmp_path if place == "data_dir" else tmp_path / "cache" / "pyg" / "cora-downloaded"
    raw = root / "Cora" / "raw"
    raw.mkdir(parents=True)
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph"):
        (raw / f"ind.cora.{part}").write_bytes(pickle.dumps(Code(tmp_path / "ran")))
    (raw / "ind.cora.test.index").write_text("0\n")
    with pytest.raises(ValueError, match=r"cannot be read \(UnpicklingError: it names .*, which is no array\)"):
        PyGDataset(name="cora").load(tmp_path, 0)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["data.pt", "pre_transform.pt", "pre_filter.pt"])
def test_a_cache_that_pyg_reads_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """PyG unpickles its notes of transforms, and what torch refuses for a class that one could allow."""
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    raw = tmp_path / "Cora" / "raw"
    raw.mkdir(parents=True)
    for file in CORA:
        (raw / file).write_bytes(b"")
    root = tmp_path / "cache" / "pyg" / f"cora-{fingerprint(raw, CORA)}" / "Cora"
    shutil.copytree(raw, root / "raw")
    (root / "processed").mkdir()
    content = {"data.pt": (Data(x=torch.ones(2, 2)).to_dict(), None, Data)}
    for file, what in (content | {name: Code(tmp_path / "ran")}).items():
        torch.save(what, root / "processed" / file)
    with contextlib.suppress(ValueError):  # a graph without edges, or the file
        PyGDataset(name="cora").load(tmp_path, 0)
    assert not (tmp_path / "ran").exists()


WAITING: dict[str, tuple[str, str]] = {  # dataset, the pipe that a reader would wait for
    "raw of PyG": ("cora", "Cora/raw/ind.cora.x"),
    "processed of PyG": ("cora", "cache/pyg/cora-downloaded/Cora/processed/data.pt"),
    "raw of OGB": ("ogbn_arxiv", "ogbn_arxiv/raw/edge.csv.gz"),
    "arrays of OGB": ("ogbn_arxiv", "cache/ogb_arrays/ogbn_arxiv-downloaded/x.npy"),
}


@pytest.mark.parametrize("kind", WAITING)
def test_pipes_among_the_files_of_a_dataset_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ogb, "_table", lambda file, dtype: pytest.fail("it was opened"))
    monkeypatch.setattr(pyg, "_arrays_alone", lambda: pytest.fail("it was opened"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was opened"))
    monkeypatch.setattr(zipfile, "is_zipfile", lambda file: pytest.fail("it was opened"))
    dataset, pipe = WAITING[kind]
    if not pipe.startswith("cache"):
        for name in CORA if dataset == "cora" else ogb.required_files(dataset):
            file = (tmp_path / "Cora" / "raw" if dataset == "cora" else tmp_path / dataset) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    file = tmp_path / pipe
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    with pytest.raises(ValueError, match=rf"{file.name} is no file, but a pipe|it is no file: .*{file.name}"):
        (PyGDataset(name="cora") if dataset == "cora" else ogb.OGBDataset(name="ogbn_arxiv")).load(tmp_path, 0)


def test_a_cache_that_goes_round_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two links to their own folder: a walk that follows them has 2^40 paths."""
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "cache" / "pyg" / "cora-downloaded"
    root.mkdir(parents=True)
    (root / "a").symlink_to(".")
    with pytest.raises(ValueError, match=r"of the cache cannot be read \(ValueError: .*/a is a link to a folder\)"):
        PyGDataset(name="cora").load(tmp_path, 0)


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_lock_of_a_cache_is_no_pipe_and_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precious: Path, kind: str
) -> None:
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    lock = tmp_path / "cache" / "a" / ".b.lock"
    lock.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(lock)
        assert cached_folder("a/b", lambda made: (made / "x").touch()).is_dir()
        return
    target = next(file for file in precious.rglob("*") if file.is_file())
    lock.symlink_to(target)
    with pytest.raises(ValueError, match="cannot write to the cache folder"):
        cached_folder("a/b", lambda made: None)
    assert untouched(precious)


def ogb_files(folder: Path, **changed: str) -> None:
    """ogbn-arxiv with 40 nodes, as OGB unpacks it. `changed`: the text of a file, by its name with _ for -."""
    lists = {"node_feat": "1,0\n" * 40, "node_label": "0\n1\n" * 20, "edge": "0,1\n1,2\n2,0\n"}
    lists |= {"num_node_list": "40\n", "num_edge_list": "3\n", "train": "0\n", "valid": "1\n", "test": "2\n"} | changed
    for file in ogb.required_files("ogbn_arxiv"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        content = lists[Path(file).name.removesuffix(".csv.gz").replace("-", "_")]
        (folder / file).write_bytes(gzip.compress(content.encode()))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"train": "0\n40\n"}, "the split train names nodes 0 to 40, but there are 0 to 39"),
        ({"train": "-1\n"}, "the split train names nodes -1 to -1, but there are 0 to 39"),
        ({"train": "0.5\n"}, r"the files in .*/ogbn_arxiv cannot be read \(ValueError\)"),
        ({"edge": "0,1\n1,x\n2,0\n"}, r"the files in .*/ogbn_arxiv cannot be read \(ValueError\)"),
        (
            {"num_node_list": f"{10**15}\n"},
            r".*they say 1000000000000000 nodes and 3 edges, and have features of 40 and",
        ),
        ({"num_edge_list": "4\n"}, r".*they say 40 nodes and 4 edges, and have features of 40 and 3 edges\)\.$"),
        ({"edge": "0,1,2\n1,2,0\n2,0,0\n"}, r"edge_index must have shape \[2, edges\], got \[3, 3\]"),
    ],
)
def test_files_of_ogb_that_disagree_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], line: str
) -> None:
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    ogb_files(tmp_path / "ogbn_arxiv", **changed)
    with pytest.raises(ValueError, match=f"^dataset ogbn_arxiv: {line}"):
        ogb.OGBDataset(name="ogbn_arxiv").load(tmp_path, 0)


@pytest.mark.parametrize("command", ["train", "check"])
def test_yaml_that_is_none_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "broken.yaml").write_text("a: [1\nb: {")
    monkeypatch.chdir(tmp_path)
    assert run(command, ["model=broken", *(["strategy=single", "epochs=1"] if command == "train" else [])]) == 2
    said = capsys.readouterr().err
    assert "model/broken.yaml is no YAML: " in said and "in line 2; correct it" in said and "Traceback" not in said


def test_a_cache_of_ogb_holds_arrays_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OGB itself unpickles what it has saved."""
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    ogb_files(tmp_path / "ogbn_arxiv")
    assert ogb.OGBDataset(name="ogbn_arxiv").load(tmp_path, 0).y.tolist() == [0, 1] * 20
    (labels,) = (tmp_path / "cache" / "ogb_arrays").glob("*/y.npy")
    np.save(labels, np.array([Code(tmp_path / "ran")], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="of the cache cannot be read"):
        ogb.OGBDataset(name="ogbn_arxiv").load(tmp_path, 0)
    assert not (tmp_path / "ran").exists()


def header(shape: str) -> bytes:
    """Of a .npy file."""
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    "content",
    {
        "nothing": b"",
        "a zip": b"PK\x03\x04",
        "too large": header("(99999999999999999999, 2)"),
        "negative": header("(-4, 2)"),
        "a truth": header("(True, 2)") + bytes(64),
        "no end": header("(4, 2"),
        "beyond memory": header("(10000000000000, 2)"),
        "a pipe": None,
        "an archive": None,
    }.items(),
    ids=lambda item: item[0],
)
def test_what_is_no_array_is_one_line(tmp_path: Path, content: tuple[str, bytes | None]) -> None:
    """numpy raised EOFError, OverflowError, MemoryError, TokenError, ..., gave an archive, or waited for a writer."""
    file, trained = tmp_path / "pairs.npy", settings_of("task=link")
    if content[0] == "a pipe":
        os.mkfifo(file)
    elif content[0] == "an archive":
        np.savez(tmp_path / "pairs.npz", np.zeros((2, 2)))
        (tmp_path / "pairs.npz").rename(file)
    else:
        file.write_bytes(content[1] or b"")
    with pytest.raises(ValueError, match=r"pairs\.npy cannot be read \(.+\); give a \.npy$"):
        checked_pairs(file, trained)


@pytest.mark.parametrize("place", ["wandb", ".wandb"])
def test_settings_of_wandb_in_the_working_directory_take_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """wandb reads them unasked: a server that they name got the user's key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    file = Path(place, "settings")
    file.parent.mkdir()
    file.write_text("[default]\nproject = mine\nbase_url = https://api.wandb.ai\n")
    wandb.refuse_settings_of(tmp_path, entity=None)
    for line in ("base_url = http://elsewhere", "https_proxy = http://elsewhere"):
        file.write_text(f"[default]\n{line}\n")
        with pytest.raises(ValueError, match=r"settings sets \w+, and decides who gets your key; put it into"):
            wandb.load(entity=None)
        assert run("dashboard", ["."]) == 2
    file.write_bytes(b"[default]\nbase_url = http://elsewhere\n# \xe9\n")  # wandb reads it where the locale is Latin-1
    with pytest.raises(ValueError, match="settings holds characters that are not ASCII, and decides who gets your key"):
        wandb.load(entity=None)


FIGURES = """
from pathlib import Path
from gnnpar.report import figures
try:
    figures.write_figures(None, Path("matplotlibrc"))
except figures.ConfigError:
    import matplotlib
    print(matplotlib.rcParams["lines.linewidth"])
"""


def test_figures_read_no_matplotlibrc_of_the_working_directory(tmp_path: Path) -> None:
    """Its colours are code to matplotlib before 3.11."""
    (tmp_path / "matplotlibrc").write_text("lines.linewidth: 77\n")
    command = [sys.executable, "-P", "-c", FIGURES]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.stdout == "1.5\n", done.stderr


def test_python_m_imports_nothing_of_the_working_directory(tmp_path: Path) -> None:
    """But what Python itself imports before gnnpar is found."""
    for module in ("signal", "threading", "typing", "json", "difflib"):
        (tmp_path / f"{module}.py").write_text(f"open('ran', 'a').write('{module} ')\n")
    command = [sys.executable, "-m", "gnnpar", "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


SCRIPT = """
import threading, time, gnnpar
if __name__ == "__main__":
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # as notebooks have: ranks are not forked
    tiny = {"dataset.num_nodes": 200, "model.hidden": 8}
    gnnpar.train("gcn", "sbm", strategy="graph_parallel", world_size=2, epochs=1, folder="run", **tiny)
"""


def test_ranks_of_a_script_import_nothing_of_the_working_directory(tmp_path: Path) -> None:
    script = tmp_path / "own" / "script.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    for module in ("multiprocessing", "contextlib", "pickle"):
        (tmp_path / f"{module}.py").write_text(f"open('ran', 'a').write('{module} ')\n")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "result.json").exists()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("pid", [-1, 0, 10**12])
def test_a_process_number_that_cannot_be_is_no_record_of_a_job(tmp_path: Path, pid: int) -> None:
    record = {"started": 1, "pid": pid, "born": 1.0, "host": socket.gethostname(), "error": None}
    (tmp_path / "job.json").write_text(json.dumps(record))
    assert state_of(tmp_path) == ("missing", "")


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        "sweeper/basic.yaml",
        "launcher/joblib.yaml",
        "sweeper/sampler/tpe.yaml",
        "launcher/None.yaml",
        "callbacks/None.yaml",
    ],
)
def test_yaml_of_the_working_directory_takes_no_place_of_hydra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """hydra/sweeper/basic.yaml brought overrides of every job, and so a class."""
    file = tmp_path / "hydra" / name
    file.parent.mkdir(parents=True)
    file.write_text("params: {seed: 7}\n")
    monkeypatch.chdir(tmp_path)
    assert run("train", ["-m", "debug=tiny", "strategy=single", "seed=0,1"]) == 2
    err = capsys.readouterr().err
    assert f"{file} would be read in the place of Hydra's own hydra/{name}" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("group", ["debug", "codec"])
def test_yaml_that_nobody_chose_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], group: str
) -> None:
    """Of a group without a choice Hydra opens None.yaml, which may be endless."""
    file = tmp_path / group / "None.yaml"
    file.parent.mkdir()
    file.write_text("a: 1\n")
    monkeypatch.chdir(tmp_path)
    assert run("train", ["strategy=single"]) == 2
    assert f"{file} would be read where no {group} is chosen: rename it" in capsys.readouterr().err


def test_a_page_holds_no_file_that_a_run_links_to(tmp_path: Path, precious: Path, trained: Path) -> None:
    """schedule.svg -> ~/.ssh/id_rsa went out with the page; a pipe was waited for."""
    shutil.copytree(trained.parents[1], tmp_path / "run")
    picture = tmp_path / "run" / "schedule.svg"
    picture.symlink_to(precious / "file")
    compared = compare(collect([tmp_path / "run"]), baseline="single")
    assert schedules(compared) == []
    picture.unlink()
    os.mkfifo(picture)
    assert schedules(compared) == []
    picture.unlink()
    picture.write_text("<svg/>")
    assert len(schedules(compared)) == 1
    picture.unlink()
    os.link(precious / "file", picture)
    assert schedules(compared) == []


def test_a_resume_beyond_the_epochs_that_are_asked_for_is_refused(tmp_path: Path) -> None:
    """result.json said 1 epoch, and had the figures of 2."""
    assert train(tmp_path / "run", "strategy=single", "epochs=2").exit_code == 0
    outcome = train(tmp_path / "other", "strategy=single", "epochs=1", f"resume={tmp_path / 'run'}")
    assert outcome.exit_code == 1
    assert "has 2 epochs behind it, and epochs=1: set epochs=2 or more" in str(outcome.error)


def test_a_closed_stdout_is_no_traceback(tmp_path: Path) -> None:
    line = f"{sys.executable} -m gnnpar cite strategy=sar >&-"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment(), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_log_that_nobody_reads_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    given_up: list[int] = []
    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(os, "dup2", lambda source, target: given_up.append(target))
    say("epoch 1")
    assert len(given_up) == 1


def test_a_home_of_nobody_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("train", "debug=tiny", "cache_dir='~nobodyx/c'"), ("new", "model", "m", "--into", "~nobodyx/c")):
        assert run(words[0], list(words[1:])) == 2
        assert "~nobodyx/c: there is no such user; write the folder out" in capsys.readouterr().err


def test_a_run_of_somebody_else_is_not_trusted_for_being_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train(tmp_path / "run", "strategy=single", "epochs=1").exit_code == 0
    (file,) = (tmp_path / "run").glob("checkpoint/*/manifest.json")
    tree = read_checked_json(file)
    tree["run"]["settings"]["tracker"] = {"_target_": "evil_of_a_run.Evil"}
    write_checked_json(file, tree)
    (tmp_path / "evil_of_a_run.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    for each in (gnnpar.compare([tmp_path / "run"]).runs[0], Run(tmp_path / "run")):
        with pytest.raises(ValueError, match=r"names evil_of_a_run\.Evil, which is no class of gnnpar"):
            _ = each.model
    assert not (tmp_path / "ran").exists()


def test_two_sweeps_of_python_share_no_folder(tmp_path: Path) -> None:
    """The second would write over the runs of the first, one by one."""
    owner = Owner(pid=1, host="another", born=None, since=float("inf"))
    (tmp_path / FILE).write_text(json.dumps({**vars(owner), "since": 1e300}))
    with pytest.raises(FolderInUse, match="is in use by process 1 of another since an unknown time: wait for it, or"):
        gnnpar.sweep("gcn", "sbm", folder=tmp_path, strategy=["single"])


def test_a_lock_of_no_time_is_one_line(tmp_path: Path) -> None:
    owner = {"pid": 1, "host": "h" * 5000, "born": None, "since": float("nan"), "job": "", "attempt": [0, 0]}
    (tmp_path / FILE).write_text(json.dumps(owner))
    with pytest.raises(FolderInUse, match="unknown time") as refused, working_in(tmp_path, otherwise="", say=print):
        pass
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("which", ["part_of", "chunk_of"])
def test_a_part_or_chunk_beyond_memory_is_one_line(which: str) -> None:
    arrays = {"part_of": torch.zeros(4, dtype=torch.int64), "chunk_of": torch.zeros(4, dtype=torch.int64)}
    arrays[which][0] = 1 << 60
    plan = Plan(Placement(((0,),), arrays["part_of"], arrays["chunk_of"], (range(2),)))
    with pytest.raises(
        ValueError, match=f"the plan cannot run: {which} (goes from 0 to|has the chunk) 1152921504606846976"
    ):
        plan.verify()


def test_a_flipped_bit_in_cached_chunks_is_noticed(tmp_path: Path) -> None:
    dataset = compose(["debug=tiny"]).dataset.load(None, 0)
    part_of, lines = torch.arange(dataset.num_nodes) % 2, []
    made = chunk(dataset, part_of, 4, by=Range(), cache=tmp_path)
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[-4] ^= 1  # another chunk that is there
    file.write_bytes(bytes(data))
    assert torch.equal(chunk(dataset, part_of, 4, by=Range(), cache=tmp_path, say=lines.append), made)
    assert lines[0] == f"the cached chunking {file} is corrupt: making it again"


def test_a_row_repeated_beyond_memory_is_refused(tmp_path: Path) -> None:
    x = torch.zeros(1, 1).expand(1 << 30, 1 << 20)
    torch.save(Data(x=x, y=torch.zeros(3), edge_index=torch.zeros(2, 0, dtype=torch.int64)), tmp_path / "my.pt")
    with pytest.raises(ValueError, match="repeats the 4 that the file has"):
        PT(path=str(tmp_path / "my.pt")).load(None, 0)


def test_features_that_numpy_has_not_are_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path))
    edges = torch.tensor(np.array([[0, 1, 2, 3], [1, 2, 3, 0]]))
    data = Data(x=torch.ones(4, 2).bfloat16(), y=torch.arange(4) % 2, edge_index=edges)
    for name, split in (("train", [1, 1, 0, 0]), ("val", [0, 0, 1, 0]), ("test", [0, 0, 0, 1])):
        data[f"{name}_mask"] = torch.tensor(split).bool()
    run = gnnpar.train("gcn", data, strategy="single", folder=tmp_path / "run", epochs=1, threads_per_rank=1)
    assert run.result["epochs_done"] == 1


def test_an_export_goes_into_no_folder_that_is_a_link_of_the_run(
    trained: Path, precious: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = trained.parents[1] / "export"
    export.symlink_to(precious)
    try:
        assert run("export", [str(trained)]) == 2
    finally:
        export.unlink()
    assert "export cannot be written: it is a symbolic link" in capsys.readouterr().err
    assert untouched(precious)


def test_what_is_no_file_is_not_replaced_by_one(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before there is anything to wait for: a prediction, a plan, a page."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("device").symlink_to(os.devnull)
    Path("folder").mkdir()
    with monkeypatch.context() as alone:
        alone.setattr("gnnpar.launch.launch.launch", None)
        for name in ("pipe", "device", "folder"):
            assert run("predict", [str(trained), "strategy=single", "--out", name]) == 2
    assert run("compare", [str(trained.parents[1]), "--html", "pipe"]) == 2
    assert run("plan", ["model=gcn", "dataset=sbm", "world_size=2", "--trace", "pipe"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "cannot be written" in line]
    assert [line.endswith(("it is a folder; name a file", "or socket; name a file")) for line in lines] == [True] * 5
    assert Path("pipe").is_fifo() and Path("device").is_symlink() and Path("folder").is_dir()


def test_a_page_replaces_a_link(trained: Path, tmp_path: Path, precious: Path) -> None:
    page = tmp_path / "page.html"
    page.symlink_to(precious / "file")
    assert run("compare", [str(trained.parents[1]), "--html", str(page)]) == 0
    assert untouched(precious)
    assert not page.is_symlink()


PARTITIONS = {
    "another file": lambda file, precious: (file.unlink(), file.symlink_to(precious / "file")),
    "a device": lambda file, precious: (file.unlink(), file.symlink_to("/dev/zero")),
    "a pipe": lambda file, precious: (file.unlink(), os.mkfifo(file)),
    "missing": lambda file, precious: file.unlink(),
    "changed": lambda file, precious: file.write_bytes(file.read_bytes()[:-1] + b"\1"),
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "s"
    assert (
        run("partition", ["dataset=sbm", "dataset.num_nodes=200", "partition=range", "world_size=2", f"out={out}"]) == 0
    )
    return out


@pytest.mark.parametrize("kind", PARTITIONS)
def test_the_partition_of_shards_is_looked_at_before_it_is_copied(
    shards: Path, tmp_path: Path, precious: Path, kind: str
) -> None:
    """It is copied into the folder of the run: what it leads to would be, too."""
    folder = tmp_path / "shards"
    shutil.copytree(shards, folder)
    PARTITIONS[kind](folder / "part_of.npy", precious)
    settings = compose(["strategy=graph_parallel", f"shards={folder}", "shards.check=header", "comm=threads"])
    with pytest.raises(ValueError, match=r"shards=.*part_of\.npy is (missing|corrupt|\d+ bytes)"):
        run_training(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("array", "line"),
    [
        (np.zeros((200, 2), dtype=np.int32), "not a part of each of 200 nodes"),
        (np.full(200, 2, dtype=np.int32), "goes from 2 to 2, but there are 2 parts"),
        (np.arange(200, dtype=np.int32) % 2, "is not the partition whose hash the manifest has"),
    ],
)
def test_a_forged_partition_is_not_that_of_its_hash(shards: Path, tmp_path: Path, array: np.ndarray, line: str) -> None:
    folder = tmp_path / "shards"
    shutil.copytree(shards, folder)
    file = folder / "part_of.npy"
    np.save(file, array)
    manifest = read_checked_json(folder / "manifest.json")
    manifest["files"]["part_of.npy"] |= {"nbytes": file.stat().st_size, "sha256": durable.file_hash(file)}
    write_checked_json(folder / "manifest.json", manifest)
    with pytest.raises(ValueError, match=line):
        check_partition(folder, read_manifest(folder))


def test_a_partition_is_copied_through_no_link(shards: Path, tmp_path: Path, precious: Path) -> None:
    manifest = read_manifest(shards)
    name = f"{manifest.hashes['partition'][:16]}.npy"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(precious / "file")
    settings = compose(["strategy=graph_parallel", f"shards={shards}", "comm=threads", "epochs=1", "tracker=jsonl"])
    assert run_training(settings, tmp_path / "run").exit_code == 0
    assert untouched(precious)
    assert (tmp_path / "run" / name).read_bytes() == (shards / "part_of.npy").read_bytes()


def sweep_of(folder: Path, *, job: str = "0", argv: tuple[str, ...] = ("seed=0",)) -> Path:
    jobs = [{"key": "k", "folder": job, "overrides": ["seed=0"]}]
    (folder / "sweep.json").write_text(json.dumps({"schema": 1, "argv": list(argv), "jobs": jobs}))
    return folder


@pytest.mark.parametrize("name", ["../mine", "/mine", "${oc.env:NOPE,..}/mine", "a/${hydra:runtime.cwd}"])
def test_a_job_of_a_sweep_lies_below_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not below it"):
        resumed(["--resume", str(sweep_of(tmp_path, job=name))])


@pytest.mark.parametrize(
    "override",
    [
        "dataset.name='${oc.env:WANDB_API_KEY}'",
        "optim.lr=${oc.env:GNNPAR_TOKEN}",
        r"dataset.name=$\{oc.env:WANDB_API_KEY\}",  # which Hydra reads as ${...}
        r"epochs=1,$\\\{oc.env:GNNPAR_TOKEN\\\}",  # and, of a choice, twice
        r"hydra.sweep.subdir=$\{oc.env:HOME\}",
        "hydra.sweep.subdir=${oc.env:HOME}",
        "+hydra.sweep.mode=777",  # of the sweep's folder, in which submitit unpickles results
        "hydra.sweep.mode=777",
        "++hydra.sweep.mode='777'",
        "+hydra.sweep.subdir=a",
        "cache_dir=/elsewhere",
        "tracker.entity=somebody",
        "strategy.host_dir=/elsewhere",
    ],
)
def test_a_sweep_reads_no_environment_and_chooses_no_folder(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="run code of its own, read the environment or write elsewhere: type it"):
        resumed(["--resume", str(sweep_of(tmp_path, argv=("seed=0", override)))])


PLAN = {"schema": 1, "mesh": [[0]], "layers_of": [[0, 2]], "arrays": {}, "hashes": {}, "statistics": {}}
SINGLE = {"name": "single", "_target_": "gnnpar.parallel.single.strategy.Single"}


def test_a_job_that_can_be_read_only_when_it_runs_imports_no_class_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its plan lies in its own folder, which is not there while it is planned: what it names is then not known."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('PWNED', 'w')")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "p.json").write_text(json.dumps(PLAN | {"predicted": None, "strategy": SINGLE}))
    argv = ("model=pyg", "model.target=evil.Net", "plan=sweep/1/../p.json", "dataset=sbm", "debug=tiny", "epochs=1")
    sweep_of(tmp_path / "sweep", argv=argv)
    assert run("train", ["--resume", "sweep"]) in (1, 2)
    told = capfd.readouterr()
    assert "a file names it, and is no class of gnnpar or of a plugin" in told.out + told.err
    assert not Path("PWNED").exists()
    assert FENCE not in os.environ


ESCAPED = (
    r"early_stopping.patience=$\{oc.create\:$\{oc.select\:$\{oc.env\:GNNPAR_JOBS_AT_ONCE\,resume\}\,\\\{_targ$\{oc.env\:NOPE\,et_\}"
    r"\\\:\ subprocess.Popen\\\,\ args\\\:\ touch\ PWNED\\\,\ shell\\\:\ true\\\}\}\}"
)
"""A number that becomes a class, when a job runs and not while it is planned."""


@pytest.mark.parametrize("trust", [False, True])
def test_a_sweep_makes_no_class_out_of_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trust: bool
) -> None:
    """Whoever trusts the file gets the words of the setting."""
    monkeypatch.chdir(tmp_path)
    sweep_of(tmp_path, argv=("dataset=sbm", "debug=tiny", "strategy=single", "epochs=1,2", ESCAPED))
    assert run("train", ["--resume", ".", *(["--trust"] if trust else [])]) in (1, 2)
    told = capsys.readouterr()
    assert ("must be a whole number >= 1 or null" if trust else "run code of its own, read") in told.out + told.err
    assert not Path("PWNED").exists()


@pytest.mark.parametrize("override", [ESCAPED, r"dataset.name=$\{oc.env:SECRET\}"])
def test_a_study_makes_no_class_out_of_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    monkeypatch.chdir(tmp_path)
    study = {"base": ["debug=tiny", "strategy=single"], "factors": {"lr": ["optim.lr=0.1", ["optim.lr=0.2", override]]}}
    Path("study.yaml").write_text(json.dumps(study))
    assert run("ablate", ["study.yaml"]) == 2
    assert "reads the environment or more, and a study is data" in capsys.readouterr().err
    assert not Path("PWNED").exists()


def test_a_sweep_may_number_its_jobs(tmp_path: Path) -> None:
    numbered = "hydra.sweep.subdir=job-${hydra.job.num}"
    assert numbered in resumed(["--resume", str(sweep_of(tmp_path, argv=("seed=0", numbered)))])[0]


@pytest.mark.parametrize(
    ("strategy", "key", "value"),
    [("minibatch", "walk_length", 10**9), ("minibatch", "coverage", 10**9), ("bns", "rate", 1e-300)],
)
def test_a_number_that_would_run_for_days_or_draws_nothing_is_refused(strategy: str, key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"strategy.{key}={value:g}|strategy.{key}={value}"):
        compose([f"strategy={strategy}", f"strategy.{key}={value}"])


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '[[], [["a", "b", "c"]], null]',
        '[[[[], 1]], [["a", "b", "c"]], null]',
        '[[["a", 1]], [["a", "b", "a"]], {}]',
        '[[["a", 1]], [["a", "b", ["a"]]], null]',
        '[[["a", 1], ["a", 1]], [["a", "b", "a"]], null]',
    ],
)
def test_types_of_nodes_that_a_file_spells_wrong_are_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"does not list the types|a type without a name of its own"):
        Schema.of(text)


def test_a_folder_that_is_no_checkpoint_hides_none(tmp_path: Path, trained: Path) -> None:
    shutil.copytree(trained.parents[1], tmp_path / "run")
    good = checkpoint.folders(tmp_path / "run")
    (tmp_path / "run" / checkpoint.FOLDER / "epoch-\u00b2").mkdir()  # a digit to str.isdigit, no number to int
    assert checkpoint.folders(tmp_path / "run") == good != []


def test_numbers_of_other_widths_and_orders_are_read_and_masked_ones_are_not() -> None:
    edges = np.array([[0, 1], [1, 2]], dtype=">i8")
    x = np.arange(6).reshape(3, 2)
    for dtype in (">f4", np.longdouble):
        found = _of_arrays({"x": x.astype(dtype), "y": np.arange(3), "edge_index": edges})
        assert found.x is not None and torch.equal(found.x.double(), torch.from_numpy(x).double())
        assert found.edge_index is not None and torch.equal(found.edge_index, torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(ValueError, match="x has masked entries; fill them"):
        _of_arrays({"x": np.ma.masked_array(x, mask=x > 2), "y": np.arange(3), "edge_index": edges})


def test_what_is_written_by_itself_goes_through_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], precious: Path
) -> None:
    """multirun/study -> elsewhere; outputs itself may be one, to another disk."""
    monkeypatch.chdir(tmp_path)
    study = {"base": ["debug=tiny", "strategy=single"], "factors": {"lr": ["optim.lr=0.1"]}}
    Path("study.yaml").write_text(json.dumps(study))
    Path("multirun").mkdir()
    Path("multirun/study").symlink_to(precious)
    assert run("ablate", ["study.yaml"]) != 0
    assert "multirun/study cannot be written: it is a symbolic link" in capsys.readouterr().err
    for name in ("outputs", "multirun"):
        Path(name).mkdir(exist_ok=True)
        Path(name, "2026-01-01").symlink_to(precious)
        with pytest.raises(WriteError, match="is a symbolic link"):
            refuse_led_away(Path(name, "2026-01-01", "00-00-00").absolute(), [])
    refuse_led_away(Path("outputs", "2026-01-01", "00-00-00").absolute(), ["hydra.run.dir=outputs/2026-01-01/00-00-00"])
    Path("disk").symlink_to(precious)
    refuse_led_away(Path("disk", "x").absolute(), [])
    refuse_led_away(Path.cwd(), [])
    assert untouched(precious)


def test_rows_that_are_none_are_not_read_into_memory(tmp_path: Path) -> None:
    """60 GB of holes are a few bytes in an archive."""
    (tmp_path / jsonl.FILE).write_text('{"epoch": 0}\n')
    os.truncate(tmp_path / jsonl.FILE, 60 << 30)
    assert read_rows(tmp_path) == [{"epoch": 0}]
    assert jsonl.RowDigest(tmp_path).read().count == 1


class OnlyHere(MessagePassing):
    """A convolution of no other test: PyG generates the code of a class once a process."""

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.propagate(edge_index, x=x)


def test_code_that_pyg_generates_lies_where_nobody_else_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of all users, who could put its compiled form beside it, and is gone afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make, folders = tempfile.NamedTemporaryFile, {}

    def seen(*args: Any, **options: Any) -> Any:
        file = make(*args, **options)
        folder = Path(file.name).parent
        folders[folder] = stat.S_IMODE(folder.stat().st_mode)
        return file

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", seen)
    PyG(target=f"{__name__}.OnlyHere").build(4, 4, seed=0)
    assert set(folders.values()) == {0o700}
    assert tmp_path not in folders
    assert list(tmp_path.iterdir()) == []


def in_run(**changes: object) -> Callable[[JsonDict, JsonDict], None]:
    return lambda manifest, tree: manifest["run"].update(changes)


def weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[JsonDict, JsonDict], None]:
    return lambda manifest, tree: tree["model"].update({name: change(w) for name, w in tree["model"].items()})


def moments(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[JsonDict, JsonDict], None]:
    def changed(_: JsonDict, tree: JsonDict) -> None:
        for slots in tree["optimizer"]["state"].values():
            slots["exp_avg"] = change(slots["exp_avg"])

    return changed


LARGE = 10**10  # numbers: 40 GB, were they made
FORGED: dict[str, tuple[Callable[[JsonDict, JsonDict], None], str]] = {
    "types": (in_run(edge_types=None), "run.edge_types is None, no number from 0 to"),
    "width": (in_run(edge_attr=10**15), "run.edge_attr is 10+, no number from 0 to"),
    "weighted": (in_run(edge_weights="x"), "run.edge_weights is x, no number from 0 to"),
    "features": (in_run(num_features=-1), "run.num_features is -1, at least 1 is needed"),
    "epoch": (lambda manifest, tree: manifest.update(epoch=10**18), "says that 10+ epochs are done, its name 000001"),
    "sparse": (weights(torch.Tensor.to_sparse), "holds a tensor that is sparse"),
    "meta": (weights(lambda w: w.to("meta")), "sparse, nested, quantized or has no values"),
    "names": (lambda manifest, tree: tree["model"].update({1: torch.ones(1)}), "holds no model, optimizer"),
    "expanded moments": (moments(lambda m: torch.zeros(1).expand(LARGE)), "repeats the "),
    "expanded engine": (
        lambda manifest, tree: tree["engine"].update(x=[torch.zeros(1).expand(LARGE)]),
        "repeats the ",
    ),
    "expanded generator": (
        lambda manifest, tree: tree["random"].update(cpu=torch.zeros(1, dtype=torch.uint8).expand(LARGE)),
        "repeats the ",
    ),
    "random": (lambda manifest, tree: tree.update(random={}), "cannot be opened"),
    # the run that went on completed, with a result that nobody reads
    "endless": (
        lambda manifest, tree: manifest["progress"].update(train_seconds=float("inf")),
        "train_seconds is missing",
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert train(folder, "strategy=single", "epochs=1").exit_code == 0
    return next((folder / "checkpoint").iterdir())


def forged(trained: Path, tmp_path: Path, change: Callable[[JsonDict, JsonDict], None]) -> Path:
    """A copy of a checkpoint, changed, its checksums made again."""
    folder = tmp_path / trained.name
    shutil.copytree(trained, folder)
    manifest, file = read_checked_json(folder / "manifest.json"), folder / "rank-0.pt"
    tree = torch.load(file, weights_only=True)
    change(manifest, tree)
    torch.save(tree, file)
    manifest["files"]["rank-0.pt"] = {"nbytes": file.stat().st_size, "sha256": durable.file_hash(file)}
    write_checked_json(folder / "manifest.json", manifest)
    return folder


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_checkpoint_is_no_good_one(trained: Path, tmp_path: Path, kind: str) -> None:
    change, line = FORGED[kind]
    with pytest.raises(ValueError, match=f"is no good checkpoint: .*{line}"):
        checkpoint.read(forged(trained, tmp_path, change))


@pytest.mark.parametrize("name", ["multirun.yaml", "optimization_results.yaml"])
@pytest.mark.parametrize("kind", ["link", "pipe", "second name"])
def test_what_a_sweeper_writes_takes_the_place_of_what_is_no_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precious: Path, kind: str, name: str
) -> None:
    """optuna's wrote its best values, which may be words of a shell, over ~/.bashrc."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "sweep" / name
    file.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(file)
    else:
        (file.symlink_to if kind == "link" else file.hardlink_to)(precious / "file")
    swept = ["-m", "debug=tiny", "strategy=single", "seed=choice(0,1)", "hydra.sweep.dir=sweep"]
    optuna = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=1"] if name.startswith("optimization") else []
    assert run("train", [*swept, *optuna]) == 0
    assert untouched(precious)
    assert file.is_file() and not file.is_symlink() and file.stat().st_nlink == 1


def test_what_is_made_of_a_checkpoint_alone_lies_in_it(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was written, and files were removed, two folders above."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "export").mkdir(parents=True)
    (tmp_path / "a" / "export" / "predict.py").write_text("mine")
    shutil.copytree(trained, tmp_path / "a" / "b" / "gift")
    assert run("export", ["a/b/gift"]) == 0
    assert (tmp_path / "a" / "b" / "gift" / "export" / "weights.pt").exists()
    assert run("export", ["a/b/gift", "--out", "a/export"]) == 2
    assert "holds predict.py, which no export has written: name another folder by --out" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "a" / "export").iterdir()] == ["predict.py"]


def test_weights_that_are_not_finite_are_no_model(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no good checkpoint: .* has entries that are not finite"):
        gnnpar.load(forged(trained, tmp_path, weights(lambda w: w * torch.nan)))


def test_a_class_of_gnnpar_that_is_no_model_is_a_line(trained: Path, tmp_path: Path) -> None:
    def change(manifest: JsonDict, tree: JsonDict) -> None:
        manifest["run"]["settings"]["model"] = {"_target_": "gnnpar.settings.Host"}

    with pytest.raises(ValueError, match=r"model: gnnpar\.settings\.Host has no build, which a model needs"):
        gnnpar.load(forged(trained, tmp_path, change))


def test_an_epoch_beyond_all_rows_takes_no_memory(tmp_path: Path) -> None:
    rest = dict.fromkeys(keys.ALWAYS, 0)
    rows = [json.dumps({"epoch": epoch, **rest}) for epoch in (1, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    assert jsonl.missing_epochs(tmp_path, 10**18) == f"0, 2, 4-{10**18 - 1}"
    assert jsonl.missing_epochs(tmp_path, 3) == "0, 2"


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "[1, NaN]", "1e999"])
def test_rows_with_numbers_that_are_none_end_before_them(tmp_path: Path, value: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        f'{{"epoch": 0, "metric/val": 0.5}}\n{{"epoch": 1, "metric/val": {value}}}\n'
    )
    assert [row["epoch"] for row in read_rows(tmp_path)] == [0]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("epoch_seconds.median", -1.0),
        ("epoch_seconds.median", 0),
        ("epoch_seconds.median", float("nan")),
        ("metric.test", 5.0),
        ("metric.val", float("inf")),
        ("metric.best_val", -3),
        ("strategy", "x" * 100_000),
        ("settings.strategy", "a name"),
    ],
)
def test_a_figure_that_cannot_be_is_no_result(trained: Path, tmp_path: Path, place: str, value: object) -> None:
    result = read_json(trained.parents[1] / "result.json")
    *parents, last = place.split(".")
    node = result[parents[0]] if parents else result
    node[last] = value
    (tmp_path / "result.json").write_text(json.dumps(result))
    with pytest.raises(
        ConfigError, match=rf"result\.json is no result of a run: {place.partition('.')[0]}.*: "
    ) as refused:
        collect([tmp_path])
    assert len(str(refused.value)) < 500


def test_a_folder_that_is_a_link_is_not_worked_in(tmp_path: Path, precious: Path) -> None:
    """wandb, checkpoints, exports and jobs of a sweep would be written into it, and files in it replaced."""
    for name in ("wandb", "checkpoint", "export", "0"):
        folder = tmp_path / f"of {name}"
        folder.mkdir()
        (folder / name).symlink_to(precious)
        with pytest.raises(WriteError, match=f"{name} cannot be written: it is a symbolic link to .*; remove the link"):
            take(folder)
        assert [path.name for path in folder.iterdir()] == [name]
    assert untouched(precious)


@pytest.mark.parametrize("kind", ["strategy", "model", "codec"])
def test_new_files_are_written_through_no_linked_folder(
    tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path(kind).symlink_to(precious)
    assert run("new", [kind, "mine"]) == 2
    err = capsys.readouterr().err
    assert f"{kind} cannot be written: it is a symbolic link to {precious}" in err and err.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == [kind] and untouched(precious)


def take(folder: Path) -> None:
    with working_in(folder, otherwise="", say=say):
        raise AssertionError("a folder with a link was taken")


@pytest.mark.parametrize("sweep", [False, True])
def test_a_run_or_sweep_with_a_linked_folder_is_one_line(
    tmp_path: Path, precious: Path, sweep: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / ("a" if sweep else "wandb")).symlink_to(precious)
    where = ["-m", "hydra.sweep.dir=it", "hydra.sweep.subdir=a/b"] if sweep else ["hydra.run.dir=it"]
    assert run("train", ["debug=tiny", "strategy=single", *where]) == 2
    assert "cannot be written: it is a symbolic link to" in capsys.readouterr().err
    assert untouched(precious)


def test_no_folder_between_a_sweep_and_its_job_is_a_link(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").symlink_to(precious)
    refuse_links_below(tmp_path, "a/c")
    for folder in ("a/b", "a/b/c"):
        with pytest.raises(WriteError, match="a/b cannot be written: it is a symbolic link to"):
            refuse_links_below(tmp_path, folder)


@pytest.mark.parametrize("name", ["study.yaml", "multirun.yaml"])
def test_a_sweep_writes_through_no_link_of_its_folder(
    tmp_path: Path, precious: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("st.yaml").write_text("base: [debug=tiny, strategy=single]\nfactors: {codec: [codec=bf16]}\n")
    Path("sweep").mkdir()
    (tmp_path / "sweep" / name).symlink_to(precious / "file")

    def nothing(*_: object, **__: object) -> None:
        raise ConfigError("no job is run here")

    monkeypatch.setattr(Resuming, "launch", nothing)
    if name == "study.yaml":
        assert run("ablate", ["st.yaml", "--folder", "sweep"]) == 2
    else:
        assert run("train", ["-m", "debug=tiny", "strategy=single", "hydra.sweep.dir=sweep"]) == 2
    assert untouched(precious)
    assert not (tmp_path / "sweep" / name).is_symlink()


class Launcher:
    """One of submitit, by its module."""

    __module__ = "hydra_plugins.hydra_submitit_launcher.launcher"

    def __init__(self, folder: str) -> None:
        self.params: dict[str, Any] = {"submitit_folder": folder, "setup": ["module load cuda"]}


def test_results_of_submitit_are_read_from_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It unpickles them; somebody else may have packed the sweep's folder, or write into it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("GNNPAR_CLASSES", "a.B:it's; rm -r x\n#")
    sweep = tmp_path / "x%jy"
    launcher = Launcher(f"{sweep}/.submitit/%j")
    with results_apart(launcher, sweep, known=OF_JOBS):
        (own,) = (tmp_path / "cache" / "gnnpar" / "submitit").iterdir()
        assert launcher.params["submitit_folder"] == f"{own}/%j"
        assert own.stat().st_mode & 0o777 == 0o700
        script = "\n".join([*launcher.params["setup"][:-1], 'printf %s "$PYTHONSAFEPATH $GNNPAR_CLASSES"'])
        assert launcher.params["setup"][-1] == "module load cuda"
        assert "export SLURM_EXPORT_ENV=ALL" in launcher.params["setup"]
        told = subprocess.run(["bash"], input=script, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
        assert told.stdout == "1 a.B:it's; rm -r x\n#"
    assert not own.exists() and not sweep.exists()
    assert launcher.params == Launcher(f"{sweep}/.submitit/%j").params
    with pytest.raises(OSError, match="lost"), results_apart(launcher, sweep, known=OF_JOBS):
        raise OSError("a job is lost, whose log lies there")
    assert launcher.params == Launcher(f"{sweep}/.submitit/%j").params
    assert len(list((tmp_path / "cache" / "gnnpar" / "submitit").iterdir())) == 1
    with results_apart(Launcher(f"{tmp_path}/named/%j"), sweep, known=OF_JOBS):
        assert [file.name.partition("-")[0] for file in (tmp_path / "named").iterdir()] == ["jobs"]


@pytest.mark.parametrize("name", ["x%jy", "a\nb", "it's", 'a"b', "a\\b", "a`b", "$HOME"])
def test_submitit_writes_no_name_into_a_script_that_a_shell_reads_otherwise(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"would stand in scripts; set hydra\.launcher\.submitit_folder=FOLDER"):
        place_of_results(Launcher(f"{tmp_path}/{name}/%j"), tmp_path / "sweep")


def test_a_name_that_would_be_read_as_a_value_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("${oc.env:HOME}.yaml").write_text("base: [debug=tiny, strategy=single]\nfactors: {codec: [codec=bf16]}\n")
    assert run("ablate", ["${oc.env:HOME}.yaml"]) == 2
    assert "Hydra would read ${ as a value of its own" in capsys.readouterr().err


def test_what_is_scaffolded_is_written_through_no_link(
    tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine_of_a_link.py").symlink_to(precious / "new.py")
    assert run("new", ["model", "mine_of_a_link", "--into", "."]) == 2
    assert "mine_of_a_link.py is there already" in capsys.readouterr().err
    assert untouched(precious)


def test_a_shell_file_that_is_a_pipe_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / ".bashrc")
    monkeypatch.setenv("SHELL", "/bin/bash")
    with pytest.raises(ConfigError, match=r"\.bashrc cannot be read"):
        completion.install(tmp_path)
