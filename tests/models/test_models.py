"""What all models share: equal starts, sensible refusals, dropout that is keyed."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from composing import configured, names
from gnnpar import files
from gnnpar.comm import ThreadWorld
from gnnpar.data.tasks import make_task
from gnnpar.folds.sum import Sum
from gnnpar.models.gcn import GCN
from gnnpar.models.pairs import with_scorer
from gnnpar.models.rgcn import RGCN, Matrices
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.local import LocalRows, Pass
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Workload
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.partition import Random
from gnnpar.partition.shard import cut
from gnnpar.placement import Topology
from gnnpar.verify.conformance import small_graph, train_in_threads


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
    data = small_graph()
    task = make_task(data.task, data.num_classes)
    config = configured("model", "gcn", "model.hidden=8")
    (comm,) = ThreadWorld(1).communicators()

    def engine(seed):
        model, plan = config.build(6, 3, seed=seed), Single().plan(Workload(data, Random(), 2), Topology(1))
        return Single().build(BuildContext(plan=plan, shard=whole(data), model=model, task=task, comm=comm, seed=0))

    one, other = engine(1), engine(2)
    assert not torch.equal(one.predict(), other.predict())
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.predict(), other.predict())


def test_deep_models_train():
    """16 layers of the residual models still move their loss."""
    for model in ("gcnii", "resgcn"):
        config = configured("model", model, "model.num_layers=16", "model.hidden=8", "model.dropout=0.0")
        losses = train_in_threads(Single(), config, small_graph(), world=1, epochs=30).losses
        assert losses[-1] < 0.99 * losses[0]


def test_decoder_and_relations_beyond_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = GCN().build(4, 1000, seed=0)
    monkeypatch.setattr(files, "memory_bytes", lambda: 10**6)
    with pytest.raises(ValueError, match="a decoder of width 1000 needs"):
        with_scorer(model, "mlp", 0)
    with pytest.raises(ValueError, match="a layer of 4294967296 types of edges needs"):
        Matrices.drawn(RGCN(num_relations=1 << 32, num_bases=1), 4, 4)
