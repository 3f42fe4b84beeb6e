"""What all models share: equal starts, sensible refusals, dropout that is keyed."""

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import models

from composing import configured, names
from engines import on_ranks
from gnnpar import files
from gnnpar.folds.sum import Sum
from gnnpar.models.gcn import GCN
from gnnpar.models.initial import construct
from gnnpar.models.pairs import with_scorer
from gnnpar.models.pyg.model import PyG
from gnnpar.models.rgcn import RGCN, Matrices
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.local import LocalRows, Pass
from gnnpar.parallel.single.strategy import Single
from gnnpar.partition.shard import cut
from gnnpar.verify.conformance import make_job, small_graph, train_in_threads


def whole(data=None):
    data = data or small_graph()
    return cut(data, torch.zeros(data.num_nodes, dtype=torch.long), 1)[0]


@pytest.mark.parametrize("model", names("model"))
def test_weights_depend_on_the_seed_alone(model):
    config = configured("model", model)
    torch.manual_seed(1)
    first = config.build(6, 3, seed=5)
    torch.manual_seed(2)
    again, other = config.build(6, 3, seed=5), config.build(6, 3, seed=6)
    for (name, a), (_, b), (_, c) in zip(*(m.named_parameters() for m in (first, again, other)), strict=True):
        assert torch.equal(a, b), name
        constant = a.ndim < 2 or name.endswith((".bias", ".prior"))  # of hgt, a row a type of nodes or of edges
        assert constant or not torch.equal(a, c), name
    assert all(torch.isfinite(p).all() for p in first.parameters())


@pytest.mark.quick(94)
@pytest.mark.parametrize("model", names("model"))
@pytest.mark.parametrize("shape", [("linear", "linear"), ("linear", "none"), ("none", "linear"), ("none", "none")])
@pytest.mark.parametrize("norm", ["none", "layer"])
def test_every_shape_of_a_model_gives_logits(model, shape, norm):
    encoder, decoder = (f"model.{k}={v}" for k, v in zip(("encoder", "decoder"), shape, strict=True))
    config = configured(
        "model", model, encoder, decoder, f"model.norm={norm}", "model.residual=true", "model.num_layers=3"
    )
    if model in ("gcnii", "resgcn") and shape != ("linear", "linear"):
        with pytest.raises(ValueError, match=r"all widths must be equal, got \[.*\]: set model.encoder=linear"):
            config.build(6, 3, seed=0)
        return
    shard = whole()
    built = config.build(6, 3, seed=0)
    out = built(WholeGraph(shard, Pass(0, training=True)), shard.x)
    assert out.shape == (60, 3)
    assert torch.isfinite(out).all()
    out.sum().backward()
    assert all(p.grad is not None for p in built.parameters()), "every parameter takes part"


@pytest.mark.parametrize(
    ("model", "order", "sums", "products"),
    [
        ("gcn", "aggregate_first", 2, 5),  # of 3 layers: 3 gradients of weights, and of 2 inputs
        ("gcn", "transform_first", 3, 5),
        ("sage", "aggregate_first", 2, 10),
        ("sage", "transform_first", 3, 10),
    ],
)
def test_nobody_computes_the_gradient_of_the_features(model, order, sums, products, monkeypatch):
    """Where the first layer aggregates first, neither its matrix nor its sum is differentiated by its input."""
    shape = ("model.encoder=none", "model.decoder=none", "model.num_layers=3", "model.hidden=8", f"model.order={order}")
    shard, done = whole(), Counter()
    logits = configured("model", model, *shape).build(6, 3, seed=0)(WholeGraph(shard, Pass(0)), shard.x)
    grad = Sum.grad
    monkeypatch.setattr(Sum, "grad", lambda *args: done.update(["sum"]) or grad(*args))

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            products = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.gnnpar_kernels.dense)
            done.update(["product"] if func.overloadpacket in products else [])
            return func(*args, **(kwargs or {}))

    with Products():
        logits.sum().backward()
    assert done == {"sum": sums, "product": products}


def test_layers_know_their_parameters():
    model = configured("model", "gcn").build(6, 3, seed=0)
    assert [model.layer_of(n) for n in ("layers.2.conv.weight", "encoder.weight", "decoder.bias")] == [2, 0, None]


@pytest.mark.parametrize(
    ("model", "override", "text"),
    [
        ("gat", "model.hidden=10", "model.hidden=10 does not divide into model.heads=4 heads: use hidden=12"),
        ("gat", "model.order=aggregate_first", "model.order=aggregate_first is not possible here"),
        ("gin", "model.order=transform_first", "GIN transforms the sum. Use order=auto or order=aggregate_first"),
        ("sage_max", "model.order=transform_first", "a maximum does not commute with a matrix"),
        ("gcnii", "model.order=transform_first", "GCNII adds the initial rows between fold and matrix"),
        ("gcn", "model.jump=cat", "model.jump=cat gives rows of model.hidden to a decoder"),
    ],
)
def test_impossible_shapes_are_one_clear_line(model, override, text):
    with pytest.raises(ValueError, match=text) as caught:
        configured("model", model, override).build(6, 3, seed=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("order", "first"), [("auto", [True, True, False]), ("transform_first", [False] * 3)])
def test_auto_exchanges_the_narrower_side(order, first):
    config = configured("model", "gcn", f"model.order={order}", "model.hidden=8", "model.num_layers=3")
    built = config.build(6, 3, seed=0)
    assert [layer.conv.aggregate_first for layer in built.layers] == first


def test_dropout_is_keyed_by_seed_epoch_layer_tag_and_node():
    ids = torch.arange(4000)
    x, degree = torch.ones(4000, 8), torch.ones(4000)

    def mask(seed=0, epoch=0, layer=0, tag=0, training=True):
        return LocalRows(ids, degree, run=Pass(seed, epoch, training), layer=layer).dropout(x, 0.3, tag=tag) != 0

    base = mask()
    assert torch.equal(base, mask())
    assert float(base.double().mean()) == pytest.approx(0.7, abs=0.01)
    for other in (mask(seed=1), mask(epoch=1), mask(layer=1), mask(tag=1)):
        assert float((base == other).double().mean()) == pytest.approx(0.58, abs=0.02), "independent"
    assert bool(mask(training=False).all())
    some = torch.tensor([7, 2000, 3])
    part = LocalRows(some, degree[:3], run=Pass(0, training=True)).dropout(x[:3], 0.3) != 0
    assert torch.equal(part, base[some]), "rows keep their masks wherever they are"


def test_dropout_gradient_is_the_mask():
    local = LocalRows(torch.arange(50), torch.ones(50), run=Pass(3, training=True))
    x = torch.randn(50, 4, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(local.dropout(x, 0.5).sum(), x)
    torch.testing.assert_close(grad, local.dropout(torch.ones_like(x), 0.5))


def test_a_flat_engine_saves_and_restores_itself():
    config = configured("model", "gcn", "model.hidden=8")
    jobs = [make_job(Single(), config, small_graph(), world=1, seed=seed) for seed in (1, 2)]
    (one,), (other,) = (on_ranks(job, lambda rank: rank.engine) for job in jobs)
    assert not torch.equal(one.predict(), other.predict())
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.predict(), other.predict())


def test_deep_models_train():
    """16 layers of the residual models still move their loss."""
    for model in ("gcnii", "resgcn"):
        config = configured("model", model, "model.num_layers=16", "model.hidden=8", "model.dropout=0.0")
        losses = train_in_threads(Single(), config, small_graph(), world=1, epochs=30).losses
        assert losses[-1] < 0.99 * losses[0]


def test_decoder_and_relations_beyond_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GCN().build(4, 1000, seed=0)
    monkeypatch.setattr(files, "memory_bytes", lambda: 10**6)
    with pytest.raises(ValueError, match="a decoder of width 1000 needs"):
        with_scorer(model, "mlp", 0)
    with pytest.raises(ValueError, match="a layer of 4294967296 types of edges needs"):
        Matrices.drawn(RGCN(num_relations=1 << 32, num_bases=1), 4, 4)


@pytest.mark.parametrize("jump", ["last", "cat", "max"])
def test_jumping_knowledge_is_pygs(jump):
    """GraphSAGE of PyG with the same weights, in fp64."""
    fields = ("model.hidden=8", "model.num_layers=3", "model.decoder=linear", f"model.jump={jump}")
    ours = configured("model", "sage", *fields).build(6, 3, seed=0).double()
    theirs: Any = models.GraphSAGE(6, 8, 3, 3, jk=jump).double()
    with torch.no_grad():
        for layer, conv in zip(ours.layers, theirs.convs, strict=True):
            conv.lin_l.weight.copy_(layer.conv.neighbours)
            conv.lin_l.bias.copy_(layer.conv.own.bias)
            conv.lin_r.weight.copy_(layer.conv.own.weight)
        theirs.lin.weight.copy_(ours.decoder.weight)
        theirs.lin.bias.copy_(ours.decoder.bias)
    shard = whole().to(torch.device("cpu"), torch.float64)
    mine, wanted = ours(WholeGraph(shard, Pass(0)), shard.x), theirs(shard.x, small_graph().edge_index)
    assert torch.allclose(mine, wanted, rtol=1e-9, atol=1e-12)
    (gradient,) = torch.autograd.grad(mine.square().sum(), [ours.layers[0].conv.neighbours])
    (theirs_too,) = torch.autograd.grad(wanted.square().sum(), [theirs.convs[0].lin_l.weight])
    assert torch.allclose(gradient, theirs_too, rtol=1e-9, atol=1e-12)


def test_what_jumping_knowledge_reads_travels_through_pipelines():
    cat, largest = (configured("model", "gcnii", "model.hidden=8", f"model.jump={each}") for each in ("cat", "max"))
    assert [len(cat.build(6, 3, seed=0).activation_widths(i)) for i in range(4)] == [2, 2, 3, 4]
    assert [len(largest.build(6, 3, seed=0).activation_widths(i)) for i in range(4)] == [2, 2, 3, 3]


def test_a_rank_that_looks_at_a_model_does_not_change_the_weights_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads share torch's generator."""
    expected = construct(lambda: nn.Linear(3, 3), seed=0).weight
    looking, made, make = threading.Event(), threading.Event(), PyG._make

    def slow(self: PyG, *widths: object) -> nn.Module:
        net = make(self, *widths)  # type: ignore[arg-type]
        looking.set()
        made.wait(0.2)  # what holds the generator is waited for, so that this ends by itself
        return net

    monkeypatch.setattr(PyG, "_make", slow)
    other = threading.Thread(target=lambda: PyG(target="torch_geometric.nn.GCNConv").edge_data)

    def drawn_last() -> nn.Linear:
        made.set()
        other.join()  # had it begun before, it would now give back the generator's state of then
        return nn.Linear(3, 3)

    other.start()
    assert looking.wait(60)
    weight = construct(drawn_last, seed=0).weight
    assert torch.equal(weight, expected)
