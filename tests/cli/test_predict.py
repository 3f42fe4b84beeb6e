"""`gnnpar predict`: on any ranks, strategy and graph, the logits that the loaded model gives on one device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import gnnpar
from checkpoints import train
from conftest import Run
from gnnpar.cli.partition import run as partition
from gnnpar.config.compose import compose

MANY = ("world_size=3", "comm=threads", "threads_per_rank=1")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert train(folder, "strategy=graph_parallel", "model=sage", "epochs=3", "comm=threads").exit_code == 0
    return folder


def expected(run_dir: Path, overrides: tuple[str, ...] = ()) -> np.ndarray:
    model = gnnpar.load(run_dir)
    settings = model.settings if not overrides else compose(overrides)
    data = settings.dataset.load(settings.data_dir, settings.seed)
    with torch.no_grad():
        return model(data.x, data.edge_index, prepared=True).numpy()


@pytest.mark.parametrize(
    "chosen",
    [("strategy=single",), ("strategy=sar", *MANY), ("strategy=gnnpipe", "world_size=2", *MANY[1:])],
    ids=["single", "sar", "gnnpipe"],
)
def test_they_are_those_of_the_loaded_model(chosen: tuple[str, ...], run_dir: Path, run_here: Run, tmp_path: Path):
    done = run_here("predict", str(run_dir), *chosen, "--out", str(tmp_path / "out.npy"))
    assert (done.returncode, done.stderr) == (0, "")
    found = np.load(tmp_path / "out.npy")
    np.testing.assert_allclose(found, expected(run_dir), rtol=1e-4, atol=1e-5)
    assert "accuracy train 0." in done.stdout
    assert done.stdout.endswith("->  out.npy\n")
    assert [file.name for file in tmp_path.iterdir()] == ["out.npy"]


def test_of_another_graph_in_shards_on_disk(run_dir: Path, run_here: Run, tmp_path: Path) -> None:
    width = gnnpar.load(run_dir).model.in_dim
    other = ("dataset=sbm", "dataset.num_nodes=200", "dataset.avg_degree=5", f"dataset.num_features={width}")
    assert partition([*other, "world_size=3", f"out={tmp_path / 'shards'}"]) == 0
    done = run_here("predict", str(run_dir), f"shards={tmp_path / 'shards'}", *MANY[1:], "--out", "other.npy")
    assert (done.returncode, done.stderr) == (0, "")
    found = np.load(tmp_path / "other.npy")
    np.testing.assert_allclose(found, expected(run_dir, other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (("model=gat",), 2, "model=gat: a prediction takes it from"),
        (("dataset.num_features=7", "dataset=sbm", "comm=threads"), 1, "this run's model has (8, 7)"),
        (("strategy=nothing",), 2, "nothing"),
    ],
)
def test_what_it_cannot_do_is_one_line(arguments, code: int, line: str, run_dir: Path, run_here: Run) -> None:
    done = run_here("predict", str(run_dir), *arguments)
    assert done.returncode == code
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(run_dir.glob("predictions.npy"))
