"""What the eighteenth attack, and the two after it, found: folders that are read for values, files that are options,
links to other runs, data that was exchanged, sizes that only a header says, YAML and modules that nobody named."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportArgumentType=false

from __future__ import annotations

import http.server
import json
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import hydra
import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCN

import gnnpar
from conftest import ROOT, environment
from gnnpar import api, files
from gnnpar.cli.main import run
from gnnpar.codecs.adaptive.links import Profile, nominal
from gnnpar.config.compose import compose
from gnnpar.config.help import train_help
from gnnpar.data import stored
from gnnpar.data.folder import Folder
from gnnpar.data.hetero import homogeneous
from gnnpar.data.saved import raw_graph
from gnnpar.parallel.objective import SPLITS
from gnnpar.paths import conf_dir
from gnnpar.planner.guide import prior
from gnnpar.report.latex import _tex
from gnnpar.settings import ConfigError
from gnnpar.track.console import stdout
from gnnpar.training.result.export import export

SMALL = ["dataset=sbm", "dataset.num_nodes=60"]
OF_PYG = [
    "model=pyg",
    "model.target=torch_geometric.nn.GCN",
    *(f"model.kwargs.{key}" for key in ("hidden_channels=8", "num_layers=2")),
]


# --- folders and files whose names are keys and options


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose folders are called as keys, and whose module leaves a mark."""
    monkeypatch.chdir(tmp_path)
    for key in ("model.kwargs.act", "device"):
        (tmp_path / key).mkdir()
        (tmp_path / key / "relu.yaml").write_text("# @package _global_\noptim:\n  _target_: helpers.Net\n")
    (tmp_path / "helpers.py").write_text("open('mark', 'w')\nclass Net: pass\n")
    return tmp_path


@pytest.mark.parametrize("typed", ["+model.kwargs.act=relu", "++model.kwargs.act=relu", "+device=relu"])
@pytest.mark.parametrize("multirun", [[], ["-m"]], ids=["run", "sweep"])
def test_a_folder_called_as_a_key_is_not_read_for_its_value(
    hostile: Path, typed: str, multirun: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = run("train", [*multirun, *SMALL, *OF_PYG, typed, "strategy=single", "epochs=1"])
    if "device" in typed:
        assert code, "it is no device"
    else:
        assert code == 0, capsys.readouterr().err
        assert compose([*SMALL, *OF_PYG, typed]).resolved["model"]["kwargs"]["act"] == "relu"
    assert not (hostile / "mark").exists()


# --- links to other runs


# --- data that was exchanged


# --- sizes


def test_rows_are_read_by_what_they_weigh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "CHUNK_ROWS", 7)
    monkeypatch.setattr(stored, "CHUNK_VALUES", 50)
    for width, most in ((1, 7), (10, 5), (1000, 1)):
        chunks = list(stored.row_chunks(np.zeros((20, width))))
        assert [row for rows in chunks for row in range(20)[rows]] == list(range(20))
        assert max(rows.stop - rows.start for rows in chunks) == most


def test_a_graph_larger_than_the_disk_is_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "g"
    folder.mkdir()
    np.save(folder / "x.npy", np.zeros((40, 100_000), np.float32))
    np.save(folder / "y.npy", np.arange(40) % 2)
    np.save(folder / "src.npy", np.arange(40))
    np.save(folder / "dst.npy", np.roll(np.arange(40), 1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda place: SimpleNamespace(free=10_000_000))
    code = run(
        "partition", ["dataset=folder", f"dataset.path={folder}", "dataset.split=random", "world_size=2", "out=o"]
    )
    assert code == 2 and not (tmp_path / "o").exists()
    assert "GiB of disk at least" in capsys.readouterr().err
    assert Folder(name="g", path=str(folder), split="random").load(None, 0).num_nodes == 40


# --- downloads


@contextmanager
def server(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_address[1]}"
        serving.shutdown()


# --- Python's surroundings


# --- what others reach


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


def test_costs_beyond_any_machine_are_no_profile(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    measured = nominal(2)
    for cost, good in ((8e-9, True), (1e300, False), (-1.0, False)):
        links = {**measured.links, (0, 1): (cost, 1e-5)}
        file.write_text(json.dumps(replace(measured, links=links).as_json()))
        with (
            nullcontext() if good else pytest.raises(ValueError, match="negative, next to nothing, or an hour and more")
        ):
            assert Profile.read(file, 2).links == links


# --- arguments of the user's own classes


OWN = """
from dataclasses import dataclass
from pathlib import Path
from gnnpar.data.synthetic import SBM

@dataclass(frozen=True, kw_only=True)
class Mine(SBM):
    path: str = "its own"
    width: int = 1

    def load(self, data_dir, seed):
        Path("read").write_text(self.path)
        return super().load(data_dir, seed)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a user-defined dataset class that reads the file which its argument `path` names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dataset").mkdir()
    shutil.copy(conf_dir() / "dataset" / "sbm.yaml", tmp_path / "dataset" / "mine.yaml")
    text = (tmp_path / "dataset" / "mine.yaml").read_text()
    said = re.sub("_target_: .*", "_target_: ownreader.Mine", text) + "\npath: its own\nwidth: 1\n"
    (tmp_path / "dataset" / "mine.yaml").write_text(said)
    (tmp_path / "ownreader.py").write_text(OWN)
    yield tmp_path
    sys.modules.pop("ownreader", None)


# --- files that say two things, or have no end


def test_a_folder_with_two_lists_of_edges_is_refused(tmp_path: Path) -> None:
    arrays = {"src": [0, 1], "dst": [1, 0], "indices": [1, 0], "indptr": [0, 1, 2], "y": [0, 1], "x": [[1.0], [2.0]]}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", np.array(array))
    with pytest.raises(ValueError, match=r"edges are src and dst, or indices and indptr; remove indices\.npy"):
        Folder(name="g", path=str(tmp_path)).load(None, 0)


def test_a_group_that_is_null_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", ["debug=null", *SMALL]) == 2
    assert "debug=null: a group is chosen by a name" in capsys.readouterr().err


def test_a_name_is_no_argument_of_latex() -> None:
    assert _tex("[1cm]") == "{[}1cm]"
    assert _tex("a[1]_") == r"a[1]\_"


# --- what the nineteenth found: the mends of the eighteenth


def test_a_graph_of_more_kinds_than_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"are 64,000,000 kinds of 8,000 nodes: lower one of them"):
        compose(
            ["dataset=sbm", *(f"dataset.num_{kind}=8000" for kind in ("nodes", "communities", "classes"))]
        ).dataset.load(None, 0)


def test_types_of_nodes_spare_a_thousand_nodes_together() -> None:
    data = HeteroData()
    for number in range(3):
        data[f"t{number}"].num_nodes = 900
    data["t0"].x, data["t0"].y = torch.ones(900, 2), torch.zeros(900, dtype=torch.long)
    data["t0", "to", "t1"].edge_index = torch.tensor([[0], [1]])
    with pytest.raises(ValueError, match="type t2 has 900 nodes, and 0 numbers and ends of edges; give x"):
        homogeneous(data)


def test_edges_weigh_what_becomes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data(x=torch.ones(3, 1), y=torch.zeros(3, dtype=torch.long))
    data.edge_index = torch.zeros(2, 1, dtype=torch.int8).expand(2, 1000)
    monkeypatch.setattr(files, "memory_bytes", lambda: 32_000)
    with pytest.raises(ValueError, match="dataset g needs"):
        raw_graph("g", data)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_an_exported_program_reckons_edges_in_whole_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    """In eight bits, source and destination ran over into each other."""
    text = (ROOT / "src/gnnpar/templates/export/predict.txt").read_text()
    (tmp_path / "predict.py").write_text(text)
    told = {"num_features": 1, "dtype": "float32"}
    how = {"normalize": "none", "self_loops": True, "symmetrize": True, "drop_duplicates": True}
    (tmp_path / "model.json").write_text(json.dumps({**told, "prepare": how}))
    module = runpy.run_path(str(tmp_path / "predict.py"))
    edges = torch.randint(100, (2, 300), generator=torch.Generator().manual_seed(0))
    wanted = module["prepared"](torch.ones(100, 1), edges)[1]
    assert torch.equal(module["prepared"](torch.ones(100, 1), edges.to(dtype))[1], wanted)
    with pytest.raises(ValueError, match="give whole numbers"):
        module["prepared"](torch.ones(100, 1), edges.float())


def test_files_have_letters_of_all_languages(tmp_path: Path) -> None:
    (folder := tmp_path / "données").mkdir()
    ring = np.arange(9)
    masks = {f"{split}_mask": ring % 3 == i for i, split in enumerate(SPLITS)}
    x = np.ones((9, 2), np.float32)
    np.savez(folder / "g.npz", x=x, y=ring % 3, edge_index=np.stack([ring, np.roll(ring, 1)]), **masks)
    done = gnnpar.train("gcn", folder / "g.npz", strategy="single", epochs=1, folder=tmp_path / "run")
    assert done.result["status"] == "completed"


# --- what a twentieth attack found beside


def test_random_numbers_of_who_plans_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    prior.load.cache_clear()
    before = torch.random.get_rng_state()
    prior.load()
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_name_is_not_shown_as_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    stdout().print("a:x:b")
    assert capsys.readouterr().out == "a:x:b\n"


def test_hydra_may_run_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gnnpar.train in an application of Hydra."""
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(tmp_path)):
        (tmp_path / "app.yaml").write_text("x: 1\n")
        assert compose(SMALL).resolved["dataset"]["num_nodes"] == 60
        assert hydra.compose("app").x == 1, "and is the caller's afterwards"


# --- what a twenty-first attack found


def test_text_from_python_stays_text() -> None:
    """A model that was given by its name got 1.1 for "1.10"."""
    kwargs = {"version": "1.10", "tag": "null", "n": "1_000", "truth": "TRUE", "e": "1e3", "word": "relu", "size": 2}
    overrides = api.as_overrides({"model": "pyg", "model.target": "torch_geometric.nn.GCN", "model.kwargs": kwargs})
    assert compose([*SMALL, *overrides]).resolved["model"]["kwargs"] == kwargs


def test_a_checkpoint_brings_no_costs_that_a_file_may_not() -> None:
    profile = nominal(2)
    profile.check(2, "it")
    for cost in (float("nan"), float("inf"), -1.0, 1e-308):
        with pytest.raises(ValueError, match="it has a cost that is negative, next to nothing, or an hour and more"):
            replace(profile, fold_seconds=(cost, 0.0)).check(2, "it")
    with pytest.raises(ValueError, match="it is of 2 ranks, but there are 3"):
        profile.check(3, "it")


def test_help_shows_any_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_help(['hydra.help.template="$FOO $"']).strip() == "$FOO $"


def test_names_are_shown_in_any_encoding() -> None:
    code = "from gnnpar.__main__ import main; import sys; sys.argv = ['gnnpar', '--version']; main(); print('é')"
    ascii_alone = environment() | {"PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run([sys.executable, "-c", code], env=ascii_alone, capture_output=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, b"\\xe9")


STATES = """
import sys, torch, gnnpar
def train(name):
    done = gnnpar.train("gcn", "sbm", strategy=sys.argv[1], world_size=int(sys.argv[2]), epochs=2, folder=name,
                        **{"dataset.num_nodes": 60, "comm": sys.argv[3]})
    return done.history["loss/train"].tolist()
usual = train("a")
torch.set_default_dtype(torch.float64)
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert train("b") == usual
    assert torch.get_default_dtype() == torch.float64
    assert torch.is_autocast_enabled("cpu")
torch.set_default_dtype(torch.float32)
torch.backends.cuda.matmul.fp32_precision = "tf32"
with torch.inference_mode(), torch.device("meta"):
    assert train("c") == usual
with torch.no_grad():
    assert train("d") == usual
assert torch.backends.cuda.matmul.fp32_precision == "tf32"
assert usual
"""


@pytest.mark.parametrize(
    "ranks", [("single", "1", "gloo"), ("graph_parallel", "2", "gloo"), ("graph_parallel", "2", "threads")]
)
def test_what_a_program_has_set_of_torch_decides_no_numbers(tmp_path: Path, ranks: tuple[str, ...]) -> None:
    """Ranks that were forked had the caller's default type and autocast, others had not."""
    (tmp_path / "program.py").write_text(STATES)
    line = [sys.executable, "program.py", *ranks]
    done = subprocess.run(
        line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_export_replaces_no_files_of_another_program(tmp_path: Path) -> None:
    trained = gnnpar.train(
        "gcn", "sbm", strategy="single", epochs=1, folder=tmp_path / "run", **{"dataset.num_nodes": 60}
    )
    (tmp_path / "out").mkdir()
    for name, text in {"model.json": '{"learner": 1}', "predict.py": "mine"}.items():
        (tmp_path / "out" / name).write_text(text)
    with pytest.raises(ConfigError, match=r"holds model\.json, which no export has written"):
        export(trained.model, tmp_path / "out")
    assert (tmp_path / "out" / "predict.py").read_text() == "mine"
    for _ in range(2):
        export(trained.model, tmp_path / "own")


def test_an_empty_name_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`hydra.run.dir=$UNSET` replaced config.yaml of the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("mine")
    for typed in ("hydra.run.dir=", "hydra.run.dir=''", "cache_dir=", "resume=", "shards=", "plan="):
        assert run("train", [*SMALL, "strategy=single", "epochs=1", typed]) == 2
        assert "is empty, and names nothing" in capsys.readouterr().err
    assert run("plan", [*SMALL, "--out", ""]) == 2
    assert "an argument is empty" in capsys.readouterr().err
    with pytest.raises(ValueError, match="folder is empty"):
        gnnpar.train("gcn", "sbm", folder="")
    assert Path("config.yaml").read_text() == "mine"


def test_arguments_of_a_model_stay_the_callers(tmp_path: Path) -> None:
    """The second call had the dropout of the first."""
    given = {"hidden_channels": 8, "num_layers": 2}
    net = GCN
    for overrides in (
        {"model.kwargs": given, "model.kwargs.dropout": 0.9},
        {"model.kwargs.dropout": 0.9, "model.kwargs": given},
    ):
        kwargs = api._settings(net, "sbm", overrides).resolved["model"]["kwargs"]
        assert kwargs == {**given, "dropout": 0.9}
    assert given == {"hidden_channels": 8, "num_layers": 2}
    with pytest.raises(ConfigError, match="is one, or none: give a list of them"):
        gnnpar.compare("/home/me/run")  # pyright: ignore[reportArgumentType]  # as a caller may


def test_a_node_has_no_more_neighbours_than_there_are_others() -> None:
    """Pairs were drawn until there were more than there are."""
    with pytest.raises(ValueError, match=r"avg_degree=100\.0 is more than the 59 others of a node"):
        compose([*SMALL, "dataset.avg_degree=100"]).dataset.load(None, 0)
