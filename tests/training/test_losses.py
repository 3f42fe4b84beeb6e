"""Losses, metrics and callbacks of the user's own: equal to a plain PyG loop in fp64 on any number of ranks."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOptionalSubscript=false

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

import gnnpar
import own_losses
from gnnpar.api import TrainingFailed
from gnnpar.settings import ConfigError
from gnnpar.training.result.result import fault

NODES, EPOCHS = 48, 3
WORLDS = [
    ("single", 1, {}),
    ("graph_parallel", 2, {}),
    ("graph_parallel", 4, {}),
    ("sar", 2, {}),
    ("gnnpipe", 2, {"strategy.chunks": "one"}),
    ("minibatch", 2, {"strategy.fanout": [-1, -1], "strategy.batch_size": None, "strategy.normalize": "subgraph"}),
]


pytestmark = pytest.mark.usefixtures("own_folder")


def graph(y: Tensor, *, val: bool = True) -> Data:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, NODES, (2, 200), generator=generator).unique(dim=1)
    edges = edges[:, edges[0] != edges[1]]
    number = torch.arange(NODES)
    masks = {"train_mask": number % 3 == 0, "val_mask": (number % 3 == 1) & val, "test_mask": number % 3 == 2}
    return Data(x=torch.randn(NODES, 5, generator=generator), y=y, edge_index=edges, **masks)


def classes() -> Tensor:
    return (torch.rand(NODES, generator=torch.Generator().manual_seed(1)) * 3).long().clamp(max=2)


def labels(*, unknown: float) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    y = (torch.rand(NODES, 3, generator=generator) < 0.4).float()
    return y.masked_fill(torch.rand(NODES, 3, generator=generator) < unknown, torch.nan)


def targets(*, unknown: float) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    y = torch.randn(NODES, 2, generator=generator)
    return y.masked_fill(torch.rand(NODES, 2, generator=generator) < unknown, torch.nan)


def known(loss, outputs: Tensor, y: Tensor) -> Tensor:
    return loss(outputs[~y.isnan()], y[~y.isnan()].to(outputs.dtype))


def focal(logits: Tensor, y: Tensor) -> Tensor:
    p = logits.softmax(1)[torch.arange(len(y)), y]
    return ((1 - p) ** 2 * -p.log()).mean()


def weights(y: Tensor) -> Tensor:
    return len(y) / (3 * y.bincount(minlength=3).double())


def plain(data: Data, out_channels: int, loss) -> tuple[list[float], Tensor]:
    """Losses of a loop as PyG's users write it, and the last outputs."""
    assert data.x is not None
    net = own_losses.Net(5, out_channels).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        value = loss(net(data.x.double(), data.edge_index)[data.train_mask], data.y[data.train_mask])
        value.backward()
        optimizer.step()
        losses.append(float(value))
    with torch.no_grad():
        return losses, net(data.x.double(), data.edge_index)


def trained(data: Data, strategy: str = "single", ranks: int = 1, keys: Any = None, **further: Any) -> gnnpar.api.Run:
    common: Any = {"comm": "threads", "threads_per_rank": 1, "epochs": EPOCHS, "precision": "fp64", "eval_every": 1}
    common |= {"optim": "sgd", "optim.lr": 0.05, "optim.momentum": 0.0, "partition": "random"}
    chosen = {**common, "dataset": {"self_loops": "keep"}, **(keys or {}), **further}
    return gnnpar.train(own_losses.Net, data, strategy=strategy, world_size=ranks, **chosen)


WEIGHTS = {"task.class_weight": [1, 0.5, 4]}


def weighted(outputs: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(outputs, y, torch.tensor([1, 0.5, 4], dtype=outputs.dtype), label_smoothing=smoothing)


CASES: dict[str, tuple[Any, Any, Any]] = {
    "class_weight": (classes, WEIGHTS, weighted),
    "balanced": (classes, {"task.class_weight": "balanced"}, lambda o, y: F.cross_entropy(o, y, weights(y))),
    "smoothing": (classes, {**WEIGHTS, "task.label_smoothing": 0.1}, lambda o, y: weighted(o, y, 0.1)),
    "focal": (classes, {"task.loss": "focal"}, focal),
    "rows": (classes, {"task.loss": "own_losses:row_loss"}, lambda o, y: own_losses.row_loss(o, y).mean()),
    "mean": (classes, {"loss": own_losses.mean_loss}, own_losses.mean_loss),
    "unknown": (lambda: labels(unknown=0.3), {}, lambda o, y: known(F.binary_cross_entropy_with_logits, o, y)),
    "mse": (
        lambda: targets(unknown=0.3),
        {"dataset.task": "regression"},
        lambda o, y: known(F.mse_loss, o, y),
    ),
    "l1": (
        lambda: targets(unknown=0.3),
        {"dataset.task": "regression", "task.loss": "l1"},
        lambda o, y: known(F.l1_loss, o, y),
    ),
}


PAIRS = [(case, world) for case in CASES for world in (WORLDS if case in ("smoothing", "unknown") else WORLDS[1:2])]


@pytest.mark.quick(3)
@pytest.mark.parametrize(("case", "world"), PAIRS, ids=[f"{case}-{w[0]}-{w[1]}" for case, w in PAIRS])
def test_losses_equal_a_plain_loop(case: str, world: tuple[str, int, Any]) -> None:
    (make, chosen, loss), (strategy, ranks, keys) = CASES[case], world
    data = graph(make())
    expected, _ = plain(data, 2 if case in ("l1", "mse") else 3, loss)
    run = trained(data, strategy, ranks, keys, **chosen)
    assert list(run.history["loss/train"]) == pytest.approx(expected, rel=1e-9)
    assert not fault(run.result)


def test_losses_that_are_no_mean_are_refused_where_rows_are_apart() -> None:
    data = graph(classes())
    expected, _ = plain(data, 3, own_losses.mixed_loss)
    run = trained(data, loss=own_losses.mixed_loss)
    assert list(run.history["loss/train"]) == pytest.approx(expected, rel=1e-9)
    with pytest.raises(TrainingFailed, match=r"task.loss of all rows is no mean of the losses of its parts"):
        trained(data, "graph_parallel", 2, loss=own_losses.mixed_loss)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("task.loss", "huber", r"task.loss=huber is no loss of single_label labels \(cross_entropy, nll, focal\)"),
        ("task.loss", "own_losses.none", r"task.loss=own_losses.none cannot be imported"),
        ("task.metric", "mae", r"task.metric=mae is no metric of single_label labels"),
        ("task.class_weight", [1, 2], "task.class_weight has 2 numbers, and y 3 classes"),
    ],
)
def test_unknown_losses_and_metrics_are_one_line(key: str, value: object, line: str) -> None:
    with pytest.raises((ValueError, TrainingFailed), match=line):
        trained(graph(classes()), keys={key: value})


def test_metrics_equal_those_of_gathered_rows_and_choose_the_best_epoch() -> None:
    data = graph(classes())
    metrics: Any = {"first": own_losses.first_logit, "macro": "macro_f1", "line": lambda o, y: o.sum()}
    keys: Any = {"task.metric": "macro_f1", "metrics": metrics}
    runs = [trained(data, strategy, ranks, keys) for strategy, ranks in (("single", 1), ("graph_parallel", 3))]
    _, outputs = plain(data, 3, F.cross_entropy)
    logits, y = outputs[data.test_mask], data.y[data.test_mask]
    hits = [((logits.argmax(1) == c) & (y == c)).sum() for c in range(3)]
    sizes = [(logits.argmax(1) == c).sum() + (y == c).sum() for c in range(3)]
    f1 = float(torch.stack([2 * h / n for h, n in zip(hits, sizes, strict=True) if n]).mean())
    for run in runs:
        metric = run.result["metric"]
        assert (metric["name"], metric["test"]) == ("macro_f1", pytest.approx(f1, rel=1e-6))
        assert metric["more"]["first"]["test"] == pytest.approx(float(own_losses.first_logit(logits, y)), rel=1e-9)
        assert metric["more"]["line"]["test"] == pytest.approx(float(logits.sum()), rel=1e-9)
        assert metric["more"]["macro"] == {split: metric[split] for split in ("train", "val", "test")}
        assert not fault(run.result)


def test_errors_are_better_where_they_are_lower() -> None:
    data = graph(1e6 + targets(unknown=0.0))
    keys: Any = {"dataset.task": "regression", "task.metric": "mae", "task.metrics": ["rmse"], "checkpoint.every": 1}
    run = trained(data, "graph_parallel", 2, {**keys, "early_stopping.patience": 1, "optim.lr": 0.1})
    metric, history = run.result["metric"], list(run.history["metric/val"])
    assert (metric["name"], metric["best_val"]) == ("mae", min(history))
    assert metric["more"]["rmse"]["val"] >= metric["val"] > 1
    worse = (epoch for epoch in range(1, EPOCHS) if history[epoch] >= min(history[:epoch]))
    assert run.result["epochs_done"] == min(EPOCHS, 1 + next(worse, EPOCHS))
    assert not fault(run.result)


def test_callbacks_stop_the_run_on_all_ranks() -> None:
    data, seen = graph(classes()), []

    class Stop:
        def on_epoch_end(self, epoch: int, metrics: dict) -> None:
            seen.append((epoch, metrics["loss/train"]))
            if epoch == 1:
                raise gnnpar.StopTraining

    run = trained(data, "graph_parallel", 2, {"eval_every": 10}, callbacks=[Stop()])
    assert (run.result["status"], run.result["epochs_done"]) == ("completed", 2)
    assert seen == list(enumerate(run.history["loss/train"]))
    assert run.result["metric"]["test"] is not None
    processes: Any = {"comm": "gloo", "callbacks": [own_losses.stop_after_two], "loss": own_losses.row_loss}
    assert trained(data, "graph_parallel", 2, processes).result["epochs_done"] == 2
    with pytest.raises(ConfigError, match=r"callbacks\[0\]: .* is in no module by name, where ranks do not find it"):
        trained(data, "graph_parallel", 2, {"comm": "gloo", "callbacks": [lambda epoch, metrics: None]})


@pytest.mark.quick(1)
@pytest.mark.parametrize(("end", "warned"), [("", False), ("sigmoid", True), ("log_softmax", False)])
def test_outputs_that_are_probabilities_are_one_line(end: str, warned: bool, capsys: pytest.CaptureFixture) -> None:
    data = graph(classes())
    trained(data, "graph_parallel", 2, {"model.kwargs": {"end": end or ""}} if end else {})
    assert capsys.readouterr().out.count("outputs look like probabilities") == warned


def test_early_stopping_without_validation_nodes_is_refused() -> None:
    with pytest.raises(TrainingFailed, match=r"early_stopping.patience: there are no validation nodes to stop by"):
        trained(graph(classes(), val=False), "graph_parallel", 2, {"early_stopping.patience": 2})


def test_an_exception_in_a_model_names_its_line() -> None:
    with pytest.raises(ValueError, match=r"ZeroDivisionError: .* \(own_losses.py:\d+ in forward"):
        trained(graph(classes()), "graph_parallel", 2, {"model.kwargs": {"end": "broken"}})
