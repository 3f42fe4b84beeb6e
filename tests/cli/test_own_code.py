"""A run says which lines of the user's it was computed by: what was edited since is named, and cached for nobody."""

import json
from pathlib import Path

import pytest

from conftest import Run
from gnnpar.training.result.result import fault

NET = """
import torch
from widths import WIDTH
class Net(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(in_channels, WIDTH), torch.nn.Linear(WIDTH, out_channels))
    def forward(self, x, edge_index):
        return self.layers(x)
"""
PARTS = """
from dataclasses import dataclass
import torch
from widths import WIDTH
@dataclass(frozen=True)
class Parts:
    def part_of(self, dataset, parts):
        return torch.arange(dataset.num_nodes) * WIDTH % parts
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "own_parts.py").write_text(PARTS)
    (tmp_path / "widths.py").write_text("WIDTH = 3\n")
    (tmp_path / "partition").mkdir()
    (tmp_path / "partition" / "own.yaml").write_text("_target_: own_parts.Parts\n")
    return tmp_path


def result(run_dir: Path) -> dict:
    return json.loads((run_dir / "result.json").read_text())


def test_edited_code_is_named_by_sweeps_and_by_compare(folder: Path, run_cli: Run) -> None:
    """A module that the model's imports was edited between two sweeps; both counted as one configuration."""
    job = ["train", "-m", "model=pyg", "model.target=net.Net", "strategy=single", "dataset=sbm", "epochs=1"]
    assert run_cli(*job, "hydra.sweep.dir=first").returncode == 0
    before = result(folder / "first" / "0")
    assert before["code"].keys() == {"net", "widths"} and not fault(before)
    assert "has changed" not in run_cli(*job, "hydra.sweep.dir=first").stdout
    (folder / "widths.py").write_text("WIDTH = 4\n")
    again = run_cli(*job, "hydra.sweep.dir=first")
    assert "the code of widths has changed since jobs that are done: another hydra.sweep.dir" in again.stdout
    assert run_cli(*job, "hydra.sweep.dir=second").returncode == 0
    after = result(folder / "second" / "0")
    assert after["code"] == {**before["code"], "widths": after["code"]["widths"]} != before["code"]


def test_parts_of_edited_code_are_made_again(folder: Path, run_cli: Run) -> None:
    """The cache gave parts that a helper of the partitioner had made before it was edited."""
    job = ["train", "model=gcn", "partition=own", "dataset=sbm", "world_size=2", "epochs=1"]
    job += ["strategy=graph_parallel", f"cache_dir={folder}/cache"]
    assert run_cli(*job, "hydra.run.dir=first").returncode == 0
    assert result(folder / "first")["code"].keys() == {"own_parts", "widths"}, "nothing of gnnpar, which has a commit"
    (folder / "widths.py").write_text("WIDTH = 2\n")
    edited = run_cli(*job, "hydra.run.dir=second")
    assert edited.returncode != 0
    assert "Parts left 1 of 2 parts without nodes" in edited.stderr
