"""A loop of the caller's own: the numbers of gnnpar.train, alone and on ranks that meet."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gnnpar
import pyg_nets
from conftest import Run, environment
from gnnpar.session import Session
from gnnpar.settings import ConfigError
from ports import free_port

SMALL: Any = {"precision": "fp64", "model.hidden": 8, "dataset.num_nodes": 300}
SCRIPT = """
import json, os, torch
import gnnpar
small = {"precision": "fp64", "model.hidden": 8, "dataset.num_nodes": 300, "threads_per_rank": 1}
with gnnpar.distribute("gcn", "sbm", strategy="graph_parallel", partition="random", folder="met", **small) as session:
    optimizer = torch.optim.SGD(session.parameters(), lr=0.1)
    losses = [session.train_epoch(optimizer) for _ in range(3)]
    found = {
        "losses": losses,
        "nodes": len(session.node_ids),
        "logits": session.gather(session.predict()).tolist(),
        "test": session.evaluate()["test"],
        "weights": session.state_dict()["layers.0.conv.weight"].tolist(),
    }
    with open(f"found{session.rank}.json", "w") as file:
        json.dump(found, file)
"""


pytestmark = pytest.mark.usefixtures("own_folder")


def alone(model: Any = "gcn", **keys: Any) -> Session:
    return gnnpar.distribute(model, "sbm", strategy="graph_parallel", folder="alone", **{**SMALL, **keys})


def test_the_losses_are_those_of_train() -> None:
    run = gnnpar.train("gcn", "sbm", strategy="single", folder="run", epochs=3, **SMALL)
    with alone(epochs=3) as session:
        assert [session.train_epoch() for _ in range(3)] == list(run.history["loss/train"])
        last = run.history.iloc[-1]
        assert session.evaluate() == {part: last[f"metric/{part}"] for part in ("train", "val", "test")}
        logits = session.gather(session.predict())
    assert session.epoch == 3
    assert logits.shape == (300, run.model.model.out_dim)


@pytest.mark.slow  # the examples, a job of their own, run a script under torchrun, too
def test_joined_ranks_equal_one_rank(run_python: Run, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT)
    done = run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "loop.py")
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in range(2))
    assert first.pop("nodes") + second.pop("nodes") == 300
    assert first == second
    with alone() as session:
        optimizer = torch.optim.SGD(session.parameters(), lr=0.1)
        losses = [session.train_epoch(optimizer) for _ in range(3)]
        assert first["losses"] == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(torch.tensor(first["logits"]).double(), session.gather(session.predict()))
        weights = session.state_dict()["layers.0.conv.weight"]
        torch.testing.assert_close(torch.tensor(first["weights"]).double(), weights)
        assert first["test"] == session.evaluate()["test"]


def test_a_pyg_class_loads_its_weights() -> None:
    keys: Any = {"model.kwargs": {"hidden": 5}, "dataset.num_nodes": 300}
    with gnnpar.distribute(pyg_nets.gcn, "sbm", strategy="single", folder="alone", **keys) as session:
        session.train_epoch()
        weights = session.state_dict()
        columns = next(weight for weight in weights.values() if weight.ndim == 2).shape[1]
        pyg_nets.gcn(columns, session.predict().shape[1], hidden=5).load_state_dict(weights)


@pytest.mark.parametrize("comm", ["gloo", "threads"])
def test_session_with_more_ranks_than_started_is_one_line(comm: str) -> None:
    line = "starts no ranks: start the script with torchrun --master-port=29500 --nproc-per-node=2"
    with pytest.raises(ConfigError, match=line):
        gnnpar.distribute("gcn", "sbm", strategy="graph_parallel", world_size=2, comm=comm, folder="alone", **SMALL)


def test_session_in_the_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    with alone(), pytest.raises(ConfigError, match=r"alone is in use by process \d+"):
        alone()
    gnnpar.train("gcn", "sbm", strategy="single", folder="alone", epochs=1, **SMALL)
    plan = (tmp_path / "alone" / "plan.json").read_bytes()
    with pytest.raises(ConfigError, match="alone holds a run that has completed"):
        alone()
    assert (tmp_path / "alone" / "plan.json").read_bytes() == plan


@pytest.mark.slow  # two interpreters
def test_refusal_of_one_rank_ends_both(tmp_path: Path) -> None:
    script = "import os, gnnpar\n"
    script += "gnnpar.distribute('gcn', 'sbm', strategy='sarr' if os.environ['RANK'] == '1' else 'sar', folder='met')\n"
    (tmp_path / "loop.py").write_text(script)
    env = environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen([sys.executable, "loop.py"], env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    lines = [rank.communicate(timeout=100)[1].splitlines()[-1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert f"rank 1 on {socket.gethostname()}: strategy=sarr does not exist, did you mean sar?" in lines[0]
    assert "strategy=sarr does not exist, did you mean sar?" in lines[1]


def test_value_with_a_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match="would be read as the value of another key"):
        gnnpar.train("gcn", "/tmp/${oc.env:HOME}.pt", strategy="single", folder="run")


def test_rows_of_other_nodes_are_refused() -> None:
    with alone() as session, pytest.raises(ValueError, match="3 rows, but this rank has 300 nodes"):
        session.gather(torch.zeros(3))
