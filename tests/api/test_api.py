"""gnnpar from Python: keys and numbers of the command line, graphs in memory, loops of the caller's own."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import hydra
import networkx
import numpy as np
import psutil
import pytest
import scipy.sparse
import torch
import torch_geometric.nn
from torch_geometric.data import Data

import gnnpar
import pyg_nets
from conftest import Run, environment
from data.samples import hetero, npz_arrays, pyg_data, raw_graph
from gnnpar.api import TrainingFailed, _settings, as_overrides
from gnnpar.comm import world
from gnnpar.comm.world import restored_torch_settings
from gnnpar.config.compose import compose
from gnnpar.data.saved import PT, _of_arrays, as_data, write_given
from gnnpar.launch.launch import world_of
from gnnpar.models.gcn import GCN
from gnnpar.models.rgcn import RGCN
from gnnpar.session import Session
from gnnpar.settings import ConfigError
from ports import free_port

KWARGS: Any = {"model.kwargs": {"hidden": 5}}
QUICK: Any = {"comm": "threads", "epochs": 2, "model.hidden": 8}


pytestmark = pytest.mark.usefixtures("own_folder")


def test_links_need_neither_labels_nor_masks(tmp_path: Path):
    data = pyg_data()
    data = Data(x=data.x, edge_index=data.edge_index)
    few: Any = {"task.val_fraction": 0.3, "task.test_fraction": 0.3, "task.eval_negatives": 3}
    common: Any = {**QUICK, **few, "task": "link", "strategy": "graph_parallel", "world_size": 2}
    run = gnnpar.train("gcn", data, folder="run", **common)
    assert run.result["metric"]["name"] == "mrr"
    assert run.model(data).shape == (data.num_nodes, 64)
    assert data.x is not None
    assert data.edge_index is not None
    np.savez("links.npz", x=data.x.numpy(), edge_index=data.edge_index)
    again = gnnpar.train("gcn", "links.npz", folder="again", **common)
    assert again.result["hashes"]["split"] == run.result["hashes"]["split"]
    with pytest.raises(ConfigError, match="has no y"):
        gnnpar.train("gcn", data, folder="labels", **QUICK)
    with pytest.raises(TrainingFailed, match=r"dataset.task=link leaves labels out, and they are the task: set task"):
        gnnpar.train("gcn", "links.npz", folder="labels", **{"dataset.task": "link"}, **QUICK)


@dataclass(frozen=True, kw_only=True)
class Own(GCN):
    """A model of one's own, in a module."""


@pytest.mark.slow
def test_a_name_a_class_and_an_instance_are_the_same_model():
    losses = [
        list(gnnpar.train(model, pyg_data(), strategy="single", folder=f"run{i}", **QUICK).history["loss/train"])
        for i, model in enumerate(("gcn", GCN, GCN(hidden=8), Own))
    ]
    assert losses[0] == losses[1] == losses[2] == losses[3]


def test_the_losses_are_those_of_the_command(run_here):
    run = gnnpar.train("gcn", "sbm", strategy="graph_parallel", world_size=2, folder="python", debug="tiny", **QUICK)
    command = ("train", "model=gcn", "dataset=sbm", "strategy=graph_parallel", "world_size=2", "debug=tiny")
    done = run_here(*command, "comm=threads", "epochs=2", "model.hidden=8", "hydra.run.dir=command")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in Path("command/metrics.jsonl").read_text().splitlines()]
    assert [row["loss/train"] for row in rows] == list(run.history["loss/train"])
    result = json.loads(Path("command/result.json").read_text())
    for key in ("strategy", "model", "dataset", "hashes", "settings"):
        assert result[key] == run.result[key], key


def test_a_pyg_model_is_given_by_its_class():
    further: Any = {"comm": "threads", "epochs": 2, "world_size": 2}
    looped: Any = {"dataset": {"self_loops": True}}  # its GATConv folds then
    run = gnnpar.train(pyg_nets.Jumping, pyg_data(), strategy="sar", folder="run", **looped, **further)
    assert run.result["status"] == "completed"
    assert run.result["model"] == "jumping"
    trained = run.model
    assert trained(pyg_data()).shape == (6, 3)
    net = pyg_nets.Jumping(2, 3)
    net.load_state_dict({name.removeprefix("model.net."): value for name, value in trained.state_dict().items()})
    of_a_function = gnnpar.train(pyg_nets.gcn, pyg_data(), folder="function", **further, **KWARGS)
    assert of_a_function.result["settings"]["model"]["kwargs"] == {"hidden": 5}
    assert all(case.passed for case in gnnpar.check(pyg_nets.gcn, worlds=(1, 2)))


def test_a_pyg_model_trains_on_the_graph_as_it_is(capsys):
    data, further = pyg_data(), {"comm": "threads", "epochs": 2, "world_size": 2, "model.kwargs": {}}
    prepared: Any = {"dataset": {"self_loops": True, "drop_duplicates": True}}
    edges = raw_graph().edge_index
    assert isinstance(edges, torch.Tensor)
    data.edge_index = torch.cat([edges, edges[:, :2]], 1)
    run = gnnpar.train(pyg_nets.sage, data, strategy="graph_parallel", folder="kept", **further)
    assert "self loops" not in capsys.readouterr().out
    net = pyg_nets.sage(2, 3)
    net.load_state_dict({name.removeprefix("model.net."): value for name, value in run.model.state_dict().items()})
    torch.testing.assert_close(run.model(data), net.eval()(data.x, data.edge_index))
    gnnpar.train(pyg_nets.sage, data, strategy="graph_parallel", folder="prepared", **prepared, **further)
    shown = capsys.readouterr().out
    assert "self loops added 5" in shown
    assert "repeated edges dropped 3" in shown


def test_the_model_of_a_hetero_data_takes_it():
    data, model = hetero(), RGCN(hidden=8, encoder="linear")
    kept: Any = {"dataset": {"self_loops": "keep", "drop_duplicates": False}}
    further: Any = {"comm": "threads", "epochs": 2, "world_size": 2}
    run = gnnpar.train(model, data, strategy="graph_parallel", folder="run", **kept, **further)
    joint = gnnpar.homogeneous(data)
    assert (joint.num_nodes, joint.num_edges) == (21, 100)
    assert torch.equal(run.model(data), run.model(joint.x, joint.edge_index, edge_type=joint.edge_type))
    with pytest.raises(ValueError, match=r"^the model was trained on edges with edge_type, and these have none"):
        run.model(joint.x, joint.edge_index)


def test_model_without_the_best_weights_says_so(capsys):
    run = gnnpar.train("gcn", pyg_data(), strategy="single", folder="run", **QUICK)
    first = run.result | {"metric": run.result["metric"] | {"best_epoch": 0}}
    (run.folder / "result.json").write_text(json.dumps(first))
    shutil.rmtree(run.folder / "checkpoint" / "best", ignore_errors=True)
    assert run.model.epoch == 2
    line = "the model of epoch 2; that of epoch 1, the best on validation, was not kept"
    assert line in capsys.readouterr().out


def test_compare_and_sweep():
    compared = gnnpar.sweep([GCN, "sage"], pyg_data(), strategy=["single", "graph_parallel"], world_size=2, **QUICK)
    frame = compared.frame
    assert len(frame) == 4
    assert set(frame["strategy"]) == {"single", "graph_parallel"}
    assert set(frame["model"]) == {"gcn", "sage"}
    assert "<table" in compared._repr_html_()
    assert compared.page("page.html").stat().st_size > 1000
    assert len(gnnpar.compare(compared.runs[:2]).frame) == 2
    assert "epoch_seconds" in str(compared)
    assert len(str(compared).splitlines()) >= 5
    assert len(gnnpar.compare([compared.runs[0].folder]).frame) == 1


def test_sweep_without_a_completed_run_is_refused(capsys):
    with pytest.raises(ConfigError, match="none of the 1 runs of the sweep has completed"):
        gnnpar.sweep("gcn", pyg_data(), strategy=["sarr"], **QUICK)
    assert "did you mean sar?" in capsys.readouterr().out


def test_check_and_plan():
    cases = gnnpar.check(GCN(hidden=8), strategy="sar", worlds=(1, 2))
    assert [case.passed for case in cases] == [True, True]
    found = gnnpar.plan(GCN(hidden=8), pyg_data(), "pcie_server", world_size=2, cache_dir="cache", comm="threads")
    assert found.file.exists()
    assert found.candidates
    run = gnnpar.train("gcn", pyg_data(), plan=found.file, world_size=2, **QUICK)
    assert run.result["status"] == "completed"


def adjacency(values: object = None) -> scipy.sparse.coo_array:
    src, dst = raw_graph().edge_index.numpy()
    return scipy.sparse.coo_array((np.ones(5, dtype=np.bool_) if values is None else values, (src, dst)), shape=(6, 6))


def with_ragged_rows() -> networkx.DiGraph:
    made = as_networkx()
    made.nodes["n0"]["x"] = [1.0] * 50
    return made


def as_networkx(**of_edges: float) -> networkx.DiGraph:
    data: Any = pyg_data()
    made = networkx.MultiDiGraph()
    for i in range(6):
        made.add_node(f"n{i}", x=data.x[i].tolist(), y=int(data.y[i]), train_mask=bool(data.train_mask[i]))
    made.add_edges_from((f"n{a}", f"n{b}") for a, b in data.edge_index.T.tolist())
    if of_edges:
        made.add_edge("n0", "n1", **of_edges)
    return made


@pytest.mark.parametrize(
    "given",
    [lambda: npz_arrays(), lambda: npz_arrays(edge_index=None, adjacency=adjacency()), as_networkx],
    ids=["arrays", "scipy", "networkx"],
)
def test_graph_in_every_form_is_the_same(given):
    wanted = PT(path=str(write_given(pyg_data()))).load(None, 0)
    found = PT(path=str(write_given(given()))).load(None, 0)
    assert found.graph_hash == wanted.graph_hash
    assert torch.equal(found.train_mask, wanted.train_mask)
    assert write_given(given()) == write_given(given()), "written once"


def test_an_undirected_networkx_graph_has_both_directions():
    made = networkx.path_graph(3)
    for i in range(3):
        made.nodes[i].update(x=[1.0], y=i)
    data: Any = as_data(made)
    assert sorted(map(tuple, data.edge_index.T.tolist())) == [(0, 1), (1, 0), (1, 2), (2, 1)]


ANY: Any = {"wrong": b"x", "five": 5, "half": 2.5, "text": "/home/me/run"}  # types that the checker would refuse
UNREAD = "gnnpar check trains on labels, parts drawn at random, in fp64 by gradient descent, and reads no"
FEW: Any = {"comm": "threads", "epochs": 1}


def local() -> object:
    @dataclass(frozen=True, kw_only=True)
    class Local(GCN):
        pass

    return gnnpar.train(Local, pyg_data())


def trains(model: Any = "gcn", data: Any = "sbm", **further: Any) -> Callable[[], object]:
    return lambda: gnnpar.train(model, data, **{"comm": "threads", **further})


@pytest.mark.quick(12)
@pytest.mark.parametrize(
    ("call", "line"),
    [
        (trains(data=5), "dataset given: there is a int; give a torch_geometric Data, a NetworkX graph, or a mapping"),
        (trains(data=adjacency()), "a SciPy matrix has no x and no y; give {'adjacency'"),
        (trains(data=npz_arrays(edge_attr=np.ones(5))), "edge_attr must be [5, width], one row an edge, got [5]"),
        (trains(data=as_networkx(weight=2.0)), "1 of 6 edges have weight; give it to all or none"),
        (trains(data=npz_arrays(y=None)), "the Data has no y"),
        (trains(data=npz_arrays(x=[[1.0], [2.0, 3.0]])), "x has rows of several lengths; give each as many numbers"),
        (trains(data=with_ragged_rows()), "x has rows of several lengths"),
        (trains("gnc"), "model=gnc does not exist"),
        (trains(strategy="sarr"), "strategy=sarr does not exist, did you mean sar?"),
        (trains(epoch=3), "epoch"),
        (trains(torch.nn.Linear), "model.target=torch.nn.modules.linear.Linear has forward(input)"),
        (trains(5), "model is a int; give a name, a dataclass made from gnnpar.models.gnn.ModelConfig, or"),
        (trains(torch.nn.Linear(2, 2)), "model is a Linear that is made already, and every rank makes its own"),
        (trains(GCN(hidden=8), **{"model.hiden": 8}), "did you mean hidden"),
        (trains(data=pyg_data(), dataset={"path": "b.pt"}), "data is given, and dataset.path=b.pt: leave one of"),
        (trains(data="my.npz", **{"dataset.path": "b.npz"}), "data is given, and dataset.path=b.npz: leave one of"),
        (trains(dataset="cora"), "data is given, and dataset=cora: leave one of them out"),
        (local, "Local is defined inside a function"),
        (trains(lambda in_dim, out_dim: None, pyg_data()), "the model is a lambda, which has no name"),
        (
            trains(torch_geometric.nn.GCN, **{"model.kwargs": {"hidden": object}}),
            "model.kwargs.hidden is a type, which",
        ),
        *(
            (trains(**{key: "x"}), "is read by the commands alone: leave it out, and give folder=")
            for key in ("hydra.run.dir", "hydra/launcher", "+hydra.job.name")
        ),
        *(
            (partial(call, "gcn", cast("Any", None), **FEW), "data is None: give a graph, or the name of a dataset")
            for call in (gnnpar.train, gnnpar.plan, gnnpar.distribute)
        ),
        (partial(gnnpar.sweep, "gcn", cast("Any", None), **FEW), "none of the 1 runs"),
        (lambda: gnnpar.load(ANY["wrong"]), "run=b'x' is no path: give a str or a pathlib.Path"),
        (lambda: gnnpar.train("gcn", "sbm", folder=ANY["wrong"]), "folder=b'x' is no path: give a str or a pathlib."),
        (lambda: gnnpar.sweep("gcn", "sbm", folder=ANY["wrong"]), "folder=b'x' is no path: give a str or a pathlib."),
        (lambda: gnnpar.compare([ANY["wrong"]]), "runs=b'x' is no path: give a str or a pathlib.Path"),
        (lambda: gnnpar.plan("gcn", "sbm", out=ANY["wrong"]), "out=b'x' is no path: give a str or a pathlib.Path"),
        (lambda: gnnpar.plan("gcn", "sbm", quality=ANY["five"]), "quality=5 must be text"),
        (lambda: gnnpar.check("gcn", worlds=ANY["five"]), "worlds=5 must be a list of numbers of ranks"),
        (lambda: gnnpar.check("gcn", worlds=[ANY["half"]]), "worlds=[2.5] must be a list"),
        (
            lambda: gnnpar.load(".", device="nonsense"),
            "device='nonsense' is not available on this machine: Expected one",
        ),
        (lambda: gnnpar.load(".", device=ANY["five"]), "device=5 is not available on this machine"),
        (lambda: gnnpar.compare(ANY["five"]), "runs=5 must be a list of runs or folders"),
        (lambda: gnnpar.compare(ANY["text"]), "must be a list of runs or folders"),
        (partial(gnnpar.check, "gcn", worlds=(1,), task="link"), UNREAD),
        (partial(gnnpar.check, "gcn", worlds=(1,), partition="random"), UNREAD),
        (partial(gnnpar.check, "gcn", worlds=(1,), precision="bf16"), UNREAD),
        (partial(gnnpar.check, "gcn", worlds=(1,), **{"optim.lr": 0.1}), UNREAD),
        (lambda: gnnpar.check("gcn", worlds=()), "no world of no ranks can run strategy=graph_parallel"),
        (lambda: gnnpar.check("gcn", strategy="single", worlds=(2,)), "no world of 2 ranks can run strategy=single"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_bad_input_is_one_line_before_ranks_start(call: Callable[[], object], line: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the line is compared below
        call()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(Path().rglob("result.json"))


def test_numbers_of_numpy_are_those_of_python():
    given = {"model.hidden": np.int64(8), "epochs": np.int64(1), "deterministic": np.bool_(True)}
    numbers = _settings("gcn", "sbm", given).resolved
    assert (numbers["model"]["hidden"], numbers["epochs"], numbers["deterministic"]) == (8, 1, True)
    kwargs = {"hidden_channels": np.int64(8), "num_layers": np.int32(2), "dropout": np.float32(0.5)}
    net = _settings(torch_geometric.nn.GCN, "sbm", {"model.kwargs": kwargs}).resolved["model"]["kwargs"]
    assert net == {"hidden_channels": 8, "num_layers": 2, "dropout": 0.5}
    assert {type(value) for value in net.values()} == {int, float}


def test_check_on_an_own_graph_passes(capsys):
    data = pyg_data()
    data = Data(**{**data.to_dict(), "edge_index": raw_graph().edge_index.unique(dim=1)})
    data.edge_weight = torch.rand(data.num_edges) + 0.5
    cases = gnnpar.check(pyg_nets.weighted, data, strategy="sar", worlds=(3,))
    assert [(case.reference, case.passed) for case in cases] == [("PyG", True), ("single device", True)]
    assert re.search(r"6 nodes, \d+ edges", capsys.readouterr().out)
    with pytest.raises(ConfigError, match=r"has weights on edges"):
        gnnpar.check(pyg_nets.gcn, data, worlds=(2,))
    with pytest.raises(ConfigError, match=r"has weights on edges, which strategy=\w+ does not carry"):
        gnnpar.check(pyg_nets.weighted, data, strategy="minibatch", worlds=(2,))
    sbm = {"num_nodes": 80, "num_features": 5}
    (case,) = gnnpar.check("sage", "sbm", worlds=(2,), dataset=sbm)
    assert case.passed


def test_codec_that_is_not_read_is_reported(capsys):
    compose(["strategy=adaqp", "codec=uniform", "codec.bits=2"])
    shown = capsys.readouterr().err
    assert "codec=uniform is not read: strategy=adaqp has its own codec; set codec@strategy.codec=uniform\n" in shown
    assert "set strategy.codec.bits=2\n" in shown
    compose(["strategy=graph_parallel", "codec=uniform", "codec.bits=2"])
    assert not capsys.readouterr().err


def test_failed_run_raises_its_reason():
    data = pyg_data()
    del data.train_mask, data.val_mask, data.test_mask
    with pytest.raises(TrainingFailed, match="no split of its own") as caught:
        gnnpar.train("gcn", data, folder="failed", **QUICK)
    assert caught.value.folder == Path("failed").absolute()
    run = gnnpar.train("gcn", data, dataset={"split": "random"}, folder="works", **QUICK)
    assert run.result["status"] == "completed"


def test_values_are_spelled_as_on_the_command_line():
    given = {"a": None, "b": True, "c": [1, 2.5], "d": {"e": 1e-3, "f": {"g": "x y"}}, "h": Path("/a/b=c")}
    assert list(as_overrides(given)) == ["a=null", "b=true", "c=[1,2.5]", "d.e=0.001", "d.f.g='x y'", "h='/a/b=c'"]


SCRIPT = """
import sys
from dataclasses import dataclass
import gnnpar
from gnnpar.models.gcn import GCN
print("the script runs", flush=True)
@dataclass(frozen=True, kw_only=True)
class Net(GCN):
    pass
try:
    gnnpar.train(Net, "sbm", strategy="graph_parallel", world_size=2, debug="tiny")
except ValueError as error:
    print(error, flush=True)
run = gnnpar.train(GCN, "sbm", strategy="graph_parallel", world_size=2, epochs=int(sys.argv[1]), debug="tiny")
print(run.result["status"], run.result["transport"], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("notebook", [False, True], ids=["script", "notebook"])
def test_class_of_the_script_is_refused_and_no_guard_is_needed(run_python, tmp_path, notebook):
    """A notebook has no file for its main module, as a program that is read from a pipe."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python("-", "2", stdin=SCRIPT) if notebook else run_python("script.py", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the script runs") == 1, "ranks do not import it"
    assert "Net is defined in the script or notebook itself, which ranks do not import: move it" in done.stdout
    assert "completed gloo" in done.stdout


@pytest.mark.fault
def test_ctrl_c_ends_the_ranks(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", "1000000"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    try:
        deadline = time.monotonic() + 200
        while not list(tmp_path.rglob("metrics.jsonl")):
            assert time.monotonic() < deadline
            assert started.poll() is None, started.communicate()[1]
            time.sleep(0.2)
        ranks = psutil.Process(started.pid).children(recursive=True)
        assert len(ranks) >= 2
        os.kill(started.pid, signal.SIGINT)
        assert b"KeyboardInterrupt" in started.communicate(timeout=60)[1]
        assert psutil.wait_procs(ranks, timeout=10)[1] == [], "ranks end by themselves when their parent has ended"
    finally:
        started.kill()


def test_sweep_into_a_folder_with_runs_is_refused(tmp_path: Path) -> None:
    few: Any = {**QUICK, "dataset.num_nodes": 60}
    gnnpar.sweep("gcn", "sbm", strategy=["single"], seed=[0, 1], folder=tmp_path, **few)
    before = (tmp_path / "0" / "result.json").read_bytes()
    with pytest.raises(ConfigError, match="holds run 0 of an earlier sweep: choose another folder="):
        gnnpar.sweep("gcn", "sbm", strategy=["single"], seed=[5], folder=tmp_path, **few)
    assert (tmp_path / "0" / "result.json").read_bytes() == before


def test_plan_with_a_file_as_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").touch()
    with pytest.raises(ConfigError, match=r"is a file: name a folder, for plan\.json"):
        gnnpar.plan("gcn", "sbm", "pcie_server", out=tmp_path / "plan.json")


ODD = """
import sys, threading, torch
real = sys.stdout
class Tee:
    def write(self, text):
        real.write(text)
    def flush(self):
        real.flush()
sys.stdout = Tee()
torch.set_default_dtype(torch.float64)
import gnnpar
small = {"dataset.num_nodes": 60}
with torch.no_grad():
    gnnpar.train("gcn", "sbm", strategy="single", epochs=1, folder="run", **small)
    assert all(case.passed for case in gnnpar.check("gcn", strategy="single", worlds=(1,)))
    gnnpar.plan("gcn", "sbm", "two_nodes", world_size=2, out="plan.json", **small)
before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
with gnnpar.distribute("gcn", "sbm", strategy="single", folder="mine", threads_per_rank=1, **small) as session:
    session.train_epoch()
assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before
assert torch.get_default_dtype() == torch.float64
print("all of it")
"""


@pytest.mark.fault
def test_settings_and_streams_of_the_program_are_restored(run_python: Run) -> None:
    done = run_python("-c", ODD)
    assert done.stdout.splitlines()[-1:] == ["all of it"], done.stderr


def test_matmul_precision_of_the_program_is_not_used_and_restored() -> None:
    switches = world._matmul_switches()
    torch.set_float32_matmul_precision("medium")
    try:
        before = [each.fp32_precision for each in switches]
        with restored_torch_settings():
            world_of(compose(["strategy=single", "threads_per_rank=1"])).prepare()
            assert [each.fp32_precision for each in switches] == ["ieee", "ieee"]
        assert torch.get_float32_matmul_precision() == "medium"
        assert [each.fp32_precision for each in switches] == before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_cublas_workspace_of_the_program_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    gnnpar.train("gcn", "sbm", strategy="single", deterministic=True, **{"dataset.num_nodes": 60, **QUICK})
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_folders_of_a_sweep_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = gnnpar.sweep("gcn", "sbm", strategy=["single"], folder="s", **{"dataset.num_nodes": 60, **QUICK})
    compared = gnnpar.compare(["s"])
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    assert [run.folder for run in (*swept.runs, *compared.runs)] == [tmp_path / "s" / "0"] * 2


def test_features_of_bfloat16_are_trained_on(tmp_path: Path) -> None:
    data = pyg_data()
    assert data.x is not None
    data.x = data.x.bfloat16()
    assert gnnpar.train("gcn", data, strategy="single", **QUICK).result["epochs_done"] == 2


def test_arrays_of_other_widths_and_byte_orders_are_read_and_masked_ones_refused() -> None:
    edges = np.array([[0, 1], [1, 2]], dtype=">i8")
    x = np.arange(6).reshape(3, 2)
    for dtype in (">f4", np.longdouble):
        found = _of_arrays({"x": x.astype(dtype), "y": np.arange(3), "edge_index": edges})
        assert found.x is not None and torch.equal(found.x.double(), torch.from_numpy(x).double())
        assert found.edge_index is not None and torch.equal(found.edge_index, torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(ValueError, match="x has masked entries; fill them"):
        _of_arrays({"x": np.ma.masked_array(x, mask=x > 2), "y": np.arange(3), "edge_index": edges})


def test_compose_inside_an_application_of_hydra_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(tmp_path)):
        (tmp_path / "app.yaml").write_text("x: 1\n")
        assert compose(["dataset=sbm", "dataset.num_nodes=60"]).resolved["dataset"]["num_nodes"] == 60
        assert hydra.compose("app").x == 1, "and is the caller's afterwards"


def test_text_from_python_stays_text() -> None:
    kwargs = {"version": "1.10", "tag": "null", "n": "1_000", "truth": "TRUE", "e": "1e3", "word": "relu", "size": 2}
    overrides = as_overrides({"model": "pyg", "model.target": "torch_geometric.nn.GCN", "model.kwargs": kwargs})
    assert compose(["dataset=sbm", *overrides]).resolved["model"]["kwargs"] == kwargs


def test_arguments_of_a_model_stay_the_callers() -> None:
    given = {"hidden_channels": 8, "num_layers": 2}
    whole, part = {"model.kwargs": given}, {"model.kwargs.dropout": 0.9}
    for overrides in (whole | part, part | whole):
        kwargs = _settings(torch_geometric.nn.GCN, "sbm", overrides).resolved["model"]["kwargs"]
        assert kwargs == {**given, "dropout": 0.9}
    assert given == {"hidden_channels": 8, "num_layers": 2}


STATES = """
import torch, gnnpar
precision = torch.backends.cuda.matmul.fp32_precision
for place in (("graph_parallel", 2, "gloo"), ("single", 1, "gloo"), ("graph_parallel", 2, "threads")):
    def train(name):
        strategy, ranks, comm = place
        few = {"dataset.num_nodes": 60, "comm": comm, "epochs": 2}
        folder = f"{strategy}-{comm}-{name}"
        done = gnnpar.train("gcn", "sbm", strategy=strategy, world_size=ranks, folder=folder, **few)
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
    torch.backends.cuda.matmul.fp32_precision = precision
    assert usual
"""


@pytest.mark.slow
def test_torch_settings_of_the_caller_change_no_numbers(run_python: Run, tmp_path: Path) -> None:
    """Forked ranks inherit the caller's default type and autocast, others do not."""
    (tmp_path / "program.py").write_text(STATES)
    done = run_python("program.py", timeout=300)
    assert done.returncode == 0, done.stderr


SMALL: Any = {"precision": "fp64", "model.hidden": 8, "dataset.num_nodes": 300}
LOOP = """
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
    (tmp_path / "loop.py").write_text(LOOP)
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
