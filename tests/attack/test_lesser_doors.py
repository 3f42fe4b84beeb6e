"""What files may say of sizes, names and depths: refused in one line, or shown without control over the terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import ROOT, environment
from gnnpar import files
from gnnpar.cli.ablate import Row, display
from gnnpar.cli.main import run
from gnnpar.models.gcn import GCN
from gnnpar.models.pairs import with_scorer
from gnnpar.models.rgcn import Matrices
from gnnpar.partition import shard

PREDICT = ROOT / "src" / "gnnpar" / "templates" / "export" / "predict.txt"


@pytest.mark.parametrize("path", ["export/predict.py", "./export/predict.py", "export//predict.py", "link/predict.py"])
def test_the_script_of_an_export_imports_nothing_that_lies_beside_it(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    (folder / "predict.py").write_text(PREDICT.read_text())
    (folder / "json.py").write_text("open('ran', 'w')")
    command = [sys.executable, path]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert "IndexError" in done.stderr, "it came to its arguments"
    assert not (tmp_path / "ran").exists()


def test_brackets_in_brackets_are_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", ["epochs=" + "[" * 3000 + "]" * 3000]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "nested too deep" in said


def test_the_name_of_a_variant_has_no_control_over_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row(name, 1, None, None, None, None, None) for name in ("", "dataset.name=\x1b]0;title\x07")]
    display(rows, {"epoch": 1.0, "bytes": 1.0, "memory": 1.0, "accuracy": 1.0}, speed=True)
    said = capsys.readouterr().out
    assert "\\x1b" in said and "\x1b]0" not in said


def test_decoders_bases_and_types_beyond_memory_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = GCN().build(4, 1000, seed=0)
    monkeypatch.setattr(files, "memory_bytes", lambda: 10**6)
    with pytest.raises(ValueError, match="a decoder of width 1000 needs"):
        with_scorer(model, "mlp", 0)
    with pytest.raises(ValueError, match="a layer of 4294967296 types of edges needs"):
        Matrices.drawn(4, 4, relations=1 << 32, bases=1, blocks=None)


def test_a_table_of_types_of_edges_beyond_memory_is_refused_before_it_is_made() -> None:
    with pytest.raises(ValueError, match="a table of 3 nodes by 1099511627776 types of edges needs"):
        shard._counted(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 3, 1 << 40)
