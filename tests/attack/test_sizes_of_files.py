"""Files whose size is a claim: of holes, of many together, of pages that are made of them."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

from gnnpar.data.saved import PT
from gnnpar.track import console


def test_a_warning_on_a_full_disk_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb was out of reach, stderr a file on a full disk, and the training failed."""

    def full(text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys.stderr, "write", full)
    console.complain("wandb stopped")


def test_a_saved_graph_with_several_numbers_of_nodes_is_one_line(tmp_path: Path) -> None:
    edges, mask = torch.zeros(2, 3, dtype=torch.int64), torch.ones(12, dtype=torch.bool)
    data = Data(x=torch.rand(12, 3), y=torch.zeros(12, dtype=torch.int64), edge_index=edges, train_mask=mask)
    data["num_nodes"] = torch.tensor(12)
    torch.save(data, tmp_path / "n.pt")
    assert PT(name="pt", path=str(tmp_path / "n.pt")).load(None, 0).num_nodes == 12
    data["num_nodes"] = torch.tensor([12, 12])
    torch.save(data, tmp_path / "n.pt")
    with pytest.raises(ValueError, match=r"num_nodes is tensor\(\[12, 12\]\), and x has 12 rows"):
        PT(name="pt", path=str(tmp_path / "n.pt")).load(None, 0)
