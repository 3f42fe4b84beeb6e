"""gnnpar.load: the trained module of a run predicts what the run evaluated, on whatever graph it is given."""

import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.transforms import ToSparseTensor

import gnnpar
from checkpoints import SMALL, damage, last, rows, train
from gnnpar.cli.main import run
from gnnpar.cli.train import run_training
from gnnpar.comm.world import restored_torch_settings
from gnnpar.config.compose import compose
from gnnpar.data.dataset import Dataset
from one_layer import NET

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
