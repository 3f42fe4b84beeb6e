"""What a sixteenth attack found: graphs, jobs and names that are not those that were meant (meetings: tests/launch)."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
import yaml
from torch_geometric.data import Data, HeteroData

import gnnpar
from checkpoints import train
from conftest import environment
from gnnpar.cli import estimate, partition, plan, predict
from gnnpar.cli.main import run
from gnnpar.cli.train import check_world
from gnnpar.comm import Communicator
from gnnpar.config.compose import compose
from gnnpar.config.inputs import as_value
from gnnpar.data.given import as_data
from gnnpar.data.saved import raw_graph
from gnnpar.files import read_json
from gnnpar.paths import own_cache
from gnnpar.report.dashboard import of_study
from gnnpar.report.fairness import differences
from gnnpar.settings import ConfigError
from gnnpar.training.checkpoint import files as checkpoint
from gnnpar.training.checkpoint.resume import of_rank_0, profile_in
from worlds import run_world

SMALL = ["dataset=sbm", "dataset.num_nodes=60"]


def graph(file: Path, nodes: int) -> None:
    ring = np.arange(nodes)
    x, y = np.eye(nodes, 8, dtype=np.float32), ring % 3
    masks = {f"{split}_mask": ring % 3 == i for i, split in enumerate(("train", "val", "test"))}
    np.savez(file, x=x, y=y, edge_index=np.stack([ring, np.roll(ring, 1)]), **masks)


def test_a_prediction_of_the_runs_own_graph_is_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    graph(tmp_path / "g.npz", 40)
    job = ["dataset=npz", "dataset.path=g.npz", "strategy=single", "epochs=1"]
    assert run("train", [*job, f"hydra.run.dir={tmp_path}/run"]) == 0
    assert run("predict", ["run", "--out", "first.npy"]) == 0
    graph(tmp_path / "g.npz", 30)
    assert run("predict", ["run", "--out", "second.npy"]) != 0
    assert "was trained on graph" in capsys.readouterr().err
    assert not (tmp_path / "second.npy").exists()
    assert run("predict", ["run", *job[:2], "--out", "second.npy"]) == 0, "named, it is another graph"


@pytest.mark.parametrize("kind", [np.asarray, list])
def test_an_adjacency_is_of_the_nodes_that_there_are(kind: Callable[[np.ndarray], object]) -> None:
    matrix = scipy.sparse.coo_array(([1, 1], ([0, 1], [1, 2])), shape=(160, 160))
    with pytest.raises(ValueError, match=r"adjacency is \[160, 160\], and x has 40 rows"):
        as_data({"adjacency": matrix, "x": kind(np.ones((40, 3))), "y": np.zeros(40, dtype=np.int64)})


def test_a_graph_is_given_once() -> None:
    with pytest.raises(ConfigError, match="data is given, and dataset=cora: leave one of them out"):
        gnnpar.train("gcn", "sbm", dataset="cora", epochs=1)


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_key_with_a_plus_is_that_key(plus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="gnnpar plan chooses the strategy"):
        plan.run([*SMALL, f"{plus}strategy.chunks=2"])
    with pytest.raises(ConfigError, match="gnnpar partition takes out=FOLDER"):
        partition.run([f"{plus}shards.folder=s", f"out={tmp_path}/out"])
    with pytest.raises(ConfigError, match="leave plan= out"):
        estimate.run([f"{plus}plan=plan.json"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="leave world_size out"):
        check_world(compose([*SMALL, "world_size=3"]), [f"{plus}world_size=3"])


def test_a_codec_that_the_chosen_strategy_does_not_take_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["dataset=sbm", "dataset.num_nodes=300", "topology=flat", "--no-measure", "--out", str(tmp_path)]
    code, said = run("plan", [*asked, "codec=drop"]), capsys.readouterr().err
    assert (code, said.count("\n")) in ((0, 0), (2, 1)), said


@pytest.mark.parametrize("nothing", ["model=glob(zzz*)", "seed=range(5,1)"])
def test_a_sweep_without_a_job_is_refused(nothing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", ["-m", nothing, f"hydra.sweep.dir={tmp_path}"]) == 2
    assert "there is no job in this sweep" in capsys.readouterr().err


def test_a_run_that_goes_on_with_other_evaluations_says_so(tmp_path: Path) -> None:
    train(tmp_path / "a", "strategy=single", "epochs=3")
    train(tmp_path / "b", "strategy=single", "epochs=4", f"resume={tmp_path}/a", "eval_every=3")
    mine = read_json(tmp_path / "b" / "result.json")
    assert mine["begun_otherwise"] == {"epochs": 3, "settings": ["eval_every"]}
    assert "what it went on from" in differences(mine, {**mine, "begun_otherwise": None})


def test_a_graph_that_says_one_thing_twice_is_refused(tmp_path: Path) -> None:
    graph(tmp_path / "g.npz", 40)
    with np.load(tmp_path / "g.npz") as found:
        arrays = dict(found)
    for more in (
        {"node_features": arrays["x"]},
        {"train_masks": arrays["train_mask"]},
        {"edges": arrays["edge_index"].T},
    ):
        np.savez(tmp_path / "both.npz", **arrays, **more)
        with pytest.raises(ValueError, match=r"has both .* and .*; leave one of them out"):
            compose(["dataset=npz", f"dataset.path={tmp_path}/both.npz"]).load_dataset()
    ends, x, y = torch.zeros(2, 4, dtype=torch.int64), torch.ones(40, 2), torch.zeros(40, dtype=torch.int64)
    with pytest.raises(ValueError, match="num_nodes is 60, and x has 40 rows"):
        raw_graph("given", Data(x=x, y=y, edge_index=ends, num_nodes=60))
    with pytest.raises(ValueError, match="has both edge_index and adj_t"):
        raw_graph("given", Data(x=x, y=y, edge_index=ends, adj_t=torch.eye(40).to_sparse()))


@pytest.mark.parametrize("python", [["-m", "gnnpar"], ["-P", "-m", "gnnpar"]])
def test_a_working_directory_that_is_gone_is_one_line(tmp_path: Path, python: list[str]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = shlex.join([sys.executable, *python, "doctor"])
    script = f"cd {gone} && rmdir {gone} && exec {command}"
    done = subprocess.run(["/bin/sh", "-c", script], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "gnnpar: the working directory has been removed; change into another one\n",
    )


def test_every_rank_goes_on_with_what_rank_0_has_measured(tmp_path: Path) -> None:
    mine = tmp_path / "profile.json"
    mine.write_text('{"of": "rank 0"}')
    (tmp_path / "others").mkdir()

    def found(comm: Communicator) -> str | None:
        file = of_rank_0(mine if comm.rank == 0 else None, comm)
        return file and file.read_text()

    assert run_world("threads", 2, found) == ['{"of": "rank 0"}'] * 2
    assert run_world("threads", 2, lambda comm: of_rank_0(mine if comm.rank else None, comm)) == [None, None]


def test_a_study_that_wandb_cannot_filter_by_is_refused() -> None:
    pytest.importorskip("wandb_workspaces")
    for name in ("lr=0.1", "it's", "a\\nb", "a\nb"):
        with pytest.raises(ValueError, match="cannot be in the name of a group that wandb filters by"):
            of_study(name)
    assert of_study("a study, 2")


def test_the_configuration_that_a_run_leaves_is_its_own(tmp_path: Path) -> None:
    assert plan.run([*SMALL, "model=sage", "world_size=1", "--no-measure", "--out", str(tmp_path / "p")]) == 0
    asked = [f"plan={tmp_path}/p/plan.json", "epochs=1", f"hydra.run.dir={tmp_path}/run"]
    assert run("train", asked) == 0
    left = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    settings = read_json(tmp_path / "run" / "result.json")["settings"]
    assert {key: left[key] for key in ("model", "strategy", "dataset")} == {
        key: settings[key] for key in ("model", "strategy", "dataset")
    }


def test_a_plan_has_its_parts_and_prices_its_own_model(tmp_path: Path) -> None:
    made_for = ["dataset=sbm", "dataset.num_nodes=300", "topology=two_nodes", "--no-measure", "world_size=2"]
    assert plan.run([*made_for, "--out", str(tmp_path / "p")]) == 0
    asked = [f"plan={tmp_path}/p/plan.json", "comm=threads", "epochs=1"]
    with pytest.raises(ConfigError, match="the plan has its parts"):
        compose([*asked, "partition=random"])
    for run_dir, more, priced in (("own", [], True), ("other", ["model=gat"], False)):
        assert run("train", [*asked, *more, f"hydra.run.dir={tmp_path}/{run_dir}"]) == 0
        assert (read_json(tmp_path / run_dir / "result.json")["predicted"] is not None) == priced


@pytest.mark.parametrize("name", ["null", "a,b", "k=v", "it's", "1e3", "shards-2", "a b/c", "nan"])
def test_printed_overrides_are_read_as_that_path(name: str) -> None:
    assert compose([f"profile={as_value(name)}"]).profile == Path(name)


def test_memory_that_a_limit_holds_back_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(argv: list[str]) -> int:
        raise MemoryError

    monkeypatch.setattr(predict, "run", ends)
    assert run("predict", []) == 1
    assert capsys.readouterr().err.startswith("gnnpar: this process may take no more memory")


def test_a_folder_that_is_in_two_places_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (tmp_path / "here" / "h", tmp_path / "data" / "h"):
        place.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match="there are two folders h"):
        compose(["dataset=folder", "dataset.path=h", f"data_dir={tmp_path}/data"]).load_dataset()


def test_a_pipe_for_a_profile_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "profile.json")
    assert profile_in(tmp_path) is None


def test_a_run_begun_from_one_below_leaves_no_older_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, "strategy=single", "epochs=4")
    train(tmp_path / "first", "strategy=single", "epochs=2")
    train(tmp_path, "strategy=single", "epochs=3", f"resume={tmp_path}/first")
    assert checkpoint.folders(tmp_path)[0].name == "epoch-000003"
    assert (tmp_path / "checkpoint-before" / "epoch-000004").is_dir()


def test_types_in_another_order_are_no_graph_for_a_model_of_types(tmp_path: Path) -> None:
    def typed(*names: str) -> HeteroData:
        data, generator = HeteroData(), torch.Generator().manual_seed(0)
        data["a"].x, data["a"].y = torch.randn(30, 4, generator=generator), torch.arange(30) % 3
        for name in names:
            data["a", name, "a"].edge_index = torch.stack([torch.arange(30), (torch.arange(30) + len(name)) % 30])
        return data

    torch.save(typed("cites", "is"), tmp_path / "g.pt")
    torch.save(typed("is", "cites"), tmp_path / "other.pt")
    job = [
        "model=rgcn",
        "dataset=pt",
        f"dataset.path={tmp_path}/g.pt",
        "dataset.self_loops=keep",
        "dataset.split=random",
    ]
    assert run("train", [*job, "epochs=1", f"hydra.run.dir={tmp_path}/run"]) == 0
    asked = [str(tmp_path / "run"), *job[1:2], *job[3:]]
    assert run("predict", [*asked, f"dataset.path={tmp_path}/g.pt"]) == 0
    assert run("predict", [*asked, f"dataset.path={tmp_path}/other.pt"]) != 0


def test_a_word_that_names_no_checkpoint_is_refused(tmp_path: Path) -> None:
    train(tmp_path, "strategy=single", "epochs=1")
    with pytest.raises(ValueError, match="which='bset' is neither 'best' nor 'last'"):
        gnnpar.load(tmp_path, which="bset")  # pyright: ignore[reportArgumentType]  # what a user may type


def test_a_relative_cache_of_the_user_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", ".cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert own_cache() == tmp_path / ".cache" / "gnnpar"


@pytest.mark.parametrize(
    "wrong", ["hydra.sweeper=null", "hydra.launcher=null", "hydra.sweeper._target_=os.system", "-p"]
)
def test_a_sweep_without_what_starts_it_is_one_line(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", ["-m", *SMALL, f"hydra.sweep.dir={tmp_path}", wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_predicts_beside_its_training(tmp_path: Path) -> None:
    train(tmp_path / "run", "strategy=graph_parallel", "world_size=2", "comm=threads", "epochs=1")
    assert predict.run([str(tmp_path / "run"), "strategy=single"]) == 0


def test_outputs_of_classes_are_no_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    graph(tmp_path / "g.npz", 40)
    with np.load(tmp_path / "g.npz") as held:
        np.savez(tmp_path / "numbers.npz", **{**held, "y": np.ones((40, 3), np.float32)})
    given = ["dataset=npz", "dataset.path=g.npz", "strategy=single", "epochs=1"]
    assert run("train", [*given, f"hydra.run.dir={tmp_path}/run"]) == 0
    numbers = ["dataset=npz", "dataset.path=numbers.npz", "dataset.task=regression"]
    assert run("predict", ["run", *numbers]) != 0
    assert "trained on labels of task 'single_label', and this graph's are 'regression'" in capsys.readouterr().err


def test_a_check_without_a_case_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no world of no ranks can run strategy=graph_parallel"):
        gnnpar.check("gcn", worlds=())
    with pytest.raises(ConfigError, match="no world of 2 ranks can run strategy=single"):
        gnnpar.check("gcn", strategy="single", worlds=(2,))
