"""Graphs that are too large, or have too many classes: one line before memory is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.samples import npz_arrays
from gnnpar import files
from gnnpar.cli.main import run
from gnnpar.config.compose import compose
from gnnpar.data.npz import NPZ
from gnnpar.data.synthetic import SBM
from gnnpar.parallel.objective import SPLITS


def test_a_label_beyond_the_number_of_nodes_is_refused(tmp_path: Path) -> None:
    labels: dict[str, Any] = npz_arrays(y=np.array([0, 1, 2, 10**9, 1, 2]))
    np.savez(tmp_path / "g.npz", **labels)
    with pytest.raises(ValueError, match=r"the largest label, 1000000000, gives .*; number the classes"):
        NPZ(path=str(tmp_path / "g.npz")).load(None, seed=0)


@pytest.mark.parametrize("label", [2**63, 2**64 - 1])
def test_a_label_beyond_63_bits_is_refused(tmp_path: Path, label: int) -> None:
    labels: dict[str, Any] = npz_arrays(y=np.array([0, 1, 2, 0, label, 2], dtype=np.uint64))
    np.savez(tmp_path / "g.npz", **labels)
    with pytest.raises(ValueError, match=rf"the number {label}, beyond 2\^63"):
        NPZ(path=str(tmp_path / "g.npz")).load(None, seed=0)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"num_classes": 10**12}, "dataset.num_classes=1000000000000 is more than the 3000 nodes: lower it"),
        ({"num_communities": 10**12}, "dataset.num_communities=1000000000000 is more than the 3000 nodes"),
        ({"num_nodes": 10**12}, "dataset sbm with 1,000,000,000,000 nodes needs"),
        ({"num_features": 10**12}, "lower dataset.num_nodes or num_features"),
        ({"scale": 1e12}, "dataset sbm with 3,000,000,000,000,000 nodes needs"),
        ({"avg_degree": 1e12}, "is more than the 3000 nodes: lower it"),
    ],
)
def test_a_block_model_beyond_the_machine_is_refused(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        SBM(**fields).load(None, seed=0)


def test_a_degree_beyond_the_other_nodes_is_refused() -> None:
    """Pairs were drawn until there were more than there are."""
    with pytest.raises(ValueError, match=r"avg_degree=100\.0 is more than the 60 nodes"):
        compose(["dataset=sbm", "dataset.num_nodes=60", "dataset.avg_degree=100"]).dataset.load(None, 0)


def test_outputs_beyond_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every node a class of its own: what a model gives for them has the square of their number."""
    nodes = 400
    ring, masks = np.arange(nodes), {f"{split}_mask": np.arange(nodes) % 3 == i for i, split in enumerate(SPLITS)}
    edges = np.stack([ring, np.roll(ring, 1)])
    np.savez(tmp_path / "g.npz", x=np.ones((nodes, 2), np.float32), y=ring, edge_index=edges, **masks)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "memory_bytes", lambda: 24 * nodes**2 - 1)
    assert run("train", ["dataset=npz", "dataset.path=g.npz", "strategy=single", "epochs=1"]) != 0
    assert "400 nodes of a rank with 400 outputs each needs" in capsys.readouterr().err
