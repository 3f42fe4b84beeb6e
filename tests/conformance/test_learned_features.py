"""features=learned, both: a vector of each node that trains equals nn.Embedding in a plain loop, on all ranks."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalOperand=false

from __future__ import annotations

import copy
import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv

import gnnpar
from checkpoints import SMALL, hashes, rows, strategy_of, train
from composing import configured, names, settings_of
from conftest import Run
from gnnpar.comm import ThreadWorld
from gnnpar.data.dataset import Dataset
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import GNN
from gnnpar.models.pyg.model import PyG
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.local import Pass
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.pipeline.strategy import GNNPipe
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Strategy
from gnnpar.partition.learned import initial_vectors
from gnnpar.partition.shard import Shard
from gnnpar.settings import ConfigError
from gnnpar.training.checks import check_strategy
from gnnpar.training.optim import SGD, Adam, AdamW
from gnnpar.verify.conformance import Outcome, make_job, merge_ranks, relative_error, small_graph

SEED, WIDTH, EPOCHS = 3, 5, 3
REFUSING = {"cofree", "minibatch", "tag"}
SAGE = "torch_geometric.nn.models.GraphSAGE"


def graph(how: str) -> Dataset:
    return small_graph().with_features(how, WIDTH, SEED)  # type: ignore[arg-type]


def pyg(target: str = SAGE, layers: int = 2, **kwargs: Any) -> PyG:
    kwargs = {"hidden_channels": 8, "num_layers": layers, **kwargs}
    return PyG(target=target, kwargs=kwargs, self_loops="keep")


@cache
def parted(strategy: Strategy, config: Any, how: str, world: int, optim: Any = Adam(lr=0.05)) -> tuple[Outcome, Tensor]:
    """What a training on threads leaves, and the gradient of all vectors in the last epoch, [N, WIDTH]."""
    data = graph(how)
    job = make_job(strategy, config, data, world=world, epochs=EPOCHS, seed=SEED, optim=optim)
    got = merge_ranks(job, ThreadWorld(world).run(job))
    vectors = torch.zeros(data.num_nodes, WIDTH, dtype=torch.float64)
    for part in range(job.plan.num_parts):
        vectors[job.plan.part_of == part] = got.gradients[-1][f"features.piece{part}"]
    return got, vectors


def looped(
    forward: Callable[[Tensor], Tensor],
    model: nn.Module,
    how: str,
    make: Callable[..., Any],
    clip=None,
) -> tuple[list[float], Tensor, Tensor]:
    """(losses, logits, gradient of the embedding in the last epoch) of a loop that knows nothing of gnnpar."""
    data = small_graph()
    table = nn.Embedding(data.num_nodes, WIDTH).double()
    table.weight.data = initial_vectors(torch.arange(data.num_nodes), WIDTH, SEED)

    def read() -> Tensor:
        return table.weight if how == "learned" else torch.cat([data.x.double(), table.weight], dim=1)

    optimizer, losses = make([*model.parameters(), table.weight]), []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(read())[data.train_mask], data.y[data.train_mask])
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_([*model.parameters(), table.weight], clip)
        losses.append(float(loss.detach()))
        optimizer.step()
    assert table.weight.grad is not None
    return losses, forward(read()).detach(), table.weight.grad


@cache
def plain(config: PyG, how: str, make: Callable[..., Any], clip=None) -> Any:
    """The user's own module, as PyG runs it, with nn.Embedding."""
    model = make_job(Single(), config, graph(how), world=1, seed=SEED).model
    net = copy.deepcopy(model.net).double()  # type: ignore[union-attr]
    return looped(lambda x: net(x, small_graph().edge_index), net, how, make, clip)


ADAM = partial(torch.optim.Adam, lr=0.05)


def same(got: Outcome, vectors: Tensor, expected: tuple[list[float], Tensor, Tensor], *, gradient: bool = True) -> None:
    losses, logits, table = expected
    assert got.losses == pytest.approx(losses, rel=1e-9)
    assert relative_error(got.logits, logits) < 1e-9
    if gradient:
        assert relative_error(vectors, table) < 1e-9


MANY = sorted({*names("strategy")} - REFUSING - {"single", "adaqp_p", "adaqp_q", "hybrid"})


@pytest.mark.quick(2)
@pytest.mark.parametrize(("name", "world"), [("single", 1), ("hybrid", 4), *product(MANY, [2, 4])])
def test_ranks_train_vectors_as_an_embedding_in_a_plain_loop(name: str, world: int) -> None:
    strategy: Strategy = configured("strategy", name).exact_limit()
    config = pyg(layers=4 if isinstance(strategy, GNNPipe | Hybrid) else 2)
    for how in ("learned", "both"):
        same(*parted(strategy, config, how, world), plain(config, how, ADAM))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("optim", "make", "clip"),
    [
        (SGD(lr=0.5), partial(torch.optim.SGD, lr=0.5), None),
        (SGD(lr=0.5, momentum=0.9, clip=0.05), partial(torch.optim.SGD, lr=0.5, momentum=0.9), 0.05),
        (AdamW(lr=0.05, weight_decay=0.1), partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1), None),
        (Adam(lr=0.05, weight_decay=0.1, clip=0.05), partial(torch.optim.Adam, lr=0.05, weight_decay=0.1), 0.05),
    ],
    ids=["sgd", "sgd clipped", "adamw", "adam clipped"],
)
def test_every_optimizer_steps_vectors_as_in_a_plain_loop(optim, make, clip) -> None:
    for strategy, world in ((GraphParallel(), 3), (configured("strategy", "hybrid").exact_limit(), 4)):
        config = pyg(layers=4 if world == 4 else 2)
        same(*parted(strategy, config, "both", world, optim), plain(config, "both", make, clip), gradient=clip is None)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["gcn", "gat", "gcnii", "sage_max"])
def test_own_models_train_vectors_as_a_plain_loop(name: str) -> None:
    config = configured("model", name, "model.hidden=8", "model.num_layers=3", "model.dropout=0")
    model: GNN = copy.deepcopy(make_job(Single(), config, graph("both"), world=1, seed=SEED).model).double()
    (comm,) = ThreadWorld(1).communicators()
    whole = Shard.open(small_graph(), torch.zeros(small_graph().num_nodes).long(), comm, edge_ids=True)
    whole = whole.to(comm.device, torch.float64)
    expected = looped(lambda x: model(WholeGraph(whole, Pass(SEED)), x), model, "both", ADAM)
    for strategy, world in ((GraphParallel(), 2), (configured("strategy", "sar"), 4)):
        same(*parted(strategy, config, "both", world), expected)


def test_whole_neighbourhoods_train_vectors_as_a_plain_loop() -> None:
    config = pyg("torch_geometric.nn.models.EdgeCNN")
    same(*parted(GraphParallel(), config, "learned", 3), plain(config, "learned", ADAM))


def test_inexact_strategies_train_vectors_within_their_inexactness() -> None:
    exact, _ = parted(GraphParallel(), GCN(hidden=8, dropout=0.0), "learned", 2)
    for name in ("adaqp", "bns", "pipegcn", "digest", "sancus", "gnnpipe"):
        got, vectors = parted(configured("strategy", name), GCN(hidden=8, dropout=0.0), "learned", 2)
        assert got.losses[0] == pytest.approx(exact.losses[0], rel=0.5), name
        assert got.losses[-1] < got.losses[0], name
        assert int(vectors.abs().sum(1).count_nonzero()) > 0.5 * len(vectors), name


def test_first_values_are_normal_and_follow_from_seed_and_node_alone() -> None:
    ids = torch.arange(200_000)
    vectors = initial_vectors(ids, 4, 7)
    assert abs(float(vectors.mean())) < 0.005 and abs(float(vectors.std()) - 1) < 0.005
    assert abs(float((vectors**4).mean()) - 3) < 0.05
    assert float(torch.corrcoef(vectors.T).triu(1).abs().max()) < 0.01
    some = ids[torch.randperm(len(ids))[:70_000]]
    assert torch.equal(initial_vectors(some, 4, 7), vectors[some])
    assert not torch.equal(initial_vectors(ids[:9], 4, 8), vectors[:9])


def test_dropout_and_batch_norm_on_vectors_equal_the_single_device() -> None:
    config = GCN(hidden=8, input_dropout=0.3, norm="batch")
    (one, vectors), (four, parts) = parted(Single(), config, "both", 1), parted(GraphParallel(), config, "both", 4)
    assert four.losses == pytest.approx(one.losses, rel=1e-9)
    assert relative_error(parts, vectors) < 1e-9


LEARNED = ("features=learned", "features_dim=6", "dataset=sbm", "checkpoint.every=2", "partition=random")


@pytest.mark.quick(1)
@pytest.mark.parametrize("strategy", ["graph_parallel", "hybrid", "adaqp"])
def test_a_resumed_run_has_the_same_bits(strategy: str, tmp_path: Path) -> None:
    how = (*LEARNED, *strategy_of(strategy), f"world_size={4 if strategy == 'hybrid' else 2}", "model.num_layers=2")
    train(tmp_path / "whole", *how, "epochs=4")
    train(tmp_path / "half", *how, "epochs=2")
    train(tmp_path / "half", *how, "epochs=4", "resume=auto")
    assert hashes(tmp_path / "half") == hashes(tmp_path / "whole")
    assert rows(tmp_path / "half") == rows(tmp_path / "whole")


@pytest.mark.quick(1)
@pytest.mark.parametrize("other", [("strategy=graph_parallel", "world_size=3"), ("strategy=gnnpipe", "world_size=2")])
def test_a_run_goes_on_in_other_parts_with_the_same_vectors_and_moments(other, tmp_path: Path) -> None:
    exact = ("precision=fp64", "strategy.chunks=one") if "gnnpipe" in other[0] else ("precision=fp64",)
    how = (*LEARNED, "model.dropout=0", "precision=fp64")
    train(tmp_path / "whole", *how, "strategy=single", "world_size=1", "epochs=4")
    train(tmp_path / "half", *how, "strategy=graph_parallel", "world_size=2", "epochs=2")
    train(tmp_path / "more", *how, *other, *exact, "epochs=4", f"resume={tmp_path / 'half'}")
    ends = [gnnpar.load(tmp_path / name, which="last") for name in ("whole", "more")]
    assert relative_error(ends[1].vectors, ends[0].vectors) < 1e-9
    losses = [rows(tmp_path / name)[-1]["loss/train"] for name in ("whole", "more")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


def test_a_run_with_features_does_not_go_on_with_learned_ones(tmp_path: Path) -> None:
    train(tmp_path / "given", "epochs=1", "world_size=1", "strategy=single")
    how = ("features=learned", "features_dim=12", "world_size=1", "strategy=single", "epochs=2")
    train(tmp_path / "other", *how, f"resume={tmp_path / 'given'}")
    assert (
        "is of a model with features=given, this run's has learned" in (tmp_path / "other" / "result.json").read_text()
    )


class Net(nn.Module):
    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.first, self.second = SAGEConv(in_channels, 8), SAGEConv(8, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def user_graph(**fields: Any) -> Data:
    g = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 60, (2, 240), generator=g).unique(dim=1)
    masks = {"train_mask": torch.arange(60) < 40, "val_mask": torch.arange(60) >= 50}
    x, y = torch.randn(60, 8, generator=g), torch.randint(0, 3, (60,), generator=g)
    return Data(**{"x": x, "y": y, "edge_index": edges, **masks, **fields})


HERE: dict[str, Any] = {"comm": "threads", "partition": "random", "epochs": 3, "dataset": {"self_loops": "keep"}}


def test_a_graph_without_x_trains_and_predicts(tmp_path: Path, monkeypatch, run_here: Run) -> None:
    monkeypatch.chdir(tmp_path)
    bare = user_graph(x=None, num_nodes=60)
    how = {**HERE, "precision": "fp64", "features": "learned", "features_dim": 5}
    trained = [gnnpar.train(Net, bare, strategy=s, world_size=n, folder=tmp_path / s, **how) for s, n in PLACES]
    assert len({round(each.result["loss"]["last"], 9) for each in trained}) == 1
    model = trained[1].model
    net = Net(5, 3).double()
    net.load_state_dict(model.model.net.state_dict())  # type: ignore[union-attr]
    logits = model(bare).detach()
    assert model.vectors is not None and model.vectors.shape == (60, 5)
    assert relative_error(logits, net(model.vectors, bare.edge_index).detach()) < 1e-12
    assert torch.equal(model(user_graph()), logits)  # its x is not read
    run_here(
        "predict",
        str(tmp_path / "graph_parallel"),
        "--trust",
        "world_size=3",
        "strategy=graph_parallel",
        "comm=threads",
    )
    predicted = np.load(tmp_path / "graph_parallel" / "predictions.npy")
    assert relative_error(torch.from_numpy(predicted), logits) < 1e-9
    with pytest.raises(ValueError, match="x has 59 rows, but 60 nodes have learned vectors"):
        model(torch.zeros(59, 3), bare.edge_index % 59)


def test_an_export_holds_the_vectors(tmp_path: Path, monkeypatch, run_here: Run) -> None:
    monkeypatch.chdir(tmp_path)
    bare, how = user_graph(x=None, num_nodes=60), {**HERE, "precision": "fp64", "features": "learned"}
    model = gnnpar.train("sage", bare, strategy="single", folder=tmp_path / "run", features_dim=5, **how).model
    run_here("export", str(tmp_path / "run"), "--out", str(tmp_path / "out"))
    weights = torch.load(tmp_path / "out" / "weights.pt", weights_only=True)
    assert torch.equal(weights["features.weight"], model.vectors)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    taken = runpy.run_path(str(tmp_path / "out" / "predict.py"))["predict"](torch.zeros(60, 0), bare.edge_index)
    assert relative_error(taken, model(bare).detach()) < 1e-12


class Written(Net):
    def __init__(self) -> None:
        super().__init__(13, 3)


class Frozen(Net):
    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(in_channels, out_channels)
        self.requires_grad_(False)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("net", "how"), [(Written, "both"), (Frozen, "learned")])
def test_models_of_written_widths_and_frozen_ones_train_vectors_on_two_ranks(net, how: str, tmp_path: Path) -> None:
    """Widths are those of x and the vectors beside it."""
    data = user_graph() if how == "both" else user_graph(x=None, num_nodes=60)
    given = {**HERE, "precision": "fp64", "features": how, "features_dim": 5}
    ends = [gnnpar.train(net, data, strategy=s, world_size=n, folder=tmp_path / s, **given) for s, n in PLACES]
    first, second = (each.result["loss"] for each in ends)
    assert first["last"] == pytest.approx(second["last"], rel=1e-9)
    assert first["last"] < first["first"]
    assert ends[1].result["verified"] == "probed"


PLACES = (("single", 1), ("graph_parallel", 2))
HINT = "the graph has no features: features=learned gives each node a vector to train"


def test_a_session_trains_vectors_and_gives_those_of_all_nodes(tmp_path: Path) -> None:
    bare = user_graph(x=None, num_nodes=60)
    with gnnpar.distribute(
        Net, bare, strategy="single", folder=tmp_path, features="learned", features_dim=5
    ) as session:
        before = session.state_dict()["features.weight"].clone()
        session.train_epoch(torch.optim.SGD(session.parameters(), lr=0.5))
        after = session.state_dict()["features.weight"]
    assert after.shape == (60, 5) and not torch.equal(before, after)


@pytest.mark.parametrize("how", ["given", "both"])
def test_a_graph_without_x_is_refused_with_a_way_on(how: str) -> None:
    with pytest.raises(ConfigError, match=HINT):
        gnnpar.train(Net, user_graph(x=None, num_nodes=60), strategy="single", features=how, **HERE)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("strategy=minibatch",), "strategy=minibatch as it is configured reads rows and returns"),
        (("strategy=cofree",), "strategy=cofree as it is configured"),
        (("strategy=tag",), "strategy=tag as it is configured"),
        (("strategy=sar", "strategy.logical_parts=4"), "strategy=sar as it is configured"),
        (
            ("first_layer=cached",),
            "first_layer=cached keeps what features=learned changes in every epoch; set first_layer=live",
        ),
        (("model=hgt", "model.num_node_types=2"), "with model.num_node_types the last features are types of nodes"),
        (("launch.cuda_graph=true",), "launch.cuda_graph=true: the host waits for a norm with features=learned"),
    ],
)
def test_what_cannot_train_vectors_says_so_in_one_line(overrides: tuple[str, ...], line: str) -> None:
    settings = settings_of(*SMALL, "features=learned", *overrides)
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        check_strategy(settings, 1)
    assert "\n" not in str(caught.value)
    check_strategy(replace(settings, features="given"), 1)


def test_a_graph_with_types_of_nodes_and_a_check_refuse_learned_features() -> None:
    typed = HeteroData()
    typed["a"].x, typed["a"].y, typed["a"].train_mask = (
        torch.ones(4, 2),
        torch.tensor([0, 1, 0, 1]),
        torch.arange(4) < 2,
    )
    typed["b"].x = torch.ones(3, 3)
    typed["b", "to", "a"].edge_index = torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="features=learned: types of nodes have features of their own widths"):
        gnnpar.train(TypedNet, typed, strategy="single", features="learned", **HERE)
    with pytest.raises(ConfigError, match=r"features=learned: gnnpar check .* reads no features; leave it out"):
        gnnpar.check("gcn", features="learned")


class TypedNet(nn.Module):
    def __init__(self, out_channels: int):
        super().__init__()
        self.conv = HeteroConv({("b", "to", "a"): SAGEConv((-1, -1), out_channels)})

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> dict[str, Tensor]:
        return self.conv(x_dict, edge_index_dict)
