"""Names that become words of a shell, programs and code that lie where others may have been first, and what is taken
for a run's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

from gnnpar.cli import ablate, dashboard
from gnnpar.cli.main import run
from gnnpar.cli.predict import with_model_of
from gnnpar.data.saved import PT
from gnnpar.settings import ConfigError
from gnnpar.training.result.trained import find

# --- what others may have put there


# --- names


# --- more than is there, and something else than was asked for


def test_a_type_of_nodes_has_no_more_of_them_than_its_file_speaks_of(tmp_path: Path) -> None:
    """x of no columns holds no number: 3 KB took 10 GiB."""
    data = HeteroData()
    data["a"].x, data["a"].y = torch.ones(3, 2), torch.tensor([0, 1, 0])
    data["b"].x = torch.ones(2**31, 0)
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1], [0, 5]])
    torch.save(data, tmp_path / "g.pt")
    with pytest.raises(ValueError, match="type b has 2147483648 nodes, and 4 numbers and ends of edges; give x"):
        PT(path=str(tmp_path / "g.pt"), split="random").load(None, 0)


def test_a_study_says_how_long_it_looks_at_its_variants(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """65,536 took seven hours before the first line."""
    monkeypatch.setattr(ablate, "_TELL_SECONDS", -1.0)
    monkeypatch.setattr(ablate, "compose", lambda overrides, check: overrides)
    monkeypatch.setattr(ablate, "key_of", str)
    variants: Any = [SimpleNamespace(keys=(), name=str(i), overrides=[f"seed={i}"]) for i in range(3)]
    ablate.check(Path("s.yaml"), variants)
    assert capsys.readouterr().err.splitlines() == [
        f"gnnpar: s.yaml: {done} of 3 variants are looked at, 0 minutes left" for done in (1, 2)
    ]


def test_another_graph_is_prepared_as_the_runs_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """67 of 100 nodes got another class than by the run's own dataset, which was the same file."""
    r = np.random.default_rng(0)
    file = tmp_path / "g.npz"
    np.savez(file, x=r.random((30, 4)), y=np.arange(30) % 2, edge_index=r.integers(0, 30, (2, 90)))
    named = ["dataset=npz", f"dataset.path={file}", "dataset.split=random"]
    for how in ("row", "standard"):
        prepared = ["dataset.symmetrize=true", f"dataset.normalize={how}", "checkpoint.every=1"]
        tiny = ["strategy=single", "world_size=1", "epochs=1", f"hydra.run.dir={tmp_path / how}"]
        assert run("train", [*named, *prepared, *tiny]) == 0
    found, trained = find(tmp_path / "row", "best")
    asked: Any = with_model_of(trained, found, named).dataset
    assert (asked.normalize, asked.symmetrize) == ("row", True)
    asked = with_model_of(trained, found, [*named, "dataset.normalize=none"]).dataset
    assert (asked.normalize, asked.symmetrize) == ("none", True)
    found, trained = find(tmp_path / "standard", "best")
    assert with_model_of(trained, found, named).dataset == trained.dataset
    assert run("predict", [f"{tmp_path}/standard", *named]) == 0, "it is the same graph"
    np.savez(file, x=9 * r.random((30, 4)), y=np.arange(30) % 2, edge_index=r.integers(0, 30, (2, 90)))
    assert run("partition", [*named, *prepared[:2], "world_size=1", f"out={tmp_path}/shards"]) == 0
    capsys.readouterr()
    for graph in (named, [f"shards={tmp_path}/shards"]):
        assert run("predict", [f"{tmp_path}/standard", *graph]) != 0
        assert "were standardised by the mean and deviation of its own training nodes" in capsys.readouterr().err


def test_features_that_gnnpar_made_are_made_for_a_prediction_too(tmp_path: Path) -> None:
    """A run on degrees was predicted on the columns of the file, of which there were as many."""
    r = np.random.default_rng(0)
    edges = r.integers(0, 30, (2, 90))
    columns = int(np.log2(np.bincount(edges[1], minlength=30).max() + 1)) + 1
    np.savez(tmp_path / "g.npz", x=r.random((30, columns)), y=np.arange(30) % 2, edge_index=edges)
    named = ["dataset=npz", f"dataset.path={tmp_path}/g.npz", "dataset.split=random"]
    tiny = ["strategy=single", "world_size=1", "epochs=1", f"hydra.run.dir={tmp_path}/run"]
    assert run("train", [*named, "dataset.features=degree", *tiny]) == 0
    found, trained = find(tmp_path / "run", "best")
    assert with_model_of(trained, found, named).dataset == trained.dataset
    with pytest.raises(ConfigError, match=r"trained with dataset\.features=degree, which dataset=pt has not"):
        with_model_of(trained, found, ["dataset=pt", "dataset.path=g.pt"])
    assert run("partition", [*named, "world_size=1", f"out={tmp_path}/shards"]) == 0
    with pytest.raises(ConfigError, match=r"were made with dataset\.features=file"):
        with_model_of(trained, found, [f"shards={tmp_path}/shards"])


def test_a_server_that_takes_no_dashboard_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Thing:
        url = "x"

        def save(self) -> None:
            raise ConnectionError("no route")

    assert dashboard.save({"workspace": Thing()}) == 1
    assert "workspace cannot be saved (" in capsys.readouterr().err
