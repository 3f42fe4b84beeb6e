"""Models of a run, loaded or exported, predict what the run evaluated; what cannot be exported is one line."""

import json
import runpy
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.transforms import ToSparseTensor

import gnnpar
import pyg_nets
from checkpoints import SMALL, damage, last, rows, train
from composing import READS_ALL_NODES, configured, names
from conftest import ROOT, Refused, Run
from gnnpar.cli.main import run
from gnnpar.cli.train import run_training
from gnnpar.comm import ThreadWorld
from gnnpar.comm.world import restored_torch_settings
from gnnpar.config.compose import compose
from gnnpar.data.dataset import Dataset
from gnnpar.folds.edge_data import EdgeSizes
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import GNN
from gnnpar.models.pyg.model import PyG
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.local import Pass
from gnnpar.partition.shard import Shard
from gnnpar.settings import ConfigError
from gnnpar.training.checkpoint.resume import EdgeFacts
from gnnpar.training.result.export import Plain, export, traced
from gnnpar.verify.conformance import small_graph
from outcomes import refused

GRAPH = [option for option in SMALL if option.startswith("dataset.")]
CSR: Any = torch.sparse_csr  # PyG's own annotation of a layout says int


def raw(dataset: Dataset) -> Data:
    """As a user has it: no self loops, edges in another order."""
    src, dst = dataset.edge_index
    kept = (src != dst).nonzero().flatten().flip(0)
    return Data(x=dataset.x, edge_index=dataset.edge_index[:, kept])


def accuracy(logits: torch.Tensor, dataset: Dataset, mask: torch.Tensor) -> float:
    return float((logits.argmax(1) == dataset.y)[mask].double().mean())


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", ["gat", "gcn"])
def test_the_loaded_module_predicts_what_was_evaluated(tmp_path: Path, model: str) -> None:
    common = ("strategy=graph_parallel", f"model={model}", "epochs=8", "optim.lr=0.2", "checkpoint.every=2")
    assert train(tmp_path, *common).exit_code == 0
    dataset = compose(GRAPH).load_dataset()
    evaluated = {row["epoch"] + 1: row for row in rows(tmp_path) if "metric/val" in row}
    for which in ("best", "last"):
        found = gnnpar.load(tmp_path, which=which)
        assert not found.training
        with torch.no_grad():
            logits = found(raw(dataset))
            again = found(dataset.x, dataset.edge_index, prepared=True)
            transposed = found(ToSparseTensor(layout=CSR)(raw(dataset)))
        assert torch.equal(logits, again)
        assert torch.equal(logits, transposed)
        told = evaluated[found.epoch]
        assert found.val == told["metric/val"]
        for split in ("train", "val", "test"):
            reached = accuracy(logits, dataset, getattr(dataset, f"{split}_mask"))
            assert reached == pytest.approx(told[f"metric/{split}"])
    assert found.epoch == 8
    assert max(row["metric/val"] for row in evaluated.values()) == gnnpar.load(tmp_path).val
    assert found.settings.model == compose([f"model={model}", "model.hidden=8"]).model
    smaller = found(torch.randn(3, 12), torch.tensor([[0, 1], [1, 2]]))
    assert smaller.shape == (3, 8)
    smaller.sum().backward()
    assert all(p.grad is not None for p in found.parameters())


NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = torch.nn.Linear(in_channels, out_channels)
    def forward(self, x, edge_index):
        return self.lin(x)
"""
X, EDGE = torch.zeros(5, 12), torch.tensor([[0], [1]])


@pytest.fixture(scope="module")
def loaded(trained_once: Path) -> Any:
    return gnnpar.load(trained_once)


@pytest.mark.parametrize(
    ("x", "edges", "line"),
    [
        (X[:, :3], EDGE[:, :0], r"x is \(5, 3\), but the model was trained on 12 features a node"),
        (X, torch.tensor([[0], [7]]), r"1 of 1 edges point outside nodes 0\.\.4"),
        (X.to(torch.complex64), EDGE, "^dataset given: features are torch.complex64; store real numbers"),
        (X / 0, EDGE, "^dataset given: features hold 60 NaN"),
        (X.numpy(), EDGE, "^dataset given: features must be a dense torch tensor, not ndarray"),
        (
            X.to_sparse(),
            EDGE,
            "^dataset given: features must be a dense torch tensor, not one of layout torch.sparse_c",
        ),
        (X, EDGE.bool(), "^dataset given: edge_index is torch.bool; node ids must be integers"),
        (X, EDGE.float(), "^dataset given: edge_index is torch.float32; node ids must be integers"),
        (X, EDGE.repeat(2, 1)[:3], r"^dataset given: edge_index must have shape \[2, edges\], got \[3, 1\]"),
    ],
)
def test_input_that_does_not_fit_is_one_line(loaded: Any, x: Any, edges: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        loaded(x, edges)


def test_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "strategy=single", "epochs=4", "checkpoint.every=2").exit_code == 0
    assert gnnpar.load(tmp_path / "checkpoint" / "epoch-000002").epoch == 2
    assert gnnpar.load(tmp_path, which="last").epoch == 4
    with pytest.raises(ValueError, match="has no good checkpoint"):
        gnnpar.load(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="which='bset' is neither 'best' nor 'last'"):
        gnnpar.load(tmp_path, which=cast("Any", "bset"))
    damage(last(tmp_path).folder / "rank-0.pt")
    assert gnnpar.load(tmp_path, which="last").epoch == 2
    assert "epoch-000004 is no good checkpoint" in capsys.readouterr().err


def test_the_best_epoch_is_kept_without_a_setting(tmp_path: Path) -> None:
    """Its weights are those that training had then: the logits are those which were evaluated."""
    assert train(tmp_path, "strategy=graph_parallel", "epochs=12", "optim.lr=1.0", "eval_every=1").exit_code == 0
    evaluated = {row["epoch"] + 1: row for row in rows(tmp_path)}
    best = max(evaluated, key=lambda epoch: evaluated[epoch]["metric/val"])
    assert best < 12 and gnnpar.load(tmp_path, which="last").epoch == 12
    found = gnnpar.load(tmp_path)
    assert (found.epoch, found.val) == (best, evaluated[best]["metric/val"])
    dataset = compose(GRAPH).load_dataset()
    with torch.no_grad():
        logits = found(dataset.x, dataset.edge_index, prepared=True)
    assert accuracy(logits, dataset, dataset.test_mask) == pytest.approx(evaluated[best]["metric/test"])


def test_the_users_own_class_needs_no_trust_where_the_user_has_trained_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere, or for a user who has not, the file alone names it."""
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_net_of_mine.py").write_text(NET)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (run := tmp_path / "here" / "run").mkdir()
    own = ("model=pyg", "model.target=own_net_of_mine.Net")
    debug = ("debug=tiny", "strategy=single", "epochs=2", "tracker=jsonl")
    assert run_training(compose([*debug, *own]), run).exit_code == 0
    assert gnnpar.load(run, which="last").epoch == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of another user"))
    with pytest.raises(ValueError, match=r"names own_net_of_mine\.Net.*trust=True"):
        gnnpar.load(run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path / "there")
    with pytest.raises(ValueError, match=r"names own_net_of_mine\.Net.*trust=True"):
        gnnpar.load(run)


def test_loaded_model_does_not_depend_on_the_default_dtype(trained_once: Path) -> None:
    with restored_torch_settings():
        torch.set_default_dtype(torch.bfloat16)
        with torch.inference_mode():
            model = gnnpar.load(trained_once)
        assert torch.get_default_dtype() == torch.bfloat16
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert not any(each.is_inference() for each in model.parameters())


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", ["hgt", "rgat", "rgcn"])
def test_unseen_edge_types_are_refused(tmp_path: Path, model: str) -> None:
    overrides = ["debug=tiny", "strategy=single", f"model={model}", "dataset=sbm_typed", "epochs=1", "model.hidden=8"]
    assert run("train", [*overrides, f"hydra.run.dir={tmp_path}"]) == 0
    trained = gnnpar.load(tmp_path)
    edges, types = torch.tensor([[0, 1], [1, 2]]), trained.edges.sizes.types
    assert trained(torch.zeros(3, trained.model.in_dim), edges, edge_type=torch.tensor([0, types - 1])).shape[0] == 3
    with pytest.raises(ValueError, match=rf"edge_type of edge 1 is {types}, outside 0\.\.{types - 1}"):
        trained(torch.zeros(3, trained.model.in_dim), edges, edge_type=torch.tensor([0, types]))


DATA = small_graph()  # isolated nodes, loops on most, repeated edges
ELSEWHERE = """
import sys
sys.modules["gnnpar"] = sys.modules["gnnpar_kernels"] = None  # an import of either is an error
import runpy
sys.argv = ["predict.py", "graph.pt", "logits.pt"]
runpy.run_path("taken/predict.py", run_name="__main__")
"""


def built(name: str) -> GNN:
    model = configured("model", name, "model.hidden=8", "model.num_layers=3").build(6, 3, seed=1).double().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # biases too
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def expected(model: GNN) -> torch.Tensor:
    everybody = torch.zeros(DATA.num_nodes, dtype=torch.int64)
    (comm,) = ThreadWorld(1).communicators()
    shard = Shard.open(DATA, everybody, comm, edge_ids=model.needs_edge_ids).to(torch.device("cpu"), torch.float64)
    return model(WholeGraph(shard, Pass(0)), shard.x)


def largest_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", [*names("model"), *READS_ALL_NODES])
def test_every_model_is_the_same_in_plain_torch(name: str) -> None:
    model = built(name)
    shuffled = DATA.edge_index[:, torch.randperm(DATA.num_edges, generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        found = Plain(model)(DATA.x.double(), shuffled)
        assert largest_error(found, expected(model)) < 1e-12


@pytest.mark.slow  # seconds a model
@pytest.mark.parametrize("name", names("model"))
def test_every_model_has_a_program_for_any_graph(name: str) -> None:
    model = built(name)
    program = traced(model).module()
    with torch.no_grad():
        assert largest_error(program(DATA.x.double(), DATA.edge_index), expected(model)) < 1e-12
        few = torch.randn(4, 6, dtype=torch.float64), torch.tensor([[0, 1, 2], [1, 2, 0]])
        assert largest_error(program(*few), Plain(model)(*few)) < 1e-12


def test_layers_that_read_those_before_have_a_program_for_any_graph(tmp_path: Path) -> None:
    fields = ("model.num_layers=3", "model.residual=true", "model.jump=cat", "model.decoder=linear")
    assert train(tmp_path / "run", "strategy=single", "model=gcn", "epochs=1", *fields).exit_code == 0
    loaded = gnnpar.load(tmp_path / "run")
    loaded.edges = EdgeFacts(sizes=EdgeSizes(degrees=((1, 4),)))
    assert export(loaded, tmp_path / "taken") == []
    few = torch.randn(4, loaded.model.in_dim), torch.tensor([[0, 1, 2], [1, 2, 0]])
    program = torch.export.load(tmp_path / "taken" / "program.pt2").module()
    with torch.no_grad():
        assert largest_error(program(*few), Plain(loaded.model)(*few)) < 1e-5


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_a_program_names_no_folder_of_this_machine(name: str, tmp_path: Path) -> None:
    torch.export.save(traced(built(name)), tmp_path / "program.pt2")
    with zipfile.ZipFile(tmp_path / "program.pt2") as archive:
        said = b"".join(archive.read(each) for each in archive.infolist())
    assert b"weight" in said and b'.py"' not in said and b".py\\" not in said
    assert all(str(folder).encode() not in said for folder in (ROOT, sys.prefix))


@pytest.mark.slow  # processes that start: 15 s
def test_a_run_is_taken_away_and_predicts_without_gnnpar(run_here: Run, run_python: Run, tmp_path: Path) -> None:
    job = ("strategy=graph_parallel", "model=gat", "epochs=4", "dataset.homophily=0.7")
    assert train(tmp_path / "run", *job).exit_code == 0
    done = run_here("export", "run", "--out", "taken")
    assert done.stdout.splitlines()[-1] == "epoch 4: model.json, predict.py, program.pt2, weights.pt  ->  taken"
    kept = tmp_path / "run" / "checkpoint" / "epoch-000004"
    before = sorted(p.name for p in kept.iterdir())
    assert run_here("export", str(kept)).returncode == 0
    assert sorted(p.name for p in kept.iterdir()) == before, "a checkpoint holds what its manifest names"
    taken = [json.loads((tmp_path / name / "model.json").read_text()) for name in ("run/export", "taken")]
    assert taken[0]["files"]["weights.pt"] == taken[1]["files"]["weights.pt"]
    told = taken[1]
    assert (told["model"]["name"], told["num_features"], told["dtype"]) == ("gat", 12, "float32")
    dataset = compose(["dataset.num_nodes=200", "dataset.avg_degree=6", "dataset.num_features=12", *job]).load_dataset()
    src, dst = dataset.edge_index
    raw = dataset.edge_index[:, (src != dst).nonzero().flatten().flip(0)]
    torch.save({"x": dataset.x, "edge_index": raw}, tmp_path / "graph.pt")
    done = run_python("-c", ELSEWHERE)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        loaded = gnnpar.load(tmp_path / "run")
        wanted = loaded(dataset.x, raw)
    assert largest_error(torch.load(tmp_path / "logits.pt", weights_only=True), wanted) < 1e-5
    weights = torch.load(tmp_path / "taken" / "weights.pt", weights_only=True)
    assert all(torch.equal(weights[name], p) for name, p in loaded.model.named_parameters())


def test_an_onnx_file_gives_the_logits_of_the_run_for_any_graph(run_here: Run, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="the extra [onnx] is not installed")
    assert train(tmp_path / "run", "strategy=single", "model=gat", "epochs=2", "precision=fp64").exit_code == 0
    assert run_here("export", "run", "--out", "taken", "--onnx").returncode == 0
    assert "model.onnx" in json.loads((tmp_path / "taken" / "model.json").read_text())["files"]
    content = (tmp_path / "taken" / "model.onnx").read_bytes()
    assert b"/" + str(Path(gnnpar.__file__).parent).encode()[1:] not in content, "no folder of this machine"
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    loaded = gnnpar.load(tmp_path / "run")
    for num_nodes, num_edges in ((60, 300), (9, 4)):
        drawn = torch.Generator().manual_seed(num_nodes)
        x = torch.randn(num_nodes, loaded.model.in_dim, generator=drawn)
        edges = torch.randint(0, num_nodes, (2, num_edges), generator=drawn)
        (found,) = session.run(["logits"], {"x": x.numpy(), "edge_index": edges.numpy()})
        assert largest_error(torch.from_numpy(found), loaded(x, edges, prepared=True).detach()) < 1e-5


def test_onnx_without_its_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = "--onnx needs onnx, which is not installed: pip install 'gnnpar[onnx]'"
    refused(line, "export", "nowhere", "--onnx")


@pytest.mark.parametrize("target", ["gcn", "gat", "gated", "Jumping"])
def test_a_pyg_model_is_the_same_in_plain_torch_and_in_its_own_class(target: str) -> None:
    model = PyG(target=f"pyg_nets.{target}", self_loops=True).build(6, 3, seed=1).double()
    loops = torch.arange(DATA.num_nodes).expand(2, -1)
    plain = DATA.edge_index[:, DATA.edge_index[0] != DATA.edge_index[1]].unique(dim=1)
    edges = torch.cat([plain, loops], dim=1)
    own = vars(pyg_nets)[target](6, 3).double()
    own.load_state_dict({name.removeprefix("net."): value for name, value in model.state_dict().items()})
    with torch.no_grad():
        found, wanted = Plain(model)(DATA.x.double(), edges), own.eval()(DATA.x.double(), edges)
    assert largest_error(found, wanted) < 1e-12


@pytest.mark.quick(1)
@pytest.mark.parametrize("target", ["gcn", "gat", "gated", "transformer"])
def test_the_program_of_a_pyg_model_takes_graphs_of_any_size(target: str) -> None:
    model = PyG(target=f"pyg_nets.{target}", self_loops=True).build(6, 3, seed=1)
    x, edges = torch.rand(5, 6), torch.tensor([[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 1]])
    with torch.no_grad():
        assert largest_error(traced(model).module()(x, edges), Plain(model)(x, edges)) < 1e-6


def test_whole_neighbourhoods_have_no_program() -> None:
    model = PyG(target="pyg_nets.edge").build(6, 3, seed=1)
    with pytest.raises(ValueError, match=r"reads whole neighbourhoods has no form in plain torch; load weights\.pt"):
        traced(model)


class Stubborn(nn.Module):
    """Its forward pass depends on values."""

    def forward(self, g: Graph, h: torch.Tensor) -> torch.Tensor:
        return g.aggregate(Sum(), (h * float(h.sum()),)) if h.sum() > 0 else h


@dataclass(frozen=True, kw_only=True)
class StubbornConfig(GCN):
    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        stubborn: Any = Stubborn()
        stubborn.weight = nn.Parameter(torch.ones(out_dim, in_dim))
        return stubborn


def test_what_cannot_be_exported_is_one_line() -> None:
    with refused(r"^StubbornConfig has no program: .*can be traced that uses tensors"):
        traced(StubbornConfig(num_layers=1).build(3, 3, seed=0))


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """What the program of an export makes of a graph without features of its own."""
    (tmp_path / "predict.py").write_text((ROOT / "src/gnnpar/templates/export/predict.txt").read_text())
    how = {"normalize": "none", "self_loops": True, "symmetrize": True, "drop_duplicates": True}
    (tmp_path / "model.json").write_text(json.dumps({"num_features": 1, "dtype": "float32", "prepare": how}))
    return runpy.run_path(str(tmp_path / "predict.py"))["prepared"]


@pytest.mark.parametrize("wrong", [4, -1])
def test_exported_program_refuses_edges_of_missing_nodes(prepared, wrong: int) -> None:
    assert prepared(torch.ones(4, 1), torch.tensor([[0], [3]]))[1].shape[1] >= 1
    with pytest.raises(ValueError, match=r"edge_index names nodes .* x has 4 rows"):
        prepared(torch.ones(4, 1), torch.tensor([[wrong], [0]]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_an_exported_program_with_narrow_integers_has_the_same_edges(prepared, dtype: torch.dtype) -> None:
    edges = torch.randint(100, (2, 300), generator=torch.Generator().manual_seed(0))
    wanted = prepared(torch.ones(100, 1), edges)[1]
    assert torch.equal(prepared(torch.ones(100, 1), edges.to(dtype))[1], wanted)
    with pytest.raises(ValueError, match="give whole numbers"):
        prepared(torch.ones(100, 1), edges.float())


def test_an_export_into_a_folder_of_another_program_is_refused(trained_once: Path, tmp_path: Path) -> None:
    loaded = gnnpar.load(trained_once)
    (tmp_path / "out").mkdir()
    for name, text in {"model.json": '{"learner": 1}', "predict.py": "mine"}.items():
        (tmp_path / "out" / name).write_text(text)
    with pytest.raises(ConfigError, match=r"holds model\.json, which no export has written"):
        export(loaded, tmp_path / "out")
    assert (tmp_path / "out" / "predict.py").read_text() == "mine"
    for _ in range(2):
        export(loaded, tmp_path / "own")
