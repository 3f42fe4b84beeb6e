"""`gnnpar predict`: on any ranks, strategy and graph, the logits that the loaded model gives on one device."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

import gnnpar
from checkpoints import train
from composing import settings_of
from conftest import Refused, Run
from gnnpar.cli import predict
from gnnpar.cli.main import run
from gnnpar.cli.partition import run as partition
from gnnpar.cli.predict import checked_pairs, with_model_of
from gnnpar.config.compose import compose
from gnnpar.files import read_json
from gnnpar.settings import ConfigError
from gnnpar.training.result.trained import find

MANY = ("world_size=3", "comm=threads", "threads_per_rank=1")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert train(folder, "strategy=graph_parallel", "model=sage", "epochs=3", "comm=threads").exit_code == 0
    return folder


def expected(run_dir: Path, overrides: tuple[str, ...] = ()) -> np.ndarray:
    model = gnnpar.load(run_dir)
    settings = model.settings if not overrides else compose(overrides)
    data = settings.dataset.load(settings.data_dir, settings.seed)
    with torch.no_grad():
        return model(data.x, data.edge_index, prepared=True).numpy()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "chosen",
    [("strategy=single",), ("strategy=sar", *MANY), ("strategy=gnnpipe", "world_size=2", *MANY[1:])],
    ids=["single", "sar", "gnnpipe"],
)
def test_predictions_equal_the_loaded_model(chosen: tuple[str, ...], run_dir: Path, run_here: Run, tmp_path: Path):
    done = run_here("predict", str(run_dir), *chosen, "--out", str(tmp_path / "out.npy"))
    assert (done.returncode, done.stderr) == (0, "")
    found = np.load(tmp_path / "out.npy")
    np.testing.assert_allclose(found, expected(run_dir), rtol=1e-4, atol=1e-5)
    assert "accuracy train 0." in done.stdout
    assert done.stdout.endswith("->  out.npy\n")
    assert [file.name for file in tmp_path.iterdir()] == ["out.npy"]


def test_predictions_from_shards_equal_the_loaded_model(run_dir: Path, run_here: Run, tmp_path: Path) -> None:
    width = gnnpar.load(run_dir).model.in_dim
    other = ("dataset=sbm", "dataset.num_nodes=200", "dataset.avg_degree=5", f"dataset.num_features={width}")
    assert partition([*other, "world_size=3", f"out={tmp_path / 'shards'}"]) == 0
    done = run_here("predict", str(run_dir), f"shards={tmp_path / 'shards'}", *MANY[1:], "--out", "other.npy")
    assert (done.returncode, done.stderr) == (0, "")
    found = np.load(tmp_path / "other.npy")
    np.testing.assert_allclose(found, expected(run_dir, other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (("model=gat",), 2, "model=gat: a prediction takes it from"),
        (("dataset.num_features=7", "dataset=sbm", "comm=threads"), 1, "this run's model has (8, 7)"),
        (("strategy=nothing",), 2, "nothing"),
    ],
)
def test_wrong_prediction_is_one_line(arguments, code: int, line: str, run_dir: Path, run_here: Run) -> None:
    done = run_here("predict", str(run_dir), *arguments)
    assert done.returncode == code
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(run_dir.glob("predictions.npy"))


@pytest.mark.slow
def test_files_made_from_an_earlier_run_are_moved_aside(run_here: Run, tmp_path: Path) -> None:
    given = ("train", "hydra.run.dir=run", *FEW, "strategy=single")
    for command in (given, ("predict", "run"), ("export", "run")):
        assert run_here(*command).returncode == 0
    (run := tmp_path / "run").joinpath("wandb.json").touch()
    done = run_here(*given, "model=sage")
    assert done.returncode == 0
    for name in ("predictions.npy", "export", "wandb.json"):
        aside = Path(name).with_stem(f"{Path(name).stem}-before").name
        assert f"run/{name} is of an earlier run: moved to {aside}" in done.stdout
        assert not (run / name).exists() and (run / aside).exists()
    (run / "predictions.npy").touch()
    assert run_here(*given, "model=sage", "epochs=2", "resume=auto").returncode == 0
    assert (run / "predictions.npy").exists()


def test_price_of_a_plan_with_another_first_layer_is_left_out(run_here: Run, tmp_path: Path) -> None:
    assert run_here("train", *FEW, "strategy=single", "hydra.run.dir=run").returncode == 0
    file = tmp_path / "run" / "plan.json"
    price = {"epoch_seconds": 1.0, "label": "of the plan", "peak_bytes": [1]}
    file.write_text(json.dumps({**read_json(file), "setup": {"first_layer": "cached"}, "predicted": price}))
    for layer, said in (("cached", True), ("live", False)):
        done = run_here("train", *FEW, "plan=run/plan.json", f"first_layer={layer}", f"hydra.run.dir={layer}")
        assert done.returncode == 0
        assert (read_json(tmp_path / layer / "result.json").get("predicted") is not None) == said


@pytest.mark.slow
def test_another_graph_is_prepared_as_that_of_the_run(run_here: Run, tmp_path: Path) -> None:
    r = np.random.default_rng(0)
    np.savez(tmp_path / "g.npz", x=r.random((30, 4)), y=np.arange(30) % 2, edge_index=r.integers(0, 30, (2, 90)))
    named = [*NPZ[:1], f"dataset.path={tmp_path}/g.npz", "dataset.split=random"]
    for how in ("row", "standard"):
        prepared = ("dataset.symmetrize=true", f"dataset.normalize={how}", "world_size=1")
        tiny = ("strategy=single", "checkpoint.every=1", "epochs=1", f"hydra.run.dir={how}")
        assert run_here("train", *named, *prepared, *tiny).returncode == 0
    found, trained = find(tmp_path / "row", "best")
    for more, normalize in (([], "row"), (["dataset.normalize=none"], "none")):
        asked: Any = with_model_of(trained, found, [*named, *more]).dataset
        assert (asked.normalize, asked.symmetrize) == (normalize, True)
    found, trained = find(tmp_path / "standard", "best")
    assert with_model_of(trained, found, named).dataset == trained.dataset
    assert run_here("predict", "standard", *named).returncode == 0, "it is the same graph"
    np.savez(tmp_path / "g.npz", x=9 * r.random((30, 4)), y=np.arange(30) % 2, edge_index=r.integers(0, 30, (2, 90)))
    assert run_here("partition", *named, *prepared, "out=shards").returncode == 0
    for graph in (named, ["shards=shards"]):
        done = run_here("predict", "standard", *graph)
        assert done.returncode != 0
        assert "were standardised by the mean and deviation of its own training nodes" in done.stderr


def test_degree_features_are_made_for_a_prediction(tmp_path: Path) -> None:
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


FEW = ("dataset=sbm", "dataset.num_nodes=60", "epochs=1", "threads_per_rank=1")
NPZ = ("dataset=npz", "dataset.path=g.npz")


def graph(file: Path, nodes: int, **changes: Any) -> None:
    ring = np.arange(nodes)
    arrays: Any = {"x": np.eye(nodes, 8, dtype=np.float32), "y": ring % 3, "edge_index": [ring, np.roll(ring, 1)]}
    arrays |= {f"{split}_mask": ring % 3 == i for i, split in enumerate(("train", "val", "test"))}
    np.savez(file, **arrays | changes)


@pytest.fixture
def trained_on_file(run_here: Run, tmp_path: Path) -> Run:
    """run_here in a folder with a run on g.npz of 40 nodes."""
    graph(tmp_path / "g.npz", 40)
    assert run_here("train", *NPZ, "strategy=single", "epochs=1", "hydra.run.dir=run").returncode == 0
    return run_here


def test_changed_graph_of_a_run_is_refused(trained_on_file: Run, tmp_path: Path) -> None:
    assert trained_on_file("predict", "run", "--out", "first.npy").returncode == 0
    graph(tmp_path / "g.npz", 30)
    done = trained_on_file("predict", "run", "--out", "second.npy")
    assert done.returncode != 0 and "was trained on graph" in done.stderr
    assert not (tmp_path / "second.npy").exists()
    named = trained_on_file("predict", "run", *NPZ, "--out", "second.npy")
    assert named.returncode == 0, "named, it is another graph"


def test_graph_with_types_in_another_order_is_refused(tmp_path: Path) -> None:
    def typed(*names: str) -> HeteroData:
        data, generator = HeteroData(), torch.Generator().manual_seed(0)
        data["a"].x, data["a"].y = torch.randn(30, 4, generator=generator), torch.arange(30) % 3
        for name in names:
            data["a", name, "a"].edge_index = torch.stack([torch.arange(30), (torch.arange(30) + len(name)) % 30])
        return data

    torch.save(typed("cites", "is"), tmp_path / "g.pt")
    torch.save(typed("is", "cites"), tmp_path / "other.pt")
    graph = ["dataset=pt", "dataset.self_loops=keep", "dataset.split=random"]
    job = ["model=rgcn", f"dataset.path={tmp_path}/g.pt", "epochs=1", f"hydra.run.dir={tmp_path}/run"]
    assert run("train", [*graph, *job, *MANY[1:]]) == 0
    asked = [str(tmp_path / "run"), *graph]
    assert run("predict", [*asked, f"dataset.path={tmp_path}/g.pt"]) == 0
    assert run("predict", [*asked, f"dataset.path={tmp_path}/other.pt"]) != 0


def test_graph_of_another_task_is_refused(trained_on_file: Run, tmp_path: Path) -> None:
    graph(tmp_path / "numbers.npz", 40, y=np.ones((40, 3), np.float32))
    numbers = ("dataset=npz", "dataset.path=numbers.npz", "dataset.task=regression")
    done = trained_on_file("predict", "run", *numbers)
    assert done.returncode != 0
    assert "trained on labels of task 'single_label', and this graph's are 'regression'" in done.stderr


def test_prediction_with_a_changed_graph_needs_its_dataset(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"of which graph\? set dataset=NAME"):
        predict.run([str(run_dir), "dataset.split_seed=1"])
    graph = ["dataset=sbm", "dataset.num_nodes=60", "dataset.self_loops=false", "partition=range", "world_size=1"]
    assert partition([*graph, f"out={tmp_path}/shards"]) == 0
    with pytest.raises(ConfigError, match=r"were made with dataset\.self_loops=False"):
        predict.run([str(run_dir), f"shards={tmp_path}/shards"])


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00"])
def test_pairs_that_are_no_array_are_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pairs.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"pairs\.npy cannot be read \(.+\); give a \.npy$"):
        checked_pairs(tmp_path / "pairs.npy", settings_of("task=link"))


def test_output_that_is_a_folder_or_device_is_refused_before_work(
    run_dir: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "device").symlink_to(os.devnull)
    (tmp_path / "folder").mkdir()
    plan = ("plan", "model=gcn", "dataset=sbm", "world_size=2", "--trace", "device")
    with monkeypatch.context() as alone:
        alone.setattr("gnnpar.launch.launch.launch", None)
        outs = [("predict", str(run_dir), "strategy=single", "--out", name) for name in ("device", "folder")]
        for command in (*outs, ("compare", str(run_dir), "--html", "device"), plan):
            said = refused("cannot be written", *command)
            assert said.endswith("name a file\n")
