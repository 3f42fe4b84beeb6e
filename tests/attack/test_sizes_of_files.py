"""Files whose size is a claim: of holes, of many together, of pages that are made of them."""

from __future__ import annotations

import errno
import gzip
import os
import sys
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

from gnnpar import capacity
from gnnpar.data import files, ogb
from gnnpar.data.files import require_unpacked
from gnnpar.data.saved import PT
from gnnpar.partition import manifest
from gnnpar.partition.manifest import FileFacts, verify
from gnnpar.saved_tensors import load_saved
from gnnpar.track import console


def test_a_saved_graph_beyond_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 KB of holes took 4.4 GB."""
    torch.save({"x": torch.zeros(1 << 20)}, tmp_path / "a.pt")
    monkeypatch.setattr(capacity, "memory_bytes", lambda: 1 << 20)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(ValueError, match=r"a\.pt needs .* at least"):
        load_saved(tmp_path / "a.pt")


def test_packed_files_are_measured_together_and_short_lines_as_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 MB of OGB's files took 15 GB: pandas makes 8 bytes, twice, of the two of a line."""
    for module in (capacity, files):
        monkeypatch.setattr(module, "memory_bytes", lambda: 2_800_000)
    for name, text in {"long": b"0.123456," * 30_000, "lines": b"0\n" * 100_000, "all": b"0\n" * 200_000}.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text))
    require_unpacked(tmp_path / "long.gz")
    require_unpacked(tmp_path / "lines.gz")
    with pytest.raises(ValueError, match=r"lines\.gz, unpacked, needs"):
        require_unpacked(tmp_path / "long.gz", tmp_path / "lines.gz")
    with pytest.raises(ValueError, match=r"all\.gz, unpacked, needs"):
        require_unpacked(tmp_path / "all.gz")


def test_holes_of_shards_are_not_read_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 TB of them would be hashed for hours, before the first epoch."""
    monkeypatch.setattr(manifest, "file_hash", lambda file: pytest.fail("it was read"))
    (tmp_path / "x.npy").touch()
    os.truncate(tmp_path / "x.npy", 8 << 30)
    with pytest.raises(ValueError, match=r"x\.npy is 8589934592 bytes, of which the disk has few"):
        verify(tmp_path, "x.npy", FileFacts(sha256="0" * 64, nbytes=8 << 30, shape=(1,), dtype="<f4"), "full")


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


def test_an_error_of_a_library_quotes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A raw file was a link to a private one, of which 200 characters came into the result of a sweep."""
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path / "cache"))
    for name in ogb.required_files("ogbn_arxiv"):
        file = tmp_path / "ogbn_arxiv" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(b"password=hunter2"))
    with pytest.raises(ValueError, match=r"cannot be read \(ValueError\)") as refused:
        ogb.OGBDataset(name="ogbn_arxiv").load(tmp_path, 0)
    assert "hunter2" not in str(refused.value)
