"""What a thirtieth attack found: runs that are no samples of what they stand for, and states of programs and hosts."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.sparse import coo_array

import gnnpar
from checkpoints import result, train
from composing import settings_of
from gnnpar.cli import partition
from gnnpar.cli.main import run
from gnnpar.comm.world import torch_given_back
from gnnpar.config.compose import compose
from gnnpar.data.given import as_data
from gnnpar.report.fairness import differences, unequal_accuracy
from gnnpar.report.runs import configuration_of
from gnnpar.training.result.header import KERNELS
from gnnpar.training.result.record import agreed_on
from gnnpar.training.result.trained import load
from gnnpar_kernels import dispatch

QUICK = {"dataset.num_nodes": 60, "epochs": 1, "threads_per_rank": 1, "comm": "threads"}


# --- runs


def test_shards_say_which_graph_was_drawn(tmp_path: Path) -> None:
    """Runs of other seeds from one folder of shards counted as samples of graphs that they had not seen."""
    drawn = ["dataset.graph_seed=null", "dataset.split=random", "dataset.split_seed=null", "seed=3"]
    graph = ["dataset=sbm", "dataset.num_nodes=60", "partition=range", "world_size=2", *drawn]
    assert partition.run([*graph, f"out={tmp_path}/shards"]) == 0
    there = compose([f"shards={tmp_path}/shards", "seed=5"]).resolved["dataset"]
    assert (there["graph_seed"], there["split_seed"], there["split_index"]) == (3, 3, 0)


def test_what_a_sweep_of_a_program_has_made_stays_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read after the program had changed its directory, it was another sweep of the same name."""
    for place in "ab":
        (tmp_path / place).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    swept = gnnpar.sweep("gcn", "sbm", strategy=["single"], folder="s", **QUICK)
    compared = gnnpar.compare(["s"])
    monkeypatch.chdir(tmp_path / "b")
    assert [run.folder for run in (*swept.runs, *compared.runs)] == [tmp_path / "a" / "s" / "0"] * 2


def test_kernels_that_the_environment_forces_are_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of the naive ones was one of the same configuration, and joined ranks did not say which they had."""
    assert KERNELS == dispatch.VARIABLE
    plain = agreed_on(settings_of())
    train(tmp_path / "plain", "epochs=1")
    monkeypatch.setenv(KERNELS, "naive")
    train(tmp_path / "naive", "epochs=1")
    assert {name for name, value in agreed_on(settings_of()).items() if plain[name] != value} == {KERNELS}
    plain_run, naive_run = result(tmp_path / "plain"), result(tmp_path / "naive")
    assert configuration_of(plain_run) != configuration_of(naive_run)
    assert "kernels" in differences(plain_run, naive_run) and "kernels" not in unequal_accuracy(plain_run, naive_run)


def test_a_study_is_no_task_of_torchruns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One of its tasks said that the folder is in use, and jobs of the other waited for ranks."""
    monkeypatch.setenv("RANK", "0")
    assert run("ablate", ["study.yaml"]) == 2
    assert "a study starts its own ranks and cannot join those of torchrun" in capsys.readouterr().err


# --- graphs


def test_edges_that_a_matrix_has_twice_are_to_be_added() -> None:
    """Entries of 1 that were there twice were one edge, and summed up they were a weight of 2."""
    found = {"x": np.eye(3, dtype=np.float32), "y": np.arange(3)}
    twice = [0, 0, 1], [1, 1, 2]
    with pytest.raises(ValueError, match="adjacency has 1 repeated weight, which SciPy adds"):
        as_data({**found, "adjacency": coo_array((np.ones(3), twice), shape=(3, 3))})
    flags = coo_array((np.ones(3, dtype=np.bool_), twice), shape=(3, 3))
    assert as_data({**found, "adjacency": flags}) is not None, "of truth values the sum is one"


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


# --- hosts
