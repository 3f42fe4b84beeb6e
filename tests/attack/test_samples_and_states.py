"""What a thirtieth attack found: runs that are no samples of what they stand for, and states of programs and hosts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.sparse import coo_array

import gnnpar
from checkpoints import train
from conftest import Run, environment
from gnnpar.cli import partition
from gnnpar.cli.main import run
from gnnpar.comm.world import torch_given_back
from gnnpar.config.compose import compose
from gnnpar.data.given import as_data
from gnnpar.folder_lock import FILE, FolderInUse, Lock, Owner, own_machine
from gnnpar.training.result.trained import load

QUICK = {"dataset.num_nodes": 60, "epochs": 1, "threads_per_rank": 1, "comm": "threads"}
NET = """
import torch
from torch_geometric.nn import GCNConv
class Net(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = GCNConv(in_channels, out_channels)
    def forward(self, x, edge_index):
        return self.conv(x, edge_index)
"""


# --- runs


def test_shards_say_which_graph_was_drawn(tmp_path: Path) -> None:
    """Runs of other seeds from one folder of shards counted as samples of graphs that they had not seen."""
    drawn = ["dataset.graph_seed=null", "dataset.split=random", "dataset.split_seed=null", "seed=3"]
    graph = ["dataset=sbm", "dataset.num_nodes=60", "partition=range", "world_size=2", *drawn]
    assert partition.run([*graph, f"out={tmp_path}/shards"]) == 0
    there = compose([f"shards={tmp_path}/shards", "seed=5"]).resolved["dataset"]
    assert (there["graph_seed"], there["split_seed"], there["split_index"]) == (3, 3, 0)


def test_a_model_whose_code_was_edited_since_says_so(tmp_path: Path, run_cli: Run) -> None:
    """`predict`, `export` and `load` computed what was never trained."""
    (tmp_path / "net_of_30.py").write_text(NET)
    few = ["dataset=sbm", "dataset.num_nodes=60", "epochs=1", "strategy=single", "threads_per_rank=1"]
    assert run_cli("train", "model=pyg", "model.target=net_of_30.Net", *few, "hydra.run.dir=run").returncode == 0
    assert "has changed" not in run_cli("predict", "run", "--trust").stderr
    (tmp_path / "net_of_30.py").write_text(NET.replace("return self", "return -self"))
    for command in ("predict", "export"):
        told = run_cli(command, "run", "--trust")
        assert told.returncode == 0
        assert "the code of net_of_30 has changed since run/checkpoint/epoch-000001 was written" in told.stderr


def test_a_helper_beside_a_script_is_code_of_the_run(tmp_path: Path) -> None:
    """Of a model on PYTHONPATH, or of a script's folder, its own module counted alone."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "net_of_30.py").write_text(NET.replace("\nclass", "\nimport helper_of_30\nclass"))
    (project / "helper_of_30.py").write_text("")
    script = "import net_of_30, gnnpar.source_code as s; print(sorted(s.own_code(['net_of_30.Net'])))"
    env = environment() | {"PYTHONPATH": os.pathsep.join([str(project), environment().get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "['helper_of_30', 'net_of_30']", done.stderr


def test_what_a_sweep_of_a_program_has_made_stays_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read after the program had changed its directory, it was another sweep of the same name."""
    for place in "ab":
        (tmp_path / place).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    swept = gnnpar.sweep("gcn", "sbm", strategy=["single"], folder="s", **QUICK)
    compared = gnnpar.compare(["s"])
    monkeypatch.chdir(tmp_path / "b")
    assert [run.folder for run in (*swept.runs, *compared.runs)] == [tmp_path / "a" / "s" / "0"] * 2


# --- graphs


def test_edges_that_a_matrix_has_twice_are_to_be_added() -> None:
    """Entries of 1 that were there twice were one edge, and summed up they were a weight of 2."""
    found = {"x": np.eye(3, dtype=np.float32), "y": np.arange(3)}
    twice = [0, 0, 1], [1, 1, 2]
    with pytest.raises(ValueError, match="adjacency has 1 repeated weight, which SciPy adds"):
        as_data({**found, "adjacency": coo_array((np.ones(3), twice), shape=(3, 3))})
    flags = coo_array((np.ones(3, dtype=np.bool_), twice), shape=(3, 3))
    assert as_data({**found, "adjacency": flags}).edge_index is not None, "of truth values the sum is one"


# --- programs


def test_a_model_is_loaded_as_it_was_trained_whatever_the_program_has_set(tmp_path: Path) -> None:
    """Buffers that its class makes were rounded to the program's own type."""
    train(tmp_path / "run", "epochs=1")
    with torch_given_back():
        torch.set_default_dtype(torch.bfloat16)
        with torch.inference_mode():
            model = load(tmp_path / "run")
        assert torch.get_default_dtype() == torch.bfloat16
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert not any(each.is_inference() for each in model.parameters())


def test_a_workspace_of_cublas_is_the_programs_own_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    gnnpar.train("gcn", "sbm", strategy="single", deterministic=True, **QUICK)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_an_import_moves_no_random_numbers_of_the_program() -> None:
    script = "import random; random.seed(0); import gnnpar; gnnpar.train; print(random.random())"
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    random.seed(0)
    assert float(done.stdout) == random.random()


# --- hosts


@pytest.mark.parametrize(("machine", "refused"), [(own_machine(), False), ("another", True), ("", False)])
def test_a_host_of_the_same_name_is_another_one(tmp_path: Path, machine: str, refused: bool) -> None:
    """The folder of a run that lived on one was taken for left on the other: both wrote into it."""
    owner = replace(Owner.this({}), pid=2**22 + 1, machine=machine)
    (tmp_path / FILE).write_text(json.dumps(asdict(owner)))
    if refused:
        with pytest.raises(FolderInUse, match=r", another host of this name since .* has ended, remove"):
            Lock.take(tmp_path, otherwise="", say=pytest.fail)
    else:
        Lock.take(tmp_path, otherwise="", say=lambda line: None).release()


def test_gloo_connects_at_once_whatever_the_environment_says(tmp_path: Path, run_cli: Run) -> None:
    """Two groups that connect at their first use waited for each other for half an hour."""
    few = ["dataset=sbm", "dataset.num_nodes=60", "epochs=1", "strategy=graph_parallel", "world_size=2"]
    told = run_cli("train", *few, "threads_per_rank=1", "comm.timeout_seconds=30", TORCH_GLOO_LAZY_INIT="1")
    assert told.returncode == 0, told.stderr


def test_an_option_that_shows_nothing_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", ["--resolve"]) == 2
    assert capsys.readouterr().err == "gnnpar: --resolve says how --cfg job is shown: give both, or neither\n"
