"""The promise of SECURITY.md: opening somebody's file runs no code. Every case is one line and a non-zero exit."""

import hashlib
import json
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import gnnpar
from checkpoints import SMALL
from conftest import Run

FOREIGN = ("os.system", "evil.Evil", "gnnpar.train", "pathlib.Path")
EVIL = """
from pathlib import Path
Path("ran").touch()
class Evil:
    def __init__(self, **_):
        Path("ran").touch()
"""
SINGLE = ("world_size=1", "strategy=single", "epochs=1")


class Evil:
    """Make the folder `ran` when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, ("ran",)


@pytest.fixture
def gnnpar_here(run_here: Run, tmp_path: Path) -> Run:
    """Run a command in a folder that also holds evil.py."""
    (tmp_path / "evil.py").write_text(EVIL)
    return run_here


def node(target: str) -> dict[str, str]:
    """Return a YAML node that runs code if its target is called with its arguments."""
    return {"_target_": target, **({"command": "touch ran"} if target == "os.system" else {})}


def change(file: Path, edit: Callable[[Any], object]) -> None:
    """Edit a JSON file and renew its checksum, as the author of a malicious file would."""
    data = json.loads(file.read_text())
    data.pop("checksum", None)
    edit(data)
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({**data, "checksum": digest}))


def replace(folder: Path, name: str, content: bytes) -> None:
    """Replace a file that a manifest lists, and renew its checksum there."""
    (folder / name).write_bytes(content)
    new = {"nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change(folder / "manifest.json", lambda data: data["files"][name].update(new))


def assert_refused(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert done.returncode != 0
    lines = done.stderr.strip().splitlines()
    assert lines and all(line.startswith("gnnpar: ") for line in lines)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("target", FOREIGN)
@pytest.mark.parametrize("group", ["strategy", "model", "dataset"])
def test_plan_with_foreign_class_is_refused(gnnpar_here: Run, tmp_path: Path, group: str, target: str) -> None:
    single = {"name": "single", "_target_": "gnnpar.parallel.single.strategy.Single"}
    setup = {"names": {}} | ({group: node(target)} if group != "strategy" else {})
    strategy = {"name": "x", **node(target)} if group == "strategy" else single
    (tmp_path / "plan.json").write_text(json.dumps({"strategy": strategy, "setup": setup}))
    done = gnnpar_here("train", "debug=tiny", "plan=plan.json")
    assert_refused(done, tmp_path)
    assert target in done.stderr and "--trust" in done.stderr


def test_trust_allows_foreign_class(gnnpar_here: Run, tmp_path: Path) -> None:
    single = {"name": "single", "_target_": "gnnpar.parallel.single.strategy.Single"}
    plan = {"strategy": single, "setup": {"names": {}, "model": node("evil.Evil")}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    gnnpar_here("train", "debug=tiny", "plan=plan.json", "--trust")
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("target", FOREIGN)
def test_checkpoint_with_foreign_class_is_refused(
    gnnpar_here: Run, finished: Path, tmp_path: Path, target: str
) -> None:
    for manifest in finished.glob("checkpoint/*/manifest.json"):
        change(manifest, lambda data: data["run"]["settings"].update(model=node(target)))
    for argv in (("export", "run"), ("predict", "run")):
        assert_refused(gnnpar_here(*argv), tmp_path)
    with pytest.raises(ValueError, match=target):
        gnnpar.load(finished)
    assert not (tmp_path / "ran").exists()


def test_checkpoint_with_pickle_is_refused(gnnpar_here: Run, finished: Path, tmp_path: Path) -> None:
    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    for manifest in finished.glob("checkpoint/*/manifest.json"):
        replace(manifest.parent, "rank-0.pt", (tmp_path / "evil.pt").read_bytes())
    again = gnnpar_here("train", *SMALL, "strategy=single", "epochs=7", "resume=run", "hydra.run.dir=again")
    assert "rank-0.pt cannot be opened (UnpicklingError)" in again.stderr
    for done in (again, gnnpar_here("export", "run"), gnnpar_here("predict", "run")):
        assert_refused(done, tmp_path)


@pytest.mark.parametrize("content", [pickle.dumps(Evil()), b'{"strategy": {"_target_": "os.system"}}'])
def test_result_with_pickle_or_class_is_refused(
    gnnpar_here: Run, finished: Path, tmp_path: Path, content: bytes
) -> None:
    (finished / "result.json").write_bytes(content)
    assert_refused(gnnpar_here("compare", "run"), tmp_path)


@pytest.mark.parametrize("flaw", [*FOREIGN, "pickle"])
def test_shards_with_foreign_class_or_pickle_are_refused(gnnpar_here: Run, tmp_path: Path, flaw: str) -> None:
    argv = ("dataset.num_nodes=60", "dataset.num_features=3", "world_size=1", "partition=range", "out=shards")
    assert gnnpar_here("partition", *argv).returncode == 0
    if flaw == "pickle":
        np.save(tmp_path / "evil.npy", np.array([Evil()] * 60), allow_pickle=True)
        replace(tmp_path / "shards", "part-0/y.npy", (tmp_path / "evil.npy").read_bytes())
    else:
        change(tmp_path / "shards" / "manifest.json", lambda data: data["setup"].update(dataset=node(flaw)))
    assert_refused(gnnpar_here("train", *SINGLE, "shards=shards"), tmp_path)


def test_graph_files_with_pickles_are_refused(gnnpar_here: Run, tmp_path: Path) -> None:
    arrays = {"edge_index": np.array([[0, 1], [1, 0]]), "x": np.ones((2, 3), "f4"), "y": np.array([Evil(), Evil()])}
    np.savez(tmp_path / "my.npz", **arrays)
    torch.save(Data(x=torch.ones(2, 3), edge_index=torch.tensor([[0, 1], [1, 0]]), y=Evil()), tmp_path / "my.pt")  # pyright: ignore[reportArgumentType]
    (tmp_path / "my").mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / "my" / f"{name}.npy", array)
    np.save(tmp_path / "my" / "src.npy", arrays["edge_index"][0])
    np.save(tmp_path / "my" / "dst.npy", arrays["edge_index"][1])
    for name, path in (("npz", "my.npz"), ("pt", "my.pt"), ("folder", "my")):
        data = (f"dataset={name}", f"dataset.path={path}")
        assert_refused(gnnpar_here("train", *SINGLE, *data), tmp_path)


def test_raw_planetoid_files_with_pickles_are_refused(gnnpar_here: Run, tmp_path: Path) -> None:
    raw = tmp_path / "data" / "cora" / "raw"
    raw.mkdir(parents=True)
    for name in ("x", "tx", "allx", "y", "ty", "ally", "graph"):
        (raw / f"ind.cora.{name}").write_bytes(pickle.dumps(Evil()))
    (raw / "ind.cora.test.index").write_text("0\n")
    assert_refused(gnnpar_here("train", *SINGLE, "dataset=cora", "data_dir=data"), tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        'base: ["model._target_=os.system"]\nfactors: {codec: [codec=bf16]}',
        'base: [model=pyg, "model.target=evil.Evil"]\nfactors: {codec: [codec=bf16]}',
        "base: [debug=tiny]\nfactors: {model: ['model={_target_:evil.Evil}']}",
        "base: !!python/object/apply:os.mkdir [ran]\nfactors: {codec: [codec=bf16]}",
    ],
)
def test_study_with_foreign_class_is_refused(gnnpar_here: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "study.yaml").write_text(text)
    assert_refused(gnnpar_here("ablate", "study.yaml"), tmp_path)
