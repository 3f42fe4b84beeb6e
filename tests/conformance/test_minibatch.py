"""Sampled training: exact where nothing is left out, unbiased where something is, PyG's layers where asked for.

What a batch computes is specified in docs/strategies/minibatch.md.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from threading import Event, current_thread
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import GCNConv, GINConv, SAGEConv
from torch_geometric.utils import subgraph

from checkpoints import result, rows, train
from composing import configured, names
from conformance.test_cofree import PLAIN, of_dense
from conformance.test_exact import UNIFORM
from gnnpar.comm import ThreadWorld
from gnnpar.data.tasks import make_task
from gnnpar.folds.aggregator import ByBlock
from gnnpar.folds.generic import Generic
from gnnpar.folds.max import Max
from gnnpar.folds.sum import Sum
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import GNN, ModelConfig
from gnnpar.parallel.local import Pass
from gnnpar.parallel.sampling import batches as minibatch
from gnnpar.parallel.sampling.batches import DRAW, Induced, SeedBatches, Shared, shuffled
from gnnpar.parallel.sampling.engine import one_ahead
from gnnpar.parallel.sampling.neighbours import Replica, native, replica_of, sampler_of
from gnnpar.parallel.sampling.saint import NodeSets, SaintBatches, estimated
from gnnpar.parallel.sampling.strategy import Minibatch
from gnnpar.parallel.sampling.view import SampledGraph, subgraph_of
from gnnpar.parallel.single.strategy import Single
from gnnpar.partition.shard import Shard
from gnnpar.training.result.result import schema_path
from gnnpar.verify.conformance import TOLERANCE, check, make_job, relative_error, small_graph, train_in_threads
from gnnpar_kernels import fold_key
from outcomes import assert_passed

ALL = Minibatch(fanout=(-1,), batch_size=None)


def shard_of(dataset) -> tuple[Shard, Replica]:
    (comm,) = ThreadWorld(1).communicators()
    shard = Shard.open(dataset, torch.zeros(dataset.num_nodes, dtype=torch.int64), comm, edge_ids=True)
    shard = shard.to(torch.device("cpu"), torch.float64)
    return shard, replica_of(shard, comm, edge_ids=True)


def same(got: dict, expected: dict, tolerance: float) -> None:
    """But for a rounding of the model's largest entry: the gradient of hgt's bias of keys is 0 by its mathematics."""
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    least = torch.finfo(torch.float64).eps * largest / tolerance
    assert max(relative_error(got[name], gradient, least=least) for name, gradient in expected.items()) < tolerance


@pytest.mark.parametrize("model", ["gcn", "gat", "gatv2"])
def test_one_batch_with_all_neighbours_is_the_single_device(model) -> None:
    """To 1e-12, with attention dropout: masks go by global ids of edges and nodes. Others: test_strategies.py."""
    more = ("model.attention_dropout=0.3",) if model.startswith("gat") else ()
    config, data = configured("model", model, "model.hidden=8", *more), small_graph()
    expected = train_in_threads(Single(), config, data, world=1, epochs=1)
    for world in (1, 2):
        got = train_in_threads(ALL, config, data, world=world, epochs=1)
        assert got.losses == pytest.approx(expected.losses, rel=1e-12)
        same(got.gradients[0], expected.gradients[0], 1e-12)


@pytest.mark.quick(1)
@pytest.mark.parametrize("world", [1, 3])
def test_batches_with_all_neighbours_make_up_the_exact_gradient(world) -> None:
    """35 training nodes in batches of 8 for 3 ranks: the last has a rank without a seed when it holds 2 of them.

    The probe's mean over batches, at the weights the epoch begins with, is the exact gradient.
    """
    config, data = GCN(hidden=8), small_graph()
    batch = next(b for b in range(8, 20) if 0 < int(data.train_mask.sum()) % b < 3)
    strategy = Minibatch(fanout=(-1,), batch_size=batch)
    got = train_in_threads(strategy, config, data, world=world, epochs=1)
    expected = train_in_threads(Single(), config, data, world=1, epochs=1)
    same(got.gradients[0], expected.gradients[0], 1e-12)
    assert relative_error(got.logits, expected.logits) > 1e-3, "several steps are not one"
    one = train_in_threads(strategy, config, data, world=1, epochs=2)
    many = train_in_threads(strategy, config, data, world=3, epochs=2)
    assert many.losses == pytest.approx(one.losses, rel=1e-12), "more ranks are the same optimisation"
    assert relative_error(many.logits, one.logits) < TOLERANCE


class TwoHops(nn.Module):
    """A layer that aggregates twice, with a learned row for every edge."""

    glorot = ("of_edge",)
    needs_edge_ids = True

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Linear(in_dim, out_dim)
        self.of_edge = nn.Parameter(torch.empty(1, out_dim))

    def forward(self, g, h):
        edge = torch.sin(g.edge_ids.to(h.dtype) * 0.37)[:, None] * self.of_edge
        value = Generic(value=lambda src, dst, edge, shared: src[0] * edge[0])
        return g.aggregate(value, (g.aggregate(Sum(), (self.weight(h),)),), (), (edge,))


class Twice(ModelConfig):
    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        return TwoHops(in_dim, out_dim)


def test_a_layer_of_ones_own_may_aggregate_twice_and_read_edges() -> None:
    assert_passed(check(ALL, {"twice": Twice(hidden=4)}, worlds=(1, 2)))


@pytest.mark.parametrize(
    ("config", "fanout", "hops"),
    [
        (GCN(hidden=4, encoder="linear", decoder="linear"), (3, 2), [3, 2]),
        (GCN(hidden=4, num_layers=4, encoder="linear", decoder="linear"), (3, 2), [3, 2, 2, 2]),
        (Twice(hidden=4), (3, 2), [3, 3, 2, 2]),
        (Twice(hidden=4, num_layers=3, encoder="linear"), (-1, 5), [-1, -1, 5, 5, 5, 5]),
    ],
)
def test_fanout_is_a_number_a_layer_whatever_a_layer_has(config, fanout, hops, monkeypatch) -> None:
    """The last layer's first; dense layers around have none, and a model of n layers takes at most n numbers."""
    asked = []
    monkeypatch.setattr(
        minibatch, "sampler_of", lambda edges, by_hop, body: asked.append(by_hop) or sampler_of(edges, by_hop, body)
    )
    train_in_threads(Minibatch(fanout=fanout, batch_size=8), config, small_graph(), world=1, epochs=1)
    assert asked == [hops]
    with pytest.raises(ValueError, match=f"numbers, but the model {config.num_layers} layers"):
        Minibatch(fanout=(3,) * (config.num_layers + 1)).check(1, config.num_layers, 2)


def on_a_sample(config: ModelConfig, call) -> tuple[int, ...]:
    """Ends of the hops of a sample of [4, 3, 2] on which `call` ran a model's layers, as the engine does."""
    shard, graph = shard_of(small_graph(num_nodes=300, num_edges=1500))
    model = config.build(shard.x.shape[1], 3, seed=1).double()
    sampler, _ = sampler_of(graph.edges, (4, 3, 2), "own")
    batches = SeedBatches(graph, Shared("graph", seed=1, rank=0, ranks=1), sampler, batch_size=8)
    sub = batches[0, 0]
    assert sub.weights is not None
    assert sorted(set(sub.ends)) == list(sub.ends), "every hop reaches rows"
    view = SampledGraph(sub, Pass(0, training=True), hops=3)
    call(model, view, shard.x[view.node_ids].requires_grad_(model.encoder is not None))
    return sub.ends


@pytest.mark.parametrize("model", names("model"))
def test_each_layer_gives_the_rows_that_the_next_one_reads(model) -> None:
    config = configured("model", model, "model.hidden=8", "model.num_layers=3", "model.norm=layer")
    given, read = [], []

    def run(net: GNN, view: SampledGraph, x: torch.Tensor) -> None:
        activations = net.begin(view, x)
        for i, layer in enumerate(net.layers):
            layer.get_submodule("conv").register_forward_hook(lambda conv, args, out: given.append(len(out)))
            read.append(len(activations[0]))
            activations = layer(view.at(i), activations)
            assert len(activations[0]) == given[-1]
            view = view.inner_view(1)
            activations = tuple(rows[: view.num_rows] for rows in activations)

    ends = on_a_sample(config, run)
    assert read == [ends[3], ends[2], ends[1]]
    assert given == [ends[2], ends[1], ends[0]]


@pytest.mark.parametrize(
    ("model", "order", "hops"),
    [
        ("gcn", "aggregate_first", [2, 1, 0]),
        ("gcn", "transform_first", [3, 2, 1]),
        ("sage", "aggregate_first", [2, 2, 1, 1, 0, 0]),
        ("sage", "transform_first", [3, 2, 2, 1, 1, 0]),
        ("gin", "auto", [2, 2, 1, 1, 0, 0]),
    ],
)
def test_a_matrix_multiplies_the_rows_that_are_read_and_no_others(model, order, hops) -> None:
    """Rows of products in the order in which they are computed, as hops within which they lie."""
    config = configured(
        "model",
        model,
        "model.hidden=8",
        "model.num_layers=3",
        f"model.order={order}",
        "model.encoder=none",
        "model.decoder=none",
    )
    rows = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.gnnpar_kernels.dense):
                rows.append(len(out))
            return out

    def run(net: GNN, view: SampledGraph, x: torch.Tensor) -> None:
        activations = net.begin(view, x)
        with Products():
            for i, layer in enumerate(net.layers):
                activations = layer(view.at(i), activations)
                view = view.inner_view(1)

    ends = on_a_sample(config, run)
    assert rows == [ends[h] for h in hops]


class Narrow(TwoHops):
    """The same in views of destinations, one after the other."""

    def forward(self, g, h):
        edge = torch.sin(g.edge_ids.to(h.dtype) * 0.37)[:, None] * self.of_edge
        value = Generic(value=lambda src, dst, edge, shared: src[0] * edge[0])
        src, (inner, _) = self.weight(h), g.destinations()
        middle = inner.aggregate(Sum(), (src,))
        last, _ = inner.destinations()
        return last.aggregate(value, (middle,), (), (edge[torch.isin(g.edge_ids, last.edge_ids)],))


class NarrowTwice(ModelConfig):
    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        return Narrow(in_dim, out_dim)


@pytest.mark.parametrize("fanout", [(-1,), (3, 2)])
def test_two_aggregations_in_views_of_destinations_are_those_of_all_rows(fanout) -> None:
    strategy = Minibatch(fanout=fanout, batch_size=None, sampler="own")
    plain, narrow = (
        train_in_threads(strategy, config(hidden=4, dropout=0.0), small_graph(), world=1, epochs=1)
        for config in (Twice, NarrowTwice)
    )
    assert narrow.losses == pytest.approx(plain.losses, rel=1e-12)
    same(narrow.gradients[0], plain.gradients[0], 1e-12)


@pytest.mark.quick(1)
@pytest.mark.parametrize("agg", [Sum(), Generic(value=lambda src, dst, edge, shared: src[0] * edge[0])])
def test_sums_over_a_sample_are_unbiased_and_loops_certain(agg) -> None:
    """The mean of 400 sampled sums is the exact one, within 4.5 of its own standard errors in every entry."""
    shard, graph = shard_of(small_graph())
    seeds = torch.arange(60)
    sampler, _ = sampler_of(graph.edges, (3,), "own")
    whole, _ = sampler_of(graph.edges, (-1,), "own")
    weight = torch.linspace(0.5, 2.0, shard.num_edges, dtype=torch.float64)[:, None]

    def sums(drawn) -> torch.Tensor:
        view = SampledGraph(subgraph_of(drawn, graph, "graph"), Pass(0), hops=1)
        edge = (weight[view.edge_ids],) if isinstance(agg, Generic) else ()
        return view.aggregate(agg, (shard.x[view.node_ids],), (), edge)[:60]

    exact = sums(whole.draw(seeds, 0))
    draws = torch.stack([sums(sampler.draw(seeds, key)) for key in range(400)])
    error = draws.std(0) / 400**0.5
    sampled = graph.edges.indptr.diff() > 3
    assert (draws.mean(0) - exact).abs()[sampled].div(error[sampled]).max() < 4.5
    torch.testing.assert_close(draws[0][~sampled], exact[~sampled])


@pytest.mark.parametrize("model", ["gcn", "gin"])
def test_with_the_samples_degrees_it_is_pygs_layer(model) -> None:
    """Two layers on the same sample: PyG's see the edges without loops, and add theirs after sampling."""
    shard, graph = shard_of(small_graph())
    assert int(graph.loops[:58].min()) >= 1
    config = configured("model", model, "model.hidden=8", "model.dropout=0", "model.norm=none")
    net = config.build(6, 3, seed=1).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
        if parameter.ndim == 0:
            nn.init.constant_(parameter, 0.5)  # PyG keeps GIN's eps in fp32
    once = replace(graph, loops=graph.loops.clamp(0, 1))  # PyG's layers add exactly one
    drawn = sampler_of(graph.edges, (4, 3), "own")[0].draw(torch.arange(0, 58, 5), 3)
    drawn_edges = torch.stack([drawn.sources, torch.arange(len(drawn.counts)).repeat_interleave(drawn.counts)])
    view, x = SampledGraph(subgraph_of(drawn, once, "subgraph")._replace(edge_ids=None), Pass(0), hops=2), shard.x
    activations = net.begin(view, x[view.node_ids])
    for i, layer in enumerate(net.layers):
        activations = layer(view.at(i), activations)
        view = view.inner_view(1)
        activations = tuple(rows[: view.num_rows] for rows in activations)
    h = x[drawn.nodes]
    for i, layer in enumerate(net.layers):
        conv = layer.conv
        if model == "gcn":
            theirs = GCNConv(*conv.weight.shape[::-1]).double()
            theirs.load_state_dict({"lin.weight": conv.weight, "bias": conv.bias})
            h = theirs(h, drawn_edges)
        else:
            inside = nn.Sequential(conv.inside, nn.ReLU(), conv.outside)
            theirs = GINConv(copy.deepcopy(inside), eps=0.5 + 1)  # the loop counts a node again
            theirs.load_state_dict({f"nn.{k}": t for k, t in inside.state_dict().items()} | {"eps": theirs.eps})
            h = theirs(h, drawn_edges)
        h = h if i else h.relu()
    torch.testing.assert_close(activations[0], h[: len(activations[0])], rtol=1e-10, atol=1e-12)


def test_every_training_node_is_a_seed_once_and_draws_differ_between_ranks_and_epochs() -> None:
    _, graph = shard_of(small_graph())
    sampler, _ = sampler_of(graph.edges, (2, 2), "own")

    def batches(rank: int, seed: int = 3) -> SeedBatches:
        return SeedBatches(graph, Shared("graph", seed, rank, ranks=3), sampler, batch_size=10)

    ranks = [batches(rank) for rank in range(3)]
    for epoch in range(2):
        dealt = [r.seeds((epoch, step)) for step in range(len(ranks[0])) for r in ranks]
        assert torch.cat(dealt).sort().values.equal(graph.train)
        sizes = [[len(r.seeds((epoch, step))) for r in ranks] for step in range(len(ranks[0]))]
        assert [sum(each) for each in sizes] == [ranks[0].size((epoch, step)) for step in range(len(sizes))]
        assert max(max(each) - min(each) for each in sizes) <= 1
    keys = [(0, 0), (0, 1), (1, 0)]
    assert not torch.equal(ranks[0].seeds((0, 0)), ranks[0].seeds((1, 0)))
    assert not torch.equal(ranks[0].seeds((0, 0)), batches(0, seed=4).seeds((0, 0)))
    drawn = {str(r[at].indices.tolist()) for r in ranks for at in keys}
    assert len(drawn) == 9
    assert str(batches(1)[0, 1].indices.tolist()) in drawn


@pytest.mark.slow
def test_a_run_says_what_it_cost_and_workers_change_no_bit(tmp_path: Path) -> None:
    common = ("strategy=minibatch", "strategy.batch_size=32", "strategy.fanout=[4,3]", "epochs=3", "fidelity_every=2")
    for name, more in {"alone": (), "worker": ("strategy.num_workers=1",)}.items():
        done = train(tmp_path / name, *common, "world_size=1", *more)
        assert done.exit_code == 0, done.error
    assert rows(tmp_path / "alone") == rows(tmp_path / "worker")
    assert train(tmp_path / "pair", *common, "world_size=2").exit_code == 0
    found = result(tmp_path / "pair")
    jsonschema.validate(found, json.loads(schema_path().read_text()))
    assert (found["exactness"], found["provenance"]) == (["sampled"], "emulated")
    spent = found["breakdown_seconds"]
    assert spent["sample"] > 0
    assert sum(spent.values()) - spent["comm_total"] == pytest.approx(found["epoch_seconds"]["mean"], rel=0.02)
    told = rows(tmp_path / "pair")[0]
    task, data = make_task("single_label", 8), 12
    numbers = sum(p.numel() for p in GCN(hidden=8).build(data, task.out_dim, seed=0).parameters()) + 1
    sent = {name: count for name, count in found["bytes_per_epoch"].items() if count}
    assert sent == dict.fromkeys(("reduce", "total"), told["sample/steps"] * 2 * 4 * numbers)
    assert told["sample/nodes"] > 32
    assert 0.5 < found["fidelity"]["cosine"]["last"] < 0.9999


def test_a_thread_draws_the_next_sample_while_a_step_has_the_last() -> None:
    """In order, one ahead and no more; what goes wrong in it goes wrong where the sample is asked for."""
    begun = [Event() for _ in range(4)]

    def draw(at: tuple[int, int]) -> tuple[int, int, str]:
        begun[at[1]].set()
        if at[1] == 2:
            raise ValueError("no sample")
        return (*at, current_thread().name)

    drawn = one_ahead(draw, [(5, step) for step in range(4)])
    assert not begun[0].is_set(), "nothing is drawn before it is asked for"
    epoch, step, thread = next(drawn)
    assert (epoch, step) == (5, 0)
    assert thread != current_thread().name
    assert begun[1].wait(timeout=60), "the next one is drawn though nobody asked yet"
    assert not begun[2].is_set()
    assert next(drawn)[1] == 1
    with pytest.raises(ValueError, match="no sample"):
        next(drawn)


@pytest.mark.skipif(native() is None, reason="neither pyg-lib nor torch-sparse is installed")
def test_neighborloader_in_the_place_of_our_own() -> None:
    """Exact where all is taken, and keyed where not: ranks that are threads share the generator it draws from."""
    config = configured("model", "gat", "model.hidden=8", "model.attention_dropout=0.3")
    assert_passed(check(replace(ALL, sampler="pyg"), {"gat": config}, worlds=(1, 3)))
    sampled = Minibatch(fanout=(2, 2), batch_size=8, sampler="pyg")
    runs = [train_in_threads(sampled, GCN(hidden=8), small_graph(), world=3) for _ in range(2)]
    assert runs[0].losses == runs[1].losses
    assert torch.equal(runs[0].logits, runs[1].logits)


def test_the_whole_is_exact_and_a_sample_is_not() -> None:
    assert ALL.exactness == {"exact"} != Minibatch().exactness == {"sampled"}
    assert replace(ALL, normalize="subgraph").exactness == {"sampled"}
    plan = make_job(Minibatch(), GCN(), small_graph(), world=3).plan
    assert [layer.mode for layer in Minibatch().describe(plan)] == ["sample", "sample"]


CLUSTERS = Minibatch(sampler="cluster", clusters=6, clusters_per_batch=6, normalize="subgraph")
SAINT = Minibatch(sampler="saint", batch_size=30)
ALONE = Shared("graph", seed=1, rank=0, ranks=1)


def replica() -> tuple[Replica, Tensor]:
    """The small graph on one rank, and its features, in fp64."""
    shard, graph = shard_of(small_graph())
    return graph, shard.x


def dense(graph: Any) -> Tensor:
    """[N, N] by destination and source: how many edges, loops too."""
    src, dst = graph.edge_index
    matrix = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=torch.float64)
    return matrix.index_put_((dst, src), torch.ones(len(src), dtype=torch.float64), accumulate=True)


def gradients_of(net: GNN, loss: Tensor) -> dict[str, Tensor]:
    named = dict(net.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def same_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert max(relative_error(got[name], gradient) for name, gradient in expected.items()) < 1e-12


@pytest.mark.parametrize("world", [1, 3])
def test_a_batch_of_clusters_is_autograd_on_the_subgraph_of_each_rank(world: int) -> None:
    """Degrees are those of the subgraph; edges between clusters of different ranks are not there."""
    data, config = small_graph(), configured("model", "gcn", *PLAIN)
    got = train_in_threads(CLUSTERS, config, data, world=world, epochs=1, seed=3)
    job = make_job(CLUSTERS, config, data, world=world, seed=3)
    cluster_of = job.plan.placement.chunk_of
    assert cluster_of is not None
    net = config.build(data.num_features, data.num_classes, seed=3).double()
    rank_of = torch.empty(6, dtype=torch.int64)
    order = shuffled(6, 3, 0)
    for rank in range(world):
        rank_of[order[rank::world]] = rank
    mine = rank_of[cluster_of]
    matrix = dense(data) * (mine[:, None] == mine[None, :])
    assert bool((matrix != dense(data)).any()) == (world > 1)
    logits = of_dense(net, matrix, matrix.sum(1), data.x.double())
    loss = nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
    assert got.losses[0] == pytest.approx(float(loss), rel=1e-12)
    same_gradients(got.gradients[0], gradients_of(net, loss))


def random_parts(num_nodes: int, clusters: int, seed: int, epoch: int) -> Tensor:
    """The part of each node, [N], and that parts are of N / clusters nodes."""
    rng = np.random.Generator(np.random.Philox(key=fold_key(seed, epoch, DRAW)))
    of_node = torch.as_tensor(rng.permutation(num_nodes)) % clusters
    assert int(torch.bincount(of_node, minlength=clusters).diff().abs().max()) <= 1
    return of_node


@pytest.mark.parametrize("world", [1, 2, 3])
def test_random_nodes_are_pyg_on_the_induced_subgraph_of_each_rank(world: int) -> None:
    """Two epochs of two steps by PyG's layers and SGD, in fp64: losses, final logits. Parts differ by epoch."""
    data = small_graph()
    config = configured("model", "sage", *PLAIN)
    got = train_in_threads(UNIFORM, config, data, world=world, epochs=2, seed=3)
    net = config.build(data.num_features, data.num_classes, seed=3).double()
    rows, drawn = data.x.double(), [random_parts(data.num_nodes, 6, 3, epoch) for epoch in range(2)]
    assert not torch.equal(*drawn)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch, part_of in enumerate(drawn):
        order, losses, total = shuffled(6, 3, epoch), 0.0, int(data.train_mask.sum())
        for step in range(2):
            united = order[3 * step : 3 * step + 3]
            loss = torch.zeros((), dtype=torch.float64)
            for rank in range(world):
                nodes = torch.isin(part_of, united[rank::world]).nonzero().flatten()
                edges, _ = subgraph(nodes, data.edge_index, relabel_nodes=True, num_nodes=data.num_nodes)
                logits, train = pyg_logits(net, rows[nodes], edges), data.train_mask[nodes]
                loss = loss + nn.functional.cross_entropy(logits[train], data.y[nodes][train], reduction="sum")
            optimizer.zero_grad()
            (loss / int(data.train_mask[torch.isin(part_of, united)].sum())).backward()
            optimizer.step()
            losses += float(loss) / total
        assert got.losses[epoch] == pytest.approx(losses, rel=1e-12)
    assert relative_error(got.logits, pyg_logits(net, rows, data.edge_index)) < 1e-12


def pyg_logits(net: GNN, x: Tensor, edges: Tensor) -> Tensor:
    """GraphSAGE by PyG's SAGEConv with the weights of `net`."""
    for i, layer in enumerate(net.layers):
        ours: Any = layer.get_submodule("conv")
        weights = {"lin_l.weight": ours.neighbours, "lin_l.bias": ours.own.bias, "lin_r.weight": ours.own.weight}
        x = functional_call(SAGEConv(x.shape[1], len(ours.own.bias)), weights, (x, edges))
        x = x.relu() if i + 1 < len(net.layers) else x
    return x


@pytest.mark.parametrize("saint", ["node", "edge", "walk"])
def test_a_drawn_subgraph_is_autograd_with_weighted_edges_and_losses(saint: Any) -> None:
    """The mean over the steps and ranks of an epoch, at the weights that it begins with."""
    data, config, world = small_graph(), configured("model", "gcn", *PLAIN), 2
    strategy = replace(SAINT, saint=saint)
    got = train_in_threads(strategy, config, data, world=world, epochs=1, seed=3)
    graph, x = replica()
    sets = NodeSets(graph, saint, 15, 2)
    num_nodes, draws, whole = data.num_nodes, -(-20 * data.num_nodes // 15), dense(data)
    steps = -(-num_nodes // 30)
    counts = estimated(graph, sets, draws, 3)
    of_edge = torch.ones(num_nodes, num_nodes, dtype=torch.float64)
    targets = torch.arange(num_nodes).repeat_interleave(graph.edges.indptr.diff())
    of_edge[targets, graph.edges.sources] = counts.nodes[targets] / counts.edges.clamp_min(1).double()
    of_edge.fill_diagonal_(1)
    net = config.build(data.num_features, data.num_classes, seed=3).double()
    loss = torch.zeros((), dtype=torch.float64)
    for step in range(steps):
        for rank in range(world):
            drawn = torch.zeros(num_nodes, dtype=torch.float64)
            drawn[sets.draw(fold_key(3, 0, step, rank, DRAW))] = 1
            matrix = whole * of_edge * drawn[:, None] * drawn[None, :]
            logits = of_dense(net, matrix, data.in_degree.double(), x)
            each = nn.functional.cross_entropy(logits, data.y, reduction="none")
            rows = data.train_mask & (drawn > 0)
            loss = loss + (each * draws / counts.nodes.clamp_min(1).double())[rows].sum()
    loss = loss / (steps * world * int(data.train_mask.sum()))
    same_gradients(got.gradients[0], gradients_of(net, loss))


@pytest.mark.quick(1)
@pytest.mark.parametrize("saint", ["node", "edge", "walk"])
def test_normalised_sums_and_losses_are_unbiased(saint: Any) -> None:
    """The mean over 500 draws is the sum over all in-edges, within 5 of its standard errors; those of the
    probabilities, estimated from 500 draws of their own, are as large, so the bound is 5 sqrt(2). Without weights it is
    missed."""
    graph, x = replica()
    num_nodes, draws = len(x), 500
    sets, induced = NodeSets(graph, saint, 24, 2), Induced(graph.edges, graph.train, 1)
    counts = estimated(graph, sets, draws, 7)
    batches = SaintBatches(graph, ALONE, 1, sets, counts, steps=draws)
    exact = dense(small_graph()) @ x
    sums, losses = torch.zeros(draws, *exact.shape, dtype=torch.float64), torch.zeros(draws, num_nodes)
    bare, held = torch.zeros_like(exact), torch.zeros(draws, num_nodes)
    for step in range(draws):
        sub = batches[0, step]
        view = SampledGraph(sub, Pass(0), hops=1)
        assert sub.loss_weight is not None
        sums[step, sub.node_ids[: view.num_read]] = view.aggregate(Sum(), (x[sub.node_ids],))[: view.num_read]
        losses[step, sub.node_ids[: view.num_read]] = sub.loss_weight.float()
        held[step, sub.node_ids[: view.num_read]] = 1
        plain = SampledGraph(sub._replace(weights=None), Pass(0), hops=1)
        bare[sub.node_ids[: view.num_read]] += plain.aggregate(Sum(), (x[sub.node_ids],))[: view.num_read]
    assert induced.of(graph.train).ends[0] == len(graph.train)
    # where an in-edge is in a handful of draws alone, a standard error says nothing
    targets = torch.arange(num_nodes).repeat_interleave(graph.edges.indptr.diff())
    rarest = torch.full((num_nodes,), float(draws)).scatter_reduce(0, targets, counts.edges.float(), "amin")
    often = (rarest >= 8) & (held.sum(0) >= 8)
    often &= torch.zeros(num_nodes, dtype=torch.bool).index_fill_(0, graph.train, True)
    assert int(often.sum()) >= 5
    number = held.sum(0)[often].double()[:, None]
    mean = sums.sum(0)[often] / number
    spread = ((sums - (sums.sum(0) / held.sum(0)[:, None].clamp_min(1))) * held[..., None]).square().sum(0)[often]
    error = (spread / number).sqrt() / number.sqrt()
    bound = 5 * 2**0.5 * error + 1e-9
    assert bool(((mean - exact[often]).abs() < bound).all())
    assert not bool(((bare[often] / number - exact[often]).abs() < bound).all())
    weight, of_weight = losses.mean(0)[often], losses.std(0)[often] / draws**0.5
    assert bool(((weight - 1).abs() < 5 * 2**0.5 * of_weight + 1e-6).all())


def test_a_fold_of_an_edge_function_is_weighted_as_a_sum_is_and_maxima_are_not() -> None:
    graph, x = replica()
    sets = NodeSets(graph, "node", 24, 2)
    counts = estimated(graph, sets, 40, 7)
    sub = SaintBatches(graph, ALONE, 1, sets, counts, steps=1)[0, 0]
    view, rows = SampledGraph(sub, Pass(0), hops=1), x[sub.node_ids].requires_grad_()
    assert sub.weights is not None
    assert float(sub.weights.max()) > 1
    own = view.aggregate(Generic(value=lambda src, dst, edge, shared: src[0]), (rows,))
    (of_own,) = torch.autograd.grad(own.square().sum(), rows)
    linear = view.aggregate(Sum(), (rows,))
    (of_linear,) = torch.autograd.grad(linear.square().sum(), rows)
    torch.testing.assert_close(own, linear)
    torch.testing.assert_close(of_own, of_linear)
    plain = SampledGraph(sub._replace(weights=None), Pass(0), hops=1)
    assert torch.equal(view.aggregate(Max(), (rows,)), plain.aggregate(Max(), (rows,)))


def test_a_fold_that_cannot_count_an_edge_more_than_once_is_refused_where_edges_are_left_out() -> None:
    class Own(ByBlock):
        summed = True

    graph, x = replica()
    sampler, _ = sampler_of(graph.edges, (2,), "own")
    sub = subgraph_of(sampler.draw(torch.arange(20), 1), graph, "graph")
    assert sub.weights is not None
    with pytest.raises(ValueError, match=r"fold Own cannot count an edge more than once.*normalize=subgraph"):
        SampledGraph(sub, Pass(0), hops=1).aggregate(cast(Any, Own()), (x[sub.node_ids],))


@pytest.mark.parametrize("sampler", ["cluster", "uniform"])
def test_every_training_node_is_in_one_batch_of_clusters_and_only_gradients_travel(sampler: Any) -> None:
    strategy = Minibatch(sampler=sampler, clusters=7, clusters_per_batch=3)
    data, world = small_graph(), 2
    got = train_in_threads(strategy, GCN(hidden=8), data, world=world, epochs=2, dtype=torch.float32)
    numbers = sum(p.numel() for p in GCN(hidden=8).build(data.num_features, data.num_classes, seed=0).parameters()) + 1
    steps = 3  # of 3, 3 and 1 clusters: the last leaves a rank without nodes
    assert got.traffic == [{"reduce": steps * 2 * (world - 1) * numbers * 4}] * 2
    graph, _ = replica()
    cluster_of = make_job(strategy, GCN(hidden=8), data, world=world).plan.placement.chunk_of
    ranks = [
        strategy.batches(replace(graph, cluster_of=cluster_of), [1, 1], seed=0, rank=rank, ranks=world)
        for rank in range(world)
    ]
    for epoch in range(2):
        subs = [batches[epoch, step] for batches in ranks for step in range(len(batches))]
        seeds = torch.cat([sub.node_ids[: sub.ends[0]] for sub in subs])
        assert torch.equal(seeds.sort().values, graph.train)
        assert sum(ranks[0].size((epoch, step)) for step in range(steps)) == len(graph.train)


@pytest.mark.parametrize("saint", ["node", "walk"])
def test_steps_of_drawn_subgraphs_send_gradients_alone(saint: Any) -> None:
    data, world = small_graph(), 2
    strategy = Minibatch(sampler="saint", saint=saint, walk_length=1, batch_size=25)
    got = train_in_threads(strategy, GCN(hidden=8), data, world=world, dtype=torch.float32)
    numbers = sum(p.numel() for p in GCN(hidden=8).build(data.num_features, data.num_classes, seed=0).parameters()) + 1
    steps = 3  # as many as 60 nodes need in batches of 25
    assert got.traffic == [{"reduce": steps * 2 * (world - 1) * numbers * 4}] * 2


def test_draws_are_keyed() -> None:
    graph, _ = replica()
    batches, again = (UNIFORM.batches(graph, [1, 1], seed=0, rank=0, ranks=2) for _ in range(2))
    earlier, later = batches[4, 1], batches[5, 1]
    assert torch.equal(later.node_ids, again[5, 1].node_ids)
    assert not torch.equal(later.node_ids.sort().values, earlier.node_ids.sort().values)
    for saint in ("node", "edge", "walk"):
        sets = NodeSets(graph, saint, 20, 2)  # type: ignore[arg-type]
        assert torch.equal(sets.draw(5), sets.draw(5))
        assert not torch.equal(sets.draw(5), sets.draw(6))
        assert len(sets.draw(5)) <= 20
