"""What a network, another user of the host, and files with many small parts could do: links that are laid where a run
will lie, locks and names that others hold first, counts beyond what a run has."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportReturnType=false

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from checkpoints import train
from gnnpar import compilers
from gnnpar.comm.interfaces import MeetingError
from gnnpar.config.compose import compose
from gnnpar.config.jobs import Manifest, state_of
from gnnpar.config.study import read_study
from gnnpar.data import files
from gnnpar.data.saved import PT
from gnnpar.durable import read_json
from gnnpar.launch.environment import check_rank, restarts_allowed
from gnnpar.launch.launch import world_of
from gnnpar.launch.rendezvous import _own_end, rendezvous
from gnnpar.parallel.sequential.cuts import _Layout
from gnnpar.settings import ConfigError
from gnnpar.training.result.record import RunRecord
from gnnpar.training.result.result import valid_result
from gnnpar.training.result.started import note_start, restarts_before


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


@pytest.mark.parametrize("place", ["metric", "epoch_seconds", "memory_bytes", "bytes_per_epoch", "seed"])
def test_a_result_that_is_none_by_its_schema_is_none_of_a_job(
    tmp_path: Path, result: dict[str, Any], place: str
) -> None:
    """A study, and a sweep that optuna steers, took its figures as they were."""
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert valid_result(tmp_path) == result and state_of(tmp_path)[0] == "done"
    (tmp_path / "result.json").write_text(json.dumps(result | {place: "a text"}))
    assert valid_result(tmp_path) is None and state_of(tmp_path)[0] == "missing"


@pytest.mark.parametrize("second", ["0", "0/.", "./0", "0//"])
def test_jobs_of_a_sweep_share_no_folder(tmp_path: Path, second: str) -> None:
    jobs = [{"key": key, "folder": folder, "overrides": []} for key, folder in (("a", "0"), ("b", second))]
    (tmp_path / "sweep.json").write_text(json.dumps({"schema": 1, "argv": [], "jobs": jobs}))
    with pytest.raises(ConfigError, match="several jobs have the folder 0"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("text", ["{f}\n{f}", "base: [seed=1]\nbase: []\n{f}", "factors: {{a: [seed=1], a: [seed=2]}}"])
def test_a_study_says_nothing_twice(tmp_path: Path, text: str) -> None:
    """Of equal keys the last counted, and a factor was not run."""
    (tmp_path / "s.yaml").write_text(text.format(f="factors: {a: [codec=bf16]}"))
    with pytest.raises(ConfigError, match=r"it has \w+ twice; of the same keys only one would count"):
        read_study(tmp_path / "s.yaml")


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
    for name in ("XDG_CACHE_HOME", "GNNPAR_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    compilers.keep_torch_apart()
    assert "gnnpar-scratch-" in os.environ["TORCHINDUCTOR_CACHE_DIR"], "a new folder, gone afterwards"
    with pytest.raises(ValueError, match="this user has no home folder; set HOME, XDG_CACHE_HOME or GNNPAR_CACHE"):
        files.cache_root()


def test_a_sweep_that_lost_its_jobs_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.json has lost jobs of this sweep: another program writes there"):
        Manifest(tmp_path).states(["a"])


# --- what torchrun's store, in which anybody writes, decides


def test_hosts_of_torchrun_have_ranks() -> None:
    """A stranger's words in its store made one host train alone, and say that all was done."""
    env = {"RANK": "0", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for size, here in ((1, 1), (2, 2), (4, 4)):
        with pytest.raises(ConfigError, match=f"WORLD_SIZE={size}, but torchrun has 2 hosts and {here} ranks on this"):
            check_rank(env | {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(here)})
    check_rank(env | {"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "4"})
    check_rank(env | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"})


def test_a_run_goes_on_from_no_run_of_another_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the count in torchrun's store, a stranger made a new run report the results of the one in its folder."""
    settings, agents = {"optim.lr": "0.01", "seed": "1"}, ["a 7 1000", "b 8 2000"]
    assert restarts_before(tmp_path, settings, agents) is None, "of a start that was not noted"
    note_start(tmp_path, settings, agents)
    assert restarts_before(tmp_path, settings, agents) == 0
    assert restarts_before(tmp_path, settings, agents[::-1]) == 0, "rank 0 may be on another host then"
    assert restarts_before(tmp_path, settings | {"seed": "7"}, agents) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")  # says nothing: an id may be given again
    assert restarts_before(tmp_path, settings, ["a 9 3000", "b 10 4000"]) is None
    (tmp_path / ".started").write_text('{"by": ["job-7"]}')  # of before
    assert restarts_before(tmp_path, settings, agents) is None


def test_restarts_are_counted_by_what_the_start_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by torchrun's store, where a stranger made a run that was started again begin anew."""
    settings = compose(["dataset=sbm", "dataset.num_nodes=60"])

    def started(agents: list[str]) -> int:
        record = RunRecord(settings, replace(world_of(settings), how="joined"), tmp_path)
        record.before_start(agents, restartable=restarts_allowed(os.environ))
        return record.header["restarts"]

    def completed() -> None:
        RunRecord(settings, world_of(settings), tmp_path)._write("completed", "")

    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    (saved := tmp_path / "checkpoint" / "epoch-000001").mkdir(parents=True)
    assert started(["a 7 1000", "b 8 2000"]) == 0
    saved.mkdir(parents=True, exist_ok=True)
    assert [started(["b 8 2000", "a 7 1000"]), started(["b 8 2000", "c 9 3000"]), started(["c 9 3000"])] == [1, 2, 3]
    assert saved.exists()
    assert started(["d 10 4000"]) == 0
    assert not saved.exists(), "another start's"
    completed()
    assert started(["d 10 4000"]) == 0, "two runs of one process"
    completed()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert started(["d 10 4000"]) == 1
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS")
    assert started(["d 10 4000"]) == 0


@pytest.mark.parametrize("master", ["00", "0.0", "0x0", "::0.0.0.0", "0:0:0:0:0:0:0:0"])
def test_all_interfaces_by_another_spelling_are_refused(master: str) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": master, "MASTER_PORT": "29511"}
    with pytest.raises(MeetingError, match="stands for all interfaces"):
        rendezvous(env | {"GNNPAR_TOKEN": "x" * 32}, about={}, patience=1.0)


def test_ranks_on_one_host_keep_gloo_there() -> None:
    """It takes the interface of the host's name otherwise, which others reach."""
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    _own_end(env, "127.0.0.1", 29_512, several=False)
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
