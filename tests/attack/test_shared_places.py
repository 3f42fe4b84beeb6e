"""What a network, another user of the host, and files with many small parts could do: links that are laid where a run
will lie, locks and names that others hold first, counts beyond what a run has."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportReturnType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from checkpoints import train
from gnnpar.data import files
from gnnpar.data.saved import PT
from gnnpar.files import read_json
from gnnpar.parallel.sequential.cuts import _Layout


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    assert train(folder, "strategy=single", "epochs=1").exit_code == 0
    return read_json(folder / "result.json")


# --- what a network, or a rank, sends


def test_rows_that_rise_only_where_differences_wrap_are_other_edges() -> None:
    most = 2**31 - 1
    layout = _Layout(num_rows=4, num_columns=3, num_edges=2, edge_ids=False)
    indptr = torch.tensor([0, most, -5, -2, 2], dtype=torch.int32)
    assert int(indptr.diff().min()) > 0
    sent = torch.cat([indptr, torch.zeros(2, dtype=torch.int32)]).view(torch.uint8)
    with pytest.raises(ValueError, match="rank 1 has sent other edges than its partition has"):
        layout.unpack(sent, 1)


# --- results of runs


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("edge_type", torch.zeros(2, dtype=torch.uint32), "edge_type is torch.uint32; give whole numbers"),
        ("edge_type", torch.full((2,), torch.inf), "edge_type is torch.float32; give whole numbers"),
        ("y", torch.zeros(4, 0), r"labels are \[4, 0\], without a class|must have shape"),
    ],
)
def test_what_a_saved_graph_cannot_have_is_one_line(tmp_path: Path, field: str, value: torch.Tensor, line: str) -> None:
    fields = {"x": torch.ones(4, 2), "y": torch.tensor([0, 1, 0, 1]), "edge_index": torch.tensor([[0, 1], [1, 2]])}
    torch.save(Data(**(fields | {field: value})), tmp_path / "g.pt")
    task = "multi_label" if field == "y" else "auto"
    with pytest.raises(ValueError, match=line):
        PT(name="g", path=str(tmp_path / "g.pt"), task=task).load(None, seed=0)


# --- places of a host that others write to


def test_of_two_files_of_a_dataset_none_is_taken_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("data/d", "d"):
        Path(folder).mkdir(parents=True)
        np.savez(f"{folder}/d.npz", x=np.zeros(1))
    with pytest.raises(ValueError, match=r"dataset d: there are two files d/d\.npz, .* and .*; say by dataset\.path"):
        files.find_file("d", "d/d.npz", Path("data"), example="")
    whole = str((tmp_path / "data/d/d.npz").absolute())
    assert files.find_file("d", whole, Path("data"), example="") == Path(whole)
    assert files.find_file("d", "d/d.npz", Path(), example="") == Path("d/d.npz")
    Path("d/d.npz").unlink()
    assert files.find_file("d", "d/d.npz", Path("data"), example="") == Path("data/d/d.npz")


def test_a_user_without_a_home_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    monkeypatch.setattr(Path, "expanduser", lambda path: none())
    for name in ("XDG_CACHE_HOME", "GNNPAR_CACHE"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match="this user has no home folder; set HOME, XDG_CACHE_HOME or GNNPAR_CACHE"):
        files.cache_root()


# --- what torchrun's store, in which anybody writes, decides
